"""Sharded parameters: builds a model with sharded parameters, and gathers them."""

from __future__ import annotations

import contextlib
import enum
import itertools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_parameter_registration_hook

import penstock
from penstock import ConfigError
from penstock.front import sharded_init
from penstock.front.engine import engine_of

from ...comm.comm import get_world_size

_orig_torch_arange = torch.arange
_orig_torch_empty, _orig_torch_zeros = torch.empty, torch.zeros
_orig_torch_ones, _orig_torch_full = torch.ones, torch.full


def zero_wrapper_for_fp_tensor_constructor(fn: Any, target_fp_dtype: torch.dtype) -> Any:
    """Returns the constructor itself: the model's code determines dtypes."""
    return fn


class ZeroParamStatus(enum.Enum):
    """Whether this rank has all values of a parameter."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(enum.Enum):
    """Whether a parameter is sharded."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


_ids = itertools.count()


def mark(param: torch.Tensor) -> None:
    """Adds DeepSpeed's attributes to a sharded parameter. Its shape stays the full one."""
    if hasattr(param, "ds_id"):
        return
    made: Any = param
    made.ds_id = next(_ids)
    made.ds_shape, made.ds_numel = param.shape, param.numel()
    made.ds_status, made.ds_persist = ZeroParamStatus.NOT_AVAILABLE, False
    made.ds_active_sub_modules = set()
    made.ds_process_group = None
    made.ds_tensor = None
    for name in ("partition_numel", "all_gather", "partition", "ds_summary"):
        setattr(made, name, types.MethodType(_METHODS[name], param))


def _partition_numel(param: Any) -> int:
    return -(-int(param.ds_numel) // get_world_size())


_open: dict[int, list[Any]] = {}


def _all_gather(param: Any, param_list: Any = None, **_: Any) -> None:
    """Gathers the parameter until partition()."""
    chosen = [param] if param_list is None else list(param_list)
    context = GatheredParameters(chosen)
    context.__enter__()
    _open.setdefault(id(param), []).append(context)


def _partition(param: Any, param_list: Any = None, **_: Any) -> None:
    if not _open.get(id(param)):
        raise ConfigError("[deepspeed::partition] call all_gather() of this parameter first")
    _open[id(param)].pop().__exit__(None, None, None)


def _summary(param: Any, **_: Any) -> dict[str, Any]:
    return {
        "id": param.ds_id,
        "status": param.ds_status.name,
        "numel": param.numel(),
        "ds_numel": param.ds_numel,
        "shape": tuple(param.shape),
        "ds_shape": tuple(param.ds_shape),
        "requires_grad": param.requires_grad,
    }


_METHODS: dict[str, Any] = {
    "partition_numel": _partition_numel,
    "all_gather": _all_gather,
    "partition": _partition,
    "ds_summary": _summary,
}


def _nvme_path(config: Any) -> str:
    """Returns the folder for parameters on disk in a config; "" if they are not on disk."""
    section = (config.get("zero_optimization") or {}) if config else {}
    offload = section.get("offload_param") or {} if isinstance(section, dict) else {}
    return str(offload.get("nvme_path") or "") if offload.get("device") == "nvme" else ""


class Init:
    """Shards the parameters of modules that are built in this context, when they are created.

    Shapes (`ds_shape` is the same), dtypes and values do not change; the engine casts to its
    precision. See penstock.init().

    Args:
        module: an existing module whose parameters are sharded at once.
        remote_device: "nvme": shards are on disk, in `offload_param.nvme_path` of the config.
        config_dict_or_path: the config with this path.
        config: another name of config_dict_or_path.
        enabled: False to disable it.
        data_parallel_group, mem_efficient_linear, pin_memory, dtype, mpu, options: accepted,
            without effect.

    Raises:
        ConfigError: remote_device is unknown.
    """

    def __init__(  # noqa: PLR0913 - DeepSpeed's signature
        self,
        module: torch.nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **options: Any,
    ) -> None:
        from ..config import as_dict, make_folder  # noqa: PLC0415 - it imports the engine

        given = config_dict_or_path if config_dict_or_path is not None else config
        self._path = _nvme_path(as_dict(given) if given is not None else None)
        if enabled and self._path:
            make_folder(self._path)
        if remote_device not in (None, "none", "cpu", "nvme", "cuda"):
            raise ConfigError(f'[deepspeed::zero.Init] remote_device is "{remote_device}"')
        if enabled and not dist.is_initialized():
            from ...comm.comm import init_distributed  # noqa: PLC0415 - as above

            init_distributed()
        self.enabled = enabled
        self._stack: contextlib.ExitStack | None = None
        if module is not None and enabled:
            with self:
                for param in module.parameters():
                    self._shard(param)

    @staticmethod
    def _shard(param: torch.nn.Parameter) -> None:
        sharded_init.shard(param)
        mark(param)

    def __enter__(self) -> Init:
        if not self.enabled:
            return self
        self._stack = contextlib.ExitStack()

        def registered(_module: Any, _name: str, param: torch.nn.Parameter | None) -> None:
            if isinstance(param, torch.nn.Parameter) and param.is_floating_point():
                mark(param)

        self._stack.enter_context(penstock.init(path=self._path))
        handle = register_module_parameter_registration_hook(registered)
        self._stack.callback(handle.remove)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._stack is not None:
            self._stack.__exit__(*error)
            self._stack = None


class GatheredParameters:
    """Gathers parameters inside the context. All ranks must enter and leave it.

    Args:
        params: one or several parameters, sharded or not.
        modifier_rank: the rank whose changes are kept; None if no rank changes values.
        fwd_module: accepted, without effect.
        enabled: False to disable it.

    Raises:
        RuntimeFault: at the end of the context, if values were changed without a modifier_rank.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: Any = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, torch.Tensor):
            params = [params]
        elif isinstance(params, torch.nn.Module):
            params = params.parameters()
        self._params = [one for one in _flat(params) if is_zero_param(one)] if enabled else []
        self._modifier_rank = modifier_rank
        self._stack: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        self._stack = contextlib.ExitStack()
        try:
            self._stack.enter_context(_whole(self._params, self._modifier_rank))
        except BaseException:
            self._stack.close()
            raise

    def __exit__(self, *error: Any) -> bool | None:
        stack, self._stack = self._stack, None
        return stack.__exit__(*error) if stack is not None else None


def _flat(params: Any) -> Iterator[torch.Tensor]:
    for one in params.values() if isinstance(params, dict) else params:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, Iterable):
            yield from _flat(one)


@contextlib.contextmanager
def _whole(params: list[torch.Tensor], modifier_rank: int | None) -> Iterator[None]:
    held = sharded_init.waiting()
    waiting = [one for one in params if held is not None and held.holds(one)]
    engines: dict[int, tuple[Any, list[torch.Tensor]]] = {}
    for one in params:
        engine = engine_of(one)
        if engine is not None:
            engines.setdefault(id(engine), (engine, []))[1].append(one)
    with contextlib.ExitStack() as stack:
        for engine, own in engines.values():
            stack.enter_context(engine.gathered(own, write=modifier_rank is not None))
        for one in waiting:
            stack.enter_context(_of_init(held, one, modifier_rank))
        before = [getattr(param, "ds_status", None) for param in params]
        for param in params:
            param.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
        try:
            yield
            if modifier_rank:  # the engine keeps the values of rank 0
                for _, own in engines.values():
                    for one in own:
                        dist.broadcast(one.data, modifier_rank)
        finally:
            for param, status in zip(params, before, strict=True):
                param.ds_status = status  # type: ignore[attr-defined]


@contextlib.contextmanager
def _of_init(held: Any, param: torch.Tensor, modifier_rank: int | None) -> Iterator[None]:
    """Gathers a parameter that has no engine yet."""
    hollow = param.data
    values = held.whole(hollow)
    shown = values.clone() if modifier_rank is None else values
    param.data = shown.as_strided(param.shape, param.stride(), param.storage_offset())
    try:
        yield
    finally:
        param.data = hollow
    if modifier_rank is not None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(values, modifier_rank)
        held.keep(hollow, values)
    elif not torch.equal(shown, values):
        raise penstock.RuntimeFault(
            "[deepspeed::GatheredParameters] values were changed without a modifier_rank: pass it"
        )


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Accepted, without effect: the engine finds parameters that a module reads elsewhere."""
    if not isinstance(parameter, torch.nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Accepted, without effect: see register_external_parameter()."""


def is_zero_param(parameter: Any) -> bool:
    if not torch.is_tensor(parameter):
        return False
    held = sharded_init.waiting()
    if held is not None and held.holds(parameter):
        mark(parameter)  # copy.deepcopy() copies no attributes of parameters
    return hasattr(parameter, "ds_id")


class InsertPostInitMethodToModuleSubClasses:
    """Base class of zero.Init in DeepSpeed, for isinstance() checks."""


def shutdown_init_context() -> None:
    """Does nothing: engines can be created inside zero.Init and outside."""


def restore_init_context() -> None:
    """Does nothing: see shutdown_init_context()."""
