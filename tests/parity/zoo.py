"""The model zoo: one small model for each thing that real models do to an engine.

A model's dtypes follow its weights, so the same code computes in any precision. Names that contain
"never" belong to parameters that no loss depends on.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import layer_models
import models
import tensor_models
import torch
import torch.nn.functional as F
from models import FEATURES, SEQ, VOCAB, WIDTH, OddBlock
from torch import nn

HIDDEN = 7


class Mlp(nn.Module):
    def __init__(self, hidden: int = 11):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, hidden), nn.Linear(hidden, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) / self.up.out_features**0.5


class Regressor(nn.Module):
    """Features in, the mean squared error out; a subclass says what happens between."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, 1)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def lift(self, features: torch.Tensor) -> torch.Tensor:
        return self.enter(features.to(self.enter.weight.dtype))

    def error(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.leave(x).float().squeeze(-1), targets)

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.error(self.between(self.lift(features)), targets)


# ---- whole architectures


class EncoderDecoder(nn.Module):
    """The first half of a text in, the second half out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 56, **options) for _ in range(2)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(WIDTH, 4, 56, **options) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        half = SEQ // 2
        memory, x = (self.tokens(tokens) + self.places.weight).split(half, dim=1)
        for layer in self.encoder:
            memory = layer(memory)
        later = torch.ones(half, half, dtype=torch.bool).triu(1)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=later)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets[:, half:].flatten())


class WideBatchNorm(nn.BatchNorm2d):
    """On the CPU, torch normalises bf16 or fp16 with fp32 statistics only by fp32 weights: this
    computes the op in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        weights = self.weight.float(), self.bias.float()
        return F.batch_norm(x.float(), *statistics, *weights, training=self.training).to(x.dtype)


class ConvBlock(nn.Module):
    def __init__(self, channels: int, out: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 3, padding=1, bias=False)
        self.norm = WideBatchNorm(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.conv(x)))


class ConvNet(Regressor):
    """Convolutions with batch norm on a 5 x 5 image of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(ConvBlock(1, 4), ConvBlock(4, HIDDEN))

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        image = (features.unsqueeze(1) * features.unsqueeze(2)).unsqueeze(1)
        x = self.blocks(image.to(self.enter.weight.dtype)).mean(dim=(2, 3))
        return self.error(x + self.lift(features), targets)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 12)
        self.lstm = nn.LSTM(12, 13, num_layers=2, batch_first=True)
        self.head = nn.Linear(13, VOCAB)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.tokens(tokens))
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


class Experts(nn.Module):
    """One expert a sample, chosen by a hash (arXiv:2106.04426); gates are learned. Most experts are
    idle on some rank, one everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 4)
        self.experts = nn.ModuleDict({name: Mlp() for name in ("a", "b", "c", "never")})

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        gates = self.router(x).float().softmax(-1).to(x.dtype)
        for index, expert in enumerate(self.experts.values()):
            rows = (chosen == index).nonzero().squeeze(-1)
            if len(rows) > 0:
                x = x.index_add(0, rows, gates[rows, index].unsqueeze(-1) * expert(x[rows]))
        return x


class Moe(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.lift(features)
        for feature, block in enumerate(self.blocks):
            chosen = (features[:, feature] > 0).long() + (features[:, feature] > 1.2).long()
            x = block(x, chosen)
        return self.error(x, targets)


class MixedBlock(nn.Module):
    """A bf16 body and an fp32 router."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.router = Mlp().bfloat16(), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = torch.sigmoid(self.router(x.to(self.router.weight.dtype)))
        return self.body(x) * gates.to(x.dtype)


class Mixed(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.enter.bfloat16()
        self.blocks = nn.Sequential(MixedBlock(), MixedBlock())
        self.leave.bfloat16()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


# ---- shapes of modules and units


class Siamese(Regressor):
    """Each block runs twice a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(Mlp(), Mlp())

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.tower(x) - self.tower(x.flip(-1)) * x


class Reused(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = Mlp(), Mlp()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(6):
            x = self.again(x)
        return x


class Stage(nn.Module):
    """Has a parameter of its own around two inner blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(HIDDEN))
        self.blocks = nn.Sequential(Mlp(), Mlp())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x * self.gain) * self.gain


class Nested(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(Stage(), Stage())

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.stages(x)


class Chain(Regressor):
    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def odd_sizes() -> nn.Module:
    """Parameters of one, three and other odd numbers of elements."""
    return Chain(*(OddBlock(HIDDEN) for _ in range(5)))


def lopsided() -> nn.Module:
    """One unit is larger than all others together."""
    return Chain(Mlp(3), Mlp(1001), Mlp(3))


# ---- inputs and outputs


@dataclasses.dataclass
class Signal:
    value: torch.Tensor
    name: str = "signal"


@dataclasses.dataclass(slots=True)
class SlottedSignal:
    value: torch.Tensor
    name: str = "signal"


class Pair(NamedTuple):
    first: Any
    second: torch.Tensor


# Ways to wrap a tensor, and to get it back.
WRAPPINGS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (lambda x: {"out": {"value": x}, "none": None}, lambda out: out["out"]["value"]),
    "tuple": (lambda x: ("text", [x], 3), lambda out: out[1][0]),
    "named tuple": (lambda x: Pair(None, x), operator.attrgetter("second")),
    "dataclass": (Signal, operator.attrgetter("value")),
    "slotted dataclass": (SlottedSignal, operator.attrgetter("value")),
}


class Wrapped(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.block = kind, Mlp()

    def forward(self, x: torch.Tensor) -> Any:
        return WRAPPINGS[self.kind][0](self.block(x))


class Containers(Regressor):
    """Every unit, and the model, return something that holds the tensor."""

    def __init__(self, *kinds: str):
        super().__init__()
        self.blocks = nn.ModuleList(Wrapped(kind) for kind in kinds)

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> Any:
        x = self.lift(features)
        for block in self.blocks:
            x = WRAPPINGS[block.kind][1](block(x))
        return WRAPPINGS[self.blocks[0].kind][0](self.error(x, targets))

    def loss(self, output: Any) -> torch.Tensor:
        return WRAPPINGS[self.blocks[0].kind][1](output)


class KeywordBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Mlp()

    def forward(self, *, inputs: list[torch.Tensor], mode: str, power: int = 1) -> torch.Tensor:
        assert mode == "odd" and power == 3
        return self.block(inputs[0]) + self.block(inputs[1] / power)


class Keywords(Regressor):
    """Keyword-only inputs, some of which are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeywordBlock() for _ in range(2))

    def forward(self, *, batch: dict[str, torch.Tensor], mode: str, extra: None = None) -> Any:
        x = self.lift(batch["features"])
        for block in self.blocks:
            x = block(inputs=[x, x * x], mode=mode, power=3)
        return {"loss": self.error(x, batch["targets"]), "extra": extra}


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(4, HIDDEN), nn.Linear(FEATURES, HIDDEN)

    def forward(
        self, rows: torch.Tensor, features: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        mixed = self.mix(features.to(self.mix.weight.dtype))
        return self.table(rows) * mask.unsqueeze(-1) + mixed


class PlainInputs(Regressor):
    """No unit has an input with a gradient; some are whole numbers or truth values."""

    def __init__(self) -> None:
        super().__init__()
        self.lookups = nn.ModuleList(Lookup() for _ in range(3))

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.lift(features)
        for feature, lookup in enumerate(self.lookups):
            rows = (features[:, feature] > 0).long()
            x = x * lookup(rows, features, features[:, feature] < 1)
        return self.error(x, targets)


class Forked(nn.Module):
    """Returns what the loss uses, and what it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.never = Mlp(), Mlp()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.main(x), self.never(x)


class UnusedOutputs(Regressor):
    """Blocks with an unused output, and one that runs for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"a": Forked(), "never": Forked(), "b": Forked()})

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> Any:
        x = self.lift(features)
        unused = []
        for name, block in self.blocks.items():
            main, aside = block(x)
            unused.append(aside)
            if name != "never":
                x = main
        return self.error(x, targets), unused


class Conditional(Regressor):
    """Runs the blocks it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))

    def forward(
        self, features: torch.Tensor, targets: torch.Tensor, wanted: list[int]
    ) -> torch.Tensor:
        x = self.lift(features)
        for index in wanted:
            x = self.blocks[index](x)
        return self.error(x, targets)


# ---- the table


class Place(NamedTuple):
    """Where a loss is computed."""

    step: int
    rank: int


Part = tuple[torch.Tensor, ...]  # some samples of a batch


def output_is_loss(model: Any, part: Part, place: Place) -> torch.Tensor:
    return model(*part)


def _keywords(model: Any, part: Part, place: Place) -> torch.Tensor:
    return model(batch=dict(zip(("features", "targets"), part, strict=True)), mode="odd")["loss"]


def _by_step(model: Any, part: Part, place: Place) -> torch.Tensor:
    return model(*part, [i for i in range(4) if (place.step + i) % 3 != 0])


def _by_rank(model: Any, part: Part, place: Place) -> torch.Tensor:
    return model(*part, [i for i in range(4) if sum(place, i) % 3 != 0])


def _by_rank_later(model: Any, part: Part, place: Place) -> torch.Tensor:
    return model(*part, [i for i in range(4) if place.step == 0 or sum(place, i) % 3 != 0])


def _order_by_rank(model: Any, part: Part, place: Place) -> torch.Tensor:
    return model(*part, [0, 1, 2, 3] if place.rank % 2 == 0 else [3, 2, 1, 0])


def _order_by_rank_later(model: Any, part: Part, place: Place) -> torch.Tensor:
    return _order_by_rank(model, part, place if place.step > 2 else Place(place.step, 0))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model, its data (models.batches) and its loss, whose mean over equal parts of a batch is
    the loss of the whole."""

    make: Callable[..., nn.Module]
    data: str = "awkward"
    loss: Callable[[Any, Part, Place], torch.Tensor] = output_is_loss
    units: list[str] = dataclasses.field(default_factory=list)  # empty: as the engine finds them
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16")
    steps: int = 8
    layer_bytes: int = 1 << 20  # of one outside of blocks that is a unit
    # Each rank's samples give their own statistics or take their own way, so the reference, too,
    # takes them one rank at a time.
    by_rank: bool = False


ZOO = {
    "tied": Entry(functools.partial(models.Gpt, blocks=2), "gpt", steps=6),
    "untied": Entry(functools.partial(models.Gpt, blocks=2, tied=False), "gpt", steps=6),
    "encoder_decoder": Entry(EncoderDecoder, "gpt", steps=6),
    "conv_net": Entry(ConvNet, by_rank=True),
    "lstm": Entry(Recurrent, "gpt", units=["LSTM"]),
    "moe": Entry(Moe),
    "mixed": Entry(Mixed, precisions=("own", "bf16")),
    "siamese": Entry(Siamese),
    "reused": Entry(Reused),
    "nested": Entry(Nested, units=["Mlp"]),
    "odd_sizes": Entry(odd_sizes),
    "lopsided": Entry(lopsided),
    "containers": Entry(
        functools.partial(Containers, "dict", "tuple", "named tuple", "dataclass"),
        loss=lambda model, part, place: model.loss(model(*part)),
    ),
    "slotted": Entry(
        functools.partial(Containers, "slotted dataclass", "slotted dataclass"),
        loss=lambda model, part, place: model.loss(model(*part)),
    ),
    "keywords": Entry(Keywords, loss=_keywords),
    "plain_inputs": Entry(PlainInputs),
    "unused_outputs": Entry(UnusedOutputs, loss=lambda model, part, place: model(*part)[0]),
    "by_step": Entry(Conditional, loss=_by_step),
    "by_rank": Entry(Conditional, loss=_by_rank, by_rank=True),
    "by_rank_later": Entry(Conditional, loss=_by_rank_later, by_rank=True),
}


def _adapts_by_rank(model: Any, part: Part, place: Place) -> torch.Tensor:
    return model(*part, sum(place) % 2 == 0)


def _layered(make: Callable[..., nn.Module]) -> Entry:
    return Entry(make, "gpt", steps=6, layer_bytes=1000)  # embedding and head, no norm


LAYERED = {
    "called": _layered(layer_models.Untied),
    "read": _layered(layer_models.Read),
    "read_first": _layered(layer_models.ReadFirst),
    "never_called": _layered(layer_models.NeverCalled),
    "hooked": _layered(layer_models.Hooked),
    "hooked_before": _layered(layer_models.HookedBefore),
    "hooked_later": _layered(layer_models.HookedLater),
    "twice": _layered(layer_models.Twice),
    "no_grad": _layered(layer_models.NoGrad),
    "frozen": _layered(layer_models.Frozen),
    "frozen_read": _layered(layer_models.FrozenRead),
    "run_again": _layered(layer_models.Recomputed),
    "left_out": dataclasses.replace(
        _layered(layer_models.Sometimes), loss=_adapts_by_rank, by_rank=True
    ),
}

UNORDERED = dataclasses.replace(
    LAYERED["left_out"], make=functools.partial(layer_models.Sometimes, in_order=False)
)

ENTRIES = (
    ZOO
    | LAYERED
    | {
        "unordered": UNORDERED,
        "unordered_in_root": dataclasses.replace(UNORDERED, layer_bytes=1 << 20),
        "gpt": Entry(models.Gpt, "gpt", steps=20),
        "parts": Entry(tensor_models.Parts, "gpt", steps=20),
        "awkward": Entry(models.Awkward, steps=20),
        "order_by_rank": Entry(Conditional, loss=_order_by_rank, by_rank=True),
        "order_by_rank_later": Entry(Conditional, loss=_order_by_rank_later, by_rank=True),
    }
)

EVERYWHERE = [*ZOO, "gpt", "awkward"]  # what trains under every strategy, with no hooks of its own


def build(name: str, recompute: str = "off") -> nn.Module:
    options = {} if recompute == "off" else {"recompute": recompute}
    return models.fill(ENTRIES[name].make(**options))


def batches(name: str, samples: int) -> list[Part]:
    return models.batches(ENTRIES[name].data, ENTRIES[name].steps, samples)
