"""Modules whose rules are wrong without an error of torch, and modules whose rules are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import fill
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, INNER, HEADS, SEQ = 16, 32, 4, 4
SIZE = WIDTH // HEADS
MLP = {"*.up": "column", "*.down": "row"}
ATTENTION = {"*.query": "column", "*.key": "column", "*.value": "column", "*.out": "row"}
DIVIDED = ATTENTION | {"*.heads": "divide"}


class Mlp(nn.Module):
    """up, an operation on the hidden features, down."""

    middle: Callable[[torch.Tensor], torch.Tensor] = staticmethod(torch.relu)

    def __init__(self, up: int = INNER, down: int = INNER) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, up), nn.Linear(down, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(type(self).middle(self.up(x)))


def mlp(name: str, middle: Callable[[torch.Tensor], torch.Tensor], up: int = INNER) -> Any:
    kind = type(name, (Mlp,), {"middle": staticmethod(middle), "__module__": __name__})
    return lambda: kind(up)


class Sliced(Mlp):
    """The row layer's input is a slice of a whole tensor, the same slice on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.size = INNER

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)[..., : self.size])


class Pooled(nn.Module):
    """No layer takes the column layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.up(x).tanh().mean(-1, keepdim=True)


class InputBeside(Mlp):
    """The whole input meets parts outside of a column layer: its gradient lacks other ranks'."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * x.mean(-1, keepdim=True))


class OnesBeside(Mlp):
    """A row layer has its bias as more columns of its weight, beside those for the features."""

    def __init__(self) -> None:
        super().__init__(down=INNER + 4)
        self.ones = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).tanh()
        return self.down(F.pad(hidden, (0, self.ones), value=1.0))


class BiasOnEachRank(Mlp):
    """The bias is added before the ranks' addends are summed: its share on each rank is all of it,
    because the layer that makes it is not cut."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Linear(WIDTH, INNER // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).tanh()
        return self.down(hidden + self.bias(x).repeat(1, 1, hidden.shape[-1] * 2 // INNER))


class Scaled(Mlp):
    """A weight that all features share has an addend of its gradient on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh() * self.scale)


class Normed(Mlp):
    """A norm of the whole input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).relu())


class Attention(nn.Module):
    def __init__(self, keys: int = HEADS) -> None:
        super().__init__()
        self.heads, self.keys = HEADS, keys
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, keys * SIZE) for _ in range(2))

    def split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.view(*x.shape[:2], heads, -1).transpose(1, 2)

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def mixed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.split(self.query(x), self.heads)
        key = self.repeated(self.split(self.key(x), self.keys))
        value = self.repeated(self.split(self.value(x), self.keys))
        return self.out(self.mixed(query, key, value).transpose(1, 2).reshape(*x.shape[:2], -1))


class Divided(Attention):
    """Keys have as many heads as queries."""

    def split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return super().split(x, self.heads)


class OneKey(Attention):
    """One head of keys, of which each rank gets a half, and heads that are not divided."""

    def __init__(self) -> None:
        super().__init__(1)

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(-1, self.heads, -1, -1)


class Interleaved(Attention):
    """Query head i uses key head i % 2, but a rank has query heads next to each other."""

    def __init__(self) -> None:
        super().__init__(2)

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, self.heads // self.keys, 1, 1)


class Talking(Divided):
    """Heads are mixed between scores and softmax."""

    def mixed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = query @ key.transpose(-1, -2)
        return (scores - scores.mean(1, keepdim=True)).softmax(-1) @ value


class Returned(Divided):
    """Also returns the attention's weights; a rank has those of its heads."""

    def forward(self, x: torch.Tensor) -> Any:
        query, key = (self.split(part(x), self.heads) for part in (self.query, self.key))
        weights = (query @ key.transpose(-1, -2)).softmax(-1)
        value = self.split(self.value(x), self.heads)
        return self.out((weights @ value).transpose(1, 2).reshape(*x.shape[:2], -1)), weights


class Fused(nn.Module):
    """[Q|K|V] in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three = self.up(x).chunk(3, -1)
        return self.down(one.tanh() * two + three)


class Dropping(Mlp):
    """Dropout of a part, a buffer and a count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(SEQ)
        self.calls: list[int] = []
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.calls.append(self.count)
        x = self.norm(x) + torch.rand(x.shape[0], 1, 1)
        return F.dropout(self.down(F.dropout(self.up(x).relu(), 0.3, self.training)), 0.2)


class InPlace(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return self.down(self.up(x).mul_(2).relu_())


class Zeroed(Mlp):
    """The last weight is zero, so a wrong hidden value shows only in its gradient."""

    def reset(self) -> None:
        nn.init.zeros_(self.down.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).softmax(-1))


class Checkpointed(Mlp):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Net(nn.Module):
    """Residual blocks around modules of one kind. In `flat` models the layers are the model's."""

    def __init__(self, made: Callable[[], nn.Module], blocks: int = 2, recompute: str = "") -> None:
        super().__init__()
        self.first, self.recompute = nn.Linear(WIDTH, WIDTH), recompute
        self.blocks = nn.ModuleList(made() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            if self.recompute:
                made = checkpoint(block, x * 1, use_reentrant=self.recompute == "reentrant")
            else:
                made = block(x * 1)
            x = x + (made[0] if isinstance(made, tuple) else made)
        return x.square().mean()


def build(made: Callable[[], nn.Module], recompute: str = "") -> Net:
    """The same weights each time."""
    model = fill(Net(made, recompute=recompute), 3)
    for block in model.blocks:
        getattr(block, "reset", lambda: None)()
    return model


class Flat(nn.Module):
    """Layers of the model itself, which are units if they are large enough."""

    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.middle = middle
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.middle(self.up(x))).square().mean()


def rotated(x: torch.Tensor) -> torch.Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat([-two, one], -1)


# name: module, rules, what the error names
WRONG: dict[str, tuple[Callable[[], nn.Module], dict[str, str], str]] = {
    "softmax": (mlp("Soft", lambda h: h.softmax(-1)), MLP, "output 0"),
    "layer norm": (mlp("Norm", lambda h: F.layer_norm(h, h.shape[-1:])), MLP, "output 0"),
    "rms norm": (
        mlp("Rms", lambda h: h * h.square().mean(-1, keepdim=True).rsqrt()), MLP, "output 0"
    ),
    "group norm": (
        mlp("Group", lambda h: F.group_norm(h.transpose(1, 2), 2).transpose(1, 2)), MLP, "output 0"
    ),
    "mean": (mlp("Mean", lambda h: h - h.mean(-1, keepdim=True)), MLP, "output 0"),
    "maximum": (mlp("Most", lambda h: h / h.abs().amax(-1, keepdim=True)), MLP, "output 0"),
    "rotation": (mlp("Rotated", rotated), MLP, "output 0"),
    "order": (mlp("Ordered", lambda h: h.cumsum(-1)), MLP, "output 0"),
    "gate up in one": (
        mlp("Gated", lambda h: h.chunk(2, -1)[0].tanh() * h.chunk(2, -1)[1], 2 * INNER),
        MLP, "output 0",
    ),
    "q k v in one": (Fused, MLP, "output 0"),
    "row of a slice": (
        Sliced, {"*.up": "column_gather", "*.down": "row", "*.size": "divide"}, "output 0"
    ),
    "column used whole": (Pooled, {"*.up": "column"}, "output 0"),
    "bias on each rank": (BiasOnEachRank, MLP, "gradient of"),
    "ones beside a part": (OnesBeside, MLP | {"*.ones": "divide"}, "output 0"),
    "heads not divided": (Divided, ATTENTION, "output 0"),
    "mixed heads": (Talking, DIVIDED, "output 0"),
    "one key head": (OneKey, ATTENTION, "output 0"),
    "interleaved key heads": (Interleaved, DIVIDED | {"*.keys": "divide"}, "output 0"),
    "zero last weight": (Zeroed, MLP, "gradient of parameter"),
    "whole input beside": (InputBeside, MLP, "gradient of argument 0"),
    "addend without partial": (Scaled, MLP, "gradient of parameter .*scale"),
    "partial of a whole input": (
        Normed, MLP | {"*.norm": "partial"}, "gradient of parameter .*norm"
    ),
}  # fmt: skip

# name: module, rules
RIGHT: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "mlp": (Mlp, MLP),
    "attention": (Divided, DIVIDED),
    "returned weights": (Returned, DIVIDED),
    "q k v": (Fused, {"*.up": "column:3", "*.down": "row"}),
    "partial": (Scaled, MLP | {"*.scale": "partial"}),
    "norm": (Normed, MLP),
    "gathered": (
        mlp("Soft", lambda h: h.softmax(-1)), {"*.up": "column_gather", "*.down": "row_cut"}
    ),
    "dropout": (Dropping, MLP),
    "in place": (InPlace, MLP),
    "checkpoint": (lambda: Checkpointed(False), MLP),
    "reentrant": (lambda: Checkpointed(True), MLP),
}  # fmt: skip
