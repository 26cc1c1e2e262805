"""PipelineEngine: DeepSpeed's train_batch() and eval_batch() over Penstock's pipelines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from logging import WARNING
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as _tree

from penstock import ConfigError
from penstock.front.recompute import Recomputed
from penstock.parallel.pipeline_layers import as_inputs

from ... import _missing_name
from ..._refusal import DeepSpeedRefusal
from ...utils import groups
from ...utils.loaders import RepeatingLoader
from ...utils.logging import log_dist
from ..activation_checkpointing import checkpointing
from ..config import DeepSpeedConfig, as_dict
from ..cut_parameters import own_settings
from ..engine import DeepSpeedEngine, _halved, close_earlier
from .module import PipelineError, PipelineModule

# Keys of the config section "pipeline" that have no effect. The first three have none in DeepSpeed
# either, because the PipelineModule sets these values. use_reentrant has none because the engine
# recomputes without torch's checkpoint().
_UNUSED = ("stages", "partition", "seed_layers", "pipe_partitioned", "grad_partitioned",
           "use_reentrant")  # fmt: skip


class _NoUnit:
    """The `recomputation` of a recomputed layer that is not a unit of the engine."""

    moves_inputs = False

    def begin(self, unit: int) -> None:
        """Does nothing."""


class MicroBatch(dict[str, Any]):
    """The model's inputs by name, with the labels as an attribute."""

    def __init__(self, inputs: Any, labels: Any) -> None:
        super().__init__(forward_input=inputs)
        self.labels = labels


def _refused(call: str) -> Any:
    """Returns a method that raises PipelineError: train_batch() and eval_batch() run all stages."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PipelineError(
            f"[deepspeed::{call}] a pipeline supports only train_batch() and eval_batch()"
        )

    return refuse


class PipelineEngine(DeepSpeedEngine):
    """Trains a PipelineModule, a whole batch per call. `deepspeed.initialize()` creates it.

    Attributes:
        grid: this rank's place among stages and data ranks.
        num_stages: the number of stages.
        stage_id, prev_stage, next_stage: this stage and its neighbours, from 0. prev_stage is -1 on
            the first stage; next_stage is num_stages on the last.
        micro_batches: the number of micro-batches in a batch.
        data_iterator: the source of train_batch()'s micro-batches.
        agg_train_loss: the loss of the last batch.
    """

    _INSTRUCTION_MAP = _missing_name.Thing(
        "PipelineEngine._INSTRUCTION_MAP", "the engine runs its own plan, not DeepSpeed's methods"
    )
    module: PipelineModule
    _reduction = "mean"  # losses are not divided by gradient_accumulation_steps here

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.batch_fn: Callable[[Any], Any] | None = None
        self.data_iterator: Iterator[Any] | None = None
        self.agg_train_loss: torch.Tensor | None = None
        self._recomputed: list[Recomputed] = []
        super().__init__(*args, **kwargs)
        grid = self.grid
        self.num_stages, self.stage_id = grid.pipe_parallel_size, grid.stage_id
        self.prev_stage, self.next_stage = self.stage_id - 1, self.stage_id + 1
        self.is_pipe_parallel = self.pipeline_parallelism = grid.pipe_parallel_size > 1
        self.is_data_parallel = grid.data_parallel_size > 1
        self.is_model_parallel = grid.model_parallel_size > 1
        self.micro_batches = self.gradient_accumulation_steps()
        self.micro_batch_size = self.train_micro_batch_size_per_gpu()
        if self.training_dataloader is not None:
            self.set_dataloader(self.training_dataloader)

    # ---- set-up

    def _read(self, config: Any, model: Any) -> DeepSpeedConfig:
        assert isinstance(model, PipelineModule)
        self.grid = self.mpu = model.mpu()
        given = as_dict(config)
        kept = {key: value for key, value in given.items() if key != "pipeline"}
        own = _settings(model, given)
        made = DeepSpeedConfig(kept, own=own)
        made._param_dict = given
        if not made.managed_gradient_accumulation:
            raise DeepSpeedRefusal(
                '[deepspeed::initialize] "managed_gradient_accumulation": false is not supported '
                "with pipeline parallelism, as in DeepSpeed: train_batch() sets the windows"
            )
        if made.native["mesh"]["tensor"] != self.grid.model_parallel_size:
            raise ConfigError(
                "[deepspeed::initialize] tensor_parallel is not supported with a PipelineModule. "
                'Its tensor ranks are the axis "model" of its topology, and its layers cut their '
                "own parameters over this axis"
            )
        own_settings(self.mpu, given)
        if made.sequence_parallel_size > 1:
            raise ConfigError(
                '[deepspeed::initialize] "sequence_parallel_size" above 1 is not supported with a '
                "PipelineModule"
            )
        parallel = made.native["parallel"]
        if parallel.get("virtual_stages", 1) > 1:
            if model.seed_layers:
                raise ConfigError(
                    "[deepspeed::initialize] seed_layers is not supported with "
                    "parallel.virtual_stages: drop one of them"
                )
            if parallel["stages"] == own["parallel"]["stages"]:
                del parallel["stages"]  # the engine then chooses the stages
        if made.gradient_accumulation_steps < model.num_stages:
            parallel.setdefault("schedule", "gpipe")
        return made

    def _set_groups(self) -> None:
        grid = self._grid = self.grid
        self.mp_world_size, self.sequence_parallel_size = grid.model_parallel_size, 1
        self.dp_world_size = self.seq_dp_world_size = grid.data_parallel_size
        self._close_groups = groups._open(self, grid)
        self.data_parallel_group = self.seq_data_parallel_group = grid.get_data_parallel_group()

    @property
    def _model(self) -> torch.nn.Module:
        return self.module.whole

    def _optimizer(self, given: Any, parameters: Any) -> tuple[Any, dict[str, Any]]:
        made, native = super()._optimizer(given, parameters)
        if made is not None:
            self.module.complete_groups(made)
        return made, native

    def _start(self, given: Any, parameters: Any) -> None:
        close_earlier(self._model)
        self.module.take_from_owners()
        for name, layer in self.module.recomputed_layers():
            self._recomputed.append(Recomputed(layer, name, -1, _NoUnit()))
        try:
            super()._start(given, parameters)
        except BaseException:
            self._forget_recomputed()
            raise

    def _forget_recomputed(self) -> None:
        while self._recomputed:
            self._recomputed.pop().remove()

    def destroy(self) -> None:
        super().destroy()
        self._forget_recomputed()

    def _training_loader(self, dataset: Any) -> Any:
        """Returns a loader in the dataset's order that starts over after its last batch."""
        return RepeatingLoader(
            self.deepspeed_io(dataset, data_sampler=self._sampler(dataset, False))
        )

    # ---- data

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Takes micro-batches from the loader's iterator from now on."""
        self.training_dataloader, self.data_iterator = loader, iter(loader)

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Takes micro-batches, (inputs, labels), from the iterator from now on.

        The first stage uses the inputs and the last stage the labels. Other stages need none.
        """
        self.training_dataloader, self.data_iterator = None, iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Sets fn(batch) -> (inputs, labels), which is called on each item of the iterator.

        Without an iterator, fn is called on None, for ranks that receive the batch from another
        tensor rank.
        """
        self.batch_fn = fn

    def _micro_batches(self, iterator: Iterator[Any] | None) -> Iterator[MicroBatch]:
        inner = not (self.is_first_stage() or self.is_last_stage())
        if iterator is None and inner:
            return itertools.repeat(MicroBatch(None, None))
        if iterator is None and self.batch_fn is not None:  # it receives from another tensor rank
            return map(self._micro_batch, itertools.repeat(None))
        if not hasattr(iterator, "__next__"):
            raise ConfigError(
                f"[deepspeed::train_batch] the data iterator is a {type(iterator).__name__}, but "
                f"the first and the last stage need an iterator: pass iter(loader), or use "
                f"training_data, set_dataloader(), or set_batch_fn() with a function that accepts "
                f"None"
            )
        assert iterator is not None
        return map(self._micro_batch, iterator)

    def _micro_batch(self, batch: Any) -> MicroBatch:
        given = batch if self.batch_fn is None else self.batch_fn(batch)
        needed = 1 if self.module.loss_fn is None else 2
        if not isinstance(given, (tuple, list)) or len(given) < needed:
            raise ConfigError(
                f"[deepspeed::train_batch] a micro-batch is a {type(given).__name__}; allowed: a "
                f"tuple (inputs, labels). Set a function that returns one with set_batch_fn()"
            )
        unused = given[0] is None and not self.is_first_stage()
        inputs = None if unused else as_inputs(given[0])  # raises the same error on every stage
        if self._auto_cast:
            inputs = _tree.tree_map(_halved, inputs)
        labels = given[1] if len(given) > 1 else None
        inputs, labels = _tree.tree_map(self._on_device, (inputs, labels))
        return MicroBatch(inputs, tuple(labels) if isinstance(labels, list) else labels)

    def _on_device(self, value: Any) -> Any:
        return value.to(self.device) if torch.is_tensor(value) else value

    # ---- training

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Runs forward and backward of `gradient_accumulation_steps` micro-batches, and the step.

        Args:
            data_iter: the source of micro-batches, (inputs, labels), from now on. It must give the
                same ones on the first and the last stage of a pipeline; other stages pass None.
                Default: the iterator that was set, or the one over `training_data`.

        Returns:
            The mean loss over micro-batches and data ranks, as an fp32 scalar on the rank's device.
            Every rank gets it.

        Raises:
            StopIteration: there are no more micro-batches.
            ConfigError: there is no iterator or no optimizer, or gradients are disabled.
            RuntimeFault: the iterator ends within a batch; see penstock.Engine.train_batch().
        """
        if not torch.is_grad_enabled():
            raise PipelineError(
                "[deepspeed::train_batch] gradients are disabled (torch.no_grad): call eval_batch()"
            )
        if self.basic_optimizer is None:
            raise ConfigError(
                "[deepspeed::train_batch] the engine was initialized without an optimizer"
            )
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        before = self.native.steps
        mean = self.native.train_batch(self._micro_batches(self.data_iterator), self._loss_of)
        loss: torch.Tensor = mean.to(self.device)
        self._applied = self.native.steps > before
        self.last_step_overflowed = not self._applied
        self._count()
        self._tell(float(loss))
        self.micro_steps += self.micro_batches
        self.agg_train_loss = loss
        return loss

    def _loss_of(self, outputs: Any, part: MicroBatch) -> Any:
        loss_fn: Any = self.module.loss_fn
        if isinstance(loss_fn, torch.nn.Module):  # its buffers, such as the weights of classes
            loss_fn.to(self.device)
        return outputs if loss_fn is None else loss_fn(outputs, part.labels)

    def eval_batch(  # noqa: PLR0913 - DeepSpeed's signature
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Runs forwards only, without gradients and with the model in eval mode.

        Args:
            data_iter: the source of micro-batches, as in train_batch().
            return_logits: also return the outputs of the last micro-batch.
            compute_loss: whether to return the losses. If False, the outputs are reduced and
                returned instead; each is a tensor or a tuple of tensors.
            reduce_output: "avg": the mean over micro-batches and data ranks; None: a list with
                this data rank's value of each micro-batch.
            bcast_loss: return a mean loss on every rank, not only on the last stage.
            num_micro_batches: default: as many as a batch has.

        Returns:
            The mean or the list. On stages other than the last the result is None, but with
            `bcast_loss` a mean loss is returned on all stages. With `return_logits`, a pair of this
            result and the outputs (None on other stages).

        Raises:
            ConfigError: reduce_output has another value, or bcast_loss is set for a list of losses.
        """
        _check_eval(compute_loss, reduce_output, bcast_loss)
        outputs: list[Any] = []
        losses: list[torch.Tensor] = []

        def loss_of(made: Any, part: MicroBatch) -> torch.Tensor:
            outputs.append(made)
            loss = self._loss_of(made, part) if compute_loss else torch.zeros(())
            losses.append(loss)
            return loss

        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        mean = self.native.eval_batch(self._micro_batches(data_iter), loss_of, parts=count)
        if compute_loss:
            event = ("Train/Samples/eval_loss", float(mean), self.global_samples)
            self.monitor.write_events([event])
        made: Any = None
        if compute_loss and reduce_output is not None:
            made = mean.to(self.device) if bcast_loss or self.is_last_stage() else None
        elif self.is_last_stage():
            kept = losses if compute_loss else outputs
            made = kept if reduce_output is None else self._mean(kept)
        logits = outputs[-1] if outputs and self.is_last_stage() else None
        return (made, logits) if return_logits else made

    def _mean(self, outputs: list[Any]) -> Any:
        """Returns the mean of tensors, or tuples of tensors, over micro-batches and data ranks."""
        if not isinstance(outputs[0], torch.Tensor):
            return [self._mean(list(parts)) for parts in zip(*outputs, strict=True)]
        mean = torch.stack(outputs).mean(0)
        if self.is_data_parallel:
            dist.all_reduce(mean, group=self.data_parallel_group)
            mean /= self.dp_world_size
        return mean

    def get_additional_losses(self) -> Any:
        """Returns None. Raises ConfigError if the module reports additional losses."""
        if self.module.get_additional_losses() is not None:
            raise ConfigError(
                "[deepspeed::get_additional_losses] additional losses are not supported: log them "
                "in loss_fn or in a layer of the last stage"
            )

    def set_has_attention_mask(self, value: bool) -> None:
        """Accepted, without effect: stages may exchange tensors of all dtypes."""

    def reset_activation_shape(self) -> None:
        """Does nothing: shapes may change with each micro-batch."""

    # ---- stages

    def get_pipeline_parallel_rank(self) -> int:
        return self.stage_id

    def is_first_stage(self) -> bool:
        return bool(self.grid.is_first_stage)

    def is_last_stage(self) -> bool:
        return bool(self.grid.is_last_stage)

    # ---- calls that a pipeline does not support

    forward, backward, step = map(_refused, ("forward", "backward", "step"))
    update = take_model_step = step

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Raises PipelineError if the value differs from the current one."""
        _same("set_train_batch_size", train_batch_size, self.train_batch_size())

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Raises PipelineError if the value differs from the current one."""
        _same("set_gradient_accumulation_steps", steps, self.gradient_accumulation_steps())


def _check_eval(compute_loss: bool, reduce_output: str | None, bcast_loss: bool) -> None:
    if reduce_output is not None and str(reduce_output).lower() != "avg":
        raise ConfigError(
            f'[deepspeed::eval_batch] reduce_output is {reduce_output!r}; allowed: "avg", None'
        )
    if compute_loss and bcast_loss and reduce_output is None:
        raise ConfigError(
            "[deepspeed::eval_batch] reduce_output=None returns a list of losses, which cannot "
            "be broadcast: pass bcast_loss=False"
        )


def _same(call: str, given: int, now: int) -> None:
    if given != now:
        raise PipelineError(
            f"[deepspeed::{call}] initialize() has fixed the value at {now}; it cannot change to "
            f"{given}, since the pipeline's schedule has a fixed number of micro-batches"
        )


def _settings(model: PipelineModule, given: dict[str, Any]) -> dict[str, Any]:
    """Returns Penstock's settings for the stages.

    Raises ConfigError if the config section "pipeline" has an unknown key, or if the section
    "penstock" contradicts the model.
    """
    section = given.get("pipeline") or {}
    if not isinstance(section, dict):
        raise ConfigError(
            f'[deepspeed::initialize] "pipeline" is {section!r}; allowed: a section {{key: value}}'
        )
    asked = ((given.get("penstock") or {}).get("mesh") or {}).get("pipeline", model.num_stages)
    if asked != model.num_stages:
        raise ConfigError(
            f"[deepspeed::initialize] the config has mesh.pipeline {asked}, but the PipelineModule "
            f"has {model.num_stages} stages"
        )
    interval = section.get("activation_checkpoint_interval")
    if interval:
        model.activation_checkpoint_interval = interval
    if section.get("use_reentrant") is False:
        model.activation_checkpoint_func = checkpointing.non_reentrant_checkpoint
    unknown = section.keys() - {*_UNUSED, "activation_checkpoint_interval"}
    if unknown:
        raise ConfigError(
            f'[deepspeed::initialize] "pipeline.{min(unknown)}" is not a key; allowed: '
            f"activation_checkpoint_interval, {', '.join(_UNUSED)}"
        )
    known = {"stages": model.num_stages, "partition": "best", "seed_layers": model.seed_layers}
    unlike = [key for key, own in known.items() if section.get(key) not in (None, "auto", own)]
    if unlike:
        log_dist(
            f"these keys have no effect, as in DeepSpeed, because the PipelineModule sets their "
            f"values: {', '.join('pipeline.' + key for key in unlike)}",
            ranks=[0],
            level=WARNING,
        )
    return model.pipeline_settings()
