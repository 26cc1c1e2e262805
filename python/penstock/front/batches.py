"""Training and evaluation on whole batches, with the same loop on every mesh."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault
from penstock.front import module_tree, ranks
from penstock.front.forward_guard import Forwards
from penstock.parallel import pipeline_window
from penstock.parallel.pipeline_window import Call, LossOf, loss_in

_NOTHING = object()


class Batches:
    """The engine's methods that take all samples of a step in one call."""

    config: Any
    module: torch.nn.Module
    _core: Any
    _forwards: Forwards
    _pipeline: Any

    @property
    def data_rank(self) -> int:
        """Index of this rank's part of a global batch.

        Ranks that compute one copy of the model together have the same index.
        """
        return int(self.config.mesh.data_rank(ranks.rank()))

    @property
    def data_size(self) -> int:
        """The number of parts of a global batch."""
        return int(self.config.mesh.data)

    def train_batch(self, data: Any, loss_of: LossOf | None = None) -> torch.Tensor:
        """Runs forwards, backwards and the step of one accumulation window. All ranks call it.

        Args:
            data: the samples of this data rank (`data_rank` of `data_size`) for
                `batch.accumulate` backwards: a tensor, tuple, list or mapping of tensors, cut in
                equal parts along dimension 0; or an iterator of parts. A mapping is passed to the
                model by keyword, a tuple or list by position.
            loss_of: loss_of(outputs, part) -> []. Default: the outputs if they are a tensor of one
                element, else their `loss`. In a pipeline only ranks of the last stage call it.

        Returns:
            The mean loss over all parts and data ranks, as an fp32 scalar on the CPU, the same on
            every rank.

        Raises:
            StopIteration: on every rank, if the iterator is exhausted.
            ConfigError: if the number of rows is not a multiple of `batch.accumulate`, or outputs
                have no loss.
            RuntimeFault: if an iterator ends inside a window, if there were backwards before this
                call, or for a reason that `step()` lists.
        """
        if not torch.is_grad_enabled():
            raise ConfigError(
                "[front::train_batch] gradients are off (torch.no_grad(), inference_mode()). Call "
                "train_batch() outside of these contexts, or call eval_batch()"
            )
        count = int(self.config.batch.accumulate)
        parts = list(_parts(data, count))
        if self._pipeline.active:
            return self._mean(pipeline_window.train(self, parts, loss_of))
        losses = []
        for index, part in enumerate(parts):
            loss = self._loss(part, loss_of)
            self.backward(loss)  # type: ignore[attr-defined]
            losses.append(loss.detach())
            applied = self.step()  # type: ignore[attr-defined]
            if applied and index + 1 < count:
                raise RuntimeFault(
                    "[front::train_batch] backwards had already run since the last step, so the "
                    "window ended inside this batch. Call step(True) before train_batch()"
                )
        return self._mean(losses)

    def eval_batch(
        self, data: Any, loss_of: LossOf | None = None, parts: int | None = None
    ) -> torch.Tensor:
        """Computes the mean loss as `train_batch` does, without gradients and in eval mode.

        Args:
            data: as in `train_batch`.
            loss_of: as in `train_batch`.
            parts: the number of parts of `data`; default: `batch.accumulate`.

        Returns:
            The mean loss over all parts and data ranks, as an fp32 scalar on the CPU, the same on
            every rank.

        Raises:
            ConfigError: if `parts` is less than 1, if the number of rows is not a multiple of it,
                or if outputs have no loss.
        """
        count = int(self.config.batch.accumulate) if parts is None else parts
        if count < 1:
            raise ConfigError(f"[front::eval_batch] parts is {parts}. Allowed: 1 or more")
        was = [(module, module.training) for _, module in module_tree.modules_of(self.module)]
        self.module.eval()
        try:
            with torch.no_grad():
                each = _parts(data, count)
                if self._pipeline.active:  # stages send tensors that need version counters
                    with torch.inference_mode(False):
                        return self._mean(pipeline_window.evaluate(self, list(each), loss_of))
                return self._mean([self._loss(part, loss_of) for part in each])
        finally:
            self.module.train(was[0][1])
            for module, training in was:
                module.training = training

    def _relay(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the model's forward, on all stages of a pipeline if it is not part of a batch."""
        if not self._pipeline.relays:
            return forward(*args, **kwargs)
        self._forwards.announce()
        run = functools.partial(self._forwards.run, self._pipeline.stage_of(forward))
        return pipeline_window.forward(self, Call(run, args, kwargs))

    def _outputs(self, part: Any) -> Any:
        """Returns the model's outputs for one part of a batch."""
        if isinstance(part, Call):
            return part.run(*part.args, **part.kwargs)
        if isinstance(part, Mapping):
            return self(**part)  # type: ignore[operator]
        if isinstance(part, (tuple, list)):
            return self(*part)  # type: ignore[operator]
        return self(part)  # type: ignore[operator]

    def _loss(self, part: Any, loss_of: LossOf | None) -> torch.Tensor:
        return loss_in(self._outputs(part), part, loss_of)

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Returns the mean loss over the ranks that have losses, [] fp32."""
        own = 0.0
        if losses:
            own = float(
                torch.stack([one.detach().double().cpu().reshape(()) for one in losses]).mean()
            )
        return torch.tensor(self._core.mean(own, bool(losses)), dtype=torch.float32)


def _parts(data: Any, count: int) -> Iterable[Any]:
    """Returns `count` parts of the data. If the data is an iterator, reads its first item before
    returning."""
    if not hasattr(data, "__next__"):
        return _cut(data, count)
    return itertools.chain([next(data)], _others(data, count))


def _others(data: Iterator[Any], count: int) -> Iterator[Any]:
    for index in range(1, count):
        part = next(data, _NOTHING)
        if part is _NOTHING:
            raise RuntimeFault(
                f"[front::train_batch] the iterator ended after {index} of the {count} parts of a "
                f"window (batch.accumulate)"
            )
        yield part


def _cut(data: Any, count: int) -> Iterator[Any]:
    if isinstance(data, Mapping):  # BatchEncoding of transformers is not a dict
        data = dict(data)
    tensors, left = module_tree.take_out(data)
    rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    if len(rows) != 1 or min(rows) == 0 or min(rows) % count:
        raise ConfigError(
            f"[front::train_batch] the batch has tensors of {sorted(rows)} rows. All tensors need "
            f"the same number of rows, a multiple of batch.accumulate ({count})"
        )
    size = rows.pop() // count
    for index in range(count):
        yield module_tree.put_in([tensor[index * size :][:size] for tensor in tensors], left)
