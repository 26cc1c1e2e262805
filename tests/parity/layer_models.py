"""A GPT whose embedding and head are units of their own, used in every way that code finds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import SEQ, VOCAB, WIDTH, Block
from torch import nn
from torch.utils.checkpoint import checkpoint


class Untied(nn.Module):
    """As most code has it; subclasses change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 4) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def enter(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(self.leave(self.between(self.enter(tokens))), targets)


class Read(Untied):
    """Tied by reading the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.tokens.weight)


class ReadFirst(Untied):
    """The head's weight is read before anything runs, and the embedding's by a block's input."""

    def enter(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().enter(tokens) + self.head.weight.mean(0)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return super().between(x * (1 + self.tokens.weight.square().mean()))


class NeverCalled(Untied):
    """Both are only read."""

    def enter(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.tokens.weight) + self.places.weight[: tokens.shape[1]]

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.head.weight, self.head.bias)


def scale(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
    if not inputs[0].is_floating_point():
        return None
    return (inputs[0] * (1 + layer.weight.square().mean()),)


def shift(layer: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * (1 + layer.weight.square().mean())


class Hooked(Untied):
    """Hooks that use the weight inside of the unit."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.tokens, self.head):
            layer.register_forward_hook(shift)
            layer.register_full_backward_hook(lambda layer, after, before: None)


class HookedBefore(Untied):
    """Hooks that come before the engine's."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.tokens, self.head):
            layer.register_forward_pre_hook(scale)


class HookedLater(Untied):
    """Hooks that are there only when the model runs, so after the engine's."""

    def __init__(self) -> None:
        super().__init__()
        self.has_hooks = False

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in (self.tokens, self.head) if not self.has_hooks else ():
            layer.register_forward_pre_hook(scale)
            layer.register_forward_hook(shift)
        self.has_hooks = True
        return super().forward(tokens, targets)


class Twice(Untied):
    """Both layers are used again, with blocks in between."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.enter(tokens)) + self.enter(tokens.flip(-1))
        early = self.leave(self.norm(x))
        late = self.leave(self.norm(self.blocks[1](x)))
        return self.loss(late + early, targets)


class NoGrad(Untied):
    def enter(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return super().enter(tokens)


class Frozen(Untied):
    """The embedding, and the head but for its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens.requires_grad_(False)
        self.head.weight.requires_grad_(False)


class FrozenRead(Read):
    def __init__(self) -> None:
        super().__init__()
        self.tokens.requires_grad_(False)


class Recomputed(Untied):
    """Blocks and head run again in backward, where the embedding's weight is read."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(self.mixed, block, x, use_reentrant=False)
        return self.norm(x)

    def mixed(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x) * (1 + self.tokens.weight.square().mean())

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.head, x, use_reentrant=False)


class Sometimes(Untied):
    """A layer that some calls leave out, where it is used in the order of the modules."""

    def __init__(self, in_order: bool = True) -> None:
        super().__init__()
        self.adapter = nn.Linear(WIDTH, WIDTH)
        if in_order:
            self.add_module("head", self._modules.pop("head"))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, adapts: bool) -> torch.Tensor:
        x = self.between(self.enter(tokens))
        return self.loss(self.leave(self.adapter(x) if adapts else x), targets)
