"""Sharded parameters: builds a model with sharded parameters, and gathers them."""

from __future__ import annotations

import contextlib
import itertools
import os
import types
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_parameter_registration_hook

import penstock
from penstock import ConfigError
from penstock.front import sharded_init
from penstock.front.engine import engine_of

from ... import _table
from ...accelerator.real_accelerator import get_accelerator, rank_device
from ...comm import comm
from ...comm.comm import get_world_size
from .state_placeholders import install

_orig_torch_arange = torch.arange
_orig_torch_empty, _orig_torch_zeros = torch.empty, torch.zeros
_orig_torch_ones, _orig_torch_full = torch.ones, torch.full


def zero_wrapper_for_fp_tensor_constructor(fn: Any, target_fp_dtype: torch.dtype) -> Any:
    """Returns the constructor itself: the model's code determines dtypes."""
    return fn


ZeroParamStatus: Any = _table.attributes(__name__)("ZeroParamStatus")
install()
_ids = itertools.count()


def mark(param: torch.Tensor, checks: bool = False) -> None:
    """Adds DeepSpeed's attributes to a sharded parameter. Its shape stays the full one.

    `checks` is `enable_sanity_checks` of the config.
    """
    if hasattr(param, "ds_id"):
        return
    made: Any = param
    made.ds_id = next(_ids)
    made.ds_shape, made.ds_numel = param.shape, param.numel()
    made.ds_status, made.ds_persist = ZeroParamStatus.NOT_AVAILABLE, False
    made.ds_active_sub_modules, made.is_external_param = set(), False
    made.ds_enable_sanity_checks = checks
    made.ds_process_group = None
    made.ds_tensor = None
    for name, method in _METHODS.items():
        setattr(made, name, types.MethodType(method, param))


def _partition_numel(param: Any) -> int:
    return -(-int(param.ds_numel) // get_world_size())


_open: dict[int, list[Any]] = {}


def _all_gather(param: Any, param_list: Any = None, **_: Any) -> None:
    """Gathers the parameter; partition() releases it."""
    chosen = [param] if param_list is None else list(param_list)
    context = GatheredParameters(chosen)
    context.__enter__()
    _open.setdefault(id(param), []).append(context)


def _partition(param: Any, param_list: Any = None, **_: Any) -> None:
    if not _open.get(id(param)):
        raise ConfigError(
            "[deepspeed::partition] the parameter is not gathered: call its all_gather() first"
        )
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
    """Returns a config's folder for parameters on disk; "" if they are not on disk."""
    section = (config.get("zero_optimization") or {}) if config else {}
    offload = section.get("offload_param") or {} if isinstance(section, dict) else {}
    return str(offload.get("nvme_path") or "") if offload.get("device") == "nvme" else ""


def _refuse(key: str, value: Any, advice: str) -> NoReturn:
    raise ConfigError(
        f"[deepspeed::zero.Init] {key} is {value!r}, which is not supported: {advice}"
    )


def _check_place(device: str | None, path: str) -> None:
    own = get_accelerator().device_name()
    if device not in (None, "none", "cpu", "nvme", "cuda", own):
        _refuse("remote_device", device, f'allowed: None, "none", "cpu", "nvme", "{own}"')
    if device == "nvme" and not path:
        _refuse("remote_device", device, "pass a config whose offload_param has an nvme_path")


def _check_groups(data: Any, sequence_data: Any) -> None:
    """Refuses a group that lacks ranks of the run, and a run that lacks ranks of the launcher."""
    if data is not None and sequence_data is not None:
        _refuse("sequence_data_parallel_group", sequence_data, "data_parallel_group is given, too")
    group = data if data is not None else sequence_data
    size, world = dist.get_world_size(group), dist.get_world_size()
    if size != world:
        advice = "parameters are sharded over all ranks, or as the config of initialize() says"
        _refuse("data_parallel_group", f"a group of {size} of {world} ranks", advice)
    started = os.environ.get("WORLD_SIZE") or ""
    if group is None and world == 1 and started.isdigit() and int(started) > 1:
        raise ConfigError(
            f"[deepspeed::zero.Init] the launcher has started WORLD_SIZE={started} ranks, but "
            f"torch's process group has 1 rank, so each rank would keep the whole model: call "
            f"deepspeed.init_distributed() first"
        )


class Init:
    """Shards the parameters of modules that are built in this context, when they are created.

    Shapes (`ds_shape` is the same) and values do not change. Dtypes only change if `dtype` is
    given; the engine casts to its precision. See penstock.init().

    Args:
        module: an existing module whose parameters are sharded at once, in their dtypes.
        data_parallel_group, sequence_data_parallel_group: a group of all ranks.
        remote_device: if it is "nvme", shards are on disk, in `offload_param.nvme_path` of the
            config.
        config_dict_or_path: the config with this path.
        config: the same; it has precedence over config_dict_or_path.
        enabled: False disables the context.
        dtype: the default dtype in this context, and the dtype of all floating parameters that
            modules create there. float32, bfloat16 or float16; default: as the model's code says.
        tensor_overrides: if it lacks "dtype", `dtype` has no effect.
        mem_efficient_linear, pin_memory, mpu, zero_param_parallel_group: accepted, without effect:
            they change no values. The config of initialize() counts.

    Raises:
        ConfigError: an argument is not supported, or torch's group has one rank while the launcher
            started several.
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
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = ("dtype", "device"),
    ) -> None:
        from ..config import as_dict, make_folder  # noqa: PLC0415 - it imports the engine

        self.enabled = enabled
        self._stack: contextlib.ExitStack | None = None
        self._dtype: torch.dtype | None = None
        if not enabled:
            return
        given = config if config is not None else config_dict_or_path
        values = as_dict(given) if given is not None else {}
        self._path = _nvme_path(values)
        section = values.get("zero_optimization") or {}
        self._checks = isinstance(section, dict) and section.get("enable_sanity_checks") is True
        _check_place(remote_device, self._path)
        if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            _refuse("dtype", dtype, "allowed: torch.float32, torch.bfloat16, torch.float16")
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            _refuse("zero_quantized_weights", True, "set it as a key of zero_optimization instead")
        if param_swapper is not None:
            _refuse("param_swapper", param_swapper, "the engine has its own")
        if any(str(getattr(one, "name", one)) == "dtype" for one in tensor_overrides):
            self._dtype = dtype
        if self._path:
            make_folder(self._path)
        if not dist.is_initialized():
            from ...comm.comm import init_distributed  # noqa: PLC0415 - as above

            init_distributed()
        _check_groups(data_parallel_group, sequence_data_parallel_group)
        if module is not None:
            self._dtype, kept = None, self._dtype
            with self:
                for param in module.parameters():
                    self._shard(param)
            self._dtype = kept

    def _shard(self, param: torch.nn.Parameter) -> None:
        sharded_init.shard(param)
        mark(param, self._checks)

    def __enter__(self) -> Init:
        if not self.enabled:
            return self
        self._stack = contextlib.ExitStack()
        dtype, checks = self._dtype, self._checks

        def registered(_module: Any, _name: str, param: torch.nn.Parameter | None) -> None:
            if isinstance(param, torch.nn.Parameter) and param.is_floating_point():
                if dtype is not None and param.dtype != dtype:
                    param.data = param.data.to(dtype)
                mark(param, checks)

        self._stack.enter_context(penstock.init(path=self._path, device=rank_device()))
        if dtype is not None:
            self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        handle = register_module_parameter_registration_hook(registered)
        self._stack.callback(handle.remove)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._stack is not None:
            self._stack.__exit__(*error)
            self._stack = None


class MiCS_Init(Init):  # noqa: N801 - DeepSpeed's name
    """The same as zero.Init (the config's mics_shard_size shards inside groups of ranks)."""


class GatheredParameters:
    """Gathers parameters inside the context. All ranks must enter and leave it.

    Views of the parameters that are taken inside keep their values after the context.

    Args:
        params: one or several parameters, sharded or not.
        modifier_rank: the rank whose changes are kept; None if no rank changes values, or all ranks
            make the same changes. With `enable_sanity_checks`, None makes any change an error.
        fwd_module: accepted, without effect.
        enabled: False disables the context.

    Raises:
        RuntimeFault: at the end of the context, if values were changed without a modifier_rank and
            ranks have different values.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: Any = None,
        enabled: bool = True,
    ) -> None:
        found = _flat(params) if enabled else ()
        self._params = list(dict.fromkeys(one for one in found if is_zero_param(one)))
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
    """Yields the tensors in modules, dicts and iterables. Skips None, such as a missing bias."""
    if isinstance(params, torch.Tensor):
        yield params
    elif isinstance(params, torch.nn.Module):
        yield from params.parameters()
    elif isinstance(params, Iterable) and not isinstance(params, str | bytes):
        for one in params.values() if isinstance(params, dict) else params:
            yield from _flat(one)
    elif params is not None:
        raise ConfigError(
            f"[deepspeed::GatheredParameters] a {type(params).__name__} is not a parameter: pass "
            f"parameters, or a list or generator of them"
        )


def _states(params: list[torch.Tensor], modifier_rank: int | None) -> list[Any]:
    """Returns the status of each parameter. Only the outermost block that gathers a parameter may
    write its values."""
    states = [getattr(param, "ds_status", None) for param in params]
    if modifier_rank is not None and ZeroParamStatus.AVAILABLE in states:
        raise penstock.RuntimeFault(
            "[deepspeed::GatheredParameters] an outer block has already gathered a parameter, so "
            "this block cannot have a modifier_rank, as in DeepSpeed: pass it to the outer block"
        )
    return states


@contextlib.contextmanager
def _whole(params: list[torch.Tensor], modifier_rank: int | None) -> Iterator[None]:
    before = _states(params, modifier_rank)
    held = sharded_init.waiting()
    waiting = [one for one in params if held is not None and held.holds(one)]
    engines = _by_engine(params)
    with contextlib.ExitStack() as stack:
        for engine, own in engines.values():
            stack.enter_context(engine.gathered(own, write=modifier_rank is not None))
            _keep_views(engine, own)
        for one in waiting:
            stack.enter_context(_of_init(held, one, modifier_rank))
        for param in params:
            param.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
        try:
            seen = [] if modifier_rank is not None else [_seen(one) for one in params]
            yield
            if modifier_rank:  # the engine keeps the values of rank 0
                for _, own in engines.values():
                    for one in own:
                        comm._broadcast_values(one.data, modifier_rank)
            elif modifier_rank is None:
                _refuse_edits(params, seen)
                _keep_same_edits(engines, {id(p): h for p, h in zip(params, seen, strict=True)})
        finally:
            for param, status in zip(params, before, strict=True):
                param.ds_status = status  # type: ignore[attr-defined]


def _keep_views(engine: Any, params: list[torch.Tensor]) -> None:
    """Lets views that are taken inside the block keep their values after it, as in DeepSpeed.

    For example, on a CPU `param.detach().cpu()` is a view.
    """
    values = engine._core.values
    values.keep_views(values.units_of([engine._structure.own[one] for one in params]))


_WORDS = 1 << 18  # number of words that _digest() processes at once


def _by_engine(params: list[torch.Tensor]) -> dict[int, tuple[Any, list[torch.Tensor]]]:
    engines: dict[int, tuple[Any, list[torch.Tensor]]] = {}
    for one in params:
        engine = engine_of(one)
        if engine is not None:
            engines.setdefault(id(engine), (engine, []))[1].append(one)
    return engines


def _digest(param: torch.Tensor) -> int:
    """Returns a hash of a parameter's bits and their positions."""
    raw = param.detach().contiguous().view(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    odd = torch.arange(1, 2 * _WORDS, 2, device=raw.device)
    sums = [  # over words, since sums over floats in double take ten times as long
        (words >> 32).bitwise_xor_(words).mul_(odd[: words.numel()]).sum()
        for words in torch.split(raw[:whole].view(torch.int64), _WORDS)
    ]
    found = torch.stack(sums).tolist() if sums else []
    return hash((*found, *raw[whole:].tolist()))


def _seen(param: torch.Tensor) -> tuple[int, int]:
    """Returns the digest and torch's count of edits, which includes edits that change no bits."""
    return _digest(param), param._version


def _on_any_rank(flags: list[bool]) -> list[bool]:
    found = torch.tensor(flags, dtype=torch.int32)
    comm._reduce_values(found, dist.ReduceOp.MAX)
    return [bool(one) for one in found.tolist()]


def _are_equal(values: torch.Tensor) -> bool:
    """Whether all ranks have the same values. All ranks must call it."""
    first = values.detach().clone()
    comm._broadcast_values(first, 0)
    return not _on_any_rank([not torch.equal(first, values)])[0]


def _refuse_edits(params: list[torch.Tensor], seen: list[tuple[int, int]]) -> None:
    """Refuses every change if `enable_sanity_checks` is set, as DeepSpeed does."""
    if not any(getattr(one, "ds_enable_sanity_checks", False) for one in params):
        return
    edited = [_seen(one) != before for one, before in zip(params, seen, strict=True)]
    if any(_on_any_rank(edited)):
        raise penstock.RuntimeFault(
            "[deepspeed::GatheredParameters] in-place modification of parameters without a "
            "modifier_rank is not allowed with enable_sanity_checks: set modifier_rank to the rank "
            "whose values are kept"
        )


def _keep_same_edits(engines: dict[int, tuple[Any, list[torch.Tensor]]], seen: Any) -> None:
    """Keeps changed values if every rank has made the same change; else the engine refuses them.

    All ranks must call it.
    """
    for engine, own in engines.values():
        changed = [_seen(one) != seen[id(one)] for one in own]
        edited = zip(own, _on_any_rank(changed), strict=True)
        kept = [one for one, is_edited in edited if is_edited and _are_equal(one.data)]
        if kept:
            with engine.gathered(kept, write=True):
                pass


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
        comm._broadcast_values(values, modifier_rank)
        held.keep(hollow, values)
        return
    if not _on_any_rank([not torch.equal(shown, values)])[0]:
        return
    if not _are_equal(shown):
        raise penstock.RuntimeFault(
            "[deepspeed::GatheredParameters] a rank changed values without a modifier_rank, so the "
            "ranks now have different values: set modifier_rank to the rank whose values are kept"
        )
    held.keep(hollow, shown)


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Only marks the parameter. The engine finds by itself which parameters of other modules a
    module reads.

    Raises:
        RuntimeError: if `parameter` is not a torch.nn.Parameter.
    """
    if not isinstance(parameter, torch.nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")
    parameter.is_external_param = True  # type: ignore[attr-defined]


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Removes the mark. See register_external_parameter()."""
    parameter.is_external_param = False  # type: ignore[attr-defined]


def is_zero_param(parameter: Any) -> bool:
    if not torch.is_tensor(parameter):
        return False
    held = sharded_init.waiting()
    if held is not None and held.holds(parameter):
        mark(parameter)  # copy.deepcopy() copies no attributes of parameters
    return hasattr(parameter, "ds_id")


class InsertPostInitMethodToModuleSubClasses:
    """Base class of zero.Init in DeepSpeed, for isinstance() checks."""
