"""The engine's Python front: no mathematics, no collectives, no state machine."""

import atexit
import contextlib
import datetime
import inspect
import json
import os
import pathlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from penstock import optimizer as optim
from penstock import tree
from penstock._native import ConfigError, RuntimeFault, _penstock

OptimizerLike = (
    torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | Mapping[str, Any] | None
)


def _config_dict(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    text = os.fspath(config)
    if not text.lstrip().startswith("{"):
        path = pathlib.Path(text)
        if not path.is_file():
            raise ConfigError(
                f'[front::initialize] config "{text}" is neither JSON text nor a readable file'
            )
        text = path.read_text(encoding="utf-8")
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"[front::initialize] config is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError("[front::initialize] config must be a JSON object")
    return parsed


def _process_group(timeout_s: float) -> dist.ProcessGroup | None:
    """A gloo group of the engine's own; None for a single rank."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    own: dist.ProcessGroup = dist.new_group(
        backend="gloo", timeout=datetime.timedelta(seconds=timeout_s)
    )
    return own


class Engine:
    """Trains one model. Made by `initialize()`; use it like the model."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: dict[str, Any],
        optimizer: OptimizerLike,
        lr_scheduler: Any,
    ) -> None:
        self._hooks: list[Any] = []
        self.module = model
        given = optimizer
        if callable(given) and not isinstance(given, torch.optim.Optimizer):
            given = given(model.parameters())
        assert given is None or isinstance(given, torch.optim.Optimizer)
        kind = None if given is None else optim.native_type(given)
        if given is not None:
            if "optimizer" in config:
                raise ConfigError(
                    "[front::initialize] an optimizer is given both as an argument and as the key "
                    '"optimizer": keep one'
                )
            if kind is not None:
                config = {**config, "optimizer": optim.config_of(given, kind)}
        else:
            config = {"optimizer": {"type": "AdamW"}, **config}
        self.config = _penstock.Config.parse(json.dumps(config))
        if given is None:
            effective = json.loads(self.config.json())
            given = optim.from_config(model, effective["optimizer"])
            kind = type(given).__name__
        self.optimizer = given
        self._kind = kind
        self._names = tree.names_of(model)
        described = tree.model_tree(model, optim.group_of(given, model))
        timeout_s = self.config.timeout_s
        self._process_group = _process_group(timeout_s)
        if self._process_group is None:
            group = _penstock.Group.alone()
        else:
            group = _penstock.Group.from_process_group(self._process_group, timeout_s)
        self._core = _penstock.Core(described, self.config, group, kind is None)
        self._external = None if kind is not None else optim.ShardStep(given, self._core)
        self._peak_lrs = [group["lr"] for group in given.param_groups]
        self._scheduled = json.loads(self.config.json())["schedule"]["type"] != "none"
        if lr_scheduler is not None and self._scheduled:
            raise ConfigError(
                "[front::initialize] a scheduler is given both as an argument and as the key "
                '"schedule": keep one'
            )
        if callable(lr_scheduler) and not hasattr(lr_scheduler, "step"):
            lr_scheduler = lr_scheduler(given)
        self.lr_scheduler = lr_scheduler
        if lr_scheduler is None:
            self._schedule_lr()
        self._install_hooks()
        atexit.register(_forget, weakref.ref(self))

    # ---- training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, on the same arguments."""
        self._core.unit_begin(0, torch.is_grad_enabled())
        try:
            output = self.module(*args, **kwargs)
        except BaseException as error:
            self._core.forward_failed(f"{type(error).__name__}: {error}")
            raise
        self._core.unit_end(0, list(tree.tensors_in(output)))
        return output

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Gradients of `loss`; any number of times before `step()`, adding up as in torch.

        Keyword arguments go to `torch.Tensor.backward`. Raises RuntimeFault without a forward.
        """
        self._core.check_backward()
        try:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError:
            self._core.check_backward()  # ours, as what it was before autograd passed it on
            raise

    def step(self, force: bool = False) -> bool:
        """Updates the weights once `batch.accumulate` backwards were seen.

        Args:
            force: update now, averaged over the backwards seen so far.

        Returns:
            True when the weights changed.

        Raises:
            RuntimeFault: no backward since the last step; gradients that are not finite (names
                parameter, rank and micro-step; the weights stay); a dead or diverged peer.
        """
        if not self._core.window_complete(force):
            return False
        groups = [] if self._kind is None else optim.settings(self.optimizer, self._kind)
        self._core.step(groups, self._external)
        if self.lr_scheduler is not None:
            # torch's schedulers warn unless they see the optimizer step.
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
            self.lr_scheduler.step()
        else:
            self._schedule_lr()
        return True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accepted for loops written for DDP: accumulation is `batch.accumulate`, and exact."""
        yield

    @property
    def grad_norm(self) -> float:
        """Global L2 norm of the last applied step's averaged gradient, before clipping."""
        return float(self._core.grad_norm)

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group for the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def steps(self) -> int:
        """Number of updates so far."""
        return int(self._core.steps)

    # ---- looking inside; every rank calls these together

    @contextlib.contextmanager
    def gathered(
        self, params: Iterable[torch.Tensor] | None = None, write: bool = False
    ) -> Iterator[None]:
        """Within the context these parameters (default: all) are whole on every rank.

        Args:
            params: parameters of the model; their whole units are gathered.
            write: on exit rank 0's values go to every rank and become the weights.
        """
        if params is None:
            names = []
        else:
            names = [self._names[param][0] for param in params]
        units = self._core.units_of(names)
        self._core.gather(units)
        try:
            yield
        finally:
            self._core.release(units, write)

    def full_grads(self) -> dict[str, torch.Tensor]:
        """Averaged full fp32 gradients by name, after backward and before step, on all ranks."""
        return dict(self._core.full("grad"))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Full weights on rank 0, {} elsewhere. All ranks call it.

        Trained parameters come from their fp32 masters; frozen ones have no master and carry the
        precision they compute in. Buffers are as they are.
        """
        full = dict(self._core.full("param"))
        if dist.is_initialized() and dist.get_rank() != 0:
            return {}
        by_param = {id(param): full[names[0]] for param, names in self._names.items()}
        state: dict[str, torch.Tensor] = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            state[name] = by_param[id(value)] if id(value) in by_param else value.detach().clone()
        return state

    def ledger(self) -> dict[str, Any]:
        """Bytes per rank: predicted for each strategy, and measured for the one running.

        Keys: "predicted" (strategy -> entry), "measured" (entry), "strategy". An entry has the
        peaks of "param", "grad", "optim", "buffers" and of their "total".
        """
        return dict(self._core.ledger())

    def explain(self) -> str:
        """Every effective setting, the table, the units and the plan of each section."""
        return str(self._core.explain())

    # ---- the model's own

    def eval(self) -> "Engine":
        """As `torch.nn.Module.eval`."""
        return self.train(False)

    def train(self, mode: bool = True) -> "Engine":
        """As `torch.nn.Module.train`."""
        self.module.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "module" or name.startswith("_core"):
            raise AttributeError(name)
        return getattr(self.module, name)

    # ---- the end

    def close(self) -> None:
        """Gives the model its full parameters back and returns all memory. All ranks call it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._core.close()
        if self._process_group is not None:
            dist.destroy_process_group(self._process_group)
            self._process_group = None

    # ---- set-up

    def _schedule_lr(self) -> None:
        if not self._scheduled:  # the user may change lr at any time
            return
        factor = _penstock.lr_factor(self.config, self._core.steps + 1)
        for group, peak in zip(self.optimizer.param_groups, self._peak_lrs, strict=False):
            group["lr"] = peak * factor

    def _install_hooks(self) -> None:
        if not self._core.needs_unit_events:
            return
        core = self._core

        def hook_unit(module: torch.nn.Module, unit: int) -> None:
            def begin(*_: Any) -> None:
                core.unit_begin(unit, True)

            def end(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
                core.unit_end(unit, list(tree.tensors_in(output)))

            self._hooks.append(module.register_forward_pre_hook(begin))
            self._hooks.append(module.register_forward_hook(end))

        for unit, name in enumerate(core.unit_modules):
            if unit > 0:
                hook_unit(self.module.get_submodule(name), unit)


def _forget(engine: "weakref.ref[Engine]") -> None:
    """At exit, lets go of the C++ side while torch is still whole."""
    alive = engine()
    if alive is not None and "_core" in alive.__dict__:
        del alive._core


def initialize(
    model: torch.nn.Module,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    optimizer: OptimizerLike = None,
    lr_scheduler: Any = None,
    **overrides: Any,
) -> Engine:
    """Shards a model in place and returns the engine that trains it. All ranks call it together.

    Args:
        model: any nn.Module on the CPU. Rank 0's values are used on every rank.
        config: dict, JSON text or path; see docs/config.md.
        optimizer: torch optimizer over the model's parameters, or a callable that takes the
            parameters and returns one, or a dict that replaces the config's `optimizer` section
            (the default).
        lr_scheduler: torch scheduler of that optimizer, or a callable that takes the optimizer.
            Stepped after each applied step. Default: the config's `schedule`.
        overrides: top-level config keys that replace those of `config`.

    Raises:
        ConfigError: a setting that cannot work; names key, value, what is allowed.
        RuntimeFault: ranks that disagree on model or config, with the first difference.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"[front::initialize] model must be an nn.Module, not {type(model).__name__}"
        )
    if inspect.isclass(optimizer):
        raise ConfigError(
            "[front::initialize] optimizer is a class: pass an object, or a callable such as "
            "lambda params: torch.optim.AdamW(params, lr=1e-3)"
        )
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError(
            "[front::initialize] the model has no parameters that train: there is nothing to do"
        )
    if isinstance(optimizer, Mapping):  # the config key of that name
        overrides["optimizer"] = dict(optimizer)
        optimizer = None
    return Engine(model, {**_config_dict(config), **overrides}, optimizer, lr_scheduler)


__all__ = ["Engine", "RuntimeFault", "initialize"]
