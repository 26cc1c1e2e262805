"""Nodes that train on their own (comm.codec "local"): the model, the engine, and the same training
by plain torch in one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, BLOCKS, ROWS = 24, 3, 4
EVERY, STEPS = 3, 8
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
OUTER = {"outer_every": EVERY, "outer_lr": 0.6, "outer_momentum": 0.8}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 38), nn.Linear(38, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(torch.tanh(self.one(x)))


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 5)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("shift", torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)) + self.frozen + self.shift


def samples(step: int, part: int, micro: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + micro)
    return torch.randn(ROWS, WIDTH, generator=generator)


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    dtype = next(getattr(model, "module", model).parameters()).dtype
    loss: torch.Tensor = (model(x.to(dtype)) - x[:, :5]).float().square().mean()
    return loss


def settings_of(strategy: str, nodes: int, **more: Any) -> dict[str, Any]:
    comm = {"codec": "local", "timeout_s": 60, "outer_wire": "plain"} | OUTER
    return {
        "strategy": strategy,
        "precision": "fp32",
        "optimizer": {"type": "AdamW"} | ADAMW,
        "units": {"modules": ["Block"]},
        "mesh": {"node": nodes} | more.pop("mesh", {}),
        "comm": comm | more.pop("comm", {}),
    } | more


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


class Reference:
    """Nodes of `parts` data ranks each, in one process."""

    def __init__(self, nodes: int, parts: int) -> None:
        self.parts = parts
        self.models, self.anchor = [Net() for _ in range(nodes)], Net()
        self.inner = [torch.optim.AdamW(trained(model), **ADAMW) for model in self.models]
        self.outer = torch.optim.SGD(
            trained(self.anchor), OUTER["outer_lr"], OUTER["outer_momentum"], nesterov=True
        )

    def step(self, step: int, micro: int) -> None:
        for node, (model, optimizer) in enumerate(zip(self.models, self.inner, strict=True)):
            optimizer.zero_grad()
            for part in range(self.parts):
                for one in range(micro):
                    loss = loss_of(model, samples(step, node * self.parts + part, one))
                    (loss / (self.parts * micro)).backward()
            optimizer.step()
        if (step + 1) % EVERY == 0:
            self.join()

    def join(self) -> None:
        for i, param in enumerate(trained(self.anchor)):
            theirs = [trained(model)[i].data for model in self.models]
            param.grad = torch.stack([param.data - one for one in theirs]).mean(0)
        self.outer.step()
        for model in self.models:
            model.load_state_dict(self.anchor.state_dict())

    def reload(self, still: bool) -> None:
        """All nodes go on with the moments of the first; `still`: without updates."""
        state = self.inner[0].state_dict()
        for optimizer in self.inner:
            optimizer.load_state_dict(copy.deepcopy(state))
            optimizer.param_groups[0].update({"lr": 0.0} if still else {})


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def reference(
    nodes: int,
    parts: int,
    steps: int = STEPS,
    micro: int = 1,
    reload_at: int = 0,
    still: bool = False,
) -> list[Any]:
    """By node: the weights after each step. See `Reference.reload` for the last two arguments."""
    made = Reference(nodes, parts)
    seen: list[Any] = [[] for _ in made.models]
    for step in range(steps):
        made.step(step, micro)
        if step + 1 == reload_at:
            made.reload(still)
        for node, model in enumerate(made.models):
            seen[node].append(weights_of(model))
    return seen


def start(settings: dict[str, Any]) -> Any:
    """All ranks take the values of rank 0 of the first node."""
    import penstock  # noqa: PLC0415

    rank = dist.get_rank() if dist.is_initialized() else 0
    return penstock.initialize(Net(seed=rank), copy.deepcopy(settings))


def step_of(engine: Any, step: int, micro: int = 1) -> None:
    for one in range(micro):
        engine.backward(loss_of(engine, samples(step, engine.data_rank, one)))
    engine.step()


def gathered(engine: Any) -> dict[str, torch.Tensor]:
    with engine.gathered():
        return weights_of(engine.module)


def train(settings: dict[str, Any], steps: int, micro: int = 1) -> tuple[Any, str]:
    engine = start(settings)
    seen = []
    for step in range(steps):
        step_of(engine, step, micro)
        seen.append(gathered(engine))
    said = engine.explain()
    engine.close()
    return seen, said


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)
