"""What a model does beside returning values, on stages of a pipeline: what plain torch gives, or an
error at that moment."""

from __future__ import annotations

import types
from typing import Any

import pipeline_models as models
import pytest
import torch
from ranks import Failure
from test_pipeline_life import LIMIT, far, plain_steps, start, weights_of
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.timeout(480)


class Beside(models.Block):
    """A block that has more to say than it returns."""

    kind = ""

    def forward(self, x: torch.Tensor, more: Any = None) -> torch.Tensor:
        made = super().forward(x)
        if self.kind == "list":
            more.append(made.square().mean())
        if self.kind == "attribute":
            self.aux = made.square().mean()
        if self.kind == "object":
            more.aux = more.aux + made.square().mean()
        if self.kind == "in place":
            more += made.square().mean()
        return made


class Told(models.Chain):
    """A chain of blocks, with what they said beside in its loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Beside(models.WIDTH) for _ in range(4))
        for block in self.blocks:
            block.kind, block.aux = kind, 0.0

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        more: Any = {
            "list": [],
            "object": types.SimpleNamespace(aux=torch.zeros(())),
            "in place": torch.zeros(()),
        }.get(self.kind)
        total = torch.zeros(())
        for block in self.blocks:
            if self.kind == "reentrant":
                x = checkpoint(block, x, use_reentrant=True)
            elif self.kind == "loss":
                x = block(x)
                total = total + x.square().mean()
            else:
                x = block(x, more)
        extra: Any = total
        if self.kind == "list":
            extra = sum(more)
        if self.kind == "attribute":
            extra = sum(block.aux for block in self.blocks)
        if self.kind == "object":
            extra = more.aux
        if self.kind == "in place":
            extra = more
        logits = self.head(self.norm(x))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        made: torch.Tensor = loss + extra
        return made


def says(kind: str) -> str:
    engine = start(models.fill(Told(kind), 3), comm={"timeout_s": 8})
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
        ("list", "changes one of its arguments"),
        ("attribute", "the loss is computed from a tensor that only an earlier stage has"),
        ("object", "the loss is computed from a tensor that only an earlier stage has"),
        ("in place", "changes one of its arguments"),
        ("reentrant", "use_reentrant=False"),
        ("loss", "the loss is computed from a tensor that only an earlier stage has"),
    ],
)
def test_what_is_not_handed_on_is_an_error(kind, expected, pools):
    told = pools(2).attempt(says, kind)
    said = [one.text if isinstance(one, Failure) else one for one in told]
    assert any(expected in one for one in said), said
    assert "nothing" not in said, said


def other_data(how: str) -> str:
    seed = {"seed": 3} if how == "loader" else {}
    engine = start(models.build(), comm={"timeout_s": 8}, **seed)
    rank = torch.distributed.get_rank()
    rows = [{k: v[0] for k, v in models.batch(i, 0, 1).items()} for i in range(16)]
    try:
        if how == "other":
            engine.train_batch(models.batch(rank, 0, 2))
        for _ in range(3):
            for batch in torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True):
                engine.train_batch(batch)
    except RuntimeError as error:
        return str(error)
    finally:
        engine.close()
    return "nothing"


def test_other_data_on_a_stage_is_an_error(pools):
    said = pools(2).run(other_data, "other")
    assert any("stage 1 and stage 0 were given different batches" in one for one in said), said


def test_loaders_that_shuffle_stay_in_step(pools):
    """By the config's seed, and by torch's own: layers of a stage draw from neither."""
    assert pools(2).run(other_data, "loader") == ["nothing"] * 2
    assert pools(2).run(other_data, "dropout") == ["nothing"] * 2


class Masked(models.Chain):
    """Hides tokens at random, and is scored by those: all stages must hide the same."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = torch.rand(ids.shape) < 0.5
        self.seen = hidden
        x = self.tokens(ids.masked_fill(hidden, 0))
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.1, self.training)
        logits = self.head(self.norm(x)).flatten(0, 1)[hidden.flatten()]
        return nn.functional.cross_entropy(logits, labels.flatten()[hidden.flatten()])


def draws() -> list[bool]:
    model = models.fill(Masked(), 3)
    engine = start(model, seed=1)
    seen = []
    for step in range(2):
        engine.train_batch(models.batch(step, 0, 2))
        seen += model.seen.flatten().tolist()
    engine.close()
    return seen


def test_what_a_forward_draws_is_alike_on_all_stages(pools):
    first, second = pools(2).run(draws)
    assert first == second and 0 < sum(first) < len(first)


class Holds(models.Block):
    """With buffers that change in other ways than a batch norm's."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("mean", torch.zeros(width), persistent=False)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        if self.training:
            self.seen = torch.cat([self.seen, x.detach().mean().reshape(1)])
            self.mean = 0.5 * self.mean + x.detach().mean((0, 1))
        return super().forward(x - self.mean)


def holding() -> models.Chain:
    model = models.Chain()
    model.blocks = nn.ModuleList(Holds(models.WIDTH) for _ in range(4))
    return models.fill(model, 3)


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in model.named_buffers()}


def holds(how: str) -> dict[str, float]:
    model, plain = holding(), holding()
    engine = start(model, "zero1")
    engine.train_batch(models.batch(0, 0, 2))
    plain_steps(plain, [models.batch(0, 0, 2)], 2)
    told = {}
    if how == "written":
        state = {name: one + 1 for name, one in plain.state_dict().items()}
        with engine.gathered(write=True):
            if torch.distributed.get_rank() == 0:
                model.load_state_dict(state)
        plain.load_state_dict(state)
        with engine.gathered():
            told["seen"] = far(buffers_of(model), buffers_of(plain))
    engine.close()
    told["closed"] = far(buffers_of(model), buffers_of(plain))
    return told | {"weights": far(weights_of(model), weights_of(plain))}


@pytest.mark.parametrize("how", ["closed", "written"])
def test_buffers_of_all_kinds(how, pools):
    for told in pools(2).run(holds, how):
        assert max(told.values()) < LIMIT, told


class Late(models.Block):
    """Makes its buffer in its first forward."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        if self.late is None:
            self.late = torch.ones(())
        return super().forward(x) * self.late


def makes_late() -> tuple[str, float]:
    def made() -> models.Chain:
        model = models.Chain()
        model.blocks = nn.ModuleList(Late(models.WIDTH) for _ in range(4))
        return models.fill(model, 3)

    model, plain = made(), made()
    engine = start(model)
    engine.train_batch(models.batch(0, 0, 2))
    plain_steps(plain, [models.batch(0, 0, 2)], 2)
    said = "nothing"
    try:
        engine.close()
    except RuntimeError as error:
        said = str(error)
    return said, far(weights_of(model), weights_of(plain))


def test_buffers_that_ranks_have_not_alike_cost_no_weights(pools):
    for said, apart in pools(2).run(makes_late):
        assert "the model's buffers on some ranks differ" in said and apart < LIMIT, (said, apart)


class Turned(models.Block):
    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        real = x.real if x.is_complex() else x
        return torch.complex(super().forward(real), real).conj()


class Complex(models.Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Turned(models.WIDTH) for _ in range(4))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x.real + x.imag))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def turns() -> float:
    model, plain = models.fill(Complex(), 3), models.fill(Complex(), 3)
    engine = start(model)
    engine.train_batch(models.batch(0, 0, 2))
    plain_steps(plain, [models.batch(0, 0, 2)], 2)
    engine.close()
    return far(weights_of(model), weights_of(plain))


def test_conjugated_views_travel(pools):
    assert max(pools(2).run(turns)) < LIMIT


def evaluates() -> list[bool]:
    model = models.build()
    engine = start(model)
    model.norm.eval()
    engine.eval_batch(models.batch(0, 0, 2))
    engine.close()
    return [one.training for one in (model, model.norm, model.blocks[0])]


def test_evaluation_leaves_modules_in_their_mode(pools):
    assert pools(2).run(evaluates) == [[True, False, True]] * 2
