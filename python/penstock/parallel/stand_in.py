"""Stand-ins for what another stage of a pipeline computes: shapes without values."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from penstock._native import RuntimeFault


@functools.cache
def _mode() -> FakeTensorMode:
    """One for all, so that what it makes can be computed with; its first one takes a second."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class Absent(torch.Tensor):
    """A tensor of which this rank knows shape, dtype and device alone, until `resolve()`.

    What is computed from it is absent, too. Its values are an error, and so is whatever would put
    them into a tensor that is here.
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
        """From now on it is `value`."""
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
            return made  # sizes, say, as what they are
        # What gives back its input gives back the very same.
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
    """The value of an absent tensor that has one; else what was given."""
    if isinstance(one, Absent) and one.__dict__["_value"] is not None:
        return one.__dict__["_value"]
    return one


def is_absent(one: Any) -> bool:
    return isinstance(one, Absent) and one.__dict__["_value"] is None


def is_stand_in(one: Any) -> bool:
    """Whether it is absent, or what torch computes shapes of absent tensors with."""
    return is_absent(one) or isinstance(one, FakeTensor)


def like(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Absent:
    with _mode():
        return Absent(torch.empty(shape, dtype=dtype, device=device))


def fake_of(one: torch.Tensor) -> torch.Tensor:
    """Shape, dtype and device of a tensor, absent or not, for torch to compute with."""
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
    """Whether values would go into a tensor that is here."""
    name = getattr(func, "__name__", "")
    target = kwargs.get("out") if "out" in kwargs else (args[0] if args else None)
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    in_place = in_place or name in {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__set__"}
    return ("out" in kwargs or in_place) and not isinstance(target, Absent)


def _fault(func: Any) -> RuntimeFault:
    name = getattr(func, "__name__", str(func))
    return RuntimeFault(
        f"[front::pipeline] the model, or a hook on one of its modules, computes `{name}` of what "
        f"another stage of the pipeline has computed, and this stage was not given it: stages are "
        f"given the arguments of the module that they begin with. Pass it on as one of them, or "
        f"begin stages elsewhere "
        f'("parallel.stages")'
    )
