"""Stand-ins for tensors that another stage of a pipeline computes: shapes without values."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from penstock._native import RuntimeFault


@functools.cache
def _mode() -> FakeTensorMode:
    """Returns the only mode of the process, because torch cannot mix fake tensors of several modes.
    Making the first fake tensor takes about one second."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class Absent(torch.Tensor):
    """A tensor with shape, dtype and device but without values on this rank, until `resolve()`.

    The result of an op on it is also absent. A read of its values raises RuntimeFault, and so does
    an op that would write these values to a tensor with values.
    """

    _fake: torch.Tensor
    _value: torch.Tensor | None

    @staticmethod
    def __new__(cls, fake: torch.Tensor) -> "Absent":
        made: Absent = torch.Tensor._make_wrapper_subclass(
            cls, fake.shape, dtype=fake.dtype, device=fake.device
        )
        made._fake, made._value = fake, None
        return made

    def resolve(self, value: torch.Tensor) -> None:
        """Sets the values: later ops on this tensor use `value`."""
        with torch._C.DisableTorchFunctionSubclass():
            self._value = value

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map(value_of, (args, kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        if not any(isinstance(one, Absent) for one in leaves):
            return func(*args, **kwargs)
        if _writes(func, args, kwargs) or getattr(func, "__name__", "") == "backward":
            raise _fault(func)
        try:
            made = func(*pytree.tree_map(_fake_of, args), **pytree.tree_map(_fake_of, kwargs))
        except RuntimeFault:
            raise
        except Exception as error:
            raise _fault(func) from error
        if not any(isinstance(one, FakeTensor) for one in pytree.tree_leaves(made)):
            return made  # for example sizes
        # An op that returns its input returns the same Absent.
        given = {id(_fake_of(one)): one for one in leaves if isinstance(one, Absent)}
        return pytree.tree_map(
            lambda one: given[id(one)] if id(one) in given else _absent_of(one), made
        )

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, _types: Any, _args: Any = (), _kwargs: Any = None
    ) -> Any:
        raise _fault(func)


def value_of(one: Any) -> Any:
    """Returns the value of a resolved stand-in, and any other argument unchanged."""
    if isinstance(one, Absent) and one.__dict__["_value"] is not None:
        return one.__dict__["_value"]
    return one


def is_absent(one: Any) -> bool:
    return isinstance(one, Absent) and one.__dict__["_value"] is None


def is_stand_in(one: Any) -> bool:
    """Whether `one` is absent, or a fake tensor with which torch computes shapes."""
    return is_absent(one) or isinstance(one, FakeTensor)


def like(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Absent:
    with _mode():
        return Absent(torch.empty(shape, dtype=dtype, device=device))


def fake_of(one: torch.Tensor) -> torch.Tensor:
    """Returns a fake tensor with the shape, dtype and device of a tensor, absent or not."""
    if isinstance(one, Absent):
        fake: torch.Tensor = one.__dict__["_fake"]
        return fake
    if isinstance(one, FakeTensor):
        return one
    with _mode():
        return torch.empty(one.shape, dtype=one.dtype, device=one.device)


def _fake_of(one: Any) -> Any:
    return one.__dict__["_fake"] if isinstance(one, Absent) else one


def _absent_of(one: Any) -> Any:
    return Absent(one) if isinstance(one, FakeTensor) else one


def _writes(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the op writes to a tensor that has values on this rank."""
    name = getattr(func, "__name__", "")
    target = kwargs.get("out") if "out" in kwargs else (args[0] if args else None)
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    in_place = in_place or name in {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__set__"}
    return ("out" in kwargs or in_place) and not isinstance(target, Absent)


def _fault(func: Any) -> RuntimeFault:
    name = getattr(func, "__name__", str(func))
    return RuntimeFault(
        f"[front::pipeline] the model, or a hook on one of its modules, computes `{name}` of a "
        f"tensor that only another stage of the pipeline has. A stage receives only the arguments "
        f"of its first module. Pass the tensor as one of them, or move the stage boundaries "
        f'("parallel.stages")'
    )
