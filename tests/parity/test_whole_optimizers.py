"""Optimizers that look at whole parameters: in the layout "whole" they train as in plain torch."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import test_optimizer_kinds as kinds
import test_optimizer_trial as trial
import torch
import torch.distributed as dist
from test_optimizers import Lamb
from test_optimizers_outside_step import Own
from torch import nn

pytestmark = pytest.mark.timeout(480)
SAMPLES = 12  # of a step: a multiple of every number of data ranks
WHOLE = {"optimizer": {"layout": "whole"}}


class Block(nn.Module):
    def __init__(self, matrices: bool) -> None:
        super().__init__()
        self.up = nn.Linear(8, 20, bias=not matrices)
        self.down = nn.Linear(20, 8, bias=not matrices)
        self.scale = None if matrices else nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return made if self.scale is None else made * self.scale


class Net(nn.Module):
    """Three blocks and an embedding. With `matrices`, all parameters have two dims."""

    def __init__(self, matrices: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.tokens = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(matrices) for _ in range(3)])
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), (ids * 3 + 1) % 11)


def data(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(50 + step)
    return torch.randint(0, 11, (SAMPLES,), generator=generator)


class Lars(Own):
    """A norm for each parameter (arXiv:1708.03888), with momentum."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p, state in self.each():
            if p.grad is not None:
                trust = p.norm() / p.grad.norm().clamp(min=1e-8) if p.ndim > 1 else 1.0
                moment = state.setdefault("momentum_buffer", torch.zeros_like(p))
                moment.mul_(0.9).add_(p.grad * trust, alpha=0.1 * group["lr"])
                p.sub_(moment)


class Shampoo(Own):
    """Preconditioners of rows and columns (arXiv:1802.09568), kept in a list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p, state in self.each():
            if p.grad is None:
                continue
            grad = p.grad if p.ndim == 2 else p.grad[None]
            if not state:
                state["kept"] = [torch.eye(n) for n in grad.shape]
                state["about"] = {"step": 0, "last": None}
            for dim, kept in enumerate(state["kept"]):
                kept.add_(grad @ grad.T if dim == 0 else grad.T @ grad)
            state["about"]["step"] += 1
            roots = []
            for kept in state["kept"]:
                values, vectors = torch.linalg.eigh(kept.double())
                roots.append((vectors * values.clamp(min=1e-6) ** -0.25) @ vectors.T)
            p.sub_((roots[0].float() @ grad @ roots[1].float()).reshape(p.shape) * group["lr"])


class Mixed(Own):
    """Matrices by orthogonal updates, all others by Adam, as Muon is used."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p, state in self.each():
            if p.grad is None:
                continue
            moment = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            if group.get("matrices"):
                u, _, v = torch.linalg.svd(moment.double(), full_matrices=False)
                p.sub_((u @ v).float() * group["lr"])
            else:
                squares = state.setdefault("exp_avg_sq", torch.zeros_like(p))
                squares.lerp_(p.grad.square(), 0.01)
                p.sub_(group["lr"] * moment / (squares.sqrt() + 1e-4))


def mixed(model: nn.Module) -> Any:
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "blocks" in n]
    outer = [p for p in model.parameters() if not any(p is one for one in inner)]
    return Mixed([{"params": inner, "matrices": True}, {"params": outer}], lr=0.02)


def two_groups(model: nn.Module) -> Any:
    first, *others = model.parameters()
    return kinds.Chosen([{"params": others}, {"params": [first], "normed": True}], lr=0.1)


Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "Muon": lambda m: torch.optim.Muon(m.parameters(), lr=0.02, weight_decay=0.1),
    "Muon like Adam": lambda m: torch.optim.Muon(
        m.parameters(), lr=1e-2, adjust_lr_fn="match_rms_adamw", nesterov=False
    ),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05),
    "Lamb": lambda m: Lamb(m.parameters()),
    "Lars": lambda m: Lars(m.parameters(), lr=0.1),
    "Shampoo": lambda m: Shampoo(m.parameters(), lr=0.1),
    "mixed": mixed,
    "a group": two_groups,
    "normed": lambda m: trial.Normed(m.parameters()),
    "late": lambda m: trial.Late(m.parameters()),
    "projected": lambda m: trial.Projected(m.parameters()),
    "latent": lambda m: trial.Latent(m.parameters()),
    "three dims": lambda m: kinds.Dims(m.parameters(), ndim=2),
}
# Name: ranks, micro-batches of a step, and the config.
PLACES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "alone": (1, 1, {"strategy": "zero3"}),
    "ddp": (2, 1, {"strategy": "ddp"}),
    "zero1": (2, 2, {"strategy": "zero1"}),
    "zero1 of 3": (3, 1, {"strategy": "zero1", "clip": 0.1}),
    "zero2": (3, 2, {"strategy": "zero2"}),
    "zero3": (2, 2, {"strategy": "zero3", "clip": 0.1}),
    "zero3 of 3": (3, 1, {"strategy": "zero3"}),
    "zero3 of 4": (4, 1, {"strategy": "zero3", "prefetch_bytes": 0}),
    "hpz": (4, 1, {"strategy": "hpz", "mesh": {"node": 2}}),
    "mics": (4, 1, {"strategy": "mics", "mesh": {"node": 2}}),
    "host": (2, 1, {"strategy": "zero3", "offload": {"optimizer": "host", "params": "host"}}),
    "late": (2, 1, {"strategy": "zero1", "offload": {"optimizer": "host", "late_update": True}}),
    "not fused": (2, 1, {"strategy": "zero3", "comm": {"bucket_bytes": 0}}),
    "recomputed": (2, 1, {"strategy": "zero3", "activations": {"checkpoint": "unit"}}),
}


def net(name: str) -> Net:
    return Net(matrices=name.startswith("Muon"))


def plain(name: str, clip: float, steps: int = 8) -> dict[str, torch.Tensor]:
    model = net(name)
    optimizer = OPTIMIZERS[name](model)
    for step in range(steps):
        optimizer.zero_grad()
        model(data(step)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {key: one.detach() for key, one in model.state_dict().items()}


def start(name: str, place: str, **more: Any) -> Any:
    import penstock  # noqa: PLC0415

    model = net(name)
    _, accumulate, config = PLACES[place]
    made = {"units": {"layer_bytes": 1}, "batch": {"accumulate": accumulate}} | config | more
    made["comm"] = {"timeout_s": 60} | config.get("comm", {})
    return penstock.initialize(model, made, optimizer=OPTIMIZERS[name](model))


def train(engine: Any, place: str, first: int, last: int) -> None:
    accumulate = PLACES[place][1]
    for step in range(first, last):
        mine = data(step).chunk(dist.get_world_size())[dist.get_rank()]
        for part in mine.chunk(accumulate):
            engine.backward(engine(part))
            stepped = engine.step()
        assert stepped


def trained(name: str, place: str, more: dict[str, Any]) -> dict[str, Any]:
    engine = start(name, place, **more)
    train(engine, place, 0, 8)
    told = {
        "weights": engine.state_dict(rank0_only=False),
        "layout": engine.config.optimizer.layout,
        "updated": sum(p.numel() for group in engine.optimizer.param_groups
                       for p in group["params"]),
    }  # fmt: skip
    engine.close()
    return told


def close(optimizer: str, ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    limit = 1e-2 if optimizer.startswith("Muon") else 2e-5  # it multiplies in bf16
    for name, expected in theirs.items():
        error = float((ours[name] - expected).abs().max() / expected.abs().max())
        assert error < limit, (name, error)


CASES = [(name, place) for name in OPTIMIZERS for place in PLACES]


def pytest_generate_tests(metafunc):
    if "place" in metafunc.fixturenames and "name" in metafunc.fixturenames:
        full = metafunc.config.getoption("full")
        metafunc.parametrize(("name", "place"), CASES if full else CASES[::5])


def test_trains_as_plain_torch(name, place, pools):
    world, _, config = PLACES[place]
    theirs = plain(name, config.get("clip", 0.0))
    found = pools(world).run(trained, name, place, {})
    numel = sum(one.numel() for one in theirs.values())
    for told in found:
        close(name, told["weights"], theirs)
        assert told["layout"] == "whole"
    shards = {"ddp": 1, "mics": 2, "alone": 1}.get(place, world)
    assert sum(told["updated"] for told in found) == numel * world // shards


def test_an_elementwise_optimizer_in_this_layout(pools):
    """It gives the same as in the other layout, also if the engine's kernels compute it."""
    for make in ("RMSprop", "AdamW"):
        OPTIMIZERS[make] = getattr(torch.optim, make)
    results = {
        (make, layout): pools(2).run(elementwise, make, layout)[0]
        for make in ("RMSprop", "AdamW")
        for layout in ("flat", "whole")
    }
    for make in ("RMSprop", "AdamW"):
        one, other = results[make, "flat"], results[make, "whole"]
        assert all(torch.equal(one[key], other[key]) for key in one)


def elementwise(make: str, layout: str) -> dict[str, torch.Tensor]:
    OPTIMIZERS[make] = lambda m: getattr(torch.optim, make)(m.parameters(), lr=0.01)
    made: dict[str, torch.Tensor] = trained(make, "zero3", {"optimizer": {"layout": layout}})[
        "weights"
    ]
    return made


# ---- checkpoints


def saved(name: str, place: str, folder: str) -> None:
    engine = start(name, place)
    train(engine, place, 0, 4)
    engine.save(folder)
    engine.close()


def resumed(name: str, place: str, folder: str) -> dict[str, torch.Tensor]:
    engine = start(name, place)
    engine.load(folder)
    train(engine, place, 4, 8)
    made: dict[str, torch.Tensor] = engine.state_dict(rank0_only=False)
    engine.close()
    return made


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "Lamb", "Shampoo", "mixed", "a group"])
@pytest.mark.parametrize(
    ("before", "after"), [("zero3 of 3", "zero1"), ("ddp", "zero3 of 4"), ("host", "alone")]
)
def test_goes_on_with_other_ranks(name, before, after, pools, tmp_path):
    pools(PLACES[before][0]).run(saved, name, before, str(tmp_path))
    theirs = plain(name, 0.0)
    for ours in pools(PLACES[after][0]).run(resumed, name, after, str(tmp_path)):
        close(name, ours, theirs)


def other_layout(name: str, folder: str) -> str:
    import penstock  # noqa: PLC0415

    OPTIMIZERS["RMSprop"] = lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5)
    if name == "RMSprop":
        weights = []
        for first, second in (("flat", "whole"), ("whole", "flat")):
            engine = start(name, "zero3 of 3", optimizer={"layout": first})
            train(engine, "zero3 of 3", 0, 4)
            engine.save(f"{folder}/{first}")
            engine.close()
            engine = start(name, "zero3 of 3", optimizer={"layout": second})
            engine.load(f"{folder}/{first}")
            train(engine, "zero3 of 3", 4, 8)
            weights.append(engine.state_dict(rank0_only=False))
            engine.close()
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
        close(name, weights[0], plain(name, 0.0))
        return ""
    saved("Shampoo", "zero3 of 3", folder)
    Shampoo.__name__, trial.Own.__name__ = "Shampoo", "Own"
    model = Net()
    optimizer = type("Shampoo", (torch.optim.RMSprop,), {})(model.parameters())
    engine = penstock.initialize(model, {"strategy": "zero3"}, optimizer=optimizer)
    try:
        engine.load(folder)
    except penstock.ConfigError as error:
        return str(error)
    finally:
        engine.close()
    return "loaded"


@pytest.mark.parametrize("name", ["RMSprop", "Shampoo"])
def test_loads_in_the_other_layout(name, pools, tmp_path):
    for said in pools(3).run(other_layout, name, str(tmp_path)):
        assert ('but optimizer.layout is "flat"' in said) if name == "Shampoo" else said == ""


# ---- errors


class Together(Own):
    """Divides all gradients by the norm of all of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads = [p.grad for _, p, _ in self.each() if p.grad is not None]
        norm = torch.stack([one.norm() for one in grads]).norm()
        for one in grads:
            one.div_(norm)
        super().step()


class Random(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for _, p, _ in self.each():
            if p.grad is not None:
                p.sub_(0.1 * p.grad + 0.01 * torch.randn_like(p))


class Shared(Own):
    """A norm of all parameters in a state of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norms = [p.norm() for _, p, _ in self.each()]
        for _, _, state in self.each():
            state["norm"] = torch.stack(norms).norm()
        super().step()


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "together": (Together, {}, "With whole parameters on each rank: .*depends on the others"),
    "asked for": (Together, WHOLE, '"optimizer.layout" is "whole", but Together is refused'),
    "random": (Random, {}, "With whole parameters on each rank"),
    "state": (Shared, {}, "its state of one parameter depends on the others"),
    "an option": (kinds.Adapts, {}, "options"),
    "an attribute": (kinds.Remembers, {}, "attributes"),
    "memory": (trial.Replaces, WHOLE, "gives a parameter new memory"),
    "nothing": (trial.Idle, WHOLE, "changed no parameter"),
    "flat": (Lars, {"optimizer": {"layout": "flat"}}, "Lars is not elementwise"),
    "tiles": (Lars, {"tiling": {"max_bytes": 64}}, '"tiling.max_bytes" divides the model'),
    "kernels in tiles": (
        torch.optim.AdamW,
        {"tiling": {"max_bytes": 64}} | WHOLE,
        '"tiling.max_bytes" divides the model',
    ),
    "another word": (Lars, {"optimizer": {"layout": "round"}}, "flat.*whole"),
    "other keys": (Lars, {"optimizer": {"layout": "whole", "lr": 1}}, "both as an argument"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    import penstock  # noqa: PLC0415

    make, config, words = REFUSED[case]
    model = Net()
    before = {key: one.clone() for key, one in model.state_dict().items()}
    with pytest.raises(penstock.ConfigError, match=words):
        penstock.initialize(
            model, {"strategy": "zero3"} | config, optimizer=make(model.parameters())
        )
    assert all(torch.equal(one, before[key]) for key, one in model.state_dict().items())


class Turns(Own):
    """After 20 steps its steps depend on the norm of all parameters."""

    seen = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.seen += 1
        for _, p, _ in self.each():
            if p.grad is not None and p.ndim > 1:
                p.grad.div_(p.grad.norm())
        super().step()
        if self.seen > 20:
            norms = torch.stack([p.norm() for _, p, _ in self.each()])
            for _, p, _ in self.each():
                p.mul_(1 - 0.01 * norms.norm())


def until_refused(make: Callable[..., Any], gather: bool) -> tuple[str, int]:
    """Trains until a step raises an error. Returns its text, and the steps before."""
    OPTIMIZERS["refused"] = lambda m: make(m.parameters())
    engine = start("refused", "zero3")
    said = ""
    try:
        train(engine, "zero3", 0, 30)
    except RuntimeError as error:
        said = str(error)
    steps = engine.steps
    engine.close(gather=gather)
    return said, steps


def test_a_rule_that_changes_later(pools):
    for said, steps in pools(2).run(until_refused, Turns, True):
        assert steps == 20 and "until now Turns updated some parameters" in said, said


class Replaces(Lars):
    """After 20 steps it gives parameters new memory."""

    seen = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.seen += 1
        if self.seen > 20:
            for _, p, _ in self.each():
                p.data = p.data.clone()


def test_new_memory_later(pools):
    for said, steps in pools(2).run(until_refused, Replaces, False):
        assert steps == 20 and "new memory" in said, said


def layout_of(place: str) -> tuple[dict[str, int], int]:
    bytes_of = {}
    for layout in ("flat", "whole"):
        engine = elementwise_engine(place, layout)
        bytes_of[layout] = engine.ledger()["measured"]["param"]
        engine.close()
    return bytes_of, sum(p.numel() for p in Net().parameters())


def elementwise_engine(place: str, layout: str) -> Any:
    OPTIMIZERS["RMSprop"] = lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01)
    return start("RMSprop", place, optimizer={"layout": layout})


@pytest.mark.parametrize("place", ["ddp", "mics", "alone"])
def test_shards_are_those_of_the_optimizer_state(place, pools):
    """Without shards there is no padding."""
    for bytes_of, _ in pools(PLACES[place][0]).run(layout_of, place):
        ratio = bytes_of["whole"] / bytes_of["flat"]
        assert ratio == 1.0 if place != "mics" else ratio < 1.8


class Kept(Lars):
    """Its state has a dict of a kind that cannot be loaded safely."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for _, _, state in self.each():
            state.setdefault("kept", {"by": collections.defaultdict(list)})


def keeps(folder: str) -> str:
    OPTIMIZERS["kept"] = lambda m: Kept(m.parameters())
    engine = start("kept", "zero3")
    train(engine, "zero3", 0, 1)
    try:
        engine.save(folder)
        return "saved"
    except ValueError as error:
        return str(error)
    finally:
        engine.close()


def test_state_that_a_checkpoint_cannot_hold(pools, tmp_path):
    for said in pools(2).run(keeps, str(tmp_path)):
        assert "which a checkpoint cannot hold" in said, said


class Swaps(Lars):
    """Shows an average of the weights, which depends on each parameter's norm."""

    def show(self) -> None:
        for _, p, state in self.each():
            state["kept"] = p.detach().clone()
            p.data.div_(p.detach().norm())

    def restore(self) -> None:
        for _, p, state in self.each():
            p.data.copy_(state.pop("kept"))

    def together(self) -> None:
        norm = sum(float(p.detach().norm()) for _, p, _ in self.each())
        for _, p, _ in self.each():
            p.data.div_(norm)


def swaps() -> list[Any]:
    OPTIMIZERS["swaps"] = lambda m: Swaps(m.parameters())
    engine = start("swaps", "zero3 of 3")
    train(engine, "zero3 of 3", 0, 4)
    before = engine.state_dict(rank0_only=False)
    engine.optimizer.show()
    shown = engine.state_dict(rank0_only=False)
    engine.optimizer.restore()
    back = engine.state_dict(rank0_only=False)
    said = ""
    try:
        engine.optimizer.together()
    except RuntimeError as error:
        said = str(error)
    after = engine.state_dict(rank0_only=False)
    engine.close()
    told = [torch.allclose(shown[key], one / one.norm(), rtol=1e-6) for key, one in before.items()]
    told += [torch.equal(back[key], one) for key, one in before.items()]
    return [*told, all(torch.equal(after[key], one) for key, one in before.items()), said]


def swaps_after_load(folder: str) -> list[bool]:
    OPTIMIZERS["swaps"] = lambda m: Swaps(m.parameters())
    engine = start("swaps", "zero3 of 4")
    train(engine, "zero3 of 4", 0, 2)
    engine.save(folder)
    engine.close()
    engine = start("swaps", "zero3 of 4")
    engine.load(folder)
    before = engine.state_dict(rank0_only=False)
    engine.optimizer.show()
    shown = engine.state_dict(rank0_only=False)
    engine.optimizer.restore()
    back = engine.state_dict(rank0_only=False)
    engine.close()
    told = [torch.allclose(shown[key], one / one.norm(), rtol=1e-6) for key, one in before.items()]
    return told + [torch.equal(back[key], one) for key, one in before.items()]


def test_methods_after_a_load(pools, tmp_path):
    for told in pools(4).run(swaps_after_load, str(tmp_path)):
        assert all(told)


def test_methods_outside_step(pools):
    for *told, said in pools(3).run(swaps):
        assert all(told)
        assert "if the others are not there" in said
