"""Schedules of pipeline stages as values. A script can list and compare them. The engine makes
its own plans, with the same order of forwards and backwards."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any


class PipeInstruction:
    """One action of a stage. Its arguments are attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name, self.kwargs = type(self).__name__, kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={one!r}' for key, one in self.kwargs.items())})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((self.name, *sorted(self.kwargs.items())))


class BufferOpInstruction(PipeInstruction):
    """An action on one of the stage's buffers."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


def _kind(name: str, base: type, does: str) -> type:
    return type(name, (base,), {"__doc__": does, "__module__": __name__})


OptimizerStep = _kind("OptimizerStep", PipeInstruction, "Updates the weights.")
ReduceGrads = _kind("ReduceGrads", PipeInstruction, "Sums gradients over data ranks.")
ReduceTiedGrads = _kind(
    "ReduceTiedGrads", PipeInstruction, "Sums gradients of tied layers over stages."
)
CommitP2P = _kind("CommitP2P", PipeInstruction, "Ends a group of messages.")
LoadMicroBatch = _kind(
    "LoadMicroBatch", BufferOpInstruction, "Loads inputs (first stage) or labels (last stage)."
)
ForwardPass = _kind("ForwardPass", BufferOpInstruction, "Runs a micro-batch's forward.")
BackwardPass = _kind("BackwardPass", BufferOpInstruction, "Runs a micro-batch's backward.")
SendActivation = _kind("SendActivation", BufferOpInstruction, "Sends outputs to the next stage.")
RecvActivation = _kind(
    "RecvActivation", BufferOpInstruction, "Receives inputs from the previous stage."
)
SendGrad = _kind("SendGrad", BufferOpInstruction, "Sends inputs' gradients to the previous stage.")
RecvGrad = _kind(
    "RecvGrad", BufferOpInstruction, "Receives outputs' gradients from the next stage."
)


class PipeSchedule(abc.ABC):
    """The steps of one stage. Each step is a list of instructions.

    Args:
        micro_batches: the number of micro-batches in a batch.
        stages: the number of stages.
        stage_id: the stage, from 0.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self.stage, self.num_stages, self.num_micro_batches = stage_id, stages, micro_batches
        self.is_first_stage, self.is_last_stage = stage_id == 0, stage_id == stages - 1
        self._rest: Iterator[list[PipeInstruction]] | None = None

    @abc.abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields the steps in order."""

    def num_pipe_buffers(self) -> int:
        """Returns the number of buffers, which micro-batches use in turn."""
        return self.micro_batches

    def __iter__(self) -> PipeSchedule:
        self._rest = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self._rest is None:
            self._rest = self.steps()
        return next(self._rest)

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _buffer_idx(self, micro_batch_id: int) -> int:
        return micro_batch_id % self.num_pipe_buffers()

    def _loads(self, micro_batch: int) -> list[PipeInstruction]:
        ends = self.is_first_stage or self.is_last_stage
        return [LoadMicroBatch(self._buffer_idx(micro_batch))] if ends else []


class InferenceSchedule(PipeSchedule):
    """Forwards only. Odd stages receive before they send; even stages send before they receive."""

    def num_pipe_buffers(self) -> int:
        return 2

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches + self.stages - 1):
            now, before = step - self.stage_id, step - self.stage_id - 1
            here = self._valid_micro_batch(now)
            made: list[PipeInstruction] = self._loads(now) if here else []
            buffer = (step + self.stage_id) % 2
            swaps: list[PipeInstruction] = []
            if here and not self.is_first_stage:
                swaps.append(RecvActivation(buffer))
            if self._valid_micro_batch(before) and not self.is_last_stage:
                swaps.append(SendActivation(1 - buffer))
            made += swaps[::-1] if self.stage_id % 2 == 0 else swaps
            made += [ForwardPass(buffer)] if here else []
            yield made


class TrainSchedule(PipeSchedule):
    """One forward, one backward (1F1B): forward k is in step 2 k + stage, backward k in step
    2 k + 2 stages - 1 - stage."""

    def num_pipe_buffers(self) -> int:
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def steps(self) -> Iterator[list[PipeInstruction]]:
        num_steps = 2 * (self.micro_batches + self.stages - 1)
        for step in range(num_steps):
            made = self._messages(step)
            micro_batch, forward = self._at(step)
            if self._valid_micro_batch(micro_batch):
                buffer = self._buffer_idx(micro_batch)
                made += [*self._loads(micro_batch), ForwardPass(buffer)] if forward else []
                made += [] if forward else [BackwardPass(buffer)]
            if step == num_steps - 1:
                made += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield made

    def _at(self, step: int) -> tuple[int, bool]:
        """Returns the micro-batch of a step, which may not exist, and whether it is a forward."""
        forward = step % 2 == self.stage_id % 2
        first = self.stage_id if forward else 2 * self.stages - 1 - self.stage_id
        return (step - first) // 2, forward

    def _messages(self, step: int) -> list[PipeInstruction]:
        """Returns the sends of the previous step's results and the receives for this step."""
        (now, forward), (before, _) = self._at(step), self._at(step - 1)
        other = self.prev_stage if forward else self.next_stage
        if not 0 <= other < self.stages:
            return []
        sends, receives = (SendGrad, RecvActivation) if forward else (SendActivation, RecvGrad)
        sent: list[PipeInstruction] = (
            [sends(self._buffer_idx(before))] if self._valid_micro_batch(before) else []
        )
        received: list[PipeInstruction] = (
            [receives(self._buffer_idx(now))] if self._valid_micro_batch(now) else []
        )
        return sent + received if forward else received + sent


class DataParallelSchedule(PipeSchedule):
    """Each stage computes all layers: gradient accumulation."""

    def num_pipe_buffers(self) -> int:
        return 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches):
            made: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            is_last = step == self.micro_batches - 1
            yield [*made, ReduceGrads(), OptimizerStep()] if is_last else made
