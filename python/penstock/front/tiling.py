"""Runs large layers in tiles: selects the modules and replaces their forward.

Modules and parameters stay the user's objects. While the engine is open, it replaces only `forward`
of tiled modules. The computation is in C++ (src/tiles/tiled_operators.cpp).
"""

from typing import Any

import torch

from penstock._native import ConfigError, _penstock
from penstock.front import module_tree
from penstock.front.forward_guard import Forward, Pace
from penstock.parallel.lazy_logits import LazyLogits, TiledHead


def with_head(model: torch.nn.Module, config: Any) -> Any:
    """Returns the config. Fills in `tiling.head` if `tiling.loss_tokens` needs it."""
    if config.tiling.loss_tokens == 0 or config.tiling.head:
        return config
    return config.with_head(_find_head(model))


def _find_head(model: torch.nn.Module) -> str:
    names: dict[Any, str] = {module: name for name, module in model.named_modules()}
    told = getattr(model, "get_output_embeddings", lambda: None)()
    linear = [module for module in names if isinstance(module, torch.nn.Linear)]
    if told in names:
        return names[told]
    if linear:
        return names[linear[-1]]
    raise ConfigError(
        '[front::initialize] "tiling.loss_tokens" is set, but the model has no nn.Linear whose '
        "output could be the logits. Leave the key out"
    )


def install(
    model: torch.nn.Module, core: Any, config: Any, pace: Pace, installed: list[Any]
) -> None:
    """Replaces the forward of every module whose weight is in tiles, until
    `forward_guard.remove()`."""
    tiles = {name: _penstock.Tiles(core, name) for name in _penstock.Tiles.names(core)}
    of_param = {p: tiles[n] for n, p in model.named_parameters() if n in tiles}
    for name, module in model.named_modules():
        if not module_tree.has_rows(module) or module.weight not in of_param:
            continue
        is_head = config.tiling.loss_tokens > 0 and name == config.tiling.head
        own = _forward(module, of_param[module.weight], (core, pace) if is_head else None)
        installed.append(Forward(module, own))


def _forward(module: Any, tiles: Any, lazy_in: Any) -> Any:
    def embedding(_inner: Any, ids: torch.Tensor) -> Any:
        padding = -1 if module.padding_idx is None else module.padding_idx
        return tiles.embedding(ids, padding, module.scale_grad_by_freq)

    def linear(_inner: Any, input: torch.Tensor) -> Any:  # noqa: A002 - torch's name
        return tiles.linear(input, module.bias)

    def head(inner: Any, input: torch.Tensor) -> Any:  # noqa: A002
        core, pace = lazy_in
        if pace.uneven:  # other ranks would not take part in a later computation of the logits
            return linear(inner, input)
        values = None if module.bias is None else module.bias.detach().clone()
        made = TiledHead(tiles, module.bias, values, module.out_features, core)
        return LazyLogits.of(made, input)

    if isinstance(module, torch.nn.Embedding):
        return embedding
    return linear if lazy_in is None else head
