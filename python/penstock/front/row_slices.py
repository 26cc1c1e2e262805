"""Runs a model's blocks on slices of the batch, in forwards without gradients.

A block's activations (attention scores, the inner values of an MLP) grow with the tokens that it
computes at once. In slices of some rows, they are in memory for these rows alone. The parameters of
a block are gathered once, for all slices.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault
from penstock.front import module_tree
from penstock.front.forward_guard import Forward

_CHECKED = 4  # rows that are computed together and apart, to see whether rows depend on others
_WHOLE = ("cache_position",)  # arguments of one dimension that are not by row
_PARTS = ("_parameters", "_modules", "_buffers")  # of a module
_OF_BATCH = ("batch_size", "max_batch_size")  # fields of a cache's layer: the number of rows


class RowSlices:
    """Context in which blocks run on slices of the batch.

    Args:
        model: the model.
        units: `core.units`. Those that are elements of a list of modules are the blocks.
        most_tokens: tokens that a block computes at a time, in whole rows: at least one row.
        together: ranks exchange values inside blocks, so each must run them equally often. Then
            blocks are checked only once.

    Raises:
        ConfigError: if there is no such block, or a block is compiled.
    """

    def __init__(
        self, model: torch.nn.Module, units: Sequence[Any], most_tokens: int, together: bool
    ) -> None:
        blocks = {one.module: module_tree.submodule(model, one.module) for one in _blocks(units)}
        if not blocks:
            raise ConfigError(
                '[front::inference] "block_tokens" slices blocks, elements of a ModuleList or a '
                'Sequential that are units, but no unit is one. Name them in "units.modules"'
            )
        for name, block in blocks.items():
            if any(module_tree.is_compiled_in_place(one) for one in block.modules()):
                raise ConfigError(
                    f'[front::inference] "block_tokens" slices blocks, but "{name}" is compiled. '
                    f"Leave block_tokens or the compilation out"
                )
        self._most, self.together = most_tokens, together
        self._blocks, self._installed = blocks, list[Forward]()

    def __enter__(self) -> None:
        for name, block in self._blocks.items():
            # Inside of what gives a stage's first block the values of the stage before.
            sliced = _Sliced(self, name, block)
            self._installed.append(Forward(block, sliced, inside=True))

    def __exit__(self, *_: object) -> None:
        """Restores the blocks' own forwards."""
        while self._installed:
            self._installed.pop().remove()

    def rows_for(self, tokens: int) -> int:
        """Returns the number of rows of a slice, if a row has so many tokens."""
        return max(1, self._most // max(1, tokens))


def _blocks(units: Sequence[Any]) -> Iterator[Any]:
    for index, unit in enumerate(units):
        if index > 0 and not unit.is_tile and not unit.away:
            if unit.module.rpartition(".")[2].isdigit():
                yield unit


class _Sliced:
    """The sliced forward of one block."""

    def __init__(self, slices: RowSlices, name: str, block: torch.nn.Module) -> None:
        self._slices, self._name, self._block = slices, name, block
        self._checked: Any = None  # the state of the block when its rows were last checked

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hidden = next((one for one in (*args, *kwargs.values()) if _is_hidden(one)), None)
        if torch.is_grad_enabled() or hidden is None:
            return forward(*args, **kwargs)
        rows, tokens = int(hidden.shape[0]), int(hidden.shape[1])
        step = self._slices.rows_for(tokens)
        if step >= rows:
            return forward(*args, **kwargs)
        known = self._checked is not None and self._slices.together
        if not known and self._checked != _modes_of(self._block):
            self._check_rows(forward, hidden, args, kwargs)
        joined = _Joined(rows, self._refuse)
        with _Captures(self._refuse) as captures:
            for begin in range(0, rows, step):
                part = _Rows(begin, min(begin + step, rows), rows, self._refuse)
                output = forward(*part.of(args), **part.of_names(kwargs))
                part.check_shared()
                joined.add(part, output, captures.taken())
                part.keep_caches(joined)
            output, captured = joined.result()
            captures.give(captured)
        return output

    def _refuse(self, what: str) -> None:
        raise RuntimeFault(
            f'[front::inference] block "{self._name}" (a {type(self._block).__qualname__}) cannot '
            f"run on slices of the batch: {what}. Leave block_tokens out"
        )

    def _check_rows(
        self, forward: Callable[..., Any], hidden: torch.Tensor, args: Any, kwargs: Any
    ) -> None:
        """Raises RuntimeFault if the last of some rows of the output depends on the other rows of
        the input, on their number or on its own position, as in layers whose first dimension is
        that of tokens, or if the block keeps state."""
        modes, rows = _modes_of(self._block), int(hidden.shape[0])
        state = _state_of(self._block)
        few = min(rows, _CHECKED)
        other = hidden.clone()
        other[: few - 1] = -3 * hidden[: few - 1].flip(-1)
        outputs = []
        for given, begin in ((hidden, 0), (other, 0), (hidden, few - 1)):
            part = _Rows(begin, few, rows, self._refuse, (hidden, given), clones=True)
            with _Captures(self._refuse) as captures:
                output = forward(*part.of(args), **part.of_names(kwargs))
                self._check_sizes(output, captures.taken(), few - begin)
            part.check_shared()
            outputs.append([one[-1] for one in _tensors_in(output) if _is_hidden(one)])
        for one, *others in zip(*outputs, strict=True):
            if not all(_close(one, two) for two in others):
                self._refuse("its rows depend on each other")
        if _state_of(self._block) != state:
            self._refuse("it changes buffers or attributes, which would see the slices")
        self._checked = modes

    def _check_sizes(self, output: Any, captured: Any, rows: int) -> None:
        """Raises RuntimeFault if an output does not have `rows` rows."""
        for one in _tensors_in(output):
            if _per_row(one, rows) != 1:
                self._refuse(f"it returns a tensor of the shape {tuple(one.shape)}")
        for one in _tensors_in(captured):
            if _per_row(one, rows) == 0:
                self._refuse(f"it records a tensor of the shape {tuple(one.shape)}")


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested tuples."""
    if isinstance(value, tuple):
        return [tensor for one in value for tensor in _tensors_in(one)]
    return [value] if isinstance(value, torch.Tensor) else []


def _tuple_like(value: Any, parts: list[Any]) -> Any:
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _per_row(tensor: torch.Tensor, rows: int) -> int:
    """Returns the length of the first dim for each of `rows` rows; 0 if it is not by row."""
    length = tensor.shape[0] if tensor.dim() > 0 else 0
    return 0 if length % rows else length // rows


def _is_hidden(value: Any) -> bool:
    """Whether the value has the shape of hidden states: (rows, tokens, width)."""
    return isinstance(value, torch.Tensor) and value.dim() >= 3 and value.is_floating_point()


def _close(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two results are equal, apart from the last bits, which the number of rows changes."""
    error = max(1e-5, 2 * torch.finfo(one.dtype).eps)
    largest = float(one.nan_to_num().abs().max())
    return torch.allclose(one, two, rtol=0.0, atol=error * largest, equal_nan=True)


def _modes_of(block: torch.nn.Module) -> list[Any]:
    """Returns a value that differs if modes, hooks or attributes of the block change."""
    made: list[Any] = []
    for module in block.modules():
        for name, value in vars(module).items():
            if "_hooks" in name:
                made += [(name, key) for key in value]
            elif name not in _PARTS:
                made.append((name, _mark(value)))
    return made


def _state_of(block: torch.nn.Module) -> list[Any]:
    """Returns a value that differs if attributes, what they hold, or buffers change."""
    made = _modes_of(block)
    for module in block.modules():
        kept = {name: one for name, one in vars(module).items() if name not in _PARTS}
        held = [*module._buffers.values(), *module_tree.tensors_in(kept)]
        made += [(id(one), _version(one)) for one in held if one is not None]
    return made


def _mark(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), _version(value)
    return id(value), len(value) if type(value) in module_tree.CONTAINERS else 0


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Rows:
    """Some rows of the arguments of a block.

    Args:
        begin, end: the rows.
        rows: the rows of the whole batch.
        refuse: raises an error.
        replaced: a tensor, and the tensor to use instead of it.
        clones: the caches of the whole batch must not change.
    """

    def __init__(
        self,
        begin: int,
        end: int,
        rows: int,
        refuse: Callable[[str], None],
        replaced: tuple[Any, Any] = (None, None),
        clones: bool = False,
    ) -> None:
        self.begin, self.end, self.rows = begin, end, rows
        self._refuse, self._replaced, self._clones = refuse, replaced, clones
        self._caches: dict[int, tuple[Any, _CacheRows]] = {}  # by id: the cache, and its rows
        self._shared: list[tuple[torch.Tensor, int]] = []  # arguments of all rows, with versions

    def of(self, value: Any, name: str = "") -> Any:
        """Returns the rows of an argument. Other objects stay as they are."""
        if isinstance(value, torch.Tensor):
            value = self._replaced[1] if value is self._replaced[0] else value
            return self.of_tensor(value, name)
        if isinstance(value, tuple):
            return _tuple_like(value, [self.of(one) for one in value])
        if _is_cache(value):
            if id(value) not in self._caches:
                if getattr(value, "layers", None) is None or value.offloading:
                    self._refuse(f"its cache is a {type(value).__name__}")
                self._caches[id(value)] = (value, _CacheRows(value, self))
            return self._caches[id(value)][1].cache
        if any(True for _ in module_tree.tensors_in(value)):
            self._refuse(f"an argument is a {type(value).__name__} of tensors")
        return value

    def of_names(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: self.of(value, name) for name, value in values.items()}

    def of_tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        first = tensor.shape[0] if tensor.dim() > 0 else 1
        if tensor.dim() < 2:
            if first == self.rows and name not in _WHOLE and tensor.dim() == 1:
                self._refuse(f'it is not clear whether the argument "{name}" has one value per row')
            return self._whole(tensor)
        square = tensor.dim() == 2 and tensor.shape[1] == first
        if first not in (1, self.rows) or (
            square and tensor.dtype not in (torch.int64, torch.int32)
        ):
            self._refuse(
                f"an argument has the shape {tuple(tensor.shape)}, so it is not clear which part "
                f"of it belongs to a row"
            )
        if first == 1:
            return self._whole(tensor)
        part = tensor[self.begin : self.end]
        return part.clone() if self._clones else part

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone() if self._clones else tensor
        self._shared.append((tensor, _version(tensor)))
        return tensor

    def check_shared(self) -> None:
        """Calls `refuse` if the block has written to an argument that all rows share."""
        if any(_version(tensor) != version for tensor, version in self._shared):
            self._refuse("it writes to an argument that all rows share")

    def whole_cache(self, value: Any) -> Any:
        """Returns the whole cache if the value has the rows of one, else None."""
        return next((whole for whole, part in self._caches.values() if part.cache is value), None)

    def keep_caches(self, joined: _Joined) -> None:
        """Puts the changed rows of the caches into the whole caches."""
        for _, part in self._caches.values():
            part.keep(joined)

    def of_layer(self, layer: Any) -> Any:
        """Returns a copy of a cache's layer with these rows of its tensors."""
        made = copy.copy(layer)
        for name, value in vars(layer).items():
            if type(value) is dict:  # of several states of linear attention
                part: Any = {key: self._of_field(layer, one) for key, one in value.items()}
            else:
                part = self._of_field(layer, value)
            setattr(made, name, part)
        return made

    def _of_field(self, layer: Any, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            by_row = value.dim() >= 2 and value.shape[0] == self.rows
            part = value[self.begin : self.end] if by_row else value
            return part if by_row and not self._clones else part.clone()
        if any(True for _ in module_tree.tensors_in(value)):
            self._refuse(f"a {type(layer).__name__} of its cache has a {type(value).__name__}")
        return copy.copy(value) if type(value) in module_tree.CONTAINERS else value


def _is_cache(value: Any) -> bool:
    if "transformers" not in sys.modules:
        return False
    from transformers.cache_utils import Cache  # noqa: PLC0415

    return isinstance(value, Cache)


class _CacheRows:
    """Some rows of a cache of transformers. Layers are cut when the block reads them."""

    def __init__(self, cache: Any, rows: _Rows) -> None:
        self._whole, self._layers = cache, _LayerRows(cache.layers, rows)
        self.cache = copy.copy(cache)
        self.cache.layers = self._layers

    def keep(self, joined: _Joined) -> None:
        layers = self._whole.layers
        layers.extend(self._layers.added(len(layers)))
        for index, part in self._layers.read.items():
            joined.add_layer(layers[index], part)


class _LayerRows(list[Any]):
    """The layers of a cache; those that are read are copies with some rows."""

    def __init__(self, layers: Sequence[Any], rows: _Rows) -> None:
        super().__init__(layers)
        self._rows = rows
        self.read: dict[int, Any] = {}

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        index = index % len(self) if index < 0 else index
        if index not in self.read:
            self.read[index] = self._rows.of_layer(super().__getitem__(index))
        return self.read[index]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def added(self, known: int) -> list[Any]:
        """Returns the layers that the block added, still without tokens."""
        return [copy.copy(list.__getitem__(self, index)) for index in range(known, len(self))]


class _Captures:
    """Context in which transformers records outputs of modules inside the block
    (`output_attentions`) here, for each slice, and not in the output of the model."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        module = sys.modules.get("transformers.utils.output_capturing")
        self._refuse, self._collector = refuse, getattr(module, "_active_collector", None)
        self._outer = None if self._collector is None else self._collector.get()
        self._mine: dict[str, Any] = {}

    def __enter__(self) -> _Captures:
        if self._outer is not None:
            self._token = self._collector.set(self._mine)  # type: ignore[union-attr]
            self.taken()
        return self

    def __exit__(self, *_: object) -> None:
        if self._outer is not None:
            self._collector.reset(self._token)  # type: ignore[union-attr]

    def taken(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Returns what was recorded since the last call: the tensors of each kind."""
        if self._mine.get("hidden_states"):
            self._refuse("a module inside it records hidden states")
        made = tuple(tuple(one) for one in self._mine.values() if isinstance(one, list))
        for name, value in (self._outer or {}).items():
            self._mine[name] = [] if isinstance(value, list) else value
        return made

    def give(self, recorded: tuple[tuple[torch.Tensor, ...], ...]) -> None:
        """Adds what was recorded to the output of the model."""
        names = [name for name, value in self._mine.items() if isinstance(value, list)]
        for name, values in zip(names, recorded, strict=True):
            self._outer[name].extend(values)  # type: ignore[index]


class _Joined:
    """The outputs and the caches of all slices."""

    def __init__(self, rows: int, refuse: Callable[[str], None]) -> None:
        self._rows, self._refuse = rows, refuse
        self._result: Any = None
        self._tensors: list[torch.Tensor] = []  # of the result
        self._next = 0
        self._fields: dict[tuple[int, Any], torch.Tensor] = {}  # new tensors of caches

    def add(self, part: _Rows, output: Any, captured: Any) -> None:
        """Adds the output of a slice, which has its rows, and what transformers recorded. This may
        have several rows for each row of the batch: router logits have one for each token."""
        self._begin, self._end, self._next = part.begin, part.end, 0
        self._strict = True
        made = self._of(part, output)
        self._strict = False
        made = (made, self._of(part, captured))
        if part.begin == 0:
            self._result = made

    def result(self) -> Any:
        return self._result

    def _of(self, part: _Rows, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, tuple):
            return _tuple_like(value, [self._of(part, one) for one in value])
        cache = part.whole_cache(value)
        if cache is None and value is not None:
            self._refuse(f"it returns a {type(value).__name__}")
        return cache

    def _of_tensor(self, value: torch.Tensor) -> torch.Tensor:
        times = _per_row(value, self._end - self._begin)
        if times == 0 or (self._strict and times > 1):
            self._refuse(f"it returns a tensor of the shape {tuple(value.shape)}")
        if self._begin == 0:
            self._tensors.append(value.new_empty((self._rows * times, *value.shape[1:])))
        whole = self._tensors[self._next]
        self._next += 1
        whole[self._begin * times : self._end * times] = value
        return whole

    def add_layer(self, layer: Any, part: Any) -> None:
        """Puts the rows of a cache's layer, as the block left them, into the layer."""
        self._add_fields(vars(layer), vars(part))

    def _add_fields(self, whole: dict[Any, Any], part: dict[Any, Any]) -> None:
        last = self._end == self._rows
        for name, value in part.items():
            old = whole.get(name)
            if type(value) is dict and type(old) is dict:
                self._add_fields(old, value)
            elif not isinstance(value, torch.Tensor):
                if last:
                    whole[name] = self._rows if name in _OF_BATCH else value
            elif value.dim() >= 2 and value.shape[0] == self._end - self._begin:
                if not _is_part(value, old, self._begin):
                    self._put(whole, name, value)
            elif last and isinstance(old, torch.Tensor) and old.shape == value.shape:
                old.copy_(value)  # a number of tokens, whose place stays
            elif last:
                whole[name] = value

    def _put(self, whole: dict[Any, Any], name: Any, value: torch.Tensor) -> None:
        key = (id(whole), name)
        if self._begin == 0:
            self._fields[key] = value.new_empty((self._rows, *value.shape[1:]))
        self._fields[key][self._begin : self._end] = value
        if self._end == self._rows:
            whole[name] = self._fields.pop(key)


def _is_part(value: torch.Tensor, whole: Any, begin: int) -> bool:
    """Whether the value is still these rows of `whole`, so that writes to it reached `whole`."""
    if not isinstance(whole, torch.Tensor) or whole.dim() != value.dim():
        return False
    return (
        whole.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
        and value.stride() == whole.stride()
        and value.storage_offset() == whole.storage_offset() + begin * whole.stride(0)
    )
