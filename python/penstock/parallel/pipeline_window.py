"""Runs an accumulation window of a pipeline: this rank's forwards and backwards in order."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils import _pytree as pytree

from penstock._native import ConfigError, RuntimeFault
from penstock.front import module_tree
from penstock.parallel import stage_outputs
from penstock.parallel.pipeline_parallel import Handed, Micro
from penstock.parallel.stand_in import is_absent
from penstock.parallel.stand_in_caches import caches_in

LossOf = Callable[[Any, Any], torch.Tensor]
# In this context torch's checkpoints compute a forward once for several backwards. Some versions of
# torch do not have it.
_ONE_BACKWARD = getattr(torch.utils.checkpoint, "GraphExecGroup", contextlib.nullcontext)


def loss_in(outputs: Any, part: Any, loss_of: LossOf | None) -> torch.Tensor:
    """Returns the loss, one element, of a model's outputs. Raises ConfigError if there is none."""
    loss = outputs if loss_of is None else loss_of(outputs, part)
    if loss_of is None and isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif loss_of is None and not torch.is_tensor(outputs):
        loss = getattr(outputs, "loss", None)
    if torch.is_tensor(loss) and loss.numel() == 1:
        return loss
    if loss_of is None:
        raise ConfigError(
            "[front::train_batch] the model returns no loss. Pass loss_of(outputs, part)"
        )
    what = f"a tensor of {list(loss.shape)}" if torch.is_tensor(loss) else f"{loss!r:.60}"
    raise ConfigError(
        f"[front::train_batch] loss_of(outputs, part) returned {what}, not a tensor of one element"
    )


def train(engine: Any, parts: list[Any], loss_of: LossOf | None) -> list[torch.Tensor]:
    """Runs forwards, backwards and the step. Returns the losses on the last stage, else []."""
    ranks = engine._pipeline.ranks
    micros = _micros(engine, parts)
    engine._seen_batch(parts)
    finish = functools.partial(_loss_of_part, loss_of=loss_of)
    under_way: dict[tuple[int, int], _Stage] = {}
    losses = []
    for action in ranks.begin(len(parts), True):
        key = (action.stage, action.micro)
        if action.forward:
            under_way[key] = _Stage(engine, action, micros[action.micro], finish)
        else:
            done = under_way.pop(key) if action.is_last else under_way[key]
            done.backward(action)
            if action.is_last and done.result is not None:
                losses.append(done.result.detach())
    ranks.end()
    engine.step()
    return losses


def evaluate(engine: Any, parts: list[Any], loss_of: LossOf | None) -> list[torch.Tensor]:
    """Runs only forwards. Returns the losses on the last stage, else []."""
    ranks = engine._pipeline.ranks
    micros = _micros(engine, parts)
    finish = functools.partial(_loss_of_part, loss_of=loss_of)
    made = [
        _Stage(engine, action, micros[action.micro], finish)
        for action in ranks.begin(len(parts), False)
    ]
    ranks.end()
    return [one.result for one in made if one.result is not None]


@dataclasses.dataclass(frozen=True)
class Call:
    """One forward of the model: `run(*args, **kwargs)` runs the stage that is under way."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def forward(engine: Any, call: Call) -> Any:
    """Runs one forward without gradients through all stages. All ranks of the pipeline call it with
    equal arguments. Returns the model's outputs on every rank.

    Raises:
        ConfigError: for a cache, if a rank computes several stages.
        RuntimeFault: if ranks have different arguments.
    """
    ranks, seen = engine._pipeline.ranks, engine._pipeline.count_forward()
    given = (call.args, call.kwargs)
    if ranks.num_stages > ranks.count and caches_in(module_tree.objects_in(given)):
        raise ConfigError(
            '[front::forward] with "parallel.virtual_stages" > 1, ranks run the model\'s forward '
            "several times for one token, so they cannot fill a cache. Pass use_cache=False"
        )
    name = f"{engine.config.seed} {engine._core.steps} {engine.data_rank} forward {seen}"
    # Without the contents of caches, of which each stage has its own layers.
    tensors = [one for one in pytree.tree_leaves(given) if torch.is_tensor(one)]
    micro = dataclasses.replace(Micro.of(tensors, name), part=call)
    outputs = None
    with torch.inference_mode(False), torch.no_grad():  # stages' tensors need version counters
        for action in ranks.begin(1, False):
            made = _Stage(engine, action, micro, lambda outputs, _: outputs)
            outputs = made.result
        ranks.end()
        is_last = (ranks.num_stages - 1) % ranks.count == ranks.index
        return stage_outputs.shared(ranks, is_last, outputs, given)


def _loss_of_part(outputs: Any, part: Any, loss_of: LossOf | None) -> torch.Tensor:
    loss = loss_in(outputs, part, loss_of)
    if is_absent(loss):
        raise RuntimeFault(
            "[front::train_batch] the loss is computed from a tensor that only an earlier "
            "stage has: pass it as an argument to the first module of each later stage"
        )
    return loss


def _micros(engine: Any, parts: list[Any]) -> list[Micro]:
    return [
        Micro.of(part, f"{engine.config.seed} {engine._core.steps} {engine.data_rank} {index}")
        for index, part in enumerate(parts)
    ]


class _Stage:
    """One stage's forward and backward of one micro-batch.

    Attributes:
        result: what `finish(outputs, part)` returns on the last stage: the loss, one element, if
            there is a backward; else None.
    """

    def __init__(
        self, engine: Any, action: Any, micro: Micro, finish: Callable[[Any, Any], Any]
    ) -> None:
        self._engine, self._ranks = engine, engine._pipeline.ranks
        self._ranks.start(action)
        self.result: Any = None
        given = Handed(*self._ranks.receive(action)) if action.stage > 0 else None
        with engine._seen_stage(action):
            made, self._leaves = engine._pipeline.run(
                lambda: engine._outputs(micro.part), action.stage, given, micro
            )
        self._outputs: list[torch.Tensor] = []
        if not isinstance(made, Handed):
            self.result = finish(made, micro.part)
            return
        self._outputs = made.tensors
        self._ranks.send(action, made.text, [one.detach() for one in made.tensors])

    def backward(self, action: Any) -> None:
        """Runs a backward, or one of its two parts (src/engine/step/split_backward.h)."""
        self._ranks.start(action)
        if action.splits and action.is_last:
            self._engine._core.resume_backward()
            self._outputs, self.result = [], None if self.result is None else self.result.detach()
            with _ONE_BACKWARD():
                self._run(lambda: self._ranks.backward_weights(action))
        else:
            self._backward_from(action)
        if action.is_last:
            self._ranks.end_backward(action)

    def _backward_from(self, action: Any) -> None:
        """Starts at the stage's outputs, and sends the gradients of its inputs."""
        core = self._engine._core
        outputs: list[torch.Tensor] = []
        grads: list[torch.Tensor | None] = []
        if self.result is None:
            outputs, grads = self._received(action)
            core.resume_backward()
        elif action.splits:
            outputs, grads = [self.result], [core.start_backward(self.result, None)]
        else:
            self._engine.backward(self.result)
        if action.splits:
            inputs = [leaf.anchor for leaf in self._leaves if leaf is not None]
            self._run(lambda: self._ranks.backward_inputs(action, outputs, grads, inputs))
        elif outputs:  # there are none if the stage is frozen or the next stage needs none
            self._run(lambda: torch.autograd.backward(outputs, grads))
        if action.stage > 0:
            arrived = [None if leaf is None else leaf.grad for leaf in self._leaves]
            self._ranks.send(action, b"", arrived)

    def _received(self, action: Any) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Returns the stage's outputs that have a gradient, and the gradients."""
        _, given = self._ranks.receive(action)
        pairs = [
            (output, grad)
            for output, grad in zip(self._outputs, given, strict=True)
            if output.requires_grad and grad is not None
        ]
        return [one for one, _ in pairs], [grad for _, grad in pairs]

    def _run(self, backward: Callable[[], Any]) -> None:
        try:
            backward()
        except BaseException as error:
            self._engine._core.backward_failed(f"{type(error).__name__}: {error}")
            raise
