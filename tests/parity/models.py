"""Small models that hold what real ones trip over, and their data.

Each model's forward takes a batch and returns the mean loss, so the average over equal parts of a
batch is the loss of the whole. No weight keeps a value (0 or 1) that would hide an error.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, SEQ, WIDTH = 64, 16, 48
FEATURES = 5


def run_block(block: nn.Module, x: torch.Tensor, recompute: str) -> torch.Tensor:
    if recompute == "off":
        return block(x)
    return checkpoint(block, x, use_reentrant=recompute == "reentrant")


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A GPT with tied embeddings (or not) and a frozen last LayerNorm."""

    def __init__(self, recompute: str = "off", blocks: int = 3, tied: bool = True):
        super().__init__()
        self.recompute = recompute
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 4) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.norm.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = run_block(block, x, self.recompute)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class OddBlock(nn.Module):
    """Odd sizes, a one-element and a zero-dimensional parameter, and one that is never used."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 13), nn.Linear(13, width, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(()))
        self.never = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x) + self.shift))


class Awkward(nn.Module):
    """A block used twice, a frozen one, a convolution, an unused parameter, an fp32 buffer, a
    parameter that the root shares with a block, and one of a block that the root just reads."""

    def __init__(self, recompute: str = "off"):
        super().__init__()
        self.recompute = recompute
        self.enter = nn.Linear(FEATURES, 7)
        self.conv = nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(OddBlock(7) for _ in range(4))
        self.blocks[2].requires_grad_(False)
        self.leave = nn.Linear(7, 1)
        self.never = nn.Parameter(torch.zeros(5))
        self.shared_shift = self.blocks[3].shift
        self.register_buffer("gain", torch.linspace(0.5, 1.5, 7))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert self.gain.dtype == torch.float32, f"a buffer was cast to {self.gain.dtype}"
        x = self.enter(x.to(self.enter.weight.dtype))
        x = x + self.conv(x.unsqueeze(1)).squeeze(1)
        for index in (0, 1, 0, 2, 3):
            x = run_block(self.blocks[index], x, self.recompute)
        x = (x.float() * self.gain).to(x.dtype) * self.blocks[1].scale + self.shared_shift
        return F.mse_loss(self.leave(x).float().squeeze(-1), targets)


MODELS = {"gpt": Gpt, "awkward": Awkward}


def build(name: str, recompute: str = "off", seed: int = 7) -> nn.Module:
    return fill(MODELS[name](recompute), seed)


def fill(model: nn.Module, seed: int = 7) -> nn.Module:
    """The same weights for the same seed, on every rank and in the reference."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.06 if parameter.ndim > 1 and parameter.shape[0] >= SEQ else 0.2
            start = 1.0 if (parameter == 1).all() else 0.0
            parameter.copy_(start + scale * torch.randn(parameter.shape, generator=generator))
    return model


def batches(name: str, steps: int, samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`samples` samples for each step: inputs and targets."""
    generator = torch.Generator().manual_seed(1000 + samples)
    if name == "gpt":
        start = torch.randint(VOCAB, (steps, samples, 1), generator=generator)
        stride = torch.randint(1, 4, (steps, samples, 1), generator=generator)
        text = (start + stride * torch.arange(SEQ + 1)) % VOCAB
        return [(part[:, :-1], part[:, 1:]) for part in text]
    x = torch.randn(steps, samples, FEATURES, generator=generator)
    noise = 0.1 * torch.randn(steps, samples, generator=generator)
    return list(zip(x, x.sin().sum(-1) + noise, strict=True))
