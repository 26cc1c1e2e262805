"""Plain torch with the calls of `deepspeed` that RLHF loops make: replicas whose gradients are
averaged over the ranks. A loop that gets it instead of deepspeed is the reference of rlhf_loops."""

from __future__ import annotations

import contextlib
import pathlib
import types
from typing import Any

import torch
import torch.distributed as dist

PLAIN = True


def _average(params: list[torch.nn.Parameter]) -> None:
    for one in params:
        if one.grad is None:
            one.grad = torch.zeros_like(one)
        dist.all_reduce(one.grad)
        one.grad /= dist.get_world_size()


class Engine(torch.nn.Module):
    """A model and its optimizer, as an engine of DeepSpeed."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, schedule: Any, config: Any) -> None:
        super().__init__()
        self.module = model
        self.optimizer, self.lr_scheduler, self.config = optimizer, schedule, config
        micro = config["train_micro_batch_size_per_gpu"] * dist.get_world_size()
        self._accumulate = config.get("train_batch_size", micro) // micro
        self._done = 0
        self._boundary: bool | None = None
        self._norm = 0.0
        if optimizer is not None:
            optimizer.offload_states = self.offload_states
        self.tput_timer = types.SimpleNamespace(update_epoch_count=lambda: None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._accumulate).backward()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._boundary = is_boundary

    def step(self) -> None:
        self._done += 1
        ends = self._done % self._accumulate == 0 if self._boundary is None else self._boundary
        if not ends:
            return
        params = [one for group in self.optimizer.param_groups for one in group["params"]]
        _average(params)
        norm = torch.nn.utils.clip_grad_norm_(params, self.config.get("gradient_clipping", 1.0))
        self._norm = float(norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def get_global_grad_norm(self) -> float:
        return self._norm

    def offload_states(self, **_: Any) -> None:
        """Does nothing, like reload_states()."""

    reload_states = empty_partition_cache = destroy = offload_states

    def _consolidated_16bit_state_dict(self) -> Any:
        return self.module.state_dict()

    def save_checkpoint(self, place: str, tag: str, client_state: Any) -> None:
        state = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"schedule": self.lr_scheduler.state_dict(), "client": client_state}
        if dist.get_rank() == 0:
            pathlib.Path(place).mkdir(exist_ok=True)
            torch.save(state, f"{place}/{tag}.pt")
        dist.barrier()

    def load_checkpoint(self, place: str, tag: str, **_: Any) -> tuple[str, Any]:
        state = torch.load(f"{place}/{tag}.pt", weights_only=False)
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["schedule"])
        return place, state["client"]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def initialize(
    model: torch.nn.Module,
    config: dict[str, Any],
    optimizer: Any = None,
    model_parameters: Any = None,
    lr_scheduler: Any = None,
    **_: Any,
) -> tuple[Engine, Any, None, Any]:
    if optimizer is None and "optimizer" in config:
        optimizer = torch.optim.AdamW(model_parameters, **config["optimizer"]["params"])
    schedule = lr_scheduler
    if callable(lr_scheduler) and not hasattr(lr_scheduler, "step"):
        schedule = lr_scheduler(optimizer)
    return Engine(model, optimizer, schedule, config), optimizer, None, schedule


def _adam(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **({"weight_decay": 0.0} | options))


zero = types.SimpleNamespace(GatheredParameters=lambda *_, **__: contextlib.nullcontext())
checkpoint = types.SimpleNamespace(
    utils=types.SimpleNamespace(clone_tensors_for_torch_save=lambda state: state)
)
ops = types.SimpleNamespace(adam=types.SimpleNamespace(FusedAdam=_adam, DeepSpeedCPUAdam=_adam))
