"""DeepSpeedEngine: DeepSpeed's training loop over a Penstock engine."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Sequence
from logging import WARNING
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as _tree

import penstock
from penstock import ConfigError
from penstock.front import optimizer as optimizers
from penstock.front import schedules
from penstock.front.engine import engine_of
from penstock.front.forward_guard import Hook
from penstock.launch import autotuning
from penstock.monitor.deepspeed import MonitorMaster, step_events

from .._refusal import DeepSpeedRefusal
from ..comm.comm import get_rank, get_world_size
from ..ops.adam.fused_adam import FusedAdam
from ..utils import groups
from ..utils.bwc import bwc_tensor_model_parallel_group
from ..utils.logging import log_dist
from .backward_weights import _ENGINES, BackwardWeights
from .base_optimizer import (
    DeepSpeedZeroOptimizer,
    EngineState,
    FP16_Optimizer,
    FP16_UnfusedOptimizer,
)
from .config import DeepSpeedConfig, make_folder
from .cut_parameters import CutParameters, own_settings, tensor_ranks_of
from .engine_checkpoints import EngineCheckpoints
from .engine_settings import EngineSettings
from .engine_setup import (
    check_arguments,
    device_of,
    dtypes_of_buffers,
    optimizer_of,
    say_setup,
    warn_of,
)
from .engine_timers import EngineClock
from .engine_windows import EngineWindows
from .layer_specs import rules_of
from .pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from .sequence_parallel.parallel_state_sp import SequenceGrid
from .zero.stage3 import DeepSpeedZeroOptimizer_Stage3, mark_model
from .zero.unused_parameters import refuse_unused

ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER = "adam", "adamw", "lamb"
_NOTHING = contextlib.nullcontext()


def _halved(value: Any) -> Any:
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.half() if floats else value


def _set_trainable(params: Sequence[torch.nn.Parameter], trains: bool) -> None:
    for param in params:
        param.requires_grad_(trains)


def close_earlier(model: torch.nn.Module) -> None:
    """Closes engines that still have parameters of the model."""
    for param in model.parameters():
        before = engine_of(param)
        if before is not None:
            log_dist("an earlier engine of this model is closed", ranks=[0], level=WARNING)
            before.close()
            for engine in [one for one in _ENGINES if one.native is before]:
                engine._give_parts_back()
                engine._leave_module()
            before._core.values.set_closed_by(
                ": deepspeed.initialize() was called again for its model. Use the engine that "
                "the last call returned"
            )


class DeepSpeedEngine(
    EngineCheckpoints, EngineSettings, EngineWindows, BackwardWeights, torch.nn.Module
):
    """Trains one model with the calls of DeepSpeed's engine. `deepspeed.initialize()` creates it.

    Attributes:
        module: the model.
        native: the penstock.Engine that trains it.
        optimizer: the optimizer with its parameter groups; None if no optimizer was given.
        lr_scheduler: stepped after each update; may be replaced.
        training_dataloader: the loader of `training_data`, or None.
        config: the config that was given, as a dict.
        device: the device of get_accelerator() on which this rank trains the model.
        global_steps, micro_steps, skipped_steps, global_samples: counts so far.
    """

    _reduction = "sum"  # each loss is divided by gradient_accumulation_steps here

    def __init__(  # noqa: PLR0913 - DeepSpeed's signature
        self,
        args: Any,
        model: torch.nn.Module,
        optimizer: Any = None,
        model_parameters: Any = None,
        training_data: Any = None,
        lr_scheduler: Any = None,
        mpu: Any = None,
        dist_init_required: Any = None,
        collate_fn: Any = None,
        config: Any = None,
        config_class: Any = None,
        mesh_device: Any = None,
        dont_change_device: bool = False,
    ) -> None:
        super().__init__()
        self.mpu = mpu
        self._parts: CutParameters | None = None  # the parts that the script has cut itself
        self.device = device_of(args)
        self._config = self._read(config, model)
        self.config = self._config._param_dict
        warn_of(self._config.translated)
        self.client_optimizer, self.client_lr_scheduler = optimizer, lr_scheduler
        self.training_data, self.collate_fn = training_data, collate_fn
        self.module = model
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self.last_step_overflowed = False
        self._boundary: bool | None = None
        self._managed = self._config.managed_gradient_accumulation
        self._stepping = False
        self._inside = ""  # the open context: no_sync or coalesce_grad_reduction
        self._backwards = 0  # since the last update
        self._frozen: list[torch.nn.Parameter] = []  # parameters that this engine froze
        self._applied = False
        self._losses = 0  # number of losses that backward() got in this window
        self._auto_cast = self._config.fp16_enabled and self._config.auto_cast
        self.global_rank, self.world_size = get_rank(), get_world_size()
        self.monitor = MonitorMaster(self._config.monitor_config)
        try:
            self._start(optimizer, model_parameters)
        except BaseException:
            self.monitor.close()
            self._give_parts_back()
            raise
        _ENGINES.add(self)
        self._set_groups()
        self._weigh(1.0)
        self.lr_scheduler = self._scheduler(lr_scheduler)
        self.training_dataloader = (
            None if training_data is None else self._training_loader(training_data)
        )
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        made = self._clock = EngineClock(self)
        self.timers, self.tput_timer, self.flops_profiler = made.timers, made.speed, made.profiler
        say_setup(self)
        self.pipeline_parallelism = self.has_moe_layers = False
        self.enable_backward_allreduce = True
        if self._config.steps_per_print and self.basic_optimizer is not None:
            self._report()

    def _set_groups(self) -> None:
        """Sets the process groups and sizes.

        All ranks are data ranks, unless tensor ranks share a copy of the model or sequence ranks
        share samples.
        """
        tensor = self.mp_world_size = self.native.config.mesh.tensor
        sequence = self.sequence_parallel_size = self._config.sequence_parallel_size
        self.dp_world_size = self.world_size // tensor // sequence
        self.seq_dp_world_size = self.world_size // tensor
        adds = self._config._values.get("gradient_allreduce_op") == "sum"
        self._summed = float(self.seq_dp_world_size if adds else 1)
        self._grid: Any = None
        if tensor > 1:
            places = PipeModelDataParallelTopology(1, tensor, self.dp_world_size)
            self._grid = PipelineParallelGrid(places)
        elif sequence > 1:
            known = hasattr(self.mpu, "get_sequence_parallel_group")
            self._grid = self.mpu if known else SequenceGrid(sequence)
            self._tell_of_sequence_ranks()
        self.data_parallel_group = self.seq_data_parallel_group = dist.group.WORLD
        if self._grid is not None:
            self._close_groups = groups._open(self, self._grid)
            self.data_parallel_group = groups.get_data_parallel_group()
            self.seq_data_parallel_group = groups._get_sequence_data_parallel_group()

    def _tell_of_sequence_ranks(self) -> None:
        self.seq_parallel_group = self._grid.get_sequence_parallel_group()
        if self._config.zero_optimization_stage < 3:
            text = (
                "gradients are averaged over all ranks, including sequence ranks, as in DeepSpeed "
                "at stage 3; DeepSpeed's stages 0 to 2 sum them over sequence ranks"
            )
            log_dist(text, ranks=[0], level=WARNING)

    def get_sequence_parallel_group(self) -> Any:
        """Returns the group of the ranks that share this rank's sequences."""
        return self.seq_parallel_group

    def _read(self, config: Any, model: torch.nn.Module) -> DeepSpeedConfig:
        own = own_settings(self.mpu, config)
        return DeepSpeedConfig(config, mpu=self.mpu, own=own)

    def _training_loader(self, dataset: Any) -> Any:
        return self.deepspeed_io(dataset)

    @property
    def _model(self) -> torch.nn.Module:
        """The module that the native engine trains."""
        return self.module

    def _optimizer(self, given: Any, parameters: Any) -> tuple[Any, dict[str, Any]]:
        return optimizer_of(self._config, self._model, given, parameters)

    def _start(self, given: Any, parameters: Any) -> None:
        check_arguments(self, self._reduction)
        made, native = self._optimizer(given, parameters)
        tensor = native.get("mesh", {}).get("tensor", 1)
        if self._config.sequence_parallel_size > 1 and tensor > 1:
            raise ConfigError(
                '[deepspeed::initialize] "sequence_parallel_size" is not supported with tensor '
                "ranks: use penstock.initialize(), which supports both"
            )
        native["batch"] = {**native.get("batch", {}), "reduction": self._reduction}
        rules = rules_of(
            self._model,
            self._config._values.get("tensor_parallel", {}),
            tensor,
        )
        if rules is not None:
            if native.get("parallel", {}).get("rules"):
                raise ConfigError(
                    '[deepspeed::initialize] "tensor_parallel.partition_config" and '
                    '"penstock.parallel.rules" both define how layers are cut: keep one'
                )
            native["parallel"] = {**native.get("parallel", {}), "rules": rules}
        native |= dtypes_of_buffers(self._config, self._model)
        close_earlier(self._model)
        if tensor_ranks_of(self.mpu) > 1:  # the model's modules have cut their own parameters
            native = self._with_parts_joined(native)
        if made is None:  # the weights are only read
            self._frozen = [one for one in self._model.parameters() if one.requires_grad]
            _set_trainable(self._frozen, False)
            text = "no optimizer is given: this engine's forwards compute no parameter gradients"
            log_dist(text, ranks=[0])
        if "path" in native.get("offload", {}):
            make_folder(native["offload"]["path"])
        try:
            self.native = penstock.initialize(
                self._model, native, optimizer=made, device=self.device
            )
        finally:
            _set_trainable(self._frozen, True)
        if self._config.zero_optimization_stage == 3:
            mark_model(self._model, self._config.zero_config)
        self.basic_optimizer = made
        if self.native.state_names() and made is not None:
            made.state = EngineState(self.native, made)
        self.optimizer = self._wrapped(made)
        self._module_hook = (
            self._model.register_forward_hook(Hook(self._model, self._after_module))
            if self._config.fp16_enabled and made is not None and self._reduction == "sum"
            else None
        )

    def _with_parts_joined(self, native: dict[str, Any]) -> dict[str, Any]:
        """Gives cut parameters their full values, which the engine cuts again in the same way.

        Returns the native config with a rule for each of them.
        """
        self._parts = CutParameters(self._model, bwc_tensor_model_parallel_group(self.mpu))
        self._parts.join()
        rules = {"rules": self._parts.rules, "verify": "off"}
        return {**native, "parallel": {**native.get("parallel", {}), **rules}}

    def _give_parts_back(self) -> None:
        if self._parts is not None:
            self._parts.give_back()
            self._parts = None

    def _wrapped(self, made: Any) -> Any:
        stage = self._config.zero_optimization_stage
        if made is None or (stage == 0 and "precision" not in self._config.native):
            return made
        if stage == 0:
            fused = isinstance(made, FusedAdam)
            return (FP16_Optimizer if fused else FP16_UnfusedOptimizer)(self, made)
        return (DeepSpeedZeroOptimizer_Stage3 if stage == 3 else DeepSpeedZeroOptimizer)(self, made)

    def _scheduler(self, given: Any) -> Any:
        if given is not None:
            made = given if hasattr(given, "step") else given(self.basic_optimizer)
        elif self._config.translated.scheduler and self.basic_optimizer is not None:
            made = schedules.from_section(self._config.translated.scheduler)(self.basic_optimizer)
        else:
            return None
        log_dist(f"DeepSpeed LR Scheduler = {type(made).__name__}", ranks=[0])
        return made

    # ---- training

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the model's forward with the same arguments."""
        if self._auto_cast:
            inputs, kwargs = _tree.tree_map(_halved, (inputs, kwargs))
        self._weigh(1.0)
        if self._frozen:
            return self._without_gradients(inputs, kwargs)
        self.tput_timer.start()
        self._in_forward = True
        try:
            if self._clock.silent:
                return self.native(*inputs, **kwargs)
            with self._clock.around("forward"), self._clock.profiled():
                return self.native(*inputs, **kwargs)
        finally:
            self._in_forward = False

    def _without_gradients(self, inputs: Any, kwargs: Any) -> Any:
        """Runs the forward of an engine without an optimizer: its parameters get no gradients."""
        paused = [one for one in self._frozen if one.requires_grad]
        _set_trainable(paused, False)
        try:
            return self.native(*inputs, **kwargs)
        finally:
            _set_trainable(paused, True)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Computes the gradients of the loss.

        Args:
            loss: a scalar.
            retain_graph: as in torch.
            scale_wrt_gas: divide the loss by gradient_accumulation_steps first.

        Returns:
            The loss that was differentiated.
        """
        self._need_optimizer("backward")
        steps = self.gradient_accumulation_steps()
        scaled = loss / steps if scale_wrt_gas and steps > 1 else loss
        self._losses += 1
        self._backwards += 1
        others = [one for one in _ENGINES if one is not self]
        for one in others:  # the loss may depend on these engines' parameters, too
            divided_by = steps if scale_wrt_gas else one.gradient_accumulation_steps()
            one._weigh(divided_by, self.native.loss_scale)
        self.native.set_backward_weight(self._summed)
        self._unscaled = False
        try:
            with _NOTHING if self._clock.silent else self._clock.around("backward"):
                self.native.backward(scaled, retain_graph=retain_graph)
        finally:
            for one in (self, *others):
                one._weigh(1.0)
        return scaled

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Ends a micro-batch. At the window's end it updates the weights and the scheduler.

        Without managed_gradient_accumulation each call ends a window. Raises ConfigError inside
        no_sync() and coalesce_grad_reduction().
        """
        if self._inside:
            raise DeepSpeedRefusal(
                f"[deepspeed::step] step() is not allowed inside {self._inside}(), as in DeepSpeed "
                f"(It is illegal to call Engine.step() inside no_sync context manager, or inside "
                f"coalesce_grad_reduction()). Call it after the block"
            )
        self._applied = False
        self._stepping = True
        try:
            ends = self.is_gradient_accumulation_boundary()
            if ends:
                with _NOTHING if self._clock.silent else self._clock.around("step"):
                    self.take_model_step(lr_kwargs)
        finally:
            self._stepping = False
        self.micro_steps += 1
        self.tput_timer.stop(global_step=ends)
        if not self._clock.silent:
            self._clock.log(ends)

    def _need_optimizer(self, name: str) -> None:
        if self.basic_optimizer is None:
            raise DeepSpeedRefusal(
                f"[deepspeed::{name}] the engine was initialized without an optimizer"
            )

    def update(self) -> None:
        """Updates only the weights. Raises ConfigError if the engine has no optimizer, or if a
        parameter has no gradient and "ignore_unused_parameters" is false."""
        self._need_optimizer("step")
        if self._config.zero_optimization_stage == 0 and self._reduction == "sum":
            self._take_gradients()
        if self._reduction == "sum":
            refuse_unused(self)
        self._applied = self.native.step(force=True)
        self.last_step_overflowed = not self._applied

    def take_model_step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Updates the weights, the counts and the scheduler."""
        self.update()
        loss = self._window_loss()
        self._count(lr_kwargs)
        self._tell(loss)

    def _count(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Updates counts and scheduler after an update, and logs the step."""
        self.global_steps += 1
        samples = self.train_batch_size()
        if not self._managed:
            samples = samples // self.gradient_accumulation_steps() * self._backwards
        self.global_samples += samples
        self._backwards = 0
        if self._applied and self.lr_scheduler is not None:
            self.basic_optimizer._opt_called = True  # without it torch's schedulers warn
            if lr_kwargs or optimizers.steps_alone(self.lr_scheduler):
                self.lr_scheduler.step(**(lr_kwargs or {}))
        if not self._applied:
            self.skipped_steps += 1
            log_dist(f"step {self.global_steps} is skipped: {self.native.overflow}", [0], WARNING)
        every = self._config.steps_per_print
        if every and self.global_steps % every == 0:
            self._report()
        if "autotuning" in self.config:
            autotuning.after_step(self, self.config["autotuning"])

    def _window_loss(self) -> float | None:
        """Returns the sum of the losses since the last update, averaged over data ranks.

        Returns None if there is no monitor or the step was skipped.
        """
        count, self._losses = self._losses, 0
        mean = self.native.metrics["loss"] if self._applied and self.monitor.enabled else None
        return None if mean is None else float(mean) * count

    def _tell(self, loss: float | None) -> None:
        """Writes DeepSpeed's events of a step to the monitors."""
        if self.monitor.enabled:
            scale = self.cur_scale if self._config.fp16_enabled else None
            lr = self.get_lr()[0]
            self.monitor.write_events(step_events(self.global_samples, lr, scale, loss))

    def _report(self) -> None:
        log_dist(
            f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, "
            f"mom={self.get_mom()}",
            ranks=[0],
        )

    def was_step_applied(self) -> bool:
        """Whether the last step() changed the weights."""
        return self._applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the window.

        As in DeepSpeed, the call has no effect with ZeRO-2 and 3, where a training loop may call it
        after each micro-batch.
        """
        if self._config.zero_optimization_stage < 2:
            self.native.zero_grad()
            self._losses = 0

    # ---- state and end

    def get_global_grad_norm(self) -> float | None:
        """Returns the gradient norm of the last update, before clipping; None before the first."""
        if self.last_step_overflowed:
            return math.inf
        return self.native.grad_norm if self.global_steps > 0 else None

    def destroy(self) -> None:
        """Closes the engine: restores the model's full weights and frees all memory.

        All ranks must call it. If a rank has ended already, the weights are dropped with a warning.
        The monitors' events are on disk when it returns.
        """
        if self._grid is not None:
            self._close_groups()
            self._grid = None
        self._leave_module()
        self.monitor.close()
        try:
            self.native.close()
            self._give_parts_back()
        except penstock.RuntimeFault as error:
            warnings.warn(f"[deepspeed::destroy] {error}", RuntimeWarning, stacklevel=2)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError. Compile the model's blocks before initialize() instead."""
        raise ConfigError(
            "[deepspeed::compile] engine.compile() is not supported. Compile the model's blocks "
            "before initialize(): for block in model.blocks: block.compile()"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("module", "native"):
                raise
        return getattr(self.module, name)
