"""Inputs of recomputed layers on the host, beside plain recomputation: run on a rank."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from pipe_models import deepspeed
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, LAYERS = 64, 4


@functools.cache
def layer_type() -> Any:
    """A layer as transformers' are. Made on a rank, after the switch to our DeepSpeed."""
    deepspeed()
    from transformers import GradientCheckpointingLayer  # noqa: PLC0415

    class Layer(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)
            self.gradient_checkpointing = True
            self._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states + self.up(hidden_states).sin()

    return Layer


def gradients(context: Any, device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.ModuleList(layer_type()() for _ in range(LAYERS)).to(device)
    x = hidden = torch.randn(8, WIDTH).to(device).requires_grad_()
    with context:
        for layer in model:
            hidden = layer(hidden)
        loss = hidden.square().sum()
        loss.backward(retain_graph=True)  # the second backward must find what the first one used
        loss.backward()
    return [one.grad.cpu() for one in (x, *model.parameters())]


def place_of(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    on_device = importlib.import_module("on_device")  # of tests/device
    return on_device.device()  # type: ignore[no-any-return]


def counts(kind: str, keep: int, pins: bool) -> dict[str, int]:
    """The counts of two steps' contexts; asserts that gradients are those of a plain run."""
    deepspeed()
    from deepspeed.runtime.activation_checkpointing import (  # noqa: PLC0415
        offload_activations as tested,
    )

    place = place_of(kind)
    plain_call = layer_type().__call__
    context = tested.get_checkpoint_hidden_states_offloading_ctx_manager(
        use_pin_memory=pins, keep_last_count=keep
    )
    for _ in range(2):  # the context is used again
        plain = gradients(torch.enable_grad(), place)
        offloaded = gradients(context, place)
        assert all(torch.equal(*pair) for pair in zip(plain, offloaded, strict=True))
        assert layer_type().__call__ is plain_call
    return vars(context.stats)


def marked_by_hand() -> list[int]:
    """By tensor, whether it was moved: a strided one, one with shared elements, a small one."""
    deepspeed()
    from deepspeed.runtime.activation_checkpointing import (  # noqa: PLC0415
        offload_activations as tested,
    )

    moved, device = [], place_of("device")
    for shape, strides in (((64, 32), (64, 2)), ((64, 64), (1, 0)), ((4,), (1,))):
        x = torch.empty_strided(shape, strides, device=device).fill_(0.5)
        x.requires_grad_()
        context = tested.CheckpointHiddenStatesOffload(keep_last_count=0)
        with context:
            context.mark(x)
            checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
        assert torch.equal(x.grad, x.detach().cos())
        assert context.stats.offloaded_tensors == context.stats.restored_tensors
        moved.append(context.stats.offloaded_tensors)
    return moved
