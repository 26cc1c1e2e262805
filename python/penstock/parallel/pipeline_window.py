"""Runs an accumulation window of a pipeline: this rank's forwards and backwards in order."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault
from penstock.parallel.pipeline_parallel import Handed, Micro
from penstock.parallel.stand_in import is_absent

LossOf = Callable[[Any, Any], torch.Tensor]


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
    under_way: dict[tuple[int, int], _Stage] = {}
    losses = []
    for action in ranks.begin(len(parts), True):
        key = (action.stage, action.micro)
        if action.forward:
            under_way[key] = _Stage(engine, action, micros[action.micro], loss_of)
        else:
            done = under_way.pop(key)
            done.backward(action)
            losses += [] if done.loss is None else [done.loss.detach()]
    ranks.end()
    engine.step()
    return losses


def evaluate(engine: Any, parts: list[Any], loss_of: LossOf | None) -> list[torch.Tensor]:
    """Runs only forwards. Returns the losses on the last stage, else []."""
    ranks = engine._pipeline.ranks
    micros = _micros(engine, parts)
    made = [
        _Stage(engine, action, micros[action.micro], loss_of)
        for action in ranks.begin(len(parts), False)
    ]
    ranks.end()
    return [one.loss for one in made if one.loss is not None]


def _micros(engine: Any, parts: list[Any]) -> list[Micro]:
    return [
        Micro.of(part, f"{engine.config.seed} {engine._core.steps} {engine.data_rank} {index}")
        for index, part in enumerate(parts)
    ]


class _Stage:
    """One stage's forward and backward of one micro-batch.

    Attributes:
        loss: the loss, one element, on the last stage; else None.
    """

    def __init__(self, engine: Any, action: Any, micro: Micro, loss_of: LossOf | None) -> None:
        self._engine, self._ranks = engine, engine._pipeline.ranks
        self._ranks.start(action)
        self.loss: torch.Tensor | None = None
        given = Handed(*self._ranks.receive(action)) if action.stage > 0 else None
        with engine._seen_stage(action):
            made, self._leaves = engine._pipeline.run(
                lambda: engine._outputs(micro.part), action.stage, given, micro
            )
        self._outputs: list[torch.Tensor] = []
        if not isinstance(made, Handed):
            self.loss = loss_in(made, micro.part, loss_of)
            if is_absent(self.loss):
                raise RuntimeFault(
                    "[front::train_batch] the loss is computed from a tensor that only an earlier "
                    "stage has: pass it as an argument to the first module of each later stage"
                )
            return
        self._outputs = made.tensors
        self._ranks.send(action, made.text, [one.detach() for one in made.tensors])

    def backward(self, action: Any) -> None:
        self._ranks.start(action)
        if self.loss is not None:
            self._engine.backward(self.loss)
        else:
            self._resume(action)
        self._ranks.end_backward(action)
        if action.stage > 0:
            grads = [None if leaf is None else leaf.grad for leaf in self._leaves]
            self._ranks.send(action, b"", grads)

    def _resume(self, action: Any) -> None:
        _, given = self._ranks.receive(action)
        pairs = [
            (output, grad)
            for output, grad in zip(self._outputs, given, strict=True)
            if output.requires_grad and grad is not None
        ]
        core = self._engine._core
        core.resume_backward()
        if not pairs:  # the stage is frozen, or the next stage needs none of its outputs
            return
        try:
            torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs])
        except BaseException as error:
            core.backward_failed(f"{type(error).__name__}: {error}")
            raise
