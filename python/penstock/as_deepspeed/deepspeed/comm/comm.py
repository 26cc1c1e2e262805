"""Collectives of torch.distributed with DeepSpeed's names. The engine has its own connections."""

from __future__ import annotations

import datetime
import importlib
import os
import socket
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from penstock import ConfigError
from penstock.front import process_group
from penstock.monitor.deepspeed_comms import CommsLogger, timed

from .. import _table
from .._refusal import DeepSpeedRefusal
from ..accelerator.real_accelerator import get_accelerator


def init_distributed(  # noqa: PLR0913 - DeepSpeed's signature
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Creates torch.distributed's process group, unless it exists.

    The launcher sets rank and address. Without a launcher, this process is the only rank.

    Args:
        dist_backend: by default, and if it names a device's back end (nccl, ccl, ...): gloo for
            host tensors and, on a machine with an accelerator, its back end for device tensors.
        timeout: the limit of torch's collectives and of the engine's waits for a peer; default:
            DEEPSPEED_TIMEOUT minutes, or 10. For the engine's waits, the limit is at least the
            default of `comm.timeout_s`; if a config sets this key, its value is the limit.

    Raises:
        ConfigError: DEEPSPEED_TIMEOUT is not a number, or a required group does not exist.
    """
    if dist.is_initialized():
        _warn_of_unused(timeout)
        return
    if dist_init_required is False:
        raise DeepSpeedRefusal(
            "[deepspeed::init_distributed] dist_init_required is False, but there is no group yet"
        )
    waits = _default_timeout() if timeout is None else timeout
    backend = _back_ends(dist_backend)
    if init_method is not None:
        dist.init_process_group(
            backend,
            timeout=waits,
            init_method=init_method,
            rank=rank if rank >= 0 else int(os.environ["RANK"]),
            world_size=world_size if world_size > 0 else int(os.environ["WORLD_SIZE"]),
        )
        return
    from penstock.front.environment import adopt  # noqa: PLC0415 - reads the environment

    adopt()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or "MASTER_ADDR" in os.environ:
        os.environ.setdefault("RANK", "0")
        os.environ.setdefault("WORLD_SIZE", "1")
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
        dist.init_process_group(backend, timeout=waits)
    else:
        dist.init_process_group(
            backend,
            timeout=waits,
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
        )


def _back_ends(wanted: str | None) -> str:
    """Returns the back ends of a group, as torch names them: "gloo" if ranks train on the CPU,
    "cpu:gloo,cuda:nccl" on a machine with CUDA. A name without "ccl" is returned unchanged."""
    if wanted is not None and ("ccl" not in wanted or ":" in wanted):
        return wanted
    own = get_accelerator()
    device, back_end = own.device_name(), own.communication_backend_name()
    return "gloo" if device == "cpu" else f"cpu:gloo,{device}:{back_end}"


def _default_timeout() -> datetime.timedelta:
    minutes = os.environ.get("DEEPSPEED_TIMEOUT", "10").strip()
    if not minutes.isdecimal() or len(minutes) > 6 or int(minutes) == 0:
        raise ConfigError(
            f"[deepspeed::init_distributed] DEEPSPEED_TIMEOUT={minutes!r} is not a number of "
            "minutes. Set a whole number from 1 to 999999, or unset it for 10"
        )
    return datetime.timedelta(minutes=int(minutes))


def _warn_of_unused(timeout: datetime.timedelta | None) -> None:
    """Warns on rank 0 if the existing process group has another timeout."""
    waits_s = process_group.timeout_s()
    if timeout is None or timeout.total_seconds() == waits_s or process_group.rank() != 0:
        return
    has = "another timeout" if waits_s is None else f"a timeout of {waits_s:g} s"
    warnings.warn(
        f"[deepspeed::init_distributed] timeout={timeout} has no effect, because the process group "
        f"already exists and has {has}. Pass the timeout to the call that makes the group, or set "
        '"comm.timeout_s" in the section "penstock" of the config',
        stacklevel=3,
    )


def mpi_discovery(distributed_port: int = 29500, verbose: bool = True) -> None:
    """Sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from mpi4py's world."""
    try:
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except ImportError as error:
        raise ConfigError(
            "[deepspeed::mpi_discovery] mpi4py is not installed: install it, or start the script "
            "with `penstock run`, which needs no MPI"
        ) from error
    world = mpi.COMM_WORLD
    hosts = world.allgather(mpi.Get_processor_name())
    address = world.bcast(socket.gethostbyname(socket.gethostname()), root=0)
    rank = world.Get_rank()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(hosts[:rank].count(hosts[rank])),
        "WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(distributed_port),
    }


def get_rank(group: Any = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def inference_all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None
) -> Any:
    return dist.all_reduce(tensor, op, group)


def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    return dist.all_gather_into_tensor(output_tensor, tensor, group, async_op)


def reduce_scatter_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM,
    group: Any = None, async_op: bool = False,
) -> Any:  # fmt: skip
    return dist.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


def all_gather_coalesced(
    output_tensors: list[torch.Tensor], input_tensors: list[torch.Tensor], group: Any = None,
    async_op: bool = False,
) -> None:  # fmt: skip
    for made, given in zip(output_tensors, input_tensors, strict=True):
        dist.all_gather_into_tensor(made, given, group)


def all_reduce_coalesced(
    tensors: list[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None,
    async_op: bool = False,
) -> None:  # fmt: skip
    for tensor in tensors:
        dist.all_reduce(tensor, op, group)


def _sendable(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Returns the tensor, or a copy on a device that the group's back ends support."""
    within: Any = dist.group.WORLD if group is None else group
    kinds = {one.type for one in within._device_types}
    if tensor.device.type in kinds:
        return tensor
    return tensor.to("cpu" if "cpu" in kinds else get_accelerator().current_device_name())


def _broadcast_values(tensor: torch.Tensor, src: int, group: Any = None) -> None:
    """Copies a tensor's values, of any dtype and device, from rank `src`. All ranks of the group
    call it."""
    if get_world_size(group) == 1:
        return
    sent = _sendable(tensor.detach().contiguous(), group)
    dist.broadcast(sent.view(-1).view(torch.uint8), src, group)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(sent)


def _reduce_values(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduces a tensor on any device over all ranks. All ranks call it."""
    if get_world_size() > 1:
        sent = _sendable(tensor)
        dist.all_reduce(sent, op)
        if sent is not tensor:
            tensor.copy_(sent)


def _of_ranks(value: Any, group: Any = None) -> list[Any]:
    """Returns the values of a group's ranks, by rank. All ranks of the group call it."""
    found = [value] * get_world_size(group)
    if len(found) > 1:
        dist.all_gather_object(found, value, group)
    return found


def _raise_together(problem: str) -> None:
    """Raises ConfigError on all ranks if one of them has a problem. All ranks call it."""
    problems = list(filter(None, _of_ranks(problem)))
    if problems:
        raise ConfigError(problems[0])


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, **_: Any) -> Any:
    return dist.barrier(group, async_op)


comms_logger = CommsLogger()
# Name -> position of the argument with the tensor, or list of tensors, to send.
_LOGGED = {
    "broadcast": 0, "all_reduce": 0, "inference_all_reduce": 0, "all_gather": 1, "send": 0,
    "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_to_all_single": 1, "recv": 0,
    "all_to_all": 1, "reduce": 0, "reduce_scatter": 1, "gather": 0, "isend": 0, "irecv": 0,
    "barrier": 9, "all_reduce_coalesced": 0, "all_gather_coalesced": 1, "batch_isend_irecv": 0,
}  # fmt: skip
for _name, _sent in _LOGGED.items():
    globals()[_name] = timed(comms_logger, globals().get(_name) or getattr(dist, _name), _sent)
allgather_fn, reduce_scatter_fn = all_gather_into_tensor, reduce_scatter_tensor


def configure(deepspeed_config: Any = None, **settings: Any) -> None:
    """Configures the logger of this module's collectives.

    Args:
        deepspeed_config: a DeepSpeedConfig; only its section comms_logger is read.
        settings: enabled, prof_all, prof_ops, verbose, debug; None keeps a setting.
    """
    if deepspeed_config is not None:
        comms_logger.configure(deepspeed_config)
    for key, value in settings.items():
        if value is not None:
            setattr(comms_logger, key, value)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> Any:
    """Prints the logger's table on rank 0: see CommsLogger.log_all(). All ranks call it."""
    dist.barrier()
    shows = get_rank() == 0
    return comms_logger.log_all(shows, show_straggler, return_dict)


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    kind = get_accelerator().device_name()
    return device_mesh.init_device_mesh(kind, mesh_shape, mesh_dim_names=mesh_dim_names)


__getattr__ = _table.attributes(__name__, dist)
