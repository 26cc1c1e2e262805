"""Parameter groups: what the engine's kernels, or the user's own optimizer, are asked for.

The torch optimizer object the user sees keeps its parameter groups (so any torch scheduler works on
it). AdamW, Adam, SGD, Adagrad and Lion run on the engine's kernels; any other elementwise class
steps on fp32 shards.
"""

import copy
from collections import defaultdict
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault, _penstock


class Lion(torch.optim.Optimizer):
    """Lion (arXiv:2302.06675), computed by the engine; decoupled weight decay.

    Args:
        params: parameters or groups, as for any torch optimizer.
        lr: learning rate, a third to a tenth of AdamW's.
        betas: of the update and of the momentum.
        weight_decay: as in AdamW.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> Any:
        """Raises RuntimeFault: `engine.step()` updates the weights."""
        raise RuntimeFault("[front::Lion] steps inside an engine: pass it to initialize()")


_NATIVE: dict[type, str] = {
    torch.optim.AdamW: "AdamW",
    torch.optim.Adam: "Adam",
    torch.optim.SGD: "SGD",
    torch.optim.Adagrad: "Adagrad",
    Lion: "Lion",
}
# Options that the kernels lack: set, the torch class itself runs.
_INEFFECTIVE = ("amsgrad", "maximize", "differentiable", "initial_accumulator_value")


def prepare(
    given: Any, model: torch.nn.Module, config: dict[str, Any]
) -> tuple[torch.optim.Optimizer | None, str | None, dict[str, Any]]:
    """The optimizer passed to `initialize()`, its kernel, and the config with its section.

    None when the optimizer comes from the config. Raises ConfigError for one that cannot be used.
    """
    if given is None:
        return None, None, {"optimizer": {"type": "AdamW"}, **config}
    if not isinstance(given, torch.optim.Optimizer):
        given = given(model.parameters())
    if not isinstance(given, torch.optim.Optimizer):
        raise ConfigError(
            f"[front::initialize] the optimizer callable returned a {type(given).__name__}, not a "
            f"torch.optim.Optimizer"
        )
    section = config.get("optimizer")
    only_dtype = isinstance(section, dict) and list(section) == ["moments_dtype"]
    if "optimizer" in config and not only_dtype:
        raise ConfigError(
            "[front::initialize] an optimizer is given both as an argument and as the key "
            '"optimizer": keep one (only optimizer.moments_dtype goes with an argument)'
        )
    kind = native_type(given)
    if kind is None:
        check_elementwise(given)
    else:
        config = {**config, "optimizer": config_of(given, kind) | (section or {})}
    return given, kind, config


def from_config(model: torch.nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    """A torch optimizer that holds the parameter groups of the config's `optimizer` section."""
    kinds = {kind.__name__.lower(): kind for kind in _NATIVE}
    options = {**config}
    make: Any = kinds[str(options.pop("type")).lower()]
    options.pop("moments_dtype", None)  # the engine's own
    # Some classes allocate state for what they are built with.
    made: torch.optim.Optimizer = make([torch.nn.Parameter(torch.zeros(1))], **options)
    made.state.clear()
    made.param_groups[0]["params"] = [p for p in model.parameters() if p.requires_grad]
    return made


def native_type(optimizer: torch.optim.Optimizer) -> str | None:
    """The kernel that computes what this optimizer does; None when there is none."""
    kind = _NATIVE.get(type(optimizer))
    for group in optimizer.param_groups:
        if kind is None or any(group.get(option) for option in _INEFFECTIVE):
            return None
        if any(isinstance(group.get(name), torch.Tensor) for name in ("lr", "weight_decay")):
            return None
    _check_fresh(optimizer)
    optimizer.state.clear()  # the engine keeps the state
    return kind


def _check_fresh(optimizer: torch.optim.Optimizer) -> None:
    # Some optimizers (Adagrad) make their state when they are built: step 0.
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ConfigError(
            "[front::initialize] the optimizer has taken steps already: pass a fresh one"
        )


def group_members(optimizer: torch.optim.Optimizer) -> list[tuple[int, ...]]:
    """Which parameters are in which group; it changes when groups are added or edited."""
    return [tuple(map(id, group["params"])) for group in optimizer.param_groups]


def config_of(optimizer: torch.optim.Optimizer, kind: str) -> dict[str, Any]:
    """The config section that describes the optimizer's first group."""
    group = optimizer.param_groups[0]
    section: dict[str, Any] = {"type": kind}
    for key in ("lr", "weight_decay", "betas", "eps", "lr_decay", "dampening", "nesterov"):
        if key in group:
            section[key] = group[key]
    if kind == "SGD":
        section["momentum"] = max(one["momentum"] for one in optimizer.param_groups)
    return section


def settings(optimizer: torch.optim.Optimizer, kind: str) -> list[Any]:
    """The groups' current hyperparameters, for one step."""
    all_settings = []
    for group in optimizer.param_groups:
        one = _penstock.OptimizerConfig()
        one.type = kind
        one.lr, one.weight_decay = float(group["lr"]), float(group["weight_decay"])
        if "betas" in group:
            one.beta1, one.beta2 = group["betas"]
        for key in ("eps", "momentum", "dampening", "nesterov", "lr_decay"):
            if key in group:
                setattr(one, key, group[key])
        all_settings.append(one)
    return all_settings


def group_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[torch.Tensor, int]:
    """Which group each parameter is in. Raises ConfigError for a trainable one in none."""
    groups = {
        param: index
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    for name, param in model.named_parameters():
        if param.requires_grad and param not in groups:
            raise ConfigError(
                f'[front::initialize] parameter "{name}" is in no group of the optimizer: '
                f"add it, or freeze it with requires_grad_(False)"
            )
    return groups


def _on_probe(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> Any:
    """An optimizer of the same class and settings for other parameters."""
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    probe = copy.copy(optimizer)
    probe.__dict__.pop("step", None)  # schedulers wrap it for the original
    probe.param_groups = [{**options, "params": params}]
    probe.state = defaultdict(dict)
    for param in params:
        probe.state[param] = _fresh_state(optimizer, param)
    return probe


def _fresh_state(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> dict[str, Any]:
    """The state that some optimizers (Adagrad) make when they are built, for another parameter.

    Raises ConfigError when it is more than one value for the whole parameter.
    """
    made: dict[str, Any] = {}
    for owner, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == owner.shape and value.numel() > 1:
                if not torch.equal(value, value.flatten()[0].expand_as(value)):
                    raise ConfigError(
                        f"[front::initialize] the optimizer's state {key!r} is not as it was "
                        f"built: pass a fresh optimizer"
                    )
                made[key] = value.flatten()[0].expand_as(param).clone()
            else:
                made[key] = copy.deepcopy(value)
        if made:
            break
    return made


def _halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = values.flatten()
    return flat[:11], flat[11:]


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError unless pieces of a parameter are updated as the whole would be.

    Three steps on a small matrix and on its two flat halves must give the same bits.
    """
    name = type(optimizer).__name__
    generator = torch.Generator().manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(4, 6, generator=generator))
    halves = [torch.nn.Parameter(h.clone()) for h in _halves(whole.detach())]
    try:
        on_whole, on_halves = _on_probe(optimizer, [whole]), _on_probe(optimizer, halves)
        for _ in range(3):
            whole.grad = torch.randn(4, 6, generator=generator)
            for half, gradient in zip(halves, _halves(whole.grad), strict=True):
                half.grad = gradient.clone()
            on_whole.step()
            on_halves.step()
        same = torch.allclose(whole.flatten(), torch.cat([*halves]), rtol=1e-6, atol=1e-7)
        cause = "it updates a parameter and its pieces differently"
    except Exception as error:  # noqa: BLE001 - whatever it is, this class cannot step on pieces
        same, cause = False, f"on pieces of a parameter it raised {type(error).__name__}: {error}"
    if not same:
        raise ConfigError(
            f"[front::initialize] {name} is not elementwise ({cause}), so it cannot run on shards: "
            f"use AdamW, Adam, SGD, Adagrad, Lion or another elementwise optimizer"
        )


class ShardStep:
    """Lets any elementwise torch optimizer work on this rank's fp32 shards."""

    def __init__(self, optimizer: torch.optim.Optimizer, core: Any) -> None:
        _check_fresh(optimizer)
        self._optimizer = optimizer
        self._core = core
        shards: dict[torch.Tensor, list[torch.Tensor]] = defaultdict(list)  # in tiles: several
        self._masters: list[torch.Tensor] = []
        for _, param, master in core.shards():
            shards[param].append(master)
            self._masters.append(master)
        for group in optimizer.param_groups:
            group["params"] = [piece for p in group["params"] for piece in shards.get(p, ())]
        fresh = {master: _fresh_state(optimizer, master) for master in self._masters}
        optimizer.state.clear()
        optimizer.state.update({master: state for master, state in fresh.items() if state})

    def __call__(self) -> None:
        for master, gradient in zip(self._masters, self._core.shard_gradients(), strict=True):
            master.grad = gradient
        self._optimizer.step()
        for master in self._masters:
            master.grad = None
