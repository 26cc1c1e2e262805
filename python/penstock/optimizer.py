"""Parameter groups: what the engine's kernels, or the user's own optimizer, are asked for.

The torch optimizer object the user sees keeps its parameter groups (so any torch scheduler works on
it). AdamW, Adam and SGD run on the engine's kernels; any other class steps on fp32 shards.
"""

from typing import Any

import torch

from penstock._native import ConfigError, _penstock

_NATIVE = {torch.optim.AdamW: "AdamW", torch.optim.Adam: "Adam", torch.optim.SGD: "SGD"}
_INEFFECTIVE = ("amsgrad", "maximize", "differentiable")


def from_config(model: torch.nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    """A torch optimizer that holds the parameter groups of the config's `optimizer` section."""
    kinds = {kind.__name__.lower(): kind for kind in _NATIVE}
    options = {**config}
    make: Any = kinds[str(options.pop("type")).lower()]
    made: torch.optim.Optimizer = make(
        (p for p in model.parameters() if p.requires_grad), **options
    )
    return made


def native_type(optimizer: torch.optim.Optimizer) -> str | None:
    """The kernel that computes what this optimizer does; None when there is none."""
    kind = _NATIVE.get(type(optimizer))
    for group in optimizer.param_groups:
        if kind is None or any(group.get(option) for option in _INEFFECTIVE):
            return None
        if any(isinstance(group.get(name), torch.Tensor) for name in ("lr", "weight_decay")):
            return None
    return kind


def config_of(optimizer: torch.optim.Optimizer, kind: str) -> dict[str, Any]:
    """The config section that describes the optimizer's first group."""
    group = optimizer.param_groups[0]
    section: dict[str, Any] = {"type": kind, "lr": group["lr"]}
    section["weight_decay"] = group["weight_decay"]
    if kind == "SGD":
        momenta = [one["momentum"] for one in optimizer.param_groups]
        section |= {"momentum": max(momenta), "nesterov": group["nesterov"]}
        section["dampening"] = group["dampening"]
    else:
        section |= {"betas": list(group["betas"]), "eps": group["eps"]}
    return section


def settings(optimizer: torch.optim.Optimizer, kind: str) -> list[Any]:
    """The groups' current hyperparameters, for one step."""
    all_settings = []
    for group in optimizer.param_groups:
        one = _penstock.GroupSettings()
        one.type = kind
        one.lr, one.weight_decay = float(group["lr"]), float(group["weight_decay"])
        if kind == "SGD":
            one.momentum, one.dampening = group["momentum"], group["dampening"]
            one.nesterov = group["nesterov"]
        else:
            (one.beta1, one.beta2), one.eps = group["betas"], group["eps"]
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


class ShardStep:
    """Lets any elementwise torch optimizer work on this rank's fp32 shards."""

    def __init__(self, optimizer: torch.optim.Optimizer, core: Any) -> None:
        # Some optimizers (Adagrad) make their state when they are built: step 0.
        if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
            raise ConfigError(
                "[front::initialize] the optimizer has taken steps already: pass a fresh one"
            )
        self._optimizer = optimizer
        self._core = core
        shards = {param: master for _, param, master in core.shards()}
        for group in optimizer.param_groups:
            group["params"] = [shards[p] for p in group["params"] if p in shards]
        if optimizer.state:  # again, for the shards
            remade: Any = type(optimizer)
            optimizer.state = remade(optimizer.param_groups).state
        self._masters = list(shards.values())

    def __call__(self) -> None:
        for master, gradient in zip(self._masters, self._core.shard_gradients(), strict=True):
            master.grad = gradient
        self._optimizer.step()
        for master in self._masters:
            master.grad = None
