"""Ordinary things that people do around an engine whose ranks compute one model together: what
plain torch gives, or an error at that moment."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import re
from typing import Any

import pytest
import tensor_models
import torch
import torch.distributed as dist
import zoo
from ranks import Failure
from tensor_models import Parts
from torch import nn

pytestmark = pytest.mark.timeout(480)
LIMIT = 1e-5
STRATEGIES = ["ddp", "zero2", "zero3"]
BATCHES = [batch for batch in zoo.batches("parts", 2)][:6]


def build(seed: int = 7, **options: Any) -> nn.Module:
    from models import fill  # noqa: PLC0415

    return fill(Parts(**options), seed)


def start(model: nn.Module, strategy: str, tensor: int = 2, **config: Any) -> Any:
    import penstock  # noqa: PLC0415

    settings = {
        "strategy": strategy,
        "mesh": {"tensor": tensor},
        "parallel": {"rules": tensor_models.rules(tensor)},
        "optimizer": {"type": "SGD", "lr": 0.1},
        "comm": {"timeout_s": 120},
    }
    return penstock.initialize(model, settings | config)


class Plain:
    """An engine's calls in plain torch, on the same batch as its tensor ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.module, self.accumulate = model, 1
        self.optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.accumulate).backward()

    def step(self, force: bool = False) -> bool:
        self.optimizer.step()
        self.optimizer.zero_grad()
        return True

    @contextlib.contextmanager
    def gathered(self, *_: Any, **__: Any) -> Any:
        yield

    def full_grads(self) -> dict[str, torch.Tensor]:
        return {n: p.grad.clone() for n, p in self.module.named_parameters() if p.grad is not None}

    def set_grads(self, given: dict[str, torch.Tensor]) -> None:
        for name, value in given.items():
            self.module.get_parameter(name).grad = value.clone()

    def state_dict(self, **_: Any) -> Any:
        return self.module.state_dict()

    def close(self) -> None:
        pass


def apart(ours: Any, theirs: Any) -> float:
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    return max(float((ours[n].double() - theirs[n].double()).abs().max()) for n in theirs)


def told(engine: Any, story: Any) -> Any:
    said = story(engine)
    weights = {n: v.clone() for n, v in engine.state_dict(rank0_only=False).items()}
    engine.close()
    left = {n: p.detach().clone() for n, p in engine.module.state_dict().items()}
    return {"weights": weights, "left": left, "said": said}


def compared(story: Any, strategy: str, tensor: int, config: Any) -> dict[str, float]:
    """On a rank: rank 0's weights count, whatever others have."""
    twice = story in (uses_a_block_twice, reads_late_gradients, keeps_a_window_open)
    options = {"recompute": "reentrant", "twice": True} if twice else {}
    ours = told(start(build(7 + dist.get_rank(), **options), strategy, tensor, **config), story)
    theirs = told(Plain(build(**options)), story)
    return {name: apart(ours[name], theirs[name]) for name in theirs}


def one_step(engine: Any, index: int = 0) -> float:
    loss = engine(*BATCHES[index])
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def said_by_a_step(engine: Any, *batch: torch.Tensor) -> str:
    try:
        engine.backward(engine(*batch))
        engine.step()
    except RuntimeError as error:
        return str(error)
    finally:
        engine.close()
    return "nothing"


def losses(*values: float) -> dict[str, torch.Tensor]:
    return {str(i): torch.tensor(value) for i, value in enumerate(values)}


# ---- stories, which plain torch tells alike


def reads_gathered(engine):
    first = one_step(engine)
    with engine.gathered():
        seen = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        copied = copy.deepcopy(engine.module)
    return seen | losses(first, float(copied(*BATCHES[1]).detach()), one_step(engine, 1))


def writes_gathered(engine):
    first = one_step(engine)
    with engine.gathered(write=True), torch.no_grad():
        if isinstance(engine, Plain) or dist.get_rank() == 0:
            engine.module.blocks[0].qkv.weight.mul_(1.1)
            engine.module.tokens.weight[3].zero_()
            engine.module.blocks[1].down.weight.data.add_(0.01)
            engine.module.norm.bias.add_(0.1)
    return losses(first, one_step(engine, 1), one_step(engine, 2))


def writes_some_nested(engine):
    weight = engine.module.blocks[0].attention.out.weight
    with engine.gathered([weight]), engine.gathered([weight], write=True), torch.no_grad():
        weight.mul_(1.5)
    return losses(one_step(engine), one_step(engine, 1))


def changes_gradients(engine):
    engine.backward(engine(*BATCHES[0]))
    grads = engine.full_grads()
    engine.set_grads({name: value * 0.5 for name, value in grads.items()})
    again = engine.full_grads()
    engine.step()
    return grads | {f"{name} again": value for name, value in again.items()}


def window_of(engine, count):
    """Batches of a window, which plain torch averages over by hand."""
    if isinstance(engine, Plain):
        engine.accumulate = count
    for index in range(count):
        engine.backward(engine(*BATCHES[index]))


def forces_a_step(engine):
    window_of(engine, 2)
    engine.step(force=True)  # two of three
    window_of(engine, 3)
    engine.step()
    return losses(float(engine(*BATCHES[3])))


def two_backwards(engine):
    """Two forwards whose gradients come one after the other, and a part of the model alone."""
    engine.backward(engine(*BATCHES[0]) + engine(*BATCHES[1]))
    engine.backward(engine(*BATCHES[2]))
    engine.step()
    return losses(one_step(engine, 3))


def penalizes(engine):
    """torch.autograd.grad inside a step."""
    loss = engine(*BATCHES[0])
    torch.autograd.grad(loss, [engine.module.blocks[0].norms[1].weight], retain_graph=True)
    engine.backward(loss)
    engine.step()
    return losses(one_step(engine, 1))


def freezes(engine):
    one_step(engine)
    for name in ("key_norm", "key", "out"):
        getattr(engine.module.blocks[1].attention, name).requires_grad_(False)
    second = one_step(engine, 1)
    engine.module.blocks[1].attention.key_norm.requires_grad_(True)
    return losses(second, one_step(engine, 2))


def keeps_a_window_open(engine):
    """The last backward of a window reaches nothing that trains: the window goes on."""
    named = engine.module.named_parameters()
    trained = [param for name, param in named if param.requires_grad and "never" not in name]
    if isinstance(engine, Plain):
        engine.accumulate = 2
    engine.backward(engine(*BATCHES[0]))
    shift = torch.zeros(tensor_models.WIDTH, requires_grad=True)
    hook = engine.module.tokens.register_forward_hook(lambda *args: args[-1] + shift)
    for param in trained:
        param.requires_grad_(False)
    engine.backward(engine(*BATCHES[1]))
    hook.remove()
    for param in trained:
        param.requires_grad_(True)
    if not isinstance(engine, Plain):
        assert engine._core.window_complete(False)  # as far as one can see
        assert engine.step() is False
    engine.backward(engine(*BATCHES[2]))
    engine.step()
    return losses(float(engine(*BATCHES[3])))


def uses_a_block_twice(engine):
    return losses(*(one_step(engine, index) for index in range(3)))


def reads_late_gradients(engine):
    engine.backward(engine(*BATCHES[0]))
    grads = {n: g for n, g in engine.full_grads().items() if "never" not in n}
    engine.step()
    return grads | losses(one_step(engine, 1))


def gathers_between_forwards(engine):
    first = engine(*BATCHES[0])
    with engine.gathered():
        seen = float(engine.module.blocks[0].qkv.weight.detach().sum())
    engine.backward(first + engine(*BATCHES[1]))
    engine.step()
    return losses(seen, one_step(engine, 2))


def evaluates(engine):
    one_step(engine)
    engine.module.eval()
    with torch.no_grad():
        seen = float(engine(*BATCHES[4]))
    engine.module.train()
    return losses(seen, one_step(engine, 1))


def raises_in_between(engine):
    """A forward that raises on every rank, and one that nobody goes back from."""
    one_step(engine)
    with contextlib.suppress(IndexError):
        engine(torch.full_like(BATCHES[0][0], 1000), BATCHES[0][1])
    engine(*BATCHES[1])
    return losses(one_step(engine, 2))


STORIES = [
    (reads_gathered, {}),
    (writes_gathered, {}),
    (writes_some_nested, {}),
    (changes_gradients, {}),
    (forces_a_step, {"batch": {"accumulate": 3}}),
    (two_backwards, {"batch": {"reduction": "sum", "accumulate": 1}}),
    (penalizes, {}),
    (freezes, {}),
    (keeps_a_window_open, {"batch": {"accumulate": 2}}),
    (uses_a_block_twice, {"comm": {"timeout_s": 120, "bucket_bytes": 0}}),
    (reads_late_gradients, {"comm": {"timeout_s": 120, "bucket_bytes": 0}}),
    (gathers_between_forwards, {}),
    (evaluates, {}),
    (raises_in_between, {}),
]


@pytest.mark.parametrize(("world", "strategy"), [*((2, s) for s in STRATEGIES), (4, "zero2")])
@pytest.mark.parametrize(("story", "config"), STORIES, ids=lambda v: getattr(v, "__name__", ""))
def test_story(story, config, world, strategy, pools):
    for found in pools(world).run(compared, story, strategy, 2, config):
        assert all(value <= LIMIT for value in found.values()), found


# ---- what cannot be is an error at that moment, and the next step is as if it had not been


def edits_without_write(engine):
    with engine.gathered(), torch.no_grad():
        engine.module.blocks[0].qkv.weight.mul_(2)


def calls_inside_gathered(engine):
    with engine.gathered():
        engine(*BATCHES[0])


def copies(engine):
    copy.deepcopy(engine.module)


def asks_the_model_for_its_state(engine):
    engine.module.blocks[0].state_dict()


def gives_other_inputs(engine):
    tokens, targets = BATCHES[0]
    engine(tokens if dist.get_rank() == 0 else tokens.roll(1, 1), targets)


def trains_on_one(engine):
    engine.train(dist.get_rank() == 0)
    try:
        engine(*BATCHES[0])
    finally:
        engine.train()


def sets_a_part(engine):
    engine.backward(engine(*BATCHES[0]))
    engine.set_grads({"blocks.0.qkv.weight": torch.zeros(72, 48)})


def differentiates_twice(engine):
    loss = engine(*BATCHES[0])
    (slope,) = torch.autograd.grad(loss, [engine.module.norm.weight], create_graph=True)
    engine.backward(loss + slope.square().sum())


def gives_a_gradient_by_hand(engine):
    engine.module.norm.weight.grad = torch.ones(48)
    engine.step()


def steps_inside_gathered(engine):
    engine.backward(engine(*BATCHES[0]))
    with engine.gathered(write=True):
        engine.step()


ERRORS = [
    (steps_inside_gathered, "step\\(\\) was called inside gathered"),
    (edits_without_write, "was changed in place inside gathered"),
    (calls_inside_gathered, "inside gathered\\(\\): the parameters are full tensors"),
    (copies, "this rank has a part of some parameters"),
    (asks_the_model_for_its_state, "Use engine.state_dict"),
    (gives_other_inputs, "ranks 0 and 1 compute one model together"),
    (trains_on_one, "ranks 0 and 1 compute one model together"),
    (sets_a_part, "has shape \\[72, 48\\], but its parameter has \\[144, 48\\]"),
    (differentiates_twice, "no second derivative"),
]


def raises(story: Any, strategy: str) -> str:
    engine = start(build(), strategy)
    plain = Plain(build())
    one_step(engine), one_step(plain)
    try:
        story(engine)
        said = ""
    except (RuntimeError, ValueError) as error:
        said = str(error)
    engine.zero_grad()
    for index in (1, 2):
        assert abs(one_step(engine, index) - one_step(plain, index)) <= LIMIT, said
    assert apart(engine.state_dict(rank0_only=False), plain.state_dict()) <= LIMIT
    engine.close()
    return said


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize(("story", "expected"), ERRORS, ids=lambda v: getattr(v, "__name__", ""))
def test_error(story, expected, strategy, pools):
    for said in pools(2).run(raises, story, strategy):
        assert re.search(expected, said), said


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x + self.down(self.up(x).relu())).square().mean()


def drops(seed_of_rank: bool, config: Any) -> float:
    torch.manual_seed(1)
    model = Dropping()
    torch.manual_seed(dist.get_rank() if seed_of_rank else 5)
    rules = {"up": "column", "down": "row"}
    engine = start(model, "zero3", **{"parallel": {"rules": rules}} | config)
    x = torch.ones(4, 16)
    with torch.no_grad():
        engine.eval()
        engine(x)  # draws nothing
        engine.train()
    try:
        loss = engine(x)
        engine.backward(loss)
        engine.step()
    finally:
        engine.close()
    return float(loss.detach())


def test_dropout_is_drawn_alike(pools):
    for alike in ((False, {}), (True, {"seed": 3})):
        told = pools(2).run(drops, *alike)
        assert told[0] == told[1]
    for failure in pools(2).attempt(drops, True, {}):
        assert isinstance(failure, Failure)
        assert "drew different ones" in failure.text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tiling": {"max_bytes": 1024}}, "is not supported with tensor ranks yet"),
    ({"parallel": {"rules": {"tokens": "vocab"}}}, 'module "head" also uses'),
    ({"parallel": {"rules": {"*.qkv": "column:7"}}}, "which cannot be divided into 7 equal parts"),
    ({"parallel": {"rules": {"*.nothing": "row"}}}, "no module or parameter matches this pattern"),
    ({"parallel": {"rules": {"*.heads": "divide:3"}}}, "is not divisible by the 3"),
    ({"parallel": {"rules": {"*.head": "divide"}}}, "no module has an attribute of that name"),
    ({"parallel": {}}, "Layers that can be cut: tokens, places, blocks.0.attention.query"),
    ({"mesh": {"tensor": 3}}, "do not divide 2 ranks evenly"),
]


def refuses(config: Any) -> str:
    model = build()
    try:
        start(model, "zero3", **config)
    except ValueError as error:
        assert apart(dict(model.named_parameters()), dict(build().named_parameters())) == 0
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("config", "expected"), REFUSED)
def test_refused(config, expected, pools):
    for said in pools(2).run(refuses, config):
        assert expected in said, said


def optimizer_of_ones_own() -> str:
    import penstock  # noqa: PLC0415

    model = build()
    settings = {"mesh": {"tensor": 2}, "parallel": {"rules": tensor_models.rules(2)}}
    make = torch.optim.RMSprop
    try:
        penstock.initialize(model, settings, optimizer=lambda params: make(params, lr=0.1))
    except ValueError as error:
        return str(error)
    return "nothing"


def test_an_optimizer_of_ones_own_is_refused(pools):
    for said in pools(2).run(optimizer_of_ones_own):
        assert "does not work on a part of the model yet" in said


def closes(gather: bool, inside: bool) -> Any:
    engine = start(build(), "zero2")
    one_step(engine)
    part = engine.module.blocks[1].down.weight.detach()
    expected = engine.state_dict(rank0_only=False)
    with engine.gathered() if inside else contextlib.nullcontext():
        engine.close(gather=gather)
    model = engine.module
    assert model.blocks[0].attention.heads == tensor_models.HEADS
    with pytest.raises(RuntimeError, match="is a view of the part|has no values"):
        part.sum()
    try:
        value = model.blocks[0].qkv.weight.sum()
    except RuntimeError as error:
        return str(error)
    plain = Plain(model)
    one_step(plain, 1)  # an ordinary model again
    return float(value) - float(expected["blocks.0.qkv.weight"].sum())


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("gather", [False, True])
def test_close(gather, inside, pools):
    for told in pools(2).run(closes, gather, inside):
        if gather or inside:
            assert abs(told) < LIMIT
        else:
            assert "has no values" in told


def built_sharded(tensor: int) -> float:
    import penstock  # noqa: PLC0415

    torch.manual_seed(11)
    with penstock.init():
        model = Parts()
    torch.manual_seed(11)
    plain = Plain(Parts())
    engine = start(model, "zero3", tensor)
    first = abs(one_step(engine) - one_step(plain))
    far = apart(engine.state_dict(rank0_only=False), plain.state_dict())
    engine.close()
    return max(first, far)


def test_a_model_built_sharded(pools):
    assert max(pools(2).run(built_sharded, 2)) <= LIMIT
    assert max(pools(4).run(built_sharded, 4)) <= LIMIT


def keeps_state() -> float:
    """What is kept for one parameter, whole."""
    adam = {"optimizer": {"type": "AdamW", "lr": 0.01, "eps": 1e-4}}
    engine = start(build(), "zero2", **adam)
    plain = Plain(build())
    plain.optimizer = torch.optim.AdamW(plain.module.parameters(), 0.01, eps=1e-4)
    one_step(engine), one_step(plain)
    far = 0.0
    for name in ("blocks.0.qkv.weight", "blocks.1.down.weight", "tokens.weight", "norm.bias"):
        param, kept = engine.module.get_parameter(name), plain.module.get_parameter(name)
        average = engine.param_state(param, "exp_avg")
        far = max(far, float((average - plain.optimizer.state[kept]["exp_avg"]).abs().max()))
        engine.set_param_state(param, "exp_avg", average * 2)
        plain.optimizer.state[kept]["exp_avg"].mul_(2)
    one_step(engine, 1), one_step(plain, 1)
    far = max(far, apart(engine.state_dict(rank0_only=False), plain.state_dict()))
    engine.close()
    return far


def test_state_of_a_parameter_is_whole(pools):
    assert max(pools(2).run(keeps_state)) <= LIMIT


def replicas(strategy: str, tensor: int) -> Any:
    """After 20 steps: what tensor ranks have alike, and what data ranks have alike."""
    engine = start(build(), strategy, tensor, optimizer={"type": "AdamW", "lr": 0.01})
    for step in range(20):
        one_step(engine, step % len(BATCHES))
    whole = engine.state_dict(rank0_only=False)
    norm = engine.grad_norm
    engine.close()
    left = {n: p.detach() for n, p in engine.module.state_dict().items()}
    text = b"".join(v.numpy().tobytes() for v in (*whole.values(), *left.values()))
    return hashlib.sha256(text).hexdigest(), norm


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("world", "tensor"), [(2, 2), (4, 2), (4, 4)])
def test_replicas_are_equal(world, tensor, strategy, pools):
    told = pools(world).run(replicas, strategy, tensor)
    assert len(set(told)) == 1


# ---- rules that leave something out are seen in the first step


def without_rules(left_out: list[str]) -> str:
    rules = {name: style for name, style in tensor_models.rules(2).items() if name not in left_out}
    parallel = {"rules": rules, "verify": "off"}
    return said_by_a_step(start(build(), "zero2", parallel=parallel), *BATCHES[0])


@pytest.mark.parametrize("world", [2, 4])
def test_a_norm_of_heads_without_a_rule(world, pools):
    for said in pools(world).run(without_rules, ["*.key_norm.weight"]):
        assert re.search('gradient of ".*key_norm.weight" is not the same on ranks', said), said


class ByHand(nn.Module):
    """Reads its embedding's weight for the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(x, self.up.weight)
        return self.down(hidden).square().mean()


def reads_by_hand() -> str:
    rules = {"up": "column", "down": "row"}
    return said_by_a_step(start(ByHand(), "ddp", parallel={"rules": rules}), torch.ones(2, 16))


def test_a_layer_that_is_not_called(pools):
    for said in pools(2).run(reads_by_hand):
        assert 'cut module "up", which was not called before the first step' in said
