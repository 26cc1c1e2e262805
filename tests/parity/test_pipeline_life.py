"""Ordinary things that people do around an engine of stages: what plain torch gives, or an error at
that moment."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import hugging_face as hf
import pipeline_models as models
import pytest
import torch
import torch.utils.checkpoint
from ranks import Failure

pytestmark = pytest.mark.timeout(480)
LIMIT = 1e-5
STRATEGIES = ["ddp", "zero2", "zero3"]
SPLIT: dict[str, Any] = {"parallel": {"schedule": "zero_bubble"}}


def start(model: Any, strategy: str = "zero2", micro: int = 2, **config: Any) -> Any:
    import penstock  # noqa: PLC0415

    settings = {
        "strategy": strategy,
        "mesh": {"pipeline": 2},
        "batch": {"accumulate": micro},
        "optimizer": {"type": "SGD", "lr": 0.1},
        "comm": {"timeout_s": 20},
        "units": {"layer_bytes": 1},
    }
    return penstock.initialize(model, settings | config)


def far(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    return max(float((ours[n].float() - theirs[n]).norm() / theirs[n].norm()) for n in theirs)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def plain_steps(model: torch.nn.Module, batches: list[Any], micro: int) -> torch.nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        optimizer.zero_grad()
        for part in models.parts(batch, micro):
            (model(**part) / micro).backward()
        optimizer.step()
    return model


def looks(strategy: str, tied: bool) -> dict[str, float]:
    """gathered(), with and without write, and what close() leaves."""
    model = models.build(tied=tied)
    engine = start(model, strategy)
    plain = models.build(tied=tied)
    batches = [models.batch(step, 0, 2) for step in range(3)]
    engine.train_batch(batches[0])
    plain_steps(plain, batches[:1], 2)
    with engine.gathered():
        seen = far(weights_of(model), weights_of(plain))
    with engine.gathered(write=True):
        if torch.distributed.get_rank() == 0:
            for one in model.parameters():
                one.data.mul_(1.5)
    for one in plain.parameters():
        one.data.mul_(1.5)
    engine.train_batch(batches[1])
    plain_steps(plain, batches[1:2], 2)
    engine.close()
    closed = far(weights_of(model), weights_of(plain))
    plain_steps(model, batches[2:], 2)  # an ordinary model again
    plain_steps(plain, batches[2:], 2)
    return {"seen": seen, "closed": closed, "after": far(weights_of(model), weights_of(plain))}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_looks_at_weights(strategy, tied, pools):
    for told in pools(2).run(looks, strategy, tied):
        assert max(told.values()) < LIMIT, told


def edits(strategy: str) -> str:
    engine = start(models.build(), strategy)
    try:
        with engine.gathered():
            if torch.distributed.get_rank() == 0:
                engine.module.head.weight.data.mul_(2)  # of the other stage
    except RuntimeError as error:
        return str(error)
    finally:
        engine.close()
    return "nothing"


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_edits_of_another_stage_are_refused(strategy, pools):
    for said in pools(2).run(edits, strategy):
        assert "head.weight" in said and "gathered" in said, said


def reads() -> list[str]:
    engine = start(models.build(), "zero2")
    said = []
    for look in (
        lambda: engine.module.head.weight.sum(),
        lambda: engine.module.tokens.weight.sum(),
        lambda: engine(**models.batch(0, 0, 1)),
        lambda: engine.module(**models.batch(0, 0, 1)),
        lambda: engine.module.blocks[0](torch.zeros(1, 2, models.WIDTH)),
    ):
        try:
            look()
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))
    engine.train_batch(models.batch(0, 0, 2))
    engine.close()
    return said


def test_reads_of_another_stage_say_so(pools):
    first, second = pools(2).run(reads)
    assert "is in stage 1 of the pipeline" in first[0] and first[1] == "nothing", first
    assert second[0] == "nothing" and "is in stage 0 of the pipeline" in second[1], second
    for said in (first, second):
        for one in said[2:]:
            assert "Train with engine.train_batch(), which runs all stages" in one, one


def gradients(strategy: str, tied: bool) -> dict[str, float]:
    """full_grads() in the middle of a loop is of whole windows: here by state of the optimizer."""
    model = models.build(tied=tied)
    engine = start(model, strategy, optimizer={"type": "AdamW", "lr": 0.0})
    engine.train_batch(models.batch(0, 0, 2))
    plain = models.build(tied=tied)
    for part in models.parts(models.batch(0, 0, 2), 2):
        (plain(**part) / 2).backward()
    told = {}
    for name, param in plain.named_parameters():
        ours = engine.param_state(dict(model.named_parameters())[name], "exp_avg")
        told[name] = float((ours - 0.1 * param.grad).norm() / (0.1 * param.grad).norm())
    engine.close()
    return told


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_of_every_parameter(strategy, tied, pools):
    for told in pools(2).run(gradients, strategy, tied):
        assert max(told.values()) < LIMIT, told


def goes_on(strategy: str, other: str, path: str, mesh: dict[str, int]) -> dict[str, Any]:
    """Saved in stages, loaded with another mesh and strategy."""
    import penstock  # noqa: PLC0415

    def engine_of(strategy: str, mesh: dict[str, int]) -> Any:
        return penstock.initialize(
            models.build(tied=True),
            {
                "strategy": strategy,
                "mesh": mesh,
                "batch": {"accumulate": 4 // (4 // (mesh.get("pipeline", 1) * 1)) or 1},
                "optimizer": {"type": "AdamW", "lr": 1e-2},
                "comm": {"timeout_s": 20},
                "units": {"layer_bytes": 1},
            },
        )

    engine = engine_of(strategy, {"pipeline": 2})
    engine.train_batch(models.batch(0, 7, 2))
    engine.save(path, "one")
    saved = engine.state_dict(rank0_only=False)
    engine.close()
    again = engine_of(other, mesh)
    again.load(path, "one")
    loaded = again.state_dict(rank0_only=False)
    same = all(torch.equal(saved[name], one) for name, one in loaded.items())
    loss = float(again.eval_batch(models.batch(1, 7, 4)))
    steps = again.steps
    again.close()
    return {"same": same, "loss": loss, "steps": steps, "names": set(saved) == set(loaded)}


@pytest.mark.parametrize("mesh", [{}, {"pipeline": 2}, {"pipeline": 4}], ids=str)
@pytest.mark.parametrize(("strategy", "other"), [("zero1", "zero3"), ("zero3", "zero1")])
def test_checkpoints_go_to_any_mesh(strategy, other, mesh, pools, tmp_path):
    told = pools(4).run(goes_on, strategy, other, str(tmp_path), mesh)
    for one in told:
        assert one["same"] and one["names"] and one["steps"] == 1, one
    assert len({one["loss"] for one in told}) == 1


def precise(precision: str, strategy: str, config: dict[str, Any]) -> dict[str, Any]:
    model = models.build()
    engine = start(model, strategy, precision=precision, **config)
    plain = models.build().to(getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[precision]))
    losses, theirs = [], []
    for step in range(4):
        losses.append(float(engine.train_batch(models.batch(step, 0, 2))))
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        own = []
        for part in models.parts(models.batch(step, 0, 2), 2):
            loss = plain(**part)
            (loss / 2).backward()
            own.append(float(loss.detach()))
        theirs.append(sum(own) / 2)
        optimizer.step()
    skipped, scale = engine.skipped_steps, engine.loss_scale
    engine.close()
    return {"far": max(abs(a - b) for a, b in zip(losses, theirs, strict=True))} | {
        "skipped": skipped,
        "scale": scale,
    }


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("precision", "config"),
    [
        ("bf16", {}),
        ("fp16", {"loss_scale": {"initial": 2.0**10}}),
        ("fp16", {}),
        ("bf16", SPLIT),
        ("fp16", SPLIT | {"loss_scale": {"initial": 2.0**10}}),
    ],
    ids=str,
)
def test_low_precision(precision, config, strategy, pools):
    told = pools(2).run(precise, precision, strategy, config)
    assert told[0]["skipped"] == told[1]["skipped"] and told[0]["scale"] == told[1]["scale"]
    if told[0]["skipped"] == 0:
        assert told[0]["far"] < 0.1, told


def llama(kind: str, strategy: str, config: dict[str, Any]) -> dict[str, float]:
    """A model of transformers as it is, with batches of other lengths."""
    model, plain = hf.build(kind), hf.build(kind)
    engine = start(model, strategy, units={"layer_bytes": 1500}, **config)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    worst = 0.0
    for step in range(3):
        batches = [hf.batch(kind, 2 * step + i, 0) for i in range(2)]
        loss = float(engine.train_batch(iter(batches)))
        optimizer.zero_grad()
        own = []
        for one in batches:
            made = plain(**one).loss
            (made / 2).backward()
            own.append(float(made.detach()))
        optimizer.step()
        worst = max(worst, abs(loss - sum(own) / 2))
    engine.close()
    return {"losses": worst, "weights": far(weights_of(model), weights_of(plain))}


HF = [
    (kind, strategy, config)
    for kind in ("llama", "gpt2", "qwen3", "t5", "bert", "opt", "mistral")
    for strategy, config in (
        ("zero2", {}),
        ("zero3", {"activations": {"checkpoint": "unit"}}),
        ("zero1", SPLIT),
        ("zero3", SPLIT),
    )
]


@pytest.mark.parametrize(("kind", "strategy", "config"), HF, ids=str)
def test_models_of_transformers(kind, strategy, config, pools):
    for told in pools(2).run(llama, kind, strategy, config):
        assert max(told.values()) < LIMIT, told


REFUSED = [
    ({"mesh": {"pipeline": 2}, "batch": {"accumulate": 1}}, "fewer micro-batches than pipeline"),
    ({"parallel": {"stages": ["blocks.9"]}}, 'no stage can begin with "blocks.9"'),
    ({"parallel": {"stages": ["tokens"]}}, "does not come after the module listed before it"),
    ({"parallel": {"stages": ["blocks.1", "blocks.2"]}}, "names 2 modules"),
    ({"parallel": {"virtual_stages": 8, "schedule": "gpipe"}}, "the pipeline has 16 stages"),
    ({"parallel": {"virtual_stages": 2}}, 'needs "parallel.schedule"'),
    ({"tiling": {"max_bytes": 1000}}, "is not supported in pipelines yet"),
    (SPLIT | {"activations": {"checkpoint": "unit"}}, "activations.checkpoint"),
    ({"strategy": "zero2", "offload": {"optimizer": "auto"}}, "cannot choose tiers for stages"),
]


def refused(config: dict[str, Any]) -> str:
    model = models.build()
    try:
        start(model, **config)
    except ValueError as error:
        assert far(weights_of(model), weights_of(models.build())) == 0
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("config", "expected"), REFUSED, ids=str)
def test_refused(config, expected, pools):
    for said in pools(2).run(refused, config):
        assert expected in said, said


def test_split_backwards_refuse_tensor_ranks(pools):
    parallel = SPLIT["parallel"] | {"rules": {"*.up": "column", "*.down": "row"}}
    config = {"mesh": {"pipeline": 2, "tensor": 2}, "parallel": parallel}
    for said in pools(4).run(refused, config):
        assert "zero_bubble" in said and "mesh.tensor" in said, said


class Doubled(torch.autograd.Function):
    """A product with a weight whose backward counts its runs."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        Doubled.runs += 1
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0)


class Odd(models.Chain):
    """A custom function with a weight, a block that runs twice, a checkpoint, edits in place."""

    def __init__(self) -> None:
        super().__init__(layers=6)
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, models.WIDTH))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == len(self.blocks) - 2:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        x = Doubled.apply(self.norm(x), self.scale)
        x.mul_(0.5)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def odd(strategy: str, config: dict[str, Any]) -> dict[str, Any]:
    """Hooks on weights, values and accumulated gradients change what plain torch's hooks do."""
    told: dict[str, Any] = {}
    calls = {"weight": 0, "value": 0, "taken": 0}

    def hook(model: torch.nn.Module) -> None:
        def weight(grad: torch.Tensor) -> torch.Tensor:
            calls["weight"] += 1
            return grad * 2

        def value(_module: Any, _args: Any, out: torch.Tensor) -> None:
            def scaled(grad: torch.Tensor) -> torch.Tensor:
                calls["value"] += 1
                return grad * 0.5

            if out.requires_grad:
                out.register_hook(scaled)

        model.blocks[5].up.weight.register_hook(weight)
        model.blocks[3].down.register_forward_hook(value)

    model, plain = models.fill(Odd(), 3), models.fill(Odd(), 3)
    for one in (model, plain):
        hook(one)
    engine = start(model, strategy, micro=3, **config)
    batches = [models.batch(step, 0, 3) for step in range(3)]
    Doubled.runs = 0
    for one in batches:
        engine.train_batch(one)
    told["runs"], told["calls"] = Doubled.runs, dict(calls)
    engine.close()
    plain_steps(plain, batches, 3)
    told["weights"] = far(weights_of(model), weights_of(plain))
    return told


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("config", [{}, SPLIT], ids=["1f1b", "zero_bubble"])
def test_hooks_and_odd_operators(strategy, config, pools):
    told = pools(2).run(odd, strategy, config)
    assert max(one["weights"] for one in told) < LIMIT, told
    assert told[1]["runs"] == 9 and told[0]["runs"] == 0
    hooked = [one["calls"] for one in told]
    assert sum(one["weight"] for one in hooked) == 9, told
    assert sum(one["value"] for one in hooked) == 9, told


class Careless(models.Chain):
    """Blocks are given what an earlier stage made, each another tensor."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = self.tokens(ids)
        x = first
        for block in self.blocks:
            x = block(x, first.sigmoid())
        return torch.nn.functional.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1), labels.flatten()
        )


class Looks(models.Chain):
    """Decides by values of an earlier stage."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        if x.sum() > 0:
            x = x * 2
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1), labels.flatten()
        )


class Back(models.Chain):
    """Calls its first block last."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return torch.nn.functional.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1), labels.flatten()
        )


def trains_badly(kind: str) -> str:
    make = {"careless": Careless, "looks": Looks, "back": Back}[kind]
    engine = start(make(), comm={"timeout_s": 8})
    try:
        engine.train_batch(models.batch(0, 0, 2))
    except RuntimeError as error:
        return str(error)
    finally:
        engine.close()
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("careless", "with a tensor that only an earlier stage has"),
        ("looks", "of a tensor that only another stage of the pipeline has"),
        ("back", "stages must run in order"),
    ],
)
def test_models_that_are_no_chain(kind, expected, pools):
    told = pools(2).attempt(trains_badly, kind)
    said = [one.text if isinstance(one, Failure) else one for one in told]
    assert any(re.search(expected, one) for one in said), said
    assert all(one != "nothing" for one in said), said


def dies(victim: int, how: str) -> str:
    engine = start(models.build(), "zero2", micro=4, comm={"timeout_s": 10})
    told = "trained"
    try:
        for step in range(6):
            if step == 3 and torch.distributed.get_rank() == victim:
                os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])
            engine.train_batch(models.batch(step, engine.data_rank, 4))
    except RuntimeError as error:
        told = str(error)
    try:
        engine.close()
    except RuntimeError as error:
        told += "\n" + str(error)
    return told


@pytest.mark.parametrize(
    ("how", "victim", "world"), [("killed", 1, 2), ("stopped", 0, 2), ("killed", 2, 4)]
)
def test_a_stage_that_ends_is_named(how, victim, world, pools):
    pool = pools(world)
    pool.start(dies, victim, how)
    others = set(range(world)) - {victim}
    told = pool.outcomes(others, 90)
    pool.kill()
    assert set(told) == others
    for one in told.values():
        text = one.text if isinstance(one, Failure) else one
        assert f"rank {victim} is dead or stopped" in text, text


def raises(victim: int) -> str:
    """An error of the user's own on one rank, in the middle of a batch."""
    model = models.build()
    engine = start(model, "zero2", micro=4)
    first = models.batch(0, 0, 4)
    engine.train_batch(first)
    told = "trained"
    try:
        if torch.distributed.get_rank() == victim:
            block = model.blocks[0 if victim == 0 else 3]
            calls = iter([None, None, ValueError("mine")])

            def hook(*_: Any) -> None:
                error = next(calls, None)
                if error is not None:
                    raise error

            block.register_forward_hook(hook)
        engine.train_batch(models.batch(1, 0, 4))
    except (RuntimeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"
    finally:
        engine.close()
    plain = plain_steps(models.build(), [first], 4)
    assert far(weights_of(model), weights_of(plain)) < LIMIT
    return told


@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_in_a_batch(victim, pools):
    told = pools(2).run(raises, victim)
    assert told[victim] == "ValueError: mine", told
    assert f"rank {victim}" in told[1 - victim] and "mine" in told[1 - victim], told
