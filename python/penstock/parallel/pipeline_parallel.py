"""Stages of a pipeline: each rank runs the model's own forward, and computes only its stages.

Until the forward calls the first module of the stage, modules of earlier stages return stand-ins
(`Absent`) with shapes and without values. The stage's first module gets its arguments from the
previous stage. A call of a later stage's first module ends the forward.
"""

import ctypes
import dataclasses
import functools
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from penstock._native import ConfigError, RuntimeFault, _penstock
from penstock.front import generators, module_tree
from penstock.front.forward_guard import Forward, in_backward
from penstock.parallel import stand_in_caches
from penstock.parallel.pipeline_layers import PipelineLayers
from penstock.parallel.stand_in import Absent, fake_of, is_absent, like, value_of
from penstock.parallel.stand_in_caches import CachedTokens


class _StageEnd(BaseException):  # noqa: N818 - not an error: it leaves the model's forward
    """Raised when the forward calls a module of a later stage."""

    def __init__(self, module: str, given: Any) -> None:
        super().__init__(module)
        self.module, self.given = module, given


@dataclasses.dataclass
class Handed:
    """The output of a stage: the arguments of the next stage's first module."""

    text: bytes = b""
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Running:
    """The state of one stage's forward."""

    stage: int
    given: Handed | None  # from the previous stage
    begun: bool  # the stage's first module was called
    micro: "Micro"
    trains: bool  # gradients are enabled
    seeded: bool = False  # the random numbers are the stage's own
    leaves: "list[Arrived | None]" = dataclasses.field(default_factory=list)


_STAGE_BITS = 12  # low bits of a seed that hold the stage's number


@dataclasses.dataclass
class Micro:
    """A micro-batch, on every stage.

    Attributes:
        part: this rank's part of the batch.
        batch: CRC-32 of the part's tensors; None if there are none.
        seed: seed of the forward's random numbers, the same on all ranks that compute it.
    """

    part: Any
    batch: int | None
    seed: int

    @classmethod
    def of(cls, part: Any, name: str) -> "Micro":
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")
        found = None
        for one in module_tree.tensors_in(part):
            if one.device.type != "meta" and one.layout == torch.strided and one.nbytes:
                whole = one.detach().cpu().contiguous()
                bytes_of = (ctypes.c_char * whole.nbytes).from_address(whole.data_ptr())
                found = zlib.crc32(bytes_of, found or 0)
        return cls(part, found, seed << _STAGE_BITS)


class Arrived:
    """A tensor that the previous stage sent and that needs a gradient.

    Attributes:
        grad: the gradient, after the backward has computed it.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self.value: torch.Tensor | None = value
        self.grad: torch.Tensor | None = None
        self.anchor = torch.empty(0, requires_grad=True)


class _Arrive(torch.autograd.Function):
    """The root of a stage's graph. Its output is neither a leaf nor a view, so the model may change
    it in place."""

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, arrived: Arrived) -> Any:
        ctx.arrived = arrived
        value, arrived.value = arrived.value, None
        return value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.arrived.grad = grad
        return None, None


class PipelineParallel:
    """The stages of one engine, and the state of the stage's forward that runs now.

    Attributes:
        active: True if there is more than one stage.
    """

    def __init__(self, model: nn.Module, core: Any, config: Any) -> None:
        self.active = config.mesh.pipeline > 1
        self._running: _Running | None = None
        self._inferring = False
        self._outputs: dict[Any, _Shape] = {}
        self._num_forwards = 0
        self._model = model
        self._device = module_tree.device_of(model)
        self._pieces: list[tuple[str, int, nn.Module]] = []
        if self.active:
            self.ranks = _penstock.PipelineRanks(core)
            if config.parallel.schedule == "zero_bubble":
                # A graph of torch.compile runs its backward with retain_graph=True.
                torch._functorch.config.donated_buffer = False
            for name, stage in self.ranks.pieces:
                self._pieces.append((name, stage, module_tree.submodule(model, name)))

    def install(self, tensor: Any, installed: list[Any], relay: Callable[..., Any]) -> None:
        """Replaces the forward of the model, by `relay`, and of the stages' modules. They are the
        outermost replacements, so that a recomputation in backward gets values. Raises ConfigError
        if a module cannot be in a stage."""
        self._tensor = tensor
        for name, stage, module in self._pieces:
            _check_saves(module, name, stage)
            installed.append(Forward(module, self._around(module, name, stage)))
        if self.active and isinstance(self._model, PipelineLayers):
            installed.append(Forward(self._model, self._entry, "pipeline_entry"))
        if self.active:
            installed.append(Forward(self._model, relay))

    @property
    def inferring(self) -> bool:
        """Whether a module of another stage runs without values, to find its outputs' shapes."""
        return self._inferring

    @property
    def relays(self) -> bool:
        """Whether a call of the model now is a forward of its own, outside of train_batch() and
        eval_batch(). It then has to run on all stages."""
        idle = self.active and self._running is None and not self._inferring
        return idle and not torch.is_grad_enabled() and not in_backward()

    @property
    def last(self) -> int:
        """The index of the last stage."""
        return int(self.ranks.num_stages) - 1

    def run(
        self, forward: Callable[[], Any], stage: int, given: Handed | None, micro: Micro
    ) -> "tuple[Any, list[Arrived | None]]":
        """Runs `forward`, which calls the model, as the forward of one stage.

        Returns two values: the stage's output (`Handed`, but in the last stage the model's
        outputs); and the previous stage's tensors, with None in place of each tensor that needs no
        gradient.

        Raises:
            RuntimeFault: if stages have different batches, or the forward ended without a call of
                the next stage's module.
        """
        if given is not None:
            _check_batch(json.loads(given.text), micro, stage)
        running = _Running(stage, given, stage == 0, micro, torch.is_grad_enabled())
        self._running = running
        before = [(one, one._version) for _, one in self._outside()]
        kept = generators.of_forward(self._device)
        generators.seed_forward(micro.seed, self._device)
        try:
            outputs = forward()
        finally:
            self._running = None
            generators.set_of_forward(kept, self._device)
        if stage < self.last:
            self._check_outside(before)
        handed = isinstance(outputs, Handed)
        if handed == (stage == self.last) or not running.begun:
            raise RuntimeFault(
                f"[front::train_batch] the model's forward ended in stage {stage} of "
                f"{self.last + 1} without calling a module of the next stage. First "
                f"module of each stage: {self._text()}"
            )
        return outputs, running.leaves

    def count_forward(self) -> int:
        """Returns a different number for each forward outside of train_batch() and eval_batch()."""
        self._num_forwards += 1
        return self._num_forwards

    def stage_of(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that runs `model` until it calls a module of a later stage, and then
        returns that module's arguments as `Handed`; or `model`, if there is one stage."""
        return functools.partial(self._until_its_end, model) if self.active else model

    def _until_its_end(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except _StageEnd as end:
            assert self._running is not None
            return self._hand_on(end, self._running.micro)

    def set_buffers(self) -> None:
        """Registers all buffers with the engine, each with the stage that changes it."""
        if self.active:
            self.ranks.set_buffers(list(self._buffers()))

    def bring_buffers(self) -> None:
        """Copies every buffer from the stage that uses it to all ranks. All ranks call it."""
        if self.active:
            self.set_buffers()
            self.ranks.bring_buffers()

    def write_buffers(self) -> None:
        """Copies every buffer from the first stage to all ranks. All ranks call it."""
        if self.active:
            self.ranks.set_buffers([(name, 0, one) for name, _, one in self._buffers()])
            self.ranks.bring_buffers()

    def _buffers(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yields name, stage and tensor of each buffer, once."""
        seen: set[int] = set()
        for piece, stage, outer in self._pieces:
            for name, one in module_tree.named_buffers_of(outer):
                if id(one) not in seen:
                    seen.add(id(one))
                    yield f"{piece}.{name}", stage, one
        for name, one in self._outside():
            if id(one) not in seen:
                yield name, self.last, one

    def _outside(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the buffers of modules outside of the stages' modules."""
        inside = tuple(f"{name}." for name, _ in self.ranks.pieces)
        for path, module in module_tree.modules_of(self._model):
            if not f"{path}.".startswith(inside):
                for name, one in module_tree.saved_buffers(module):
                    yield f"{path}.{name}" if path else name, one

    def _check_outside(self, before: list[tuple[torch.Tensor, int]]) -> None:
        for (name, one), (was, version) in zip(self._outside(), before, strict=True):
            if one is not was or one._version != version:
                raise RuntimeFault(
                    f'[front::train_batch] the forward changed buffer "{name}". The module of this '
                    f"buffer belongs to no single stage, so all stages run it. Put the buffer into "
                    f"a module of its own"
                )

    def _text(self) -> str:
        first: dict[int, str] = {}
        for name, stage in self.ranks.pieces:
            first.setdefault(stage, name)
        return ", ".join(f'{stage}: "{name}"' for stage, name in first.items())

    # ---- modules

    def _around(self, module: nn.Module, name: str, stage: int) -> Callable[..., Any]:
        def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._inferring:
                return inner(*args, **kwargs)
            if in_backward():  # a recomputation
                args, kwargs = module_tree.filled((args, kwargs), value_of)
                return inner(*args, **kwargs)
            running = self._running
            if running is None:
                raise RuntimeFault(
                    f"[front::forward] this rank has a part of the model (mesh.pipeline), and "
                    f'"{name}" belongs to stage {stage}. Train with engine.train_batch(), which '
                    f"runs all stages. Without gradients (torch.no_grad()), call eval_batch(), or "
                    f"the whole model on all ranks of the pipeline"
                )
            if stage > running.stage:
                raise _StageEnd(name, (args, kwargs))
            if stage == running.stage:
                args, kwargs = self._arguments(running, name, (args, kwargs))
                return inner(*args, **kwargs)
            if running.begun:
                raise RuntimeFault(
                    f'[front::train_batch] "{name}" of stage {stage} is called after stage '
                    f"{running.stage} has begun, but stages must run in order. Move the stage "
                    f'boundaries ("parallel.stages"). First module of each stage: {self._text()}'
                )
            return self._stand_in(module, name, inner, (args, kwargs))

        return call

    def _arguments(self, running: _Running, name: str, given: Any) -> Any:
        """Returns the arguments of a module of this stage, with values for all tensors."""
        if not running.begun:
            self._take(running, name, given)
            running.begun = True
            self._seed(running)
        for one in module_tree.take_out(given)[0]:
            if is_absent(one):
                raise RuntimeFault(
                    f'[front::train_batch] "{name}" is called in stage {running.stage} with a '
                    f"tensor that only an earlier stage has: pass it as an argument to the first "
                    f"module of each later stage, or move the stage boundaries "
                    f'("parallel.stages")'
                )
        return module_tree.filled(given, value_of)

    def _seed(self, running: _Running) -> None:
        """Up to here, all stages draw the same random numbers. From here on, each stage draws its
        own."""
        if not running.seeded:
            running.seeded = True
            generators.seed_forward(running.micro.seed + running.stage, self._device)

    # ---- between stages

    def _entry(self, inner: Callable[..., Any], inputs: Any) -> Any:
        """Begins the forward of a list of layers at this stage's first layer. Earlier layers do not
        run, not even without values."""
        running = self._running
        if running is None or running.given is None or in_backward():
            return inner(inputs)
        self._seed(running)
        told = json.loads(running.given.text)
        tensors = [like(one.shape, one.dtype, one.device) for one in running.given.tensors]
        if told["places"] is None:
            raise RuntimeFault(
                f'[front::train_batch] layer "{told["module"]}", the first of stage '
                f"{running.stage}, is called with {told['arguments']}. The last layer of a stage "
                f"must return a tensor or a tuple of tensors"
            )
        return int(told["module"].partition(".")[0]), _placed(told["places"], tensors)

    def _hand_on(self, end: _StageEnd, micro: Micro) -> Handed:
        tensors, left = module_tree.take_out(end.given)
        tensors = [value_of(one) for one in tensors]
        for one in tensors:
            if one.layout != torch.strided or one.is_nested or one.is_quantized:
                raise RuntimeFault(
                    f'[front::train_batch] "{end.module}", the first module of the next stage, is '
                    f"called with a {'nested' if one.is_nested else one.layout} tensor, but "
                    f"stages exchange only dense tensors. For torch's TransformerEncoder set "
                    f"enable_nested_tensor=False"
                )
        if any(is_absent(one) for one in tensors):
            raise RuntimeFault(
                f'[front::train_batch] "{end.module}", the first module of the next stage, is '
                f"called with a tensor that only an earlier stage has: pass it as an argument to "
                f"the first module of the current stage, too"
            )
        told = {
            "module": end.module,
            "arguments": _signature(left),
            "grads": [one.requires_grad for one in tensors],
            "places": _places(*left),
            "batch": micro.batch,
        }
        return Handed(json.dumps(told).encode(), [one for one in tensors])

    def _take(self, running: _Running, name: str, given: Any) -> None:
        """Puts the values that the previous stage sent into the arguments of the stage's first
        module. Raises RuntimeFault if the previous stage ended at a different module."""
        assert running.given is not None
        told = json.loads(running.given.text)
        tensors, left = module_tree.take_out(given)
        if told["module"] != name or told["arguments"] != _signature(left):
            raise RuntimeFault(
                f"[front::train_batch] stage {running.stage} begins with "
                f'"{name}" {_signature(left)}, but the previous stage ended at "{told["module"]}" '
                f"{told['arguments']}. Give all ranks of a pipeline the same batch. The order in "
                f"which the model calls its modules must not depend on values"
            )
        running.leaves = []
        for one, value, has_gradient in zip(
            tensors, running.given.tensors, told["grads"], strict=True
        ):
            # If a tensor is not a stand-in, this rank also computed it, from the batch.
            if not isinstance(one, Absent) or not is_absent(one):
                running.leaves.append(None)
                continue
            wanted = has_gradient and torch.is_grad_enabled()
            if has_gradient and running.trains and not wanted:
                raise RuntimeFault(
                    f'[front::train_batch] "{name}", the first module of stage {running.stage}, is '
                    f"called without gradients, for example by "
                    f"torch.utils.checkpoint(use_reentrant=True). Use use_reentrant=False, or "
                    f'"activations.checkpoint" in the config'
                )
            leaf = Arrived(value) if wanted else None
            running.leaves.append(leaf)
            one.resolve(value if leaf is None else _Arrive.apply(leaf.anchor, leaf))  # type: ignore[no-untyped-call]

    # ---- stand-ins

    def _stand_in(self, module: nn.Module, name: str, inner: Callable[..., Any], given: Any) -> Any:
        """Returns stand-ins for an earlier module's outputs, from the shapes of its inputs."""
        tensors, left = module_tree.take_out(given)
        shapes = tuple((one.shape, one.dtype, one.device) for one in tensors)
        own = tuple((n, one) for n, one in vars(module).items() if isinstance(one, _PLAIN))
        key = (name, _signature(left), shapes, own, _autocast(self._device.type))
        if key not in self._outputs:
            self._outputs[key] = self._infer(module, name, inner, tensors, left)
        return self._outputs[key].made(module_tree.objects_in(left))

    def _infer(
        self,
        module: nn.Module,
        name: str,
        inner: Callable[..., Any],
        tensors: list[torch.Tensor],
        left: Any,
    ) -> "_Shape":
        fakes = [fake_of(one) for one in tensors]
        versions = [one._version for one in fakes]
        args, kwargs = module_tree.put_in([Absent(one) for one in fakes], left)
        objects = module_tree.objects_in(left)
        kept = [(one, module_tree.State(one)) for one in objects]
        cached = stand_in_caches.watch(objects)
        aside: list[tuple[Any, str, _Template]] = []
        self._inferring = True
        try:
            with torch.no_grad(), self._tensor.shapes_alone(), _without_values(module, aside):
                outputs = inner(*args, **kwargs)
            changed = [
                not is_absent(one) and fake._version > before
                for one, fake, before in zip(tensors, fakes, versions, strict=True)
            ]
            if any(changed) or _signature(module_tree.take_out((args, kwargs))[1]) != _signature(
                left
            ):
                raise RuntimeFault(_puts_into(name))
            for index, (one, _) in enumerate(kept):
                fields = getattr(one, "__dict__", {})
                aside += [(index, n, _Template(v)) for n, v in fields.items() if is_absent(v)]
        except RuntimeFault:
            raise
        except Exception as error:
            raise ConfigError(
                f'[front::train_batch] the output shapes of "{name}", which other stages of the '
                f"pipeline need, cannot be computed from its input shapes: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            self._inferring = False
            for one, state in kept:
                state.put_in(one)
        return _Shape(_Template(outputs), aside, cached)


class _Template:
    """A value that contains stand-ins. `made()` returns a copy with new stand-ins."""

    def __init__(self, value: Any) -> None:
        tensors, self._left = module_tree.take_out(value)
        self._tensors = [(one.shape, one.dtype, one.device) for one in tensors]

    def made(self) -> Any:
        return module_tree.put_in([like(*one) for one in self._tensors], self._left)


@dataclasses.dataclass
class _Shape:
    """The effects of a module that ran without values: its outputs, the stand-ins that it set as
    attributes of modules, or of objects among its arguments (by index), and the tokens that it
    cached. Code that reads such an attribute gets an error from the stand-in."""

    outputs: _Template
    aside: list[tuple[Any, str, _Template]]
    cached: list[CachedTokens]

    def made(self, objects: list[Any]) -> Any:
        for one in self.cached:
            one.put_in(objects)
        for owner, name, value in self.aside:
            vars(objects[owner] if isinstance(owner, int) else owner)[name] = value.made()
        return self.outputs.made()


def _check_saves(module: nn.Module, name: str, stage: int) -> None:
    for _, one in module_tree.modules_of(module):
        own = type(one).get_extra_state is not nn.Module.get_extra_state
        if own and stage > 0:
            raise ConfigError(
                f'[front::initialize] a {type(one).__name__} in "{name}" has get_extra_state(). '
                f"Its state cannot be copied from stage {stage} to other stages yet"
            )


class _without_values:  # noqa: N801 - a context
    """Replaces a module's parameters and buffers by stand-ins. On exit, restores all attributes
    that the module set. Attributes with stand-ins are collected in `aside`."""

    def __init__(self, module: nn.Module, aside: list[tuple[Any, str, _Template]]) -> None:
        self._module, self._aside = module, aside
        self._kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._noted: list[tuple[nn.Module, dict[str, Any]]] = []

    def __enter__(self) -> None:
        for _, one in module_tree.modules_of(self._module):
            self._noted.append((one, dict(vars(one))))
            both: tuple[dict[str, Any], dict[str, Any]] = (one._parameters, one._buffers)
            for kept in both:
                self._kept.append((kept, dict(kept)))
                for name, value in kept.items():
                    if value is not None:
                        kept[name] = Absent(fake_of(value))

    def __exit__(self, *_: Any) -> None:
        for now, before in self._kept:
            now.clear()
            now.update(before)
        for module, fields in self._noted:
            for name, value in vars(module).items():
                new = fields.get(name) is not value and name not in ("_parameters", "_buffers")
                if new and any(is_absent(one) for one in module_tree.tensors_in(value)):
                    self._aside.append((module, name, _Template(value)))
            vars(module).clear()
            vars(module).update(fields)


def _places(args: Any, kwargs: Any) -> Any:
    """Returns the tensors' indices in nested lists, if the only argument is a tensor or consists of
    tuples of tensors. Else None."""

    def of(one: Any) -> Any:
        if isinstance(one, module_tree.Place):
            return one.index
        if type(one) is not tuple:
            return None
        inner = [of(item) for item in one]
        return None if None in inner else inner

    return of(args[0]) if len(args) == 1 and not kwargs else None


def _placed(places: Any, tensors: list[Any]) -> Any:
    if isinstance(places, int):
        return tensors[places]
    return tuple(_placed(one, tensors) for one in places)


_PLAIN = (bool, int, float, str, type(None))


def _puts_into(name: str) -> str:
    return (
        f'[front::train_batch] "{name}" changes one of its arguments (a tensor in place, a list). '
        f"Later stages would lose the change. Return the changed value instead"
    )


def _check_batch(told: dict[str, Any], micro: Micro, stage: int) -> None:
    """Raises RuntimeFault if the previous stage has a different micro-batch."""
    if micro.batch is not None and told["batch"] is not None and told["batch"] != micro.batch:
        raise RuntimeFault(
            f"[front::train_batch] stage {stage} and stage {stage - 1} were given different "
            f"batches. Give all ranks of a pipeline the same samples: part engine.data_rank of "
            f"engine.data_size parts. "
            f"A loader that shuffles needs a generator with the same seed on all these ranks, or "
            f"a DistributedSampler(num_replicas=engine.data_size, rank=engine.data_rank)"
        )
    micro.batch = told["batch"] if micro.batch is None else micro.batch


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _signature(left: Any) -> str:
    """Returns a text of the arguments without tensors: containers, numbers, texts, and the class
    name of any other object."""
    if isinstance(left, dict):
        return "{" + ", ".join(f"{key}: {_signature(value)}" for key, value in left.items()) + "}"
    if isinstance(left, (list, tuple)):
        return "(" + ", ".join(_signature(value) for value in left) + ")"
    if left is None or isinstance(left, (bool, int, float, str, torch.dtype, torch.device)):
        return repr(left)
    if isinstance(left, module_tree.Place):
        return f"tensor {left.index}"
    return type(left).__name__
