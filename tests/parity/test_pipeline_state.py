"""What stages of a pipeline keep beside their weights, and weights that do not train: as plain
torch in one process."""

from __future__ import annotations

from typing import Any

import pipeline_models as models
import pytest
import torch
from test_pipeline_life import LIMIT, far, plain_steps, start, weights_of
from torch import nn

pytestmark = pytest.mark.timeout(480)
INTERLEAVED = {"parallel": {"schedule": "interleaved", "virtual_stages": 2}}
SPLIT = {"parallel": {"schedule": "zero_bubble"}}
SCHEDULES = [{}, INTERLEAVED, {"parallel": {"schedule": "gpipe"}}, SPLIT]


class Normed(models.Chain):
    """Statistics in every block, and of layers before and after them."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers)
        rest = dict(self._modules)
        self._modules.clear()  # stages are runs of modules in the order of their registration
        self.tokens, self.first = rest.pop("tokens"), nn.BatchNorm1d(models.WIDTH)
        self._modules.update(rest)
        self.between = nn.BatchNorm1d(models.WIDTH)
        self.stats = nn.ModuleList(nn.BatchNorm1d(models.WIDTH) for _ in range(layers))
        for block, norm in zip(self.blocks, self.stats, strict=True):
            block.stats = norm
            block.forward = lambda x, block=block: block.down(  # type: ignore[method-assign]
                torch.relu_(block.up(block.stats(x.transpose(1, 2)).transpose(1, 2)))
            )
        del self.stats

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(self.tokens(ids).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x) + x
        x = self.between(x.transpose(1, 2)).transpose(1, 2)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone().float() for name, one in model.named_buffers()}


def normed() -> Normed:
    return models.fill(Normed(), 5)


def keeps_buffers(config: dict[str, Any], path: str) -> dict[str, float]:
    model, plain = normed(), normed()
    engine = start(model, "zero2", **config)
    batches = [models.batch(step, 0, 2) for step in range(2)]
    for one in batches:
        engine.train_batch(one)
    plain_steps(plain, batches, 2)
    expected = buffers_of(plain)
    told = {}
    state = engine.state_dict(rank0_only=False)
    told["state_dict"] = far({n: state[n].float() for n in expected}, expected)
    with engine.gathered():
        told["gathered"] = far(buffers_of(model), expected)
    engine.save(path, "one")
    engine.close()
    told["closed"] = far(buffers_of(model), expected)
    again = start(normed(), "zero1")
    again.load(path, "one")
    told["loaded"] = far(buffers_of(again.module), expected)
    loss = float(again.eval_batch(models.batch(7, 0, 2)))
    again.close()
    plain.eval()
    own = [float(plain(**part)) for part in models.parts(models.batch(7, 0, 2), 2)]
    told["evaluated"] = abs(loss - sum(own) / 2)
    return told


@pytest.mark.parametrize("config", SCHEDULES, ids=str)
def test_buffers_are_those_of_their_stage(config, pools, tmp_path):
    for told in pools(2).run(keeps_buffers, config, str(tmp_path)):
        assert max(told.values()) < LIMIT, told


def closes_with_buffers(layer_bytes: int) -> float:
    """Nothing but close() brings them."""
    model, plain = normed(), normed()
    engine = start(model, "zero1", units={"layer_bytes": layer_bytes})
    engine.train_batch(models.batch(0, 0, 2))
    engine.close()
    plain_steps(plain, [models.batch(0, 0, 2)], 2)
    return far(buffers_of(model), buffers_of(plain))


@pytest.mark.parametrize("layer_bytes", [1, 1 << 20])
def test_close_brings_buffers(layer_bytes, pools):
    assert max(pools(2).run(closes_with_buffers, layer_bytes)) < LIMIT


class Counts(models.Chain):
    """The model itself counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(ids, labels)


class Noted(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        pass


def counts() -> str:
    engine = start(Counts(), comm={"timeout_s": 8})
    try:
        engine.train_batch(models.batch(0, 0, 2))
    except RuntimeError as error:
        return str(error)
    finally:
        engine.close()
    return "nothing"


def test_buffers_that_no_stage_has_alone(pools):
    said = pools(2).run(counts)
    assert any('the forward changed buffer "calls"' in one for one in said)
    assert "nothing" not in said, said


def notes() -> str:
    model = models.build()
    model.head = Noted(models.WIDTH, models.VOCAB)
    try:
        start(model)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_extra_state_of_a_later_stage_is_refused(pools):
    for said in pools(2).run(notes):
        assert "Its state cannot be copied from stage 1" in said, said


def frozen(names: tuple[str, ...], strategy: str, config: dict[str, Any]) -> dict[str, float]:
    """Some weights do not train."""
    model, plain = models.build(), models.build()
    for one in (model, plain):
        for name, param in one.named_parameters():
            param.requires_grad_(not name.startswith(names))
    engine = start(model, strategy, **config)
    batches = [models.batch(step, 0, 2) for step in range(3)]
    losses = [float(engine.train_batch(one)) for one in batches]
    engine.close()
    expected = []
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], 0.1)
    for batch in batches:
        optimizer.zero_grad()
        own = [plain(**part) for part in models.parts(batch, 2)]
        expected.append(float(sum(own).detach()) / 2)
        (sum(own) / 2).backward()
        optimizer.step()
    return {
        "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "weights": far(weights_of(model), weights_of(plain)),
    }


FIRST = ("tokens", "places", "blocks.0", "blocks.1")
LAST = ("blocks.2", "blocks.3", "norm", "head")
QUARTERS = [("tokens", "places", "blocks.0"), ("blocks.1", "blocks.2"), LAST, ("blocks", "head")]


@pytest.mark.parametrize("config", SCHEDULES, ids=str)
@pytest.mark.parametrize("names", [FIRST, LAST, *QUARTERS], ids=str)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_frozen_stages(strategy, names, config, pools):
    for told in pools(2).run(frozen, names, strategy, config):
        assert max(told.values()) < LIMIT, told


def sums(config: dict[str, Any]) -> float:
    """Gradients of micro-batches are added up, not averaged."""
    model, plain = models.build(), models.build()
    engine = start(model, "zero1", batch={"accumulate": 2, "reduction": "sum"}, **config)
    engine.train_batch(models.batch(0, 0, 2))
    engine.close()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for part in models.parts(models.batch(0, 0, 2), 2):
        plain(**part).backward()
    optimizer.step()
    return far(weights_of(model), weights_of(plain))


@pytest.mark.parametrize("config", SCHEDULES, ids=str)
def test_sums_over_micro_batches(config, pools):
    assert max(pools(2).run(sums, config)) < LIMIT


def looks_at_one(strategy: str) -> list[float]:
    """gathered() of single parameters, of both stages."""
    model, plain = models.build(), models.build()
    engine = start(model, strategy)
    ours, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    told = []
    for name in ("head.weight", "blocks.0.up.weight", "blocks.3.down.bias"):
        with engine.gathered([ours[name]]):
            told.append(float((ours[name].detach() - theirs[name].detach()).norm()))
    engine.train_batch(models.batch(0, 0, 2))
    plain_steps(plain, [models.batch(0, 0, 2)], 2)
    engine.close()
    return [*told, far(weights_of(model), weights_of(plain))]


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_looks_at_single_parameters(strategy, pools):
    for told in pools(2).run(looks_at_one, strategy):
        assert max(told) < LIMIT, told


class InPlace(models.Block):
    """Changes what it was given."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x.mul_(0.5))


class Dropped(models.Block):
    """Gives back what it was given, where nothing is dropped."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = nn.functional.dropout(x, 0.5, self.training)
        return super().forward(x) if self.training else nn.functional.dropout(x, 0.5, False)


def other_blocks(kind: str) -> dict[str, float]:
    def made() -> models.Chain:
        model = models.Chain()
        block = {"in place": InPlace, "dropped": Dropped}[kind]
        model.blocks = nn.ModuleList(block(models.WIDTH) for _ in range(4))
        return models.fill(model, 3)

    model, plain = made(), made()
    engine = start(model, "zero2")
    told = {}
    if kind == "in place":
        engine.train_batch(models.batch(0, 0, 2))
        plain_steps(plain, [models.batch(0, 0, 2)], 2)
    loss = float(engine.eval_batch(models.batch(1, 0, 2)))
    plain.eval()
    with torch.no_grad():
        own = [float(plain(**part)) for part in models.parts(models.batch(1, 0, 2), 2)]
    told["evaluated"] = abs(loss - sum(own) / 2)
    engine.close()
    told["weights"] = far(weights_of(model), weights_of(plain))
    return told


@pytest.mark.parametrize("kind", ["in place", "dropped"])
def test_blocks_that_change_or_return_their_input(kind, pools):
    for told in pools(2).run(other_blocks, kind):
        assert max(told.values()) < LIMIT, told


class TwoHeads(models.Chain):
    """In the first step neither the tied head nor a block of each stage is called."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.other = nn.Linear(models.WIDTH, models.VOCAB)
        self.first = True

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for index, block in enumerate(self.blocks):
            if not self.first or index in (0, 2):
                x = block(x)
        logits = self.other(x) if self.first else self.head(self.norm(x)) + self.other(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def changes(strategy: str, config: dict[str, Any]) -> float:
    model, plain = models.fill(TwoHeads(), 3), models.fill(TwoHeads(), 3)
    engine = start(model, strategy, **config)
    for step in range(3):
        model.first = plain.first = step == 0
        engine.train_batch(models.batch(step, 0, 2))
        plain_steps(plain, [models.batch(step, 0, 2)], 2)
    engine.close()
    return far(weights_of(model), weights_of(plain))


STAGES = {"parallel": {"stages": ["blocks.2"]}}


@pytest.mark.parametrize("config", [STAGES, STAGES | {"offload": {"optimizer": "host"}}], ids=str)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_modules_that_are_called_later(strategy, config, pools):
    assert max(pools(2).run(changes, strategy, config)) < LIMIT
