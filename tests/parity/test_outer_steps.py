"""Nodes that train on their own (comm.codec "local"): the weights are those of plain AdamW on each
node with torch's SGD over the nodes, and they stay so through checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
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
        self.one, self.two = nn.Linear(WIDTH, 37), nn.Linear(37, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(torch.tanh(self.one(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 5)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)) + self.frozen


def samples(step: int, part: int, micro: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + micro)
    return torch.randn(ROWS, WIDTH, generator=generator)


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - x[:, :5]).float().square().mean()
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


def reference(nodes: int, parts: int, steps: int = STEPS, micro: int = 1) -> list[Any]:
    """By node: the weights after each step, in one process. Each node has `parts` data ranks."""
    models = [Net() for _ in range(nodes)]
    anchor = Net()
    trained = [one for one in anchor.parameters() if one.requires_grad]
    outer = torch.optim.SGD(trained, lr=OUTER["outer_lr"], momentum=OUTER["outer_momentum"],
                            nesterov=True)  # fmt: skip
    inner = [
        torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], **ADAMW)
        for model in models
    ]
    seen: list[Any] = [[] for _ in models]
    for step in range(steps):
        for node, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            optimizer.zero_grad()
            for part in range(parts):
                for one in range(micro):
                    loss = loss_of(model, samples(step, node * parts + part, one))
                    (loss / (parts * micro)).backward()
            optimizer.step()
        if (step + 1) % EVERY == 0:
            for i, param in enumerate(trained):
                theirs = [
                    [one for one in model.parameters() if one.requires_grad][i] for model in models
                ]
                param.grad = torch.stack([param.data - one.data for one in theirs]).mean(0)
            outer.step()
            for model in models:
                for param, one in zip(anchor.parameters(), model.parameters(), strict=True):
                    one.data.copy_(param.data)
        for node, model in enumerate(models):
            seen[node].append(weights_of(model))
    return seen


def start(settings: dict[str, Any]) -> Any:
    import penstock  # noqa: PLC0415

    return penstock.initialize(Net(), copy.deepcopy(settings))


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


# Strategy, ranks, nodes, more settings.
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "zero1": ("zero1", 4, 2, {}),
    "zero2": ("zero2", 4, 2, {}),
    "zero3": ("zero3", 4, 2, {}),
    "ddp": ("ddp", 2, 2, {}),
    "single": ("zero3", 3, 3, {}),
    "one_node": ("zero3", 2, 1, {}),
    "alone": ("zero3", 1, 1, {}),
    "host": ("zero2", 4, 2, {"offload": {"optimizer": "host", "gradients": "host"}}),
    "disk": ("zero3", 4, 2, {"offload": {"optimizer": "disk", "params": "host"}}),
    "late": ("zero3", 4, 2, {"offload": {"optimizer": "host", "late_update": True}}),
    "window": ("zero3", 4, 2, {"batch": {"accumulate": 2, "micro": ROWS}}),
    "gloo": ("zero3", 4, 2, {"comm": {"backend": "gloo"}}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_plain_torch(case, pools, tmp_path):
    strategy, world, nodes, more = CASES[case]
    if "disk" in more.get("offload", {}).values():
        more = more | {"offload": more["offload"] | {"path": str(tmp_path)}}
    micro = more.get("batch", {}).get("accumulate", 1)
    expected = reference(nodes, world // nodes, micro=micro)
    found = pools(world).run(train, settings_of(strategy, nodes, **more), STEPS, micro)
    for rank, (seen, said) in enumerate(found):
        assert f"one every {EVERY} steps, over {nodes} nodes" in said
        own = expected[rank // (world // nodes)]
        for step in range(STEPS):
            assert distance(seen[step], own[step]) < 2e-5, f"rank {rank}, step {step + 1}"
