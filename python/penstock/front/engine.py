"""The engine's Python front. The C++ core decides what happens at each call; this file installs
hooks, passes torch's optimizer groups and learning rates to the core, and translates errors."""

import contextlib
import functools
import inspect
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from penstock._native import ConfigError, _penstock
from penstock.front import (
    checkpoint,
    config_file,
    engine_calls,
    model_state,
    module_tree,
    ranks,
    recompute,
    schedules,
    sharded_init,
    tiling,
    training_device,
)
from penstock.front import optimizer as optim
from penstock.front.batches import Batches
from penstock.front.config_file import ConfigLike
from penstock.front.forward_guard import Forwards, Pace, Uneven, remove
from penstock.front.inference import EvalMode, Inference
from penstock.front.model_structure import Structure, check_params, refuse_model
from penstock.front.param_state import ParamState
from penstock.front.token_caches import MovedCaches
from penstock.monitor.monitored import Monitored
from penstock.parallel import pipeline_parallel, sequence_parallel, tensor_parallel

OptimizerLike = (
    torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | Mapping[str, Any] | None
)


class Engine(checkpoint.Checkpointing, ParamState, Batches, Inference, Monitored):
    """Trains one model. Made by `initialize()`; use it like the model.

    Attributes:
        module: the model.
        config: every setting in effect, in read-only sections: `config.offload.optimizer`.
        optimizer: the torch optimizer that has the parameter groups.
        lr_scheduler: the scheduler that was given, or None.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        values: dict[str, Any],
        optimizer: OptimizerLike,
        lr_scheduler: Any,
        of_deepspeed: Mapping[str, Any],
        device: torch.device | None,
    ) -> None:
        self.module = model
        self._of_deepspeed = of_deepspeed
        refuse_model(model)
        given, values = optim.prepare(optimizer, model, values)
        config = tiling.with_head(model, _penstock.Config(ranks.with_timeout(values)))
        config = tensor_parallel.with_rules(model, config)
        if given is None:
            given = optim.from_config(model, config.optimizer)
        self.optimizer = self._given = given
        self._native = optim.is_native(given)
        self._structure = Structure(model)
        self.lr_scheduler = self._scheduler(lr_scheduler, config)
        described = module_tree.model_tree(
            model, optim.group_of(given, self._structure.own), sharded_init.waiting(), device
        )
        super().__init__()
        self._installed: list[Any] = []  # hooks on modules, removed by close()
        self._ranks = ranks.of_config(config, described.device)
        try:
            self._adopt(described, config)
        except BaseException as error:
            if "_core" not in self.__dict__:
                self._ranks.close()
            else:  # every rank raises the same ConfigError, so no rank has to report it
                alike = isinstance(error, ConfigError)
                self._end(True, "" if alike else f"{type(error).__name__}: {error}")
            raise
        _alive.add(self)
        self._structure.engine = weakref.ref(self)
        self._watch_signals()

    def _adopt(self, described: Any, config: Any) -> None:
        self._core = self._ranks.core(described, config, not self._native)
        _cores.add(self)
        self.config = self._core.config
        if self.config.inference:
            self._installed.append(EvalMode(self.module))
        training_device.warn_of_one_thread(self.module, described.device, self.config)
        self._pipeline = pipeline_parallel.PipelineParallel(self.module, self._core, self.config)
        sharded_init.let_go(self._core.mean)
        if self.config.seed >= 0:
            mesh = self.config.mesh
            own = ranks.rank() // mesh.tensor % (mesh.data * mesh.sequence)
            torch.manual_seed(self.config.seed + own)
        self._structure.set_to_itself = self._core.values.set_to_itself
        pace = Pace(staged=self._pipeline.active)
        tiling.install(self.module, self._core, self.config, pace, self._installed)
        self._tensor = tensor_parallel.TensorParallel(
            self.module, self._core, self.config, self._installed
        )
        self._sequence = sequence_parallel.SequenceParallel(
            self.module, self._core, self.config, self._installed
        )
        self._forwards = Forwards(
            self.module, self._core, self._structure, pace, self._installed, self._tensor
        )
        self._finish_setup(self._given)
        self._pipeline.install(self._tensor, self._installed, self._relay)
        self._watch()

    def _open(self) -> bool:
        return self in _alive

    def _finish_setup(self, given: torch.optim.Optimizer) -> None:
        self._external = None if self._native else optim.ShardStep(given, self._core, ranks.world())
        optim.take_over(given, self._external, self._core)
        self._groups_seen = optim.group_members(given)
        if self.lr_scheduler is None:
            self._schedule_lr()
        self._install_hooks()

    def _scheduler(self, given: Any, config: Any) -> Any:
        """Returns the given scheduler. If a callable is given, calls it with the optimizer."""
        optimizer = self.optimizer
        self._peak_lrs = [float(group.get("lr", 0)) for group in optimizer.param_groups]
        self._scheduled = config.schedule.type != "none"
        if self._scheduled and any("lr" not in group for group in optimizer.param_groups):
            raise ConfigError(
                f'[front::initialize] "schedule" is set, but {type(optimizer).__name__} has no "lr"'
            )
        if given is not None and self._scheduled:
            raise ConfigError(
                "[front::initialize] a scheduler is given both as an argument and as the key "
                '"schedule". Remove one of them'
            )
        if callable(given) and not hasattr(given, "step"):
            given = given(optimizer)
        return given

    # ---- training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's forward on the same arguments."""
        self._forwards.reset()
        if self._pipeline.relays:
            return self.module(*args, **kwargs)
        model = self._pipeline.stage_of(self.module)
        with self._seen(kwargs, args):
            if self._sequence.active:
                run = functools.partial(self._forwards.run, model)
                return self._sequence.run(run, args, kwargs)
            return self._forwards.run(model, *args, **kwargs)

    def uneven(self) -> Uneven:
        """Context in which ranks may call the model a different number of times, without gradients.

        If a rank leaves the context early, it takes part in the forwards of the other ranks until
        all have left.
        """
        return self._forwards.uneven()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Computes the gradients of `loss`. Several calls before `step()` add up, as in torch.

        Keyword arguments (`gradient`, `retain_graph`, `inputs`) go to `torch.Tensor.backward`; with
        fp16 the loss is scaled on the way. For a gradient that is differentiated again (a gradient
        penalty) use `torch.autograd.grad(..., create_graph=True)` before this call.

        Raises:
            ConfigError: if `loss` is not a tensor, or for `create_graph`.
            RuntimeFault: if there was no forward since the last step, or a peer has ended.
        """
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(
                f"[front::backward] the loss is a {type(loss).__name__}, not a tensor. Pass the "
                f"model's loss, for example engine.backward(output.loss)"
            )
        if kwargs.get("create_graph"):
            raise ConfigError(
                "[front::backward] create_graph is not supported, because the engine removes "
                "gradients from .grad during the backward. Use "
                "torch.autograd.grad(..., create_graph=True)"
            )
        gradient = self._core.start_backward(loss, kwargs.pop("gradient", None))
        try:
            loss.backward(gradient=gradient, **kwargs)  # type: ignore[no-untyped-call]
        except BaseException as error:
            # Autograd wraps the engine's errors. backward_failed() raises the original error.
            self._core.backward_failed(f"{type(error).__name__}: {error}")
            raise
        if "inputs" not in kwargs:
            self._core.calls.end_backward()

    def set_backward_weight(self, weight: float) -> None:
        """Multiplies each gradient of the following backwards by `weight` (default: 1).

        The weight is applied once, when a gradient is added to its parameter's sum. So, with this
        weight, a plain `loss.backward()` adds the same gradients as `(weight * loss).backward()`
        does without it.
        """
        self._core.values.set_backward_weight(weight)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss for a plain `.backward()`: with fp16 it is multiplied by the loss scale.

        Raises RuntimeFault if there was no forward since the last step.
        """
        gradient = self._core.start_backward(loss, None)
        return loss if gradient is None else loss * gradient

    def step(self, force: bool = False) -> bool:
        """Updates the weights after `batch.accumulate` backwards.

        Args:
            force: update now, with the average over the backwards so far.

        Returns:
            True if the weights changed. False inside an accumulation window, and if fp16 gradients
            overflowed. After an overflow all ranks skip the step, `loss_scale` is smaller, and
            `overflow` names the first parameter.

        Raises:
            RuntimeFault: if there was no backward since the last step; if gradients are not finite
                (the error names parameter, rank and micro-step; the weights do not change); if a
                peer has ended or diverged.
        """
        if not self._core.window_complete(force):
            return False
        if self._saving:
            self._say_failure()
        self._structure.look()
        optimizer = self.optimizer
        optim.check_ours(optimizer, self._given, self._native)
        self._follow_groups()
        if self._native:
            optim.call_hooks(optimizer, before=True)
        groups = optim.settings(optimizer) if self._native else []
        options = "" if self._native else optim.options_text(optimizer)
        self._seen_options(optimizer, self._native)
        if not self._core.step(groups, self._external, options):
            self._step_events.tell(self, applied=False)
            return False
        self._stepped()
        if self._native:
            optim.call_hooks(optimizer, before=False)
            # torch's schedulers warn unless they see the optimizer step.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        if self.lr_scheduler is None:
            self._schedule_lr()
        elif optim.steps_alone(self.lr_scheduler):
            self.lr_scheduler.step()
        self._step_events.tell(self, applied=True)
        if self.config.checkpoint.signals:
            self._save_if_asked()
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients since the last step. With `set_to_none=False`, zeroes them as torch
        would.

        `step()` drops the gradients that it applied, so a loop does not need this call.
        """
        self._core.zero_grad(set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Does nothing. It exists for loops written for DDP. To reduce once per window, set
        `batch.accumulate`."""
        yield

    @property
    def grad_norm(self) -> float:
        """Global L2 norm of the last applied step's averaged gradient, before clipping."""
        return float(self._core.report.grad_norm)

    @property
    def loss_scale(self) -> float:
        """The factor on the loss of the next backward; 1 without fp16."""
        return float(self._core.report.loss_scale)

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because fp16 gradients overflowed."""
        return int(self._core.report.skipped_steps)

    @property
    def overflow(self) -> str:
        """The first overflow of the last skipped step: parameter, rank and micro-step; or ""."""
        return str(self._core.report.overflow)

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group for the next step; 0 if it has none."""
        return float(self.optimizer.param_groups[0].get("lr", 0))

    @property
    def steps(self) -> int:
        """Number of updates so far."""
        return int(self._core.steps)

    # ---- looking inside; every rank calls these together

    @contextlib.contextmanager
    def gathered(
        self, params: Iterable[torch.Tensor] | None = None, write: bool = False
    ) -> Iterator[None]:
        """Gathers these parameters (default: all) on every rank while the context is open.

        Args:
            params: parameters of the model; the call gathers their whole units.
            write: on exit, copies the values of rank 0 to every rank as the new weights.

        Raises:
            ConfigError: if a tensor is not a parameter of the model.
        """
        own = self._structure.own
        chosen = list(own) if params is None else list(params)
        if any(param not in own for param in chosen):
            raise ConfigError(
                "[front::gathered] a tensor is not a parameter of the engine's model. Pass "
                "parameters of engine.module"
            )
        names = [own[param] for param in chosen]
        values = self._core.values
        units = values.units_of(names) if names else []
        values.gather(units, write)
        if params is None:
            self._pipeline.bring_buffers()
        try:
            with self._tensor if params is None else contextlib.nullcontext():
                yield
        except BaseException:
            values.let_go(units, write)
            raise
        values.release(units, write)
        if params is None and write:
            self._pipeline.write_buffers()

    def state_dict(
        self,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        rank0_only: bool = True,
    ) -> dict[str, Any]:
        """Returns the full weights by name on rank 0, {} on other ranks. All ranks call it.

        Trained parameters are copies of their fp32 masters. Frozen parameters have no master, and
        keep their own dtype until `dtype` converts them. The dict also has copies of buffers and
        the values of `get_extra_state()`, like the dict of `torch.nn.Module.state_dict()`.

        The call gathers one unit at a time. Rank 0 holds the dict and at most one more unit, which
        counts as "buffers" in the ledger and towards a budget. Other ranks hold at most their shard
        of a unit.

        The model's own `state_dict()` makes the dict, so its overrides and hooks see full values in
        the dict and in the modules. Overrides and hooks run on rank 0 after the last collective, so
        an error in one of them is raised on rank 0 alone.

        Args:
            dtype: dtype of the parameters; default: float32. The call converts one unit at a time.
            device: device of the tensors; default: the CPU.
            rank0_only: if False, returns the whole dict on every rank.

        Raises:
            RuntimeFault: if a rank has no memory for a unit (on all ranks), or a peer has ended.
            ConfigError: if `dtype` is not a floating dtype.
        """
        made = torch.float32 if dtype is None else dtype
        if not made.is_floating_point:
            raise ConfigError(
                f"[front::state_dict] dtype is {made}. Pass a floating dtype, such as torch.float32"
            )
        place = torch.device("cpu" if device is None else device)
        full = dict(self._core.values.weights(made, place, not rank0_only))
        self._pipeline.bring_buffers()
        if rank0_only and ranks.rank() != 0:
            return {}
        by_param = {id(param): full[name] for param, name in self._structure.own.items()}
        with self._tensor:
            made = model_state.filled_state_dict(self.module, by_param, device)
        return made  # type: ignore[no-any-return]

    def ledger(self) -> dict[str, Any]:
        """Returns bytes per rank, predicted for each strategy and measured for the current one.

        Keys: "predicted" (strategy -> entry), "measured" (entry), "strategy". An entry has the
        peak bytes in memory of "param", "grad", "optim", "buffers" and of their "total"; "device"
        and "host", the total by tier; "memory", the peak of device and host at one time; and
        "disk", the bytes on disk. "exchanges" is the number of exchanges with other ranks in a
        step (measured: in the last step). "resident" has the bytes of the "process" now and of its
        parts: "engine", "libraries", "shared", "heap" (in use) and "heap_free" (freed tensors,
        whose memory malloc keeps). "engine" and "heap" overlap in small buffers. "measured" also
        has "disk_read" and "disk_written", the bytes moved so far, and "act", the bytes of
        activations moved to the host, and "cache", those of cached tokens that move; the total
        leaves out both. "activations" is the peak of the model's tensors in step two;
        "step_device" and "step_memory" are peaks predicted with them.
        """
        return dict(self._core.report.ledger())

    def explain(self) -> str:
        """Returns a text with every effective setting, the table, the units and the plans."""
        made = type(self.optimizer)
        given = f"optimizer {made.__module__}.{made.__qualname__}, as given\n"
        return ("" if self._native else given) + str(self._core.report.explain())

    # ---- methods of the model

    def eval(self) -> "Engine":
        """Sets the model to eval mode, like `torch.nn.Module.eval`. Returns the engine."""
        self.module.eval()
        return self

    def train(self, mode: bool = True) -> "Engine":
        """Sets the model's mode, like `torch.nn.Module.train`. Returns the engine."""
        self.module.train(mode)
        return self

    def __repr__(self) -> str:
        core, config = self.__dict__.get("_core"), self.__dict__.get("config")
        if core is None or config is None:
            return "<penstock.Engine, without a core>"
        shapes = dict(core.values.shapes()) if self in _alive else {}
        whole = [shapes.get(name, param.shape) for param, name in self._structure.own.items()]
        count = sum(math.prod(shape) for shape in whole)
        return (
            f"<penstock.Engine strategy={config.strategy} "
            f"precision={config.precision or 'as-built'} ranks={ranks.world()} "
            f"parameters={count} steps={core.steps}{'' if self in _alive else ' closed'}>"
        )

    def __getattr__(self, name: str) -> Any:
        if name == "module" or name.startswith("_core"):
            raise AttributeError(name)
        return getattr(self.module, name)

    # ---- the end

    def close(self, gather: bool = True) -> None:
        """Restores the model's full parameters and frees the engine's memory. All ranks call it.

        Views of parameters (`state_dict()` of the model, `detach()`, `data`) stay views of them.
        After an error on any rank, a call in a `finally:` restores the weights from before the
        failed step, if every rank makes the call. If a `step()` was interrupted, some weights may
        already be new; a RuntimeWarning reports this.

        ``gather=False`` drops the values, for a model larger than memory. Then reading a sharded
        parameter or a view of it raises RuntimeError.

        Raises:
            RuntimeFault: if the weights could not be gathered; the error names the reason (a rank
                has ended, or did not call within `comm.timeout_s`). Before the error, the memory is
                freed, and sharded parameters are then as after ``gather=False``.
        """
        error = sys.exc_info()[1]  # an error that passes through a `finally:`
        self._end(gather, "" if error is None else f"{type(error).__name__}: {error}")

    def _end(self, gather: bool, why: str) -> None:
        _alive.discard(self)
        self._structure.forget()
        remove(self._installed)
        self._end_watch()
        try:
            self._pipeline.set_buffers()
            said = self._core.close(gather, why)
        finally:
            self._ranks.close()
        if said:
            warnings.warn(f"[front::close] {said}", RuntimeWarning, stacklevel=3)

    # ---- set-up

    def _follow_groups(self) -> None:
        if optim.group_members(self.optimizer) != self._groups_seen:
            self._regroup()

    def _regroup(self) -> None:
        """Sends changed parameter groups of the optimizer to the core.

        Raises ConfigError if the optimizer computes in Python, on shards.
        """
        if self._external is not None:
            raise ConfigError(
                f"[front::step] the groups of {type(self.optimizer).__name__} changed. This "
                f"optimizer works on shards, so its groups must stay as they were at initialize()"
            )
        group_of = optim.group_of(self.optimizer, self._structure.own)
        self._core.set_groups([group_of.get(param, 0) for param in self._structure.own])
        for group in self.optimizer.param_groups[len(self._peak_lrs) :]:
            self._peak_lrs.append(float(group.get("lr", 0)))
        self._groups_seen = optim.group_members(self.optimizer)

    def _schedule_lr(self) -> None:
        if not self._scheduled:  # without a schedule the user sets lr
            return
        factor = self.config.schedule.lr_factor(self._core.steps + 1)
        for group, peak in zip(self.optimizer.param_groups, self._peak_lrs, strict=False):
            group["lr"] = peak * factor

    def _install_hooks(self) -> None:
        core = self._core
        units = core.units
        recomputed = any(unit.recomputed for unit in units)
        if not core.needs_unit_events and not recomputed:
            return
        caches = None
        if core.token_caches.moves:
            caches = MovedCaches(core.token_caches, self.config.inference)
            self._installed.append(caches.watch(self.module))
        module_tree.refuse_compiled(self.module, self.config, recomputed, caches is not None)
        modules = {}
        for index, unit in enumerate(units):
            if index > 0 and not unit.is_tile and not unit.away:
                module = modules[index] = module_tree.place_of_hooks(self.module, unit.module)
                if unit.recomputed:
                    made = recompute.Recomputed(module, unit.module, index, core.recomputation)
                    self._installed.append(made)
                if core.needs_unit_events:
                    self._forwards.watch(module, index)
                if caches is not None:
                    self._installed.append(caches.watch(module))
        if core.needs_unit_events:
            for module in module_tree.parts_around(self.module, list(modules.values())):
                self._forwards.watch_part(module)


engine_calls.tell_of_errors(Engine)
_alive: "weakref.WeakSet[Engine]" = weakref.WeakSet()


def engine_of(param: torch.Tensor) -> Engine | None:
    """Returns the open engine whose model has this parameter, or None."""
    return next((engine for engine in list(_alive) if param in engine._structure.own), None)


_cores = engine_calls.ended_at_exit()  # engines with a core, open or closed


@engine_calls.tells_if_refused
def initialize(
    model: torch.nn.Module,
    config: ConfigLike = None,
    *,
    optimizer: OptimizerLike = None,
    lr_scheduler: Any = None,
    device: training_device.DeviceLike = None,
    **overrides: Any,
) -> Engine:
    """Shards a model in place and returns the engine that trains it. All ranks call it together.

    Args:
        model: any nn.Module. Rank 0's values are used on every rank.
        config: dict, JSON text or path; see docs/config.md. The call translates a DeepSpeed config
            (docs/deepspeed.md).
        optimizer: torch optimizer over the model's parameters, or a callable that takes the
            parameters and returns one, or a dict that replaces the config's `optimizer` section
            (the default).
        lr_scheduler: torch scheduler of that optimizer, or a callable that takes the optimizer.
            `step()` steps it after each update. Default: `schedule` (DeepSpeed: `scheduler`).
        device: where the model trains ("cuda": this rank's GPU). The model moves unit by unit.
            Default: the device of `penstock.init()`, or where the parameters are.
        overrides: top-level config keys that replace those of `config`.

    Raises:
        ConfigError: if a setting cannot work; the error names the key, its value and the allowed
            values.
        RuntimeFault: if ranks have different models or configs; the error names the first
            difference.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"[front::initialize] model must be an nn.Module, not {type(model).__name__}"
        )
    if inspect.isclass(optimizer):
        raise ConfigError(
            "[front::initialize] optimizer is a class. Pass an object, or a callable such as "
            "lambda params: torch.optim.AdamW(params, lr=1e-3)"
        )
    check_params(model)
    if isinstance(optimizer, Mapping):  # it replaces the config key "optimizer"
        overrides["optimizer"] = dict(optimizer)
        optimizer = None
    values, scheduler, given = config_file.read(config)
    if scheduler and lr_scheduler is None:
        lr_scheduler = schedules.from_section(scheduler)
    place = training_device.of_model(model, device, sharded_init.waiting())
    return Engine(model, {**values, **overrides}, optimizer, lr_scheduler, given, place)
