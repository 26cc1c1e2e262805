"""Runs large layers in tiles: selects the modules and replaces their forward.

Modules and parameters stay the user's objects. While the engine is open, it replaces only `forward`
of tiled modules. The computation is in C++ (src/tiles/tiled_operators.cpp).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault, _penstock
from penstock.front import module_tree
from penstock.front.forward_guard import Forward, Pace
from penstock.parallel.lazy_logits import LazyLogits, TiledHead


def with_head(model: torch.nn.Module, config: Any) -> Any:
    """Returns the config. Fills in `tiling.head` if `tiling.loss_tokens` needs it."""
    if config.tiling.loss_tokens == 0 or config.tiling.head:
        return config
    return config.with_head(_find_head(model))


def _find_head(model: torch.nn.Module) -> str:
    modules = list(module_tree.modules_of(model))
    tell = getattr(model, "get_output_embeddings", None)
    told = tell() if callable(tell) else None
    linear = [name for name, module in modules if isinstance(module, torch.nn.Linear)]
    found = [name for name, module in modules if module is told] or linear[-1:]
    if found:
        return found[0]
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
    of_param = {p: tiles[n] for n, p in module_tree.params_of(model) if n in tiles}
    for name, module in module_tree.modules_of(model):
        weight: Any = module._parameters["weight"] if module_tree.has_rows(module) else None
        if weight not in of_param:
            continue
        is_head = config.tiling.loss_tokens > 0 and name == config.tiling.head
        own = _forward(module, of_param[weight], (core, pace) if is_head else None)
        label = f"{name}.weight"
        if _hooked(weight):
            raise ConfigError(f"[front::initialize] {_of_hook(label)}")
        plain = functools.partial(_as_torch, name, type(module).forward, own)
        installed.append(Forward(module, functools.partial(_without_hooks, module, label, plain)))


def _hooked(weight: Any) -> bool:
    """Whether the weight, or the node that accumulates its gradient, has a hook."""
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return True
    if not weight.requires_grad or torch.is_inference_mode_enabled():
        return False
    if torch.compiler.is_compiling():
        return False
    with torch.enable_grad():
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    # torch does not list a node's hooks, but the handle of an added hook refers to the dict with
    # all of them.
    for register in (node.register_hook, node.register_prehook):
        handle = register(_nothing)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def _nothing(*_: Any) -> None:
    return None


def _of_hook(label: str) -> str:
    return (
        f'parameter "{label}" has a gradient hook, but the parameter is in tiles, so its gradient '
        f'is never whole. Remove the hook, or leave the module out of "tiling.modules"; '
        f"engine.full_grads() and engine.set_grads() read and change gradients"
    )


def _without_hooks(
    module: Any, label: str, own: Callable[..., Any], inner: Any, *args: Any, **kwargs: Any
) -> Any:
    """Runs the tiled forward. Raises RuntimeFault if the weight got a hook after initialize(). If
    the hook came after the forward, the backward raises the error."""

    def check(call: str) -> None:
        if _hooked(module.weight):
            raise RuntimeFault(f"[front::{call}] {_of_hook(label)}")

    check("forward")
    output = own(inner, *args, **kwargs)
    if torch.is_grad_enabled():
        for one in (output, *args, *kwargs.values()):
            if type(one) is torch.Tensor and one.requires_grad:
                one.register_hook(lambda _: check("backward"))  # type: ignore[no-untyped-call]
                break
    return output


def _as_torch(name: str, forward: Any, own: Any, inner: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the tiled forward. Raises RuntimeFault if the module's forward was replaced."""
    if getattr(inner, "__func__", None) is not forward:
        raise RuntimeFault(
            f'[front::forward] the forward of module "{name}" was replaced after initialize(), but '
            f"its weight is in tiles, which compute only torch's own forward. Replace the "
            f'forward before initialize(), or leave the module out of "tiling.modules"'
        )
    return own(inner, *args, **kwargs)


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
