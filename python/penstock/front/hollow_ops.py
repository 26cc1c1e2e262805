"""Torch's operations on parameters inside `penstock.init()`, where each rank has only a shard of
each parameter."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock._native import ConfigError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_aten = torch.ops.aten

# Ops that write every value of their first argument and read none of it.
_OVERWRITES = {
    _aten.copy_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.zero_.default,
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.bernoulli_.float,
    _aten.exponential_.default,
    _aten.random_.default,
}


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Returns the tensors that the op writes: its first argument, `out=`, or tensors in a list."""
    written: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written.extend(value if isinstance(value, (list, tuple)) else [value])
    return written


def _only_describes(func: Any) -> bool:
    """Whether the op neither reads nor writes values. Such an op returns a view of the same
    storage, or changes the shape, the strides or the storage of its argument (t_, set_)."""
    if torch.Tag.inplace_view in func.tags:
        return True
    aliases = any(result.alias_info is not None for result in func._schema.returns)
    writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
    return aliases and not writes


def _check_resize(func: Any, args: Any) -> None:
    """Raises ConfigError for a resize_ that needs more values than the storage has."""
    if func is not _aten.resize_.default:
        return
    tensor, shape = args[0], args[1]
    wanted = (torch.Size(shape).numel() + tensor.storage_offset()) * tensor.element_size()
    if wanted > tensor.untyped_storage().nbytes():
        raise ConfigError(
            f"[front::init] resize_() of a parameter from shape {tuple(tensor.shape)} to "
            f"{tuple(shape)} needs new memory, but this rank has only a shard. Assign a new "
            "nn.Parameter of that shape"
        )


class Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each op that uses parameters without values on their full values, gathered for it."""

    def __init__(
        self,
        held: Any,
        keep: Callable[[torch.Tensor], None],
        wrote: Callable[[torch.Tensor], None] = lambda _: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held, self._keep, self._wrote = held, keep, wrote

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        flat, spec = _pytree.tree_flatten((args, kwargs))
        hollow = [t for t in flat if isinstance(t, torch.Tensor) and self._held.holds(t)]
        if not hollow:
            return func(*args, **kwargs)
        if _only_describes(func):
            return self._describe(func, args, kwargs)
        values = self._values(func, args, hollow)

        def real(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not self._held.holds(value):
                return value
            whole = values[value.untyped_storage()._cdata]
            if whole.dtype != value.dtype:  # a view with another dtype
                whole = whole.view(value.dtype)
            return whole.as_strided(value.shape, value.stride(), value.storage_offset())

        real_args, real_kwargs = _pytree.tree_unflatten([real(value) for value in flat], spec)
        result = func(*real_args, **real_kwargs)
        written = _written(func, args, kwargs)
        for tensor in written:
            if isinstance(tensor, torch.Tensor) and self._held.holds(tensor):
                self._held.keep(tensor, values[tensor.untyped_storage()._cdata])
                self._wrote(tensor)
        values.clear()
        real_written = _written(func, real_args, real_kwargs)
        in_place = {id(own): given for own, given in zip(real_written, written, strict=True)}
        return _pytree.tree_map(lambda value: in_place.get(id(value), value), result)

    def _describe(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an op that needs no values. A parameter that gets new memory keeps its shard."""
        _check_resize(func, args)
        had = [t for t in _written(func, args, kwargs) if self._held.holds(t)]
        if func.overloadpacket is _aten.set_:  # torch would ask storages without values for data
            same = func is _aten.set_.source_Tensor and args[0].dtype == args[1].dtype
            new = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
            args[0].data = args[1].detach() if same else func(new, *args[1:], **kwargs)
            result = args[0]
        else:
            result = func(*args, **kwargs)
        for tensor in had:
            self._keep(tensor)
        return result

    def _values(self, func: Any, args: Any, hollow: list[Any]) -> dict[int, torch.Tensor]:
        """Returns the full values by storage; uninitialized memory for an op that writes them
        all."""
        values: dict[int, torch.Tensor] = {}
        for tensor in hollow:
            key = tensor.untyped_storage()._cdata
            if key in values:
                continue
            all_new = (
                func in _OVERWRITES
                and tensor is args[0]
                and tensor.nbytes == tensor.untyped_storage().nbytes()
                and sum(one is tensor for one in hollow) == 1
            )
            values[key] = self._held.scratch(tensor) if all_new else self._held.whole(tensor)
        return values


class Assignments(TorchFunctionMode):
    """Shards what is assigned to `.data` of a parameter without values."""

    _set: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]

    def __init__(self, held: Any, built: "Built") -> None:
        super().__init__()
        self._held, self._built = held, built

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func != self._set:
            return func(*args, **(kwargs or {}))
        tensor = args[0]
        had = is_lazy(tensor) or self._held.holds(tensor)
        if had:
            self._built.check(args[1], "the new data of a parameter")
        result = func(*args, **(kwargs or {}))
        if had:
            self._built.keep(tensor)
            if not self._built.converting:
                self._built.wrote(tensor)
        return result


class Built:
    """The modules that got parameters in an open context.

    Args:
        place: returns the folders for shards ("": memory) and the device of training.
        wrote: called with a parameter whose values were replaced, if it has no memory.
        filled: called with a module if parameters in it were on the meta device and got memory.
    """

    def __init__(
        self,
        held: Any,
        place: Callable[[], tuple[str, torch.device]],
        wrote: Callable[[torch.Tensor], None],
        filled: Callable[[torch.nn.Module], None],
    ) -> None:
        self._held, self._place, self.wrote, self._filled = held, place, wrote, filled
        self.converting = False  # a module converts its parameters, which keeps their values
        self._from_meta = 0  # parameters that got memory
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def keep(self, tensor: torch.Tensor) -> None:
        """Keeps only this rank's shard of the tensor, if the tensor has values. Raises ConfigError
        for a floating dtype that does not train, and for another device."""
        if is_lazy(tensor) or tensor.device.type == "meta" or tensor.numel() == 0:
            return
        self.check(tensor, "a parameter")
        if tensor.dtype in _DTYPES and not self._held.holds(tensor):
            self._held.hollow(tensor, *self._place())

    def check(self, tensor: torch.Tensor, what: str) -> None:
        """Raises ConfigError if the tensor cannot be sharded and would be whole on each rank."""
        trains = self._place()[1]
        if tensor.device.type not in ("cpu", "meta") and tensor.device != trains:
            raise ConfigError(
                f"[front::init] {what} is made on {tensor.device}, but this penstock.init() is for "
                f"a model that trains on {trains}. Make parameters on the CPU or on the training "
                f'device, or pass device="{tensor.device}"'
            )
        if tensor.dtype not in _DTYPES and (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigError(
                f"[front::init] {what} would have dtype {tensor.dtype}, but under penstock.init() "
                "parameters are float32, bfloat16 or float16. Convert the model to one of these"
            )

    def registered(self, module: Any, name: str, param: torch.nn.Parameter | None) -> None:
        """Shards a parameter when a module gets it."""
        self._modules.add(module)
        if param is None or is_lazy(param):
            return
        self.check(param, f'parameter "{type(module).__name__}.{name}"')
        self.keep(param)

    def sweep(self) -> None:
        """Shards parameters that came into the modules in other ways (`module._parameters[...] =
        `)."""
        for module in list(self._modules):
            for param in module._parameters.values():
                # The memory of a parameter that has an engine cannot be resized.
                if param is None or is_lazy(param) or not param.untyped_storage().resizable():
                    continue
                self.keep(param)

    @contextlib.contextmanager
    def conversions(self) -> Iterator[None]:
        """Within the context, `model.to(...)`, `half()` and `to_empty()` shard each parameter right
        after its conversion, so only one parameter at a time is whole."""
        plain = torch.nn.Module._apply
        built = self

        def apply(module: Any, fn: Callable[[torch.Tensor], Any], recurse: bool = True) -> Any:
            names = {id(p): name for name, p in module._parameters.items() if p is not None}

            def convert(tensor: torch.Tensor) -> Any:
                made = fn(tensor)
                name = names.get(id(tensor))
                ours = name is not None and (
                    module in built._modules
                    or tensor.device.type == "meta"
                    or built._held.holds(tensor)
                )
                if ours and made is not tensor and isinstance(made, torch.Tensor):
                    built.check(made, f'parameter "{type(module).__name__}.{name}"')
                    built.keep(made)
                    built._from_meta += tensor.device.type == "meta" != made.device.type
                return made

            before = built._from_meta
            for child in module.children() if recurse else ():
                child._apply(fn)
            built.converting = True
            try:
                return plain(module, convert, recurse=False)  # type: ignore[no-untyped-call]
            finally:
                built.converting = False
                if built._from_meta > before:
                    built._filled(module)

        torch.nn.Module._apply = apply  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.nn.Module._apply = plain  # type: ignore[method-assign]
