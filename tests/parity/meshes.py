"""Every way in which ranks may compute one model together, and what plain torch in one process
makes of the same batches. The cases of test_meshes.py."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import back_ends
import compare
import expert_models
import hugging_face as hf
import pipeline_models
import torch
import torch.distributed as dist
import training
from models import fill
from torch import nn
from training import Tensors

STEPS = 20
ADAMW = {"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.1}
ODD = {"vocab_size": 67}  # which no number of ranks divides
DISK = {"optimizer": "disk"}

MESHES: list[dict[str, int]] = [
    {"tensor": 2},
    {"tensor": 4},
    {"pipeline": 2},
    {"pipeline": 4},
    {"sequence": 2},
    {"tensor": 2, "pipeline": 2},
    {"tensor": 2, "data": 2},
    {"pipeline": 2, "data": 2},
    {"tensor": 2, "pipeline": 2, "data": 2},
    {"tensor": 2, "sequence": 2},
    {"pipeline": 2, "data": 4},
    {"pipeline": 2, "sequence": 2},
    {"pipeline": 2, "sequence": 2, "data": 2},
]

# Expert ranks are some of the data ranks.
EXPERT_MESHES: list[dict[str, int]] = [
    {"data": 2, "expert": 2},
    {"data": 4, "expert": 2},
    {"data": 4, "expert": 4},
    {"data": 4, "expert": 1},
    {"tensor": 2, "data": 2, "expert": 2},
    {"pipeline": 2, "data": 2, "expert": 2},
    {"pipeline": 2, "data": 4, "expert": 2},
]

# Name: strategy and its tiers.
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "zero3 window": {"strategy": "zero3", "table": {"param": {"hold": "RR@device:fp32"}}},
    "hpz": {"strategy": "hpz"},  # where there are data ranks to group
    "zero1 host": {"strategy": "zero1", "offload": {"optimizer": "host"}},
    "zero2 disk": {"strategy": "zero2", "offload": DISK},
    "zero3 host": {"strategy": "zero3", "offload": {"optimizer": "host", "params": "host"}},
    "zero3 disk": {"strategy": "zero3", "offload": DISK | {"params": "disk"}},
    "zero3 act": {
        "strategy": "zero3",
        "offload": {"activations": "host"},
        "activations": {"checkpoint": "unit"},
    },
}

# Name: micro-batches, and keys of the config.
STEPS_OF: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "two": (2, {"clip": 0.5}),
    "three": (3, {"activations": {"checkpoint": "unit"}}),
    "eight": (8, {}),
    "interleaved": (4, {"parallel": {"schedule": "interleaved", "virtual_stages": 2}}),
    "zero bubble": (4, {"parallel": {"schedule": "zero_bubble"}}),
}
IN_TURN = ("one", "two", "three", "eight")  # in all_cases()


class Adapted(nn.Module):
    """A frozen layer, and two thin ones beside it that train."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, inner).requires_grad_(False)
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, inner, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.b(self.a(x))
        return out


def chain(**options: Any) -> nn.Module:
    return pipeline_models.build(**options)


def adapted() -> nn.Module:
    model = pipeline_models.Chain()
    for block in model.blocks:
        block.up = Adapted(pipeline_models.WIDTH, 2 * pipeline_models.WIDTH)
    for one in (model.tokens, model.places):
        one.requires_grad_(False)
    return fill(model, 3)


RULES = {"*.up": "column", "*.down": "row", "tokens": "vocab", "head": "vocab"}
ADAPTED = {"*.base": "column", "*.b": "column", "*.down": "row"}

# Name: how it is built, its kind in hugging_face.py (else it is a chain), rules for tensor ranks.
MODELS: dict[str, tuple[Any, str, dict[str, str]]] = {
    "mlp": (chain, "", RULES),
    "mlp tied": (lambda: chain(tied=True, own=True), "", RULES),
    "lora": (adapted, "", ADAPTED),
    "llama": (lambda: hf.build("llama", **ODD), "llama", {}),
    "llama tied": (lambda: hf.build("llama", tie_word_embeddings=True), "llama", {}),
    "gpt2": (lambda: hf.build("gpt2", **ODD), "gpt2", {}),
    "qwen3": (lambda: hf.build("qwen3"), "qwen3", {}),
    "phi3": (lambda: hf.build("phi3"), "phi3", {}),
    "bert": (lambda: hf.build("bert"), "bert", {}),
    # Not with ReLU: where an input of one is near 0, plain torch is 1e-3 from itself after 20 steps
    # when it adds up micro-batches in another order.
    "t5": (lambda: hf.build("t5", feed_forward_proj="gated-gelu"), "t5", {}),
}
OF_EXPERTS = {"experts": (expert_models.build, "", RULES | expert_models.RULES)}
TOKENS = ("llama", "llama tied", "gpt2", "qwen3", "bert")  # which may be cut between layers
WHOLE_HEADS = ("lora", "bert")  # on tensor ranks, too
ENDS_EVERYWHERE = ("phi3",)  # all stages have the embedding and the head; one computes with each
IN_PARTS = ("llama", "gpt2", "qwen3", "phi3")  # of which sequences can be


@dataclasses.dataclass(frozen=True)
class Case:
    mesh: tuple[tuple[str, int], ...]
    strategy: str
    model: str
    steps: str
    backend: str = ""  # comm.backend; else one that depends on the name

    @property
    def name(self) -> str:
        axes = "".join(f"{axis[0].upper()}{size}" for axis, size in self.mesh)
        return f"{axes}-{self.strategy}-{self.model}-{self.steps}".replace(" ", "_")

    def size(self, axis: str) -> int:
        return dict(self.mesh).get(axis, 1)

    @property
    def world(self) -> int:
        made = 1
        for axis, size in self.mesh:
            made *= 1 if axis == "expert" else size
        return made

    @property
    def made_of(self) -> tuple[Any, str, dict[str, str]]:
        return (MODELS | OF_EXPERTS)[self.model]

    def rules(self) -> dict[str, Any]:
        """Keys of the section "parallel"."""
        rules, tensor, expert = self.made_of[2], self.size("tensor"), self.size("expert")
        if tensor * expert == 1 or not rules:
            return {}
        return {"rules": rules} | ({"verify": "off"} if tensor > 1 and expert > 1 else {})

    def expert_groups(self) -> list[list[int]]:
        count, tensor = self.size("expert"), self.size("tensor")
        firsts = range(0, self.world, count * tensor)
        return [
            [first + one + tensor * rank for rank in range(count)]
            for first in firsts
            for one in range(tensor)
        ]

    @property
    def micro(self) -> int:
        return STEPS_OF[self.steps][0]

    @property
    def cuts_tokens(self) -> bool:
        """Sequences have 10 tokens."""
        even = self.size("tensor") == 2 and self.size("sequence") == 1
        return even and self.model in TOKENS and self.steps in ("one", "three")

    def makes_sense(self) -> bool:
        kind = self.made_of[1]
        parts = self.size("sequence") == 1 or kind in IN_PARTS
        node = self.strategy != "hpz" or self.size("data") > 1
        # A stage is a block or a layer, and these have two.
        stages = self.size("pipeline") < 4 or self.model not in ("bert", "t5")
        return parts and node and stages

    def config(self, path: str) -> dict[str, Any]:
        made = {
            "mesh": {axis: size for axis, size in self.mesh if axis != "data"},
            "batch": {"accumulate": self.micro},
            "optimizer": {"type": "AdamW"} | ADAMW,
            "comm": {"timeout_s": 120, "backend": self.backend or back_ends.of_case(self.name)},
            "units": {"layer_bytes": 1},
        }
        if self.model in ENDS_EVERYWHERE and self.size("pipeline") < 4:
            del made["units"]
        made |= STRATEGIES[self.strategy] | STEPS_OF[self.steps][1]
        offload = made.get("offload", {})
        if "disk" in offload.values():
            made["offload"] = offload | {"path": path}
        if self.strategy == "hpz":
            made["mesh"]["node"] = 2
        if self.strategy == "zero3 act":
            made["activations"] = {"checkpoint": "unit"}
        if self.rules():
            made["parallel"] = made.get("parallel", {}) | self.rules()
        cut = self.size("tensor") > 1 and self.model not in WHOLE_HEADS
        if cut and self.steps in ("two", "eight"):
            made["parallel"] = made.get("parallel", {}) | {"cut_logits": True}
        if self.size("sequence") > 1 and self.steps in ("two", "eight"):
            way = "ring" if self.size("sequence") == 2 else "both"
            made["parallel"] = made.get("parallel", {}) | {"sequence": way}
        if self.cuts_tokens:
            made["parallel"] = made.get("parallel", {}) | {"norms": "tokens"}
        if self.size("pipeline") > self.micro:
            made["parallel"] = made.get("parallel", {}) | {"schedule": "gpipe"}
        return made


def all_cases() -> list[Case]:
    """Meshes x strategies x models, with the kinds of steps in turn."""
    cases = []
    for m, mesh in enumerate(MESHES):
        for s, strategy in enumerate(STRATEGIES):
            for k, model in enumerate(MODELS):
                steps = IN_TURN[(m + s + k) % len(IN_TURN)]
                cases.append(Case(tuple(mesh.items()), strategy, model, steps))
    return [one for one in cases if one.makes_sense()]


def expert_cases() -> list[Case]:
    """Meshes with expert ranks x strategies x kinds of steps."""
    steps = (*IN_TURN, "zero bubble")
    cases = [
        Case(tuple(mesh.items()), strategy, "experts", kind)
        for mesh in EXPERT_MESHES
        for strategy in STRATEGIES
        for kind in steps
    ]
    return [
        one
        for one in cases
        if one.makes_sense()
        and (one.steps != "zero bubble" or (one.size("pipeline") > 1 and "act" not in one.strategy))
        and (one.strategy != "hpz" or one.size("data") // 2 % one.size("expert") == 0)
    ]


def parts_of(case: Case, step: int, data: int) -> Iterator[Any]:
    """The micro-batches of a data rank: of other lengths, and the last one shorter."""
    kind = case.made_of[1]
    for micro in range(case.micro):
        number = 10 * step + micro
        if kind:
            made = hf.batch(kind, number, data)
        else:
            made = pipeline_models.batch(number, data, 1, rows=3, length=5 + micro % 2)
        if micro and micro + 1 == case.micro:
            made = {name: one[:2] for name, one in made.items()}
        yield made


def loss_of(outputs: Any) -> torch.Tensor:
    loss: torch.Tensor = outputs if torch.is_tensor(outputs) else outputs.loss
    return loss


def plain(case: Case, steps: int = STEPS) -> dict[str, Any]:
    """By one process. It depends neither on the strategy nor on the ranks that share a model."""
    alike = Case((("data", case.size("data")),), "ddp", case.model, case.steps)
    return plain_once(alike, steps)


@functools.cache
def plain_once(case: Case, steps: int) -> dict[str, Any]:
    model = case.made_of[0]()
    params = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(params, **ADAMW)
    count = case.micro * case.size("data")
    told: dict[str, Any] = {"losses": [], "first": {}}
    for step in range(steps):
        optimizer.zero_grad()
        sums = 0.0
        for data in range(case.size("data")):
            for part in parts_of(case, step, data):
                loss = loss_of(model(**part)) / count
                loss.backward()
                sums += float(loss.detach())
        told["losses"].append(sums)
        clip = STEPS_OF[case.steps][1].get("clip")
        if clip:
            nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        if step == 0:
            named = model.named_parameters()
            told["first"] = {
                n: optimizer.state[p]["exp_avg"].clone() for n, p in named if p in optimizer.state
            }
    told["weights"] = {name: one.detach() for name, one in model.named_parameters()}
    return told


def hash_of(model: nn.Module) -> str:
    """Of all bits of its weights."""
    made = hashlib.sha256()
    for one in model.parameters():
        made.update(one.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-9))


def run(case: Case, path: str, device: str = "cpu", steps: int = STEPS) -> dict[str, Any]:
    """On a rank: how far the engine on `device` is from plain torch on the CPU, which rank 0 trains
    for all."""
    import penstock  # noqa: PLC0415

    if case.size("expert") > 1:
        expert_models.meet(case.expert_groups())
    model = training.moved(case.made_of[0](), device)
    engine = penstock.initialize(model, case.config(path))
    losses, first = [], {}
    for step in range(steps):
        parts = parts_of(case, step, engine.data_rank)
        there = ({name: one.to(device) for name, one in part.items()} for part in parts)
        losses.append(float(engine.train_batch(there)))
        if step == 0:
            for name, param in model.named_parameters():
                if param.requires_grad:
                    first[name] = engine.param_state(param, "exp_avg").cpu()
    engine.close()
    told: dict[str, Any] = {"hash": hash_of(model), "losses": losses}
    if dist.get_rank() > 0:
        return told
    theirs = plain(case, steps)
    weights = {name: one.detach().cpu() for name, one in model.named_parameters()}
    told["apart"] = {
        "losses": max(abs(a - b) for a, b in zip(losses, theirs["losses"], strict=True)),
        "first": compare.gradient_deviation(first, theirs["first"]),
        "each": each(first, theirs["first"]),
        "weights": compare.weight_deviation(weights, theirs["weights"]),
    }
    return told


def each(ours: Tensors, theirs: Tensors) -> float:
    """The worst of single tensors, of which small ones are mostly rounding."""
    some = 1e-3 * compare.norm(theirs)
    return max(float((ours[n] - one).norm() / (one.norm() + some)) for n, one in theirs.items())
