"""Runs a module in addition to a forward, and compares two such runs over tensor ranks.

A run has its own leaves in place of arguments and parameters, so that autograd's graph of the
forward and the engine's hooks do not see it. See [Note: Checked rules] in rule_check.py.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from penstock.front import generators, module_tree
from penstock.parallel.lazy_logits import LazyLogits

# Allowed relative differences. In a new model, scores of attention are small, and low precision
# would hide the effect of a rule on them. So runs compute in fp32 if the module can.
_ALLOWED = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_LOW = (torch.float16, torch.bfloat16)
# A gradient can be zero except for rounding (the bias of keys). So a difference is divided by the
# gradient or by this part of the largest gradient, whichever is larger.
_FLOOR = 0.1
_PIECE = 1 << 18  # elements that are compared at a time
_MODULE = frozenset(vars(torch.nn.Module()))  # attributes of torch's own
_CONTAINERS = (list, dict, set, collections.deque)


@dataclasses.dataclass
class Results:
    """What a run computed.

    Attributes:
        outputs: the tensors that the module returned.
        inputs: leaves of its arguments by name.
        params: leaves of its parameters by name.
        allowed: the largest relative difference that is allowed.
        again: enters the run's context, for a backward that recomputes.
    """

    GRADIENT_OF_PARAMETER = "the gradient of parameter "

    outputs: list[torch.Tensor]
    inputs: dict[str, torch.Tensor]
    params: dict[str, torch.Tensor]
    allowed: float
    again: Callable[[], contextlib.AbstractContextManager[None]]

    def backward(self, seeds: list[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Returns the gradients of inputs and parameters by name, and drops the graph.

        A name without a gradient is left out. `seeds`: gradients of the outputs.
        """
        pairs = zip(self.outputs, seeds, strict=True)
        roots = [(one, seed) for one, seed in pairs if one.requires_grad and seed is not None]
        leaves = self.inputs | self.params
        wanted = {name: one for name, one in leaves.items() if one.requires_grad}
        self.outputs = [one.detach() for one in self.outputs]
        if not roots or not wanted:
            return {}
        tensors, seeded = [one for one, _ in roots], [seed for _, seed in roots]
        # Reentrant checkpointing inside of the module refuses `inputs`.
        reentrant = any(_has_reentrant(one) for one in tensors)
        inputs = {} if reentrant else {"inputs": list(wanted.values())}
        with self.again():
            torch.autograd.backward(tensors, seeded, **inputs)  # type: ignore[arg-type]
        return {name: one.grad for name, one in wanted.items() if one.grad is not None}


class Probe:
    """Runs modules of one engine's model with the ranks' parts or with full weights.

    Attributes:
        tokens: the stacks with cut tokens, or None.
        running: whether a run is in progress.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        ranks: Any,
        tokens: Any,
        attributes: list[Any],
        shapes_alone: Callable[[], bool],
    ) -> None:
        self.ranks, self.tokens, self.shapes_alone = ranks, tokens, shapes_alone
        self._attributes = attributes
        self._device = module_tree.device_of(model)
        # Runs compute all tokens, so the gradients of these parameters are not addends.
        rows = {f"{one.name}.bias" for one in ranks.modules if one.style == "row_tokens"}
        self._cuts = {
            name: cut
            for name, cut in ranks.cuts.items()
            if cut[0] >= 0 or not (name in rows or (tokens and tokens.is_between(name)))
        }
        self._names = {id(param): name for name, param in module_tree.params_of(model)}
        self._run: _Run | None = None

    @property
    def running(self) -> bool:
        return self._run is not None

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """In the context, exchanges do not count as exchanges of the model's layers."""
        self.ranks.set_checking(True)
        try:
            yield
        finally:
            self.ranks.set_checking(False)

    def uncut(self, layer: str) -> bool:
        """Whether the cut layer runs with full weights now."""
        return self._run is not None and layer in self._run.uncut

    def call_uncut(self, module: Any, inner: Callable[..., Any], *args: Any) -> Any:
        """Calls a cut layer's own forward with its full weights."""
        assert self._run is not None
        parts = dict(module._parameters)
        try:
            for key, param in parts.items():
                module._parameters[key] = None if param is None else self._full(param, self._run)
            return inner(*args)
        finally:
            module._parameters.update(parts)

    def _full(self, param: Any, run: "_Run") -> Any:
        """Returns a leaf with the full values of a parameter. All tensor ranks call it."""
        name = run.names.get(id(param), "")
        dim, ranges = self._cuts.get(name, (-1, []))
        if dim < 0:
            return param
        if name in run.full:
            return run.full[name]
        parts = self.ranks.all_of(f"weights of {name}", param)
        sizes = list(param.shape)
        sizes[dim] = sum(end - begin for own in ranges for begin, end in own)
        full = param.new_empty(sizes)
        for part, own in zip(parts, ranges, strict=True):
            at = 0
            for begin, end in own:
                full.narrow(dim, begin, end - begin).copy_(part.narrow(dim, at, end - begin))
                at += end - begin
        made = _like(param, full, param.requires_grad and run.grads)
        if run.grads:  # without gradients one layer's full weights suffice
            run.full[name] = made
        return made

    def run(
        self, region: Any, inner: Callable[..., Any], given: Any, *, whole: bool, wide: bool
    ) -> Results:
        """Runs the region's module, `inner`, on the arguments `given` = (args, kwargs).

        Args:
            whole: with full weights in the region's own layers, else as the ranks compute it.
            wide: in fp32 instead of a lower precision.
        """
        uncut = {one.name for one in region.layers} if whole else set()
        run = _Run(uncut, wide, not region.gathers, dict(self._names))
        tensors, left = module_tree.take_out(given)
        leaves = _leaves(tensors, run.grads, wide)
        again = functools.partial(self._inside, region, given, run)
        with again(), torch.set_grad_enabled(run.grads):
            args, kwargs = module_tree.put_in([one.clone() for one in leaves], left)
            output = inner(*args, **kwargs)
            found = [
                one.whole() if isinstance(one, LazyLogits) else one
                for one in module_tree.take_out(output)[0]
            ]
        inputs = {f"argument {i}": one for i, one in enumerate(leaves) if one.requires_grad}
        params = {**run.parts, **run.full}
        allowed = _allowed([*found, *params.values()], wide, self._device.type)
        return Results(found, inputs, params, allowed, again)

    @contextlib.contextmanager
    def _inside(self, region: Any, given: Any, run: "_Run") -> Iterator[None]:
        """The context of a run: layers, parameters and attributes are the run's."""
        self._run = run
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.left_alone(region.module, given, run.wide))
                if run.wide and torch.is_autocast_enabled(self._device.type):
                    stack.enter_context(torch.autocast(self._device.type, enabled=False))
                if run.grads:
                    stack.enter_context(self._own_parameters(region, run))
                if run.uncut:
                    stack.enter_context(self._full_attributes(region))
                yield
        finally:
            self._run = None

    @contextlib.contextmanager
    def left_alone(self, module: torch.nn.Module, given: Any, wide: bool = False) -> Iterator[None]:
        """In the context a run of the module changes nothing: neither random numbers, buffers,
        attributes nor objects among the arguments. Dropout and modes of the caller are off.

        `wide`: buffers of low precision are fp32.
        """
        states, drawn = generators.of_forward(self._device), random.getstate()
        modules = [one for _, one in module_tree.modules_of(module)]
        fields = [(one, dict(vars(one))) for one in modules]
        buffers = [(one._buffers, dict(one._buffers)) for one in modules]
        own = [value for _, seen in fields for n, value in seen.items() if n not in _MODULE]
        changing = [one for one in own if type(one) in _CONTAINERS]
        changing += module_tree.objects_in(given)
        objects = [(one, module_tree.State(one)) for one in changing]
        cached = torch.is_autocast_cache_enabled()
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one)
        torch.set_autocast_cache_enabled(False)
        try:
            for now, before in buffers:
                now.update((n, None if v is None else _copy(v, wide)) for n, v in before.items())
            with hooks, _NoDropout(), _disable_current_modes():
                yield
        finally:
            torch.set_autocast_cache_enabled(cached)
            for one, kept in objects:
                kept.put_in(one)
            for now, before in buffers:
                now.clear()
                now.update(before)
            for one, seen in fields:
                vars(one).clear()
                vars(one).update(seen)
            generators.set_of_forward(states, self._device)
            random.setstate(drawn)

    @contextlib.contextmanager
    def _own_parameters(self, region: Any, run: "_Run") -> Iterator[None]:
        """In the context the module's parameters are leaves of the run, with the same values."""
        made, places = run.leaves, []
        for _, module in module_tree.modules_of(region.module):
            places.append((module._parameters, dict(module._parameters)))
        try:
            for params, before in places:
                for key, param in before.items():
                    if param is None:
                        continue
                    if id(param) not in made:
                        value = _wide(param.detach()) if run.wide else param.detach()
                        leaf = made[id(param)] = _like(param, value, param.requires_grad)
                        run.names[id(leaf)] = name = self._names.get(id(param), "")
                        if region.owns(name):
                            run.parts[name] = leaf
                    params[key] = made[id(param)]
            yield
        finally:
            for params, before in places:
                params.update(before)

    @contextlib.contextmanager
    def _full_attributes(self, region: Any) -> Iterator[None]:
        """In the context divided attributes have their full values, except in inner regions."""
        own = [one for one in self._attributes if not region.encloses(one.name)]
        for one in own:
            one.make_whole()
        try:
            yield
        finally:
            for one in own:
                one.divide()

    # ---- comparing two runs

    def compared(
        self, region: Any, parts: Results, full: Results
    ) -> tuple[str, float, float] | None:
        """Returns the largest difference above the allowed one: what, difference, allowed; or None.

        The result is the same on all tensor ranks. All of them call it.
        """
        allowed = max(parts.allowed, full.allowed)
        found: dict[str, float] = {}
        if len(parts.outputs) != len(full.outputs):
            found["the number of its outputs"] = math.inf
        seeds = []
        for i, (ours, theirs) in enumerate(zip(parts.outputs, full.outputs, strict=False)):
            dim = self._dim_of_share(ours, theirs) if i > 0 else -1
            share = theirs if dim < 0 else self._share(theirs, dim)
            found[f"output {i}"] = _difference(ours.detach(), share.detach())
            seeds.append(_seed(theirs, i) if ours.shape == share.shape else None)
        worst = self._worst(found, allowed)
        if worst is None and not region.gathers:
            mine = self._gradients(parts, seeds, full.outputs)
            its = full.backward([*seeds, *[None] * (len(full.outputs) - len(seeds))])
            worst = self._worst(self._differences(parts, mine, its), allowed)
        return worst

    def _gradients(
        self, parts: Results, seeds: list[torch.Tensor | None], full: list[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        own: list[torch.Tensor | None] = []
        for one, seed, theirs in zip(parts.outputs, seeds, full, strict=False):
            dim = self._dim_of_share(one, theirs)
            own.append(seed if seed is None or dim < 0 else self._share(seed, dim))
        return parts.backward([*own, *[None] * (len(parts.outputs) - len(own))])

    def _differences(
        self, parts: Results, ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]
    ) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, leaf in parts.inputs.items():
            mine, its = (one.get(name, torch.zeros_like(leaf)) for one in (ours, theirs))
            found[f"the gradient of {name}"] = _difference(mine, its)
        trained = {name: one for name, one in parts.params.items() if one.requires_grad}
        scale = max((_rms(theirs[name]) for name in trained if name in theirs), default=0.0)
        for name, leaf in trained.items():
            mine = ours.get(name, torch.zeros_like(leaf))
            dim, ranges = self._cuts.get(name, (None, []))
            if dim == -1:
                mine = self.ranks.all_of(f"gradient of {name}", mine).sum(0)
            its = theirs.get(name, torch.zeros_like(mine))
            if dim is not None and its.shape != mine.shape:
                own = ranges[self.ranks.index]
                its = torch.cat([its.narrow(dim, begin, end - begin) for begin, end in own], dim)
            found[f'{Results.GRADIENT_OF_PARAMETER}"{name}"'] = _difference(mine, its, scale)
        return found

    def _worst(self, found: dict[str, float], allowed: float) -> tuple[str, float, float] | None:
        mine = torch.tensor(list(found.values()), dtype=torch.float64)
        if not found:
            return None
        most, index = self.ranks.all_of("differences from uncut modules", mine).amax(0).max(0)
        if float(most) <= allowed:
            return None
        return list(found)[int(index)], float(most), allowed

    def _dim_of_share(self, part: torch.Tensor, whole: torch.Tensor) -> int:
        """Returns the dim along which `part` has the shape of a rank's share of `whole`, or -1."""
        if part.dim() != whole.dim():
            return -1
        other = [i for i in range(part.dim()) if part.shape[i] != whole.shape[i]]
        fits = len(other) == 1 and part.shape[other[0]] * self.ranks.count == whole.shape[other[0]]
        return other[0] if fits else -1

    def _share(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        each = whole.shape[dim] // self.ranks.count
        return whole.narrow(dim, self.ranks.index * each, each)


@dataclasses.dataclass
class _Run:
    """The state of one run."""

    uncut: set[str]  # layers that run with full weights
    wide: bool  # computes in fp32 instead of a lower precision
    grads: bool  # has a backward
    names: dict[int, str]  # id of a parameter or of its leaf -> name
    leaves: dict[int, Any] = dataclasses.field(default_factory=dict)  # by id of the parameter
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)  # leaves of own parameters
    full: dict[str, Any] = dataclasses.field(default_factory=dict)  # leaves with full values


class _NoDropout(TorchFunctionMode):
    """Turns dropout off, because a part draws different numbers from the whole."""

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else given["input"]
        if func is functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            given.pop("dropout_p", None)
        return func(*args, **given)


_DROPOUTS = frozenset(
    getattr(place, name)
    for place in (torch, functional)
    for name in (
        "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
        "alpha_dropout_", "feature_dropout", "feature_dropout_", "feature_alpha_dropout",
        "feature_alpha_dropout_",
    )
    if hasattr(place, name)
)  # fmt: skip


def same_everywhere(ranks: Any, given: Any) -> bool:
    """Whether the tensors in the arguments are equal on all tensor ranks. All of them call it."""
    digests = [_digest(one) for one in module_tree.take_out(given)[0]]
    text = hashlib.blake2b(b"".join(digests), digest_size=7).digest()
    mine = torch.tensor([int.from_bytes(text, "big")])
    return bool((ranks.all_of("arguments of a checked module", mine) == mine).all())


def _digest(tensor: torch.Tensor) -> bytes:
    seen = tensor.detach()
    if seen.layout != torch.strided or seen.is_nested or seen.numel() == 0:
        return str(tuple(seen.shape)).encode()
    flat = seen.cpu().contiguous().reshape(-1).view(torch.uint8)
    return (
        hashlib.blake2b(flat.numpy().data, digest_size=16).digest()
        + str(tuple(seen.shape)).encode()
    )


def _like(param: Any, value: torch.Tensor, trains: bool) -> torch.nn.Parameter:
    made = torch.nn.Parameter(value, requires_grad=trains)
    vars(made).update(vars(param))
    return made


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in _LOW else value


def _copy(value: torch.Tensor, wide: bool) -> torch.Tensor:
    return value.clone() if not wide or value.dtype not in _LOW else value.float()


def _leaves(tensors: list[torch.Tensor], grads: bool, wide: bool) -> list[torch.Tensor]:
    """Returns copies of the arguments. If an argument has a gradient in the forward, its copy has
    one. If the forward is without gradients (reentrant checkpointing), only the first floating copy
    has one."""
    leaves = [_copy(one.detach(), wide) for one in tensors]
    floating = [i for i, one in enumerate(leaves) if one.is_floating_point()]
    wanted = [i for i in floating if tensors[i].requires_grad]
    if not torch.is_grad_enabled():
        wanted = floating[:1]
    for i in wanted if grads else []:
        leaves[i].requires_grad_()
    return leaves


def _allowed(tensors: list[torch.Tensor], wide: bool, device: str) -> float:
    used = {one.dtype for one in tensors}
    if not wide and torch.is_autocast_enabled(device):
        used.add(torch.get_autocast_dtype(device))
    return max((_ALLOWED[one] for one in used if one in _ALLOWED), default=0.0)


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.float().square().mean().sqrt()) if tensor.numel() else 0.0


def _difference(ours: torch.Tensor, theirs: torch.Tensor, scale: float = 0.0) -> float:
    """Returns the root mean square of the difference, divided by that of `theirs`; infinite if
    shapes or infinities differ. `scale`: the root mean square of other values of this kind."""
    if ours.shape != theirs.shape:
        return math.inf
    if ours.is_complex():
        return _difference(torch.view_as_real(ours), torch.view_as_real(theirs), scale)
    if not ours.is_floating_point():
        return float((ours != theirs).float().mean()) if ours.numel() else 0.0
    far = usual = 0.0  # sums of squares, in pieces, so that large weights need no large copies
    for at in range(0, ours.numel(), _PIECE):
        mine, its = (one.reshape(-1)[at : at + _PIECE].double() for one in (ours, theirs))
        same = (mine == its).logical_or_(mine.isnan().logical_and_(its.isnan()))
        apart = mine.sub(its).masked_fill_(same, 0.0)
        if not bool(apart.isfinite().all()):
            return math.inf
        far += float(apart.square_().sum())
        usual += float(its.masked_fill(its.isfinite().logical_not_(), 0.0).square_().sum())
    usual = max(usual, (_FLOOR * scale) ** 2 * ours.numel())
    return math.sqrt(far / usual) if usual else (math.inf if far else 0.0)


def _seed(output: torch.Tensor, index: int) -> torch.Tensor | None:
    """Returns a gradient of the output, the same on all ranks."""
    if not output.is_floating_point():
        return None
    drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(index))
    return drawn.to(output)


def _has_reentrant(output: torch.Tensor) -> bool:
    """Whether the output's graph has a reentrant checkpoint."""
    waiting, seen = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            return True
        waiting.extend(one for one, _ in node.next_functions)
    return False


__all__ = ["Probe", "Results", "same_everywhere"]
