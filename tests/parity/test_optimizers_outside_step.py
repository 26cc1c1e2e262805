"""User-defined optimizers whose methods change weights outside step(): all ranks see what plain
torch gives at once, or the call is refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from training import moved

WORLD = 2
STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
PRECISIONS = ["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
REST_WHOLE = ("ddp", "zero1", "zero2")
Weights = dict[str, torch.Tensor]

# ---- a model whose gradients are small whole numbers, so that bf16 rounds none of them


class Block(nn.Module):
    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        numel = torch.Size(shape).numel()
        start = torch.arange(numel).float().reshape(shape)
        self.weight = nn.Parameter(0.01 * start - 0.2)
        self.bias = nn.Parameter(torch.linspace(-1, 1, 3))
        self.register_buffer("slope", start % 5 - 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = self.slope.to(self.weight.dtype)
        return (self.weight * slope * x).sum().float() + (self.bias * (3 - x)).sum().float()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block((5, 4)), Block((7,)), Block((2, 3, 2))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(block(x) for block in self.blocks)


def inputs(step: int, precision: str) -> list[torch.Tensor]:
    """One for each rank; the mean over the ranks is a whole number."""
    dtype = DTYPES[precision]
    return [torch.tensor(float(2 * ((step + rank) % 3)), dtype=dtype) for rank in range(WORLD)]


# ---- optimizers


class Own(torch.optim.Optimizer):
    """SGD with a place for state, in which subclasses keep other weights."""

    def __init__(self, params: Any, lr: float = 0.05, **options: Any):
        super().__init__(params, {"lr": lr, **options})

    def each(self) -> Iterator[tuple[dict[str, Any], torch.Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for p in group["params"]:
                yield group, p, self.state[p]

    def after(self, p: torch.Tensor, state: dict[str, Any]) -> None:
        pass

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad)
                    self.after(p, self.state[p])


class ScheduleFree(Own):
    """arXiv:2405.15682: trains at y, and shows the average x in eval mode."""

    def __init__(self, params: Any, lr: float = 0.05):
        super().__init__(params, lr, train_mode=False, k=0)

    def _swap(self, train_mode: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train_mode:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(end=self.state[p]["z"], weight=weight)
                group["train_mode"] = train_mode

    def eval(self) -> None:
        self._swap(False, 1 - 1 / 0.9)

    def train(self) -> None:
        self._swap(True, 1 - 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            group["k"] += 1
            part = 1 / group["k"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, part).add_(p.grad, alpha=group["lr"] * (0.9 * (1 - part) - 1))
                z.sub_(p.grad, alpha=group["lr"])


class Slow(Own):
    """Lookahead's slow weights, shown between backup() and restore()."""

    def after(self, p: torch.Tensor, state: dict[str, Any]) -> None:
        state.setdefault("slow", p.clone()).lerp_(p, 0.5)

    @torch.no_grad()
    def backup(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["backup"] = p.detach().clone()
                p.copy_(self.state[p]["slow"])

    def restore(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.copy_(self.state[p].pop("backup"))


class Averaged(Own):
    """Its average is in an attribute, and swap() exchanges it with the weights."""

    average: list[torch.Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        params = [p for group in self.param_groups for p in group["params"]]
        if self.average is None:
            self.average = [p.clone() for p in params]
        for average, p in zip(self.average, params, strict=True):
            average.lerp_(p, 0.25)

    def swap(self, keep: bool = False) -> int:
        params = [p for group in self.param_groups for p in group["params"]]
        for average, p in zip(self.average or [], params, strict=True):
            kept = p.data.clone()
            p.data.copy_(average)
            if not keep:
                average.copy_(kept)
        return 7


class Scaled(Own):
    """Its method takes arguments and calls another one."""

    @torch.no_grad()
    def scale(self, by: float, only: int | None = None) -> None:
        for index, group in enumerate(self.param_groups):
            if only in (None, index):
                for p in group["params"]:
                    p.mul_(by)

    def halve(self, *, times: int) -> None:
        for _ in range(times):
            self.scale(0.5)


Act = Callable[[Any], Any]
# Optimizer; what is called before training, to show the other weights, and to go on.
EXACT: dict[str, tuple[Callable[..., Any], Act, Act, Act]] = {
    "schedule-free": (ScheduleFree, lambda o: o.train(), lambda o: o.eval(), lambda o: o.train()),
    "slow": (Slow, lambda o: None, lambda o: o.backup(), lambda o: o.restore()),
    "averaged": (Averaged, lambda o: None, lambda o: o.swap(), lambda o: o.swap(keep=True)),
    "scaled": (
        Scaled,
        lambda o: o.scale(2.0),
        lambda o: o.halve(times=2),
        lambda o: o.scale(4.0, only=0),
    ),
}


# ---- against plain torch


def rounded(weights: Weights, precision: str) -> Weights:
    return {name: value.to(DTYPES[precision]) for name, value in weights.items()}


def of(model: nn.Module) -> Weights:
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def plain(name: str) -> list[Weights]:
    """The weights before training, in training, shown, after a step on them, and at the end."""
    make, begin, show, go_on = EXACT[name]
    model, seen = Net(), []
    optimizer = make(model.parameters())

    def train(first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            loss = sum(model(x) for x in inputs(step, "fp32")) / WORLD
            loss.backward()
            optimizer.step()

    for action, span in ((begin, (0, 3)), (show, None), (go_on, (3, 6))):
        action(optimizer)
        seen.append(of(model))
        if span is not None:
            train(*span)
            seen.append(of(model))
    return seen


def sharded(
    name: str, strategy: str, precision: str, folder: str, more: Any = None, device: str = "cpu"
) -> dict[str, Any]:
    import penstock  # noqa: PLC0415

    make, begin, show, go_on = EXACT[name]
    model, rank = moved(Net(), device), dist.get_rank()
    config = {
        "strategy": strategy,
        "precision": precision,
        "units": {"modules": ["Block"]},
        "comm": {"timeout_s": 30, "bucket_bytes": 0},
    } | (more or {})
    engine = penstock.initialize(model, config, optimizer=make(model.parameters()))
    seen: list[Weights] = []
    shown: list[Weights] = []

    def look() -> None:
        with engine.gathered():
            shown.append(of(model))
        seen.append(engine.state_dict(rank0_only=False))
        seen[-1] = {name: seen[-1][name] for name in shown[-1]}

    def train(first: int, last: int) -> None:
        for step in range(first, last):
            for _ in range(16):  # fp16 skips steps that overflow
                engine.backward(engine(inputs(step, precision)[rank].to(device)))
                if engine.step():
                    break
            else:
                raise AssertionError("no step was applied")

    for action, span in ((begin, (0, 3)), (show, None), (go_on, (3, 6))):
        action(engine.optimizer)
        # An evaluation comes first, so that the call alone must have published.
        with torch.no_grad():
            loss = engine(inputs(0, precision)[0].to(device))
        look()
        with engine.gathered():
            again = model(inputs(0, precision)[0].to(device)) if strategy in REST_WHOLE else loss
        assert torch.equal(loss, again)
        if span is None:
            engine.save(folder, tag="shown")
        else:
            train(*span)
            look()
    param = engine.param_state(model.blocks[0].weight, "param").cpu()
    assert torch.equal(param, seen[-1]["blocks.0.weight"])
    assert precision != "fp16" or engine.skipped_steps
    engine.load(folder, tag="shown", weights_only=True)
    look()
    engine.close()
    return {"seen": seen, "shown": shown, "closed": of(model)}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", EXACT)
def test_all_ranks_see_what_plain_torch_gives(name, strategy, precision, pools, tmp_path):
    compared(name, precision, pools(WORLD).run(sharded, name, strategy, precision, str(tmp_path)))


def compared(name: str, precision: str, outcomes: list[dict[str, Any]]) -> None:
    """Asserts that all ranks saw the weights of plain torch at each look."""
    theirs = plain(name)
    theirs.append(theirs[2])  # the checkpoint of the shown weights
    for found in outcomes:
        assert len(found["seen"]) == len(theirs) == 6
        for ours, shown, expected in zip(found["seen"], found["shown"], theirs, strict=True):
            for key, value in expected.items():
                assert torch.allclose(ours[key], value, rtol=1e-6, atol=1e-6), key
            low = rounded(ours, precision)
            assert all(torch.equal(shown[key], low[key]) for key in shown), "not published"


def resumed(name: str, strategy: str, folder: str) -> Weights:
    """Saves while other weights are shown; another engine loads, goes on and trains."""
    import penstock  # noqa: PLC0415

    make, begin, show, go_on = EXACT[name]

    def start() -> Any:
        model = Net()
        config = {"strategy": strategy, "comm": {"timeout_s": 30}}
        return penstock.initialize(model, config, optimizer=make(model.parameters()))

    def train(engine: Any, first: int, last: int) -> None:
        for step in range(first, last):
            engine.backward(engine(inputs(step, "fp32")[dist.get_rank()]))
            assert engine.step()

    engine = start()
    begin(engine.optimizer)
    train(engine, 0, 3)
    show(engine.optimizer)
    engine.save(folder)
    engine.close()
    engine = start()
    engine.load(folder)
    go_on(engine.optimizer)
    train(engine, 3, 6)
    weights = engine.state_dict(rank0_only=False)
    engine.close()
    return weights


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("name", ["schedule-free", "slow"])
def test_a_checkpoint_of_shown_weights_goes_on(name, strategy, pools, tmp_path):
    theirs = plain(name)[-1]
    for ours in pools(WORLD).run(resumed, name, strategy, str(tmp_path)):
        for key, value in theirs.items():
            assert torch.allclose(ours[key], value, rtol=1e-6, atol=1e-6), key


# ---- refused at the call


class Sam(Own):
    """Sharpness-aware (arXiv:2010.01412), element by element: both steps read gradients."""

    @torch.no_grad()
    def first_step(self) -> None:
        for _, p, state in self.each():
            if p.grad is not None:
                state["old"] = p.clone()
                p.add_(p.grad, alpha=0.1)

    @torch.no_grad()
    def keep_gradient(self) -> None:
        for _, p, state in self.each():
            if p.grad is not None:
                state["kept"] = p.grad.clone()


class Others(Own):
    @torch.no_grad()
    def normalize(self) -> None:
        for _, p, _ in self.each():
            p.div_(p.norm())

    def weight_norm(self) -> float:
        return sum(float(p.detach().pow(2).sum()) for _, p, _ in self.each())

    def replace(self) -> None:
        for _, p, _ in self.each():
            p.data = 2 * p.data

    @torch.no_grad()
    def by(self, function: Any) -> None:
        for _, p, _ in self.each():
            p.copy_(function(p))

    @contextlib.contextmanager
    def halved(self) -> Iterator[None]:
        for _, p, _ in self.each():
            p.data.mul_(0.5)
        yield
        for _, p, _ in self.each():
            p.data.mul_(2)

    @torch.no_grad()
    def perturb(self) -> None:
        for _, p, _ in self.each():
            p.add_(torch.randn_like(p))

    def fail(self) -> None:
        raise LookupError("no average yet")


def direct(o: Any) -> None:
    for group in o.param_groups:
        for p in group["params"]:
            p.data.mul_(0.5)


def inside(o: Any) -> None:
    with torch.no_grad():
        for group in o.param_groups:
            torch._foreach_mul_(group["params"], 0.5)


REFUSED: dict[str, tuple[Callable[..., Any], Act, list[str]]] = {
    "SAM's first step": (Sam, lambda o: o.first_step(), ["Sam.first_step()", "gradients"]),
    "a gradient kept": (Sam, lambda o: o.keep_gradient(), ["Sam.keep_gradient()", "gradients"]),
    "a norm": (Others, lambda o: o.normalize(), ["Others.normalize()", "slices"]),
    "a result": (Others, lambda o: o.weight_norm(), ["Others.weight_norm()", "returns"]),
    "p.data = x": (Others, lambda o: o.replace(), ["Others.replace()", "copy_"]),
    "a function": (Others, lambda o: o.by(torch.neg), ["Others.by()", "function"]),
    "a context": (Others, lambda o: o.halved(), ["Others.halved()", "context"]),
    "noise": (Others, lambda o: o.perturb(), ["Others.perturb()", "slices"]),
    "an error": (Others, lambda o: o.fail(), ["Others.fail()", "no average yet"]),
    "p.data.mul_ of a group": (Others, direct, ["shard", "step()", "gathered(write=True)"]),
    "_foreach_mul_ of a group": (Others, inside, ["shard", "step()", "gathered(write=True)"]),
    "a kept view": (Others, lambda o: o.kept.mul_(2), ["shard", "step()"]),
}


def refused(name: str, strategy: str, precision: str) -> tuple[str, list[Weights]]:
    import penstock  # noqa: PLC0415

    make, act, _ = REFUSED[name]
    model, rank = Net(), dist.get_rank()
    config = {"strategy": strategy, "precision": precision, "comm": {"timeout_s": 30}}
    engine = penstock.initialize(model, config, optimizer=make(model.parameters()))
    optimizer = engine.optimizer

    def keep(*_: Any) -> None:
        optimizer.kept = optimizer.param_groups[0]["params"][0].data

    handle = optimizer.register_step_pre_hook(keep)
    seen = []
    for step in range(2):
        engine.backward(engine(inputs(step, precision)[rank]))
        if step == 1:
            try:
                act(optimizer)
                told = ""
            except RuntimeError as error:
                told = str(error)
        assert engine.step()
        seen.append(engine.state_dict(rank0_only=False))
    handle.remove()
    engine.close()
    return told, seen


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_and_nothing_changed(name, strategy, precision, pools):
    model = Net()
    optimizer = Own(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        (sum(model(x) for x in inputs(step, "fp32")) / WORLD).backward()
        optimizer.step()
    expected = of(model)
    outcomes = pools(WORLD).run(refused, name, strategy, precision)
    anywhere = "; ".join(told for told, _ in outcomes)
    for told, seen in outcomes:
        # A write without the engine fails where the rank has elements to write.
        text = anywhere if REFUSED[name][2][0] == "shard" else told
        assert all(words in text for words in REFUSED[name][2]), told
        for key, value in expected.items():
            assert torch.allclose(seen[-1][key], value, rtol=1e-6, atol=1e-6), key


# ---- what a method that touches no weights may do, and ranks that differ


class Counting(Own):
    """Keeps a value of its own in its state, as MADGRAD does."""

    called = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["steps"] = self.state.get("steps", torch.zeros(2)) + 1
        super().step()

    def count(self) -> int:
        self.called += 1
        return self.called

    @torch.no_grad()
    def zero_on_one_rank(self) -> None:
        for _, p, _ in self.each():
            p.zero_()
        if p.numel() < 8 and dist.get_rank() == 1:  # not in the trial
            raise ValueError("not here")


def on_rank_0_alone(strategy: str) -> int:
    import penstock  # noqa: PLC0415

    model = Net()
    config = {"strategy": strategy, "comm": {"timeout_s": 20}}
    engine = penstock.initialize(model, config, optimizer=Counting(model.parameters()))
    counted = engine.optimizer.count() if dist.get_rank() == 0 else 1
    for step in range(2):
        engine.backward(engine(inputs(step, "fp32")[0]))
        engine.step()
    engine.close()
    return counted


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_method_without_weights_needs_no_other_rank(strategy, pools):
    assert pools(WORLD).run(on_rank_0_alone, strategy) == [1, 1]


def fails_on_one_rank() -> str:
    import penstock  # noqa: PLC0415

    model = Net()
    config = {"strategy": "zero3", "comm": {"timeout_s": 20}}
    engine = penstock.initialize(model, config, optimizer=Counting(model.parameters()))
    try:
        engine.optimizer.zero_on_one_rank()
    except (RuntimeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"
    engine.close()
    return told


def test_an_error_on_one_rank_is_raised_on_all(pools):
    first, second = pools(WORLD).run(fails_on_one_rank)
    assert "rank 1" in first and "not here" in first and "zero_on_one_rank()" in first
    assert second == "ValueError: not here"


def called_during(where: str) -> str:
    import penstock  # noqa: PLC0415

    model = Net()
    config = {"strategy": "zero3", "units": {"modules": ["Block"]}, "comm": {"timeout_s": 20}}
    engine = penstock.initialize(model, config, optimizer=Scaled(model.parameters()))
    scale = engine.optimizer.scale
    try:
        if where == "forward":
            model.blocks[1].register_forward_pre_hook(lambda *_: scale(2.0))
            engine(inputs(0, "fp32")[0])
        elif where == "backward":
            loss = engine(inputs(0, "fp32")[0])
            loss.register_hook(lambda grad: scale(2.0))
            engine.backward(loss)
        elif where == "gathered":
            with engine.gathered():
                scale(2.0)
        else:
            engine.close()
            scale(2.0)
        return ""
    except RuntimeError as error:
        return str(error)
    finally:
        engine.close()


@pytest.mark.parametrize("where", ["forward", "backward", "gathered", "close"])
def test_refused_during(where, pools):
    words = "closed" if where == "close" else f"in {where}" if "ward" in where else where
    for told in pools(WORLD).run(called_during, where):
        assert "Scaled.scale()" in told and words in told, told


def test_random_numbers_are_not_drawn():
    """The trials of initialize() and of a method leave torch's generator alone."""
    import penstock  # noqa: PLC0415

    model = Net()
    state = torch.get_rng_state()
    engine = penstock.initialize(model, optimizer=Others(model.parameters()))
    with pytest.raises(penstock.RuntimeFault):
        engine.optimizer.perturb()
    assert torch.equal(torch.get_rng_state(), state)
    engine.close()
