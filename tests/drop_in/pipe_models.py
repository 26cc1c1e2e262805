"""Pipelines of DeepSpeed's names, and the same models in plain torch in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from pipeline_models import VOCAB, WIDTH, Block
from torch import nn
from torch.nn import functional

MICRO, ROWS, LENGTH = 4, 2, 6
WITH_LOSS = ("loss", "values")  # the last layer returns it


def deepspeed() -> Any:
    """Ours. On a rank, since it stays in the process."""
    import penstock.deepspeed as switch  # noqa: PLC0415

    switch.install()
    import deepspeed as found  # noqa: PLC0415

    return found


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def as_head(embedding: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, embedding.weight)


class Scaled(nn.Module):
    """A block between tuples."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = Block(width)

    def forward(self, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, scale = given
        return self.block(x, scale), scale


class Embedded(nn.Module):
    """Of a tuple of ids and places, a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        ids, places = given
        x = self.tokens(ids) + self.places(places)
        return x, x.sigmoid()


class First(nn.Module):
    """Of a tuple, the logits of its first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.head(given[0])


class Counted(nn.Module):
    """A head that returns the loss of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 4.0 * (self.head(x) - 2.0).square().mean()


class TiedPlain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH) for _ in range(4)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return as_head(self.tokens, self.blocks(self.tokens(ids)))


class FunctionsPlain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.first, self.second = Block(WIDTH), Block(WIDTH)
        self.head = nn.Linear(2 * WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.first(self.tokens(ids % VOCAB) * 2.0))
        x = functional.gelu(self.second(x))
        return self.head(torch.cat([x, -x], -1))


def _plain_layers() -> list[nn.Module]:
    blocks = [Block(WIDTH) for _ in range(4)]
    return [nn.Embedding(VOCAB, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)]


def _odd_layers() -> list[nn.Module]:
    """Containers, some without parameters; buffers that change; a frozen layer."""
    frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    again = nn.ReLU()
    return [
        nn.Sequential(nn.Flatten(0, 1), nn.Identity()),
        nn.Sequential(nn.Linear(LENGTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)),
        again,
        nn.BatchNorm1d(WIDTH, affine=False),
        nn.Sequential(nn.Tanh()),
        frozen,
        again,
        nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)),
        nn.Sequential(nn.Linear(WIDTH, VOCAB), nn.Unflatten(0, (ROWS, LENGTH))),
    ]


def _seeded_layers() -> list[nn.Module]:
    return [
        nn.Embedding(VOCAB, WIDTH),
        nn.Sequential(Block(WIDTH), nn.Dropout(0.5)),
        nn.Dropout(0.5),
        nn.Sequential(Block(WIDTH), nn.Dropout(0.5)),
        nn.Linear(WIDTH, VOCAB),
    ]


class SeededPlain(nn.Sequential):
    """Seeded before each layer, by the count of micro-batches."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        for index, layer in enumerate(self):
            torch.manual_seed(7 * (self.count + 1) + index)
            x = layer(x)
        return x


def above(x: torch.Tensor) -> torch.Tensor:
    """The tokens that add up to more than nothing: how many is known from values alone."""
    return x[x.sum(-1) > 0]


def louder(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0 if float(x.sum()) > 0 else x * 0.5


class Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function


def _values_layers() -> list[Any]:
    blocks = [Block(WIDTH) for _ in range(4)]
    return [nn.Embedding(VOCAB, WIDTH), louder, above, *blocks[:2], louder, *blocks[2:], Counted()]


def layers_of(kind: str) -> list[Any]:
    """What PipelineModule is given."""
    pipe = deepspeed().pipe
    if kind == "modules":
        return _plain_layers()
    if kind == "specs":
        return [
            pipe.LayerSpec(nn.Embedding, VOCAB, embedding_dim=WIDTH),
            *(pipe.LayerSpec(Block, WIDTH) for _ in range(4)),
            nn.Dropout(0.0),
            pipe.LayerSpec(nn.LayerNorm, WIDTH),
            pipe.LayerSpec(nn.Linear, WIDTH, VOCAB),
        ]
    if kind == "tied":
        tied = ("tokens", nn.Embedding, VOCAB, WIDTH)
        return [
            pipe.TiedLayerSpec(*tied),
            *(pipe.LayerSpec(Block, WIDTH) for _ in range(4)),
            pipe.TiedLayerSpec(*tied, forward_fn=as_head),
        ]
    if kind == "tuples":
        return [
            pipe.LayerSpec(Embedded),
            *(pipe.LayerSpec(Scaled, WIDTH) for _ in range(4)),
            First(),
        ]
    if kind == "odd":
        return _odd_layers()
    if kind == "loss":
        return [nn.Embedding(VOCAB, WIDTH), Block(WIDTH), Block(WIDTH), Counted()]
    if kind == "seeded":
        return _seeded_layers()
    if kind == "values":
        return _values_layers()
    assert kind == "functions"
    return [
        lambda ids: ids % VOCAB,
        nn.Embedding(VOCAB, WIDTH),
        lambda x: x * 2.0,
        Block(WIDTH),
        nn.ReLU(inplace=True),
        Block(WIDTH),
        functional.gelu,
        lambda x: torch.cat([x, -x], -1),
        nn.Linear(2 * WIDTH, VOCAB),
    ]


def plain_of(kind: str) -> nn.Module:
    """The same in one process, with its parameters in the same order."""
    if kind == "tuples":
        return nn.Sequential(Embedded(), *(Scaled(WIDTH) for _ in range(4)), First())
    if kind == "loss":
        return nn.Sequential(nn.Embedding(VOCAB, WIDTH), Block(WIDTH), Block(WIDTH), Counted())
    if kind == "odd":
        return nn.Sequential(*_odd_layers())
    if kind == "seeded":
        return SeededPlain(*_seeded_layers())
    if kind == "values":
        layers = [one if isinstance(one, nn.Module) else Function(one) for one in _values_layers()]
        return nn.Sequential(*layers)
    made = {"tied": TiedPlain, "functions": FunctionsPlain}
    return made[kind]() if kind in made else nn.Sequential(*_plain_layers())


def batch(kind: str, step: int, data_rank: int, micro: int) -> Any:
    """A micro-batch: inputs and labels."""
    generator = torch.Generator().manual_seed(100 * step + 10 * data_rank + micro)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    inputs: Any = ids
    if kind == "tuples":
        inputs = (ids, torch.arange(LENGTH).expand(ROWS, LENGTH))
    if kind == "odd":
        inputs = torch.randn(ROWS, LENGTH, LENGTH, generator=generator)
    return inputs, labels


def batches(kind: str, step: int, data_rank: int, micro: int = MICRO) -> Iterator[Any]:
    return iter([batch(kind, step, data_rank, one) for one in range(micro)])


def built(kind: str, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    loss_fn = None if kind in WITH_LOSS else cross_entropy
    return deepspeed().pipe.PipelineModule(
        layers=layers_of(kind), **({"loss_fn": loss_fn} | options)
    )


def config_of(stage: int = 0, **changes: Any) -> dict[str, Any]:
    """One of DeepSpeed's."""
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "gradient_clipping": 0.5,
        "penstock": {"comm": {"timeout_s": 120}},
    } | changes


def plain_loss(model: nn.Module, kind: str, step: int, data: int, micro: int) -> torch.Tensor:
    total = torch.zeros(())
    for rank in range(data):
        for inputs, labels in batches(kind, step, rank, micro):
            made = model(inputs)
            total = total + (made if kind in WITH_LOSS else cross_entropy(made, labels))
    return total / (micro * data)


def plain_training(
    kind: str, weights: list[torch.Tensor], steps: int, data: int, micro: int
) -> dict[str, Any]:
    """Losses and weights of one process that begins with these weights."""
    model = plain_of(kind)
    for param, value in zip(model.parameters(), weights, strict=True):
        param.data.copy_(value)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = plain_loss(model, kind, step, data, micro)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        evaluated = float(plain_loss(model, kind, 9, data, micro))
    return {
        "losses": losses,
        "weights": list(model.parameters()),
        "buffers": [one for one in model.buffers() if one.is_floating_point()],
        "evaluated": evaluated,
    }
