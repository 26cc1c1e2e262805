"""Lazy logits. They are computed when an op needs them; for a cross-entropy, they are never
computed in full.

The head returns a LazyLogits if `tiling.loss_tokens` or `parallel.cut_logits` is set. A LazyLogits
has the shape and dtype of the logits, and holds their input: hidden states, or this rank's part of
the classes. Ops that only rearrange tokens or widen the dtype run on that input.
`torch.nn.functional.cross_entropy` on class indices runs chunk by chunk, or on the parts. Any other
op first computes the full logits.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import functional
from torch.utils import _pytree

from penstock._native import RuntimeFault


class Head(Protocol):
    """Computes logits [..., num_classes] from `hidden`, a tensor of the same leading shape."""

    @property
    def num_classes(self) -> int:
        """The vocabulary's size."""

    def step(self) -> int:
        """Returns the engine's step if the logits are valid only within it, else 0."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the full logits [..., num_classes].

        All ranks call it if parameters are sharded or logits are cut.
        """

    def cross_entropy(
        self, hidden: torch.Tensor, target: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor | None:
        """Returns the loss of hidden [tokens, ...] and target [tokens] int64.

        The shape is [], or [tokens] without a reduction. Returns None if it needs the full logits.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class TiledHead:
    """A head whose weights are in tiles. `hidden` are hidden states [..., size]."""

    tiles: Any
    bias: torch.Tensor | None
    bias_values: torch.Tensor | None  # a copy, because the parameter may be sharded later
    num_classes: int
    core: Any

    def step(self) -> int:
        """Returns the engine's step, because an update changes the weights."""
        return int(self.core.steps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes the full logits."""
        return self.tiles.linear(hidden, self.bias, self.bias_values)  # type: ignore[no-any-return]

    def cross_entropy(
        self, hidden: torch.Tensor, target: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor | None:
        """Computes the loss in chunks of tokens."""
        return self.tiles.cross_entropy(  # type: ignore[no-any-return]
            hidden, self.bias, self.bias_values, target, options
        )


@dataclasses.dataclass(frozen=True, eq=False)
class CutHead:
    """A head whose weight tensor ranks cut. `hidden` are this rank's logits [..., own classes]."""

    ranks: Any
    how: Any
    num_classes: int

    def step(self) -> int:
        """Returns 0, because the logits are computed already."""
        return 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gathers the full logits. All tensor ranks call it."""
        return self.ranks.whole_logits(self.how, hidden)  # type: ignore[no-any-return]

    def cross_entropy(
        self, hidden: torch.Tensor, target: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor | None:
        """Computes the loss from the parts of all tensor ranks, in one exchange."""
        if options["reduction"] == "none":
            return None
        loss = self.ranks.cross_entropy(self.how, hidden, target, options)
        return loss.to(options["dtype"])  # type: ignore[no-any-return]


class LazyLogits(torch.Tensor):
    """A tensor [..., classes] that represents the head's output on `hidden`, without values."""

    head: Head
    hidden: torch.Tensor
    step: int  # head.step() when the head ran

    @staticmethod
    def of(
        head: Head,
        hidden: torch.Tensor,
        dtype: torch.dtype | None = None,
        step: int | None = None,
    ) -> "LazyLogits":
        """Returns the head's output on `hidden` as `dtype` (default: the dtype of `hidden`)."""
        made: LazyLogits = torch.Tensor._make_wrapper_subclass(
            LazyLogits,
            (*hidden.shape[:-1], head.num_classes),
            dtype=dtype or hidden.dtype,
            device=hidden.device,
            requires_grad=torch.is_grad_enabled(),
        )
        made.head, made.hidden = head, hidden
        made.step = head.step() if step is None else step
        return made

    def like(self, hidden: torch.Tensor, dtype: torch.dtype | None = None) -> "LazyLogits":
        """Returns the logits of rearranged tokens, with the same head and step."""
        made = LazyLogits.of(self.head, hidden, dtype or self.dtype, self.step)
        return made

    def whole(self) -> torch.Tensor:
        """Returns the full logits as a plain tensor [..., classes] of this dtype.

        All ranks call it if parameters are sharded or logits are cut.

        Raises:
            RuntimeFault: if the weights changed since the head ran.
        """
        self.check()
        return self.head.logits(self.hidden).to(self.dtype)

    def check(self) -> None:
        """Raises RuntimeFault if the weights changed since the head ran."""
        if self.head.step() != self.step:
            raise RuntimeFault(
                "[front::LazyLogits] with tiling.loss_tokens, logits are computed only when they "
                "are used, and engine.step() has changed the weights in the meantime. Use the "
                "logits before step()"
            )

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Keeps the result lazy if the op only rearranges tokens. Computes losses in chunks."""
        kwargs = kwargs or {}
        if func in _AS_IT_IS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None and args and isinstance(args[0], LazyLogits):
            result = handler(args[0], *args[1:], **kwargs)
            if result is not None:
                return result
        _refuse_writes(func, args, kwargs)
        real_args, real_kwargs = _pytree.tree_map_only(LazyLogits, LazyLogits.whole, (args, kwargs))
        return func(*real_args, **real_kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raises RuntimeFault. Autograd ran already, so the result would have no gradient."""
        raise RuntimeFault(
            f"[front::LazyLogits] these logits have no values yet (tiling.loss_tokens, "
            f"parallel.cut_logits), but {func} was called on them without __torch_function__. Call "
            f"it on logits.whole()"
        )


def _refuse_writes(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raises RuntimeFault if the op would write to lazy logits or hook their gradient."""
    name = getattr(func, "__name__", "")
    given = [*args[:1], kwargs.get("out")]
    writes = (
        (name.endswith("_") and not name.endswith("__"))
        or name in _WRITING
        or kwargs.get("inplace")
        or kwargs.get("out") is not None
    )
    if writes and any(isinstance(one, LazyLogits) for one in given):
        raise RuntimeFault(
            f"[front::LazyLogits] these logits have no values yet (tiling.loss_tokens, "
            f"parallel.cut_logits), so the result of `{name}` would be lost. Compute the values "
            f"first (logits = logits.whole()), or make new logits (masked_fill, not masked_fill_)"
        )


_WRITING = {
    "__setitem__",
    *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")),
    "register_hook",
    "retain_grad",
}


def with_history(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor. For lazy logits, returns `hidden`, which receives their gradient."""
    return tensor.hidden if isinstance(tensor, LazyLogits) else tensor


_Lazy = LazyLogits | None  # None: the op needs the full logits


def _rearranged(func: Any) -> Callable[..., _Lazy]:
    """Handles ops that keep the order of elements and the last dim (the classes)."""

    def handle(logits: LazyLogits, *args: Any, **kwargs: Any) -> _Lazy:
        classes = logits.head.num_classes
        if classes == 1 or any(isinstance(arg, torch.dtype) for arg in args):
            return None
        shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
        if len(shape) == 0 or shape[-1] != classes:
            return None
        return logits.like(logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1]))

    return handle


def _float(logits: LazyLogits) -> _Lazy:
    return logits.like(logits.hidden, torch.float32)


def _to(logits: LazyLogits, *args: Any, **kwargs: Any) -> _Lazy:
    if kwargs or args not in ((torch.float32,), (logits.dtype,)):
        return None
    return logits.like(logits.hidden, args[0])


def _same(logits: LazyLogits) -> _Lazy:
    return logits


def _getitem(logits: LazyLogits, index: Any) -> _Lazy:
    items = list(index) if isinstance(index, tuple) else [index]
    if any(item is None or isinstance(item, bool | list) for item in items):
        return None
    covers = [_dims(item) for item in items]
    for place, item in enumerate(items):
        if item is Ellipsis:
            items[place : place + 1] = [slice(None)] * (logits.ndim - sum(covers))
            break
    if sum(_dims(item) for item in items) == logits.ndim:
        if not (isinstance(items[-1], slice) and items[-1] == slice(None)):
            return None
        items.pop()
    return logits.like(logits.hidden[tuple(items)])


def _dims(item: Any) -> int:
    """Returns the number of dims that an index covers."""
    if item is Ellipsis:
        return 0
    mask = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
    return item.ndim if mask else 1


_SIGNATURE = inspect.signature(functional.cross_entropy)


def _cross_entropy(logits: LazyLogits, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    bound = _SIGNATURE.bind(logits, *args, **kwargs)
    bound.apply_defaults()
    options = bound.arguments
    target, reduction = options["target"], options["reduction"]
    plain = all(options[name] is None for name in ("weight", "size_average", "reduce"))
    known = reduction in ("mean", "sum", "none") and 0.0 <= options["label_smoothing"] <= 1.0
    indices = isinstance(target, torch.Tensor) and target.dtype == torch.int64
    if not (plain and known and indices) or logits.ndim > 2 or target.shape != logits.shape[:-1]:
        return None
    logits.check()
    hidden = logits.hidden
    autocast = torch.is_autocast_enabled(hidden.device.type)
    loss = logits.head.cross_entropy(
        hidden.reshape(hidden.shape[:-1].numel(), hidden.shape[-1]),
        target.reshape(-1),
        {
            "ignore_index": options["ignore_index"],
            "reduction": reduction,
            "label_smoothing": options["label_smoothing"],
            "dtype": torch.float32 if autocast else logits.dtype,
        },
    )
    if loss is None:
        return None
    return loss if reduction != "none" else loss.reshape(target.shape)


_ORDER_KEEPING = (
    torch.Tensor.view,
    torch.Tensor.reshape,
    torch.reshape,
    torch.Tensor.flatten,
    torch.flatten,
    torch.Tensor.unsqueeze,
    torch.Tensor.squeeze,
)
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **{func: _rearranged(func) for func in _ORDER_KEEPING},
    torch.Tensor.float: _float,
    torch.Tensor.to: _to,
    torch.Tensor.contiguous: _same,
    torch.Tensor.__getitem__: _getitem,
    functional.cross_entropy: _cross_entropy,
}
_AS_IT_IS = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.__len__,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_contiguous,
}
