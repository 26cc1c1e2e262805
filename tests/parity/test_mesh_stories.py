"""Stories drawn at random: a mesh, a strategy, a model, and what a user does around training,
beside plain torch in one process which does the same.

`pytest tests/parity/test_mesh_stories.py --seeds 0-500` runs those; a story is a pure function of
its seed.
"""

from __future__ import annotations

import random
from typing import Any

import meshes
import pytest
import torch
import torch.distributed as dist
from torch import nn

pytestmark = pytest.mark.timeout(480)
DAILY = 16
LENGTH = 10  # things that are done
LIMIT = 2e-5
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", meshes.ADAMW),
    ("SGD", {"lr": 0.05, "momentum": 0.9}),
    ("Adagrad", {"lr": 0.01, "eps": 1e-4}),
]
DEEDS = ["train"] * 5 + [
    "eval",
    "look",
    "write",
    "one",
    "state",
    "state_dict",
    "lr",
    "save",
    "load",
]


class Story:
    """What the seed says."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"story {seed}")
        self.case = rng.choice(meshes.all_cases())
        while self.case.world > 4:
            self.case = rng.choice(meshes.all_cases())
        self.optimizer, self.options = rng.choice(OPTIMIZERS)
        self.clip = rng.choice([None, None, 0.3])
        self.schedule = rng.choice(["1f1b", "gpipe"])
        self.frozen = rng.choice([0.0, 0.0, 0.2])
        deeds = [rng.choice(DEEDS) for _ in range(LENGTH)]
        if "load" in deeds and "save" not in deeds[: deeds.index("load")]:
            deeds[deeds.index("load")] = "save"
        self.deeds = ["train", *deeds, "train"]

    def model(self) -> nn.Module:
        model: nn.Module = meshes.MODELS[self.case.model][0]()
        rng = random.Random(self.case.name)
        trains = list(model.parameters())
        for one in trains[1:]:
            one.requires_grad_(one.requires_grad and rng.random() >= self.frozen)
        return model

    def config(self, path: str) -> dict[str, Any]:
        made = self.case.config(path)
        made["optimizer"] = {"type": self.optimizer} | self.options
        made.pop("clip", None)
        if self.clip:
            made["clip"] = self.clip
        if self.case.size("pipeline") > 1:
            several = self.case.micro >= self.case.size("pipeline")
            schedule = self.schedule if several else "gpipe"
            made["parallel"] = made.get("parallel", {}) | {"schedule": schedule}
        return made

    def __str__(self) -> str:
        return (
            f"{self.case.name} {self.optimizer} clip={self.clip} frozen={self.frozen}: "
            + " ".join(self.deeds)
        )


class Plain:
    """The same deeds by one process."""

    def __init__(self, story: Story) -> None:
        self.story, self.case, self.model = story, story.case, story.model()
        params = [one for one in self.model.parameters() if one.requires_grad]
        made = getattr(torch.optim, story.optimizer)
        self.optimizer = made(params, **story.options)
        self.saved: Any = None

    def losses(self, number: int, trains: bool) -> float:
        count, total = self.case.micro * self.case.size("data"), 0.0
        for data in range(self.case.size("data")):
            for part in meshes.parts_of(self.case, number, data):
                loss = meshes.loss_of(self.model(**part)) / count
                total += float(loss.detach())
                if trains:
                    loss.backward()
        return total

    def weights(self, _number: int = 0) -> dict[str, torch.Tensor]:
        return {name: one.detach().clone() for name, one in self.model.named_parameters()}

    look = state_dict = weights

    def train(self, number: int) -> float:
        loss = self.losses(number, True)
        if self.story.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.story.clip)
        for one in self.model.parameters():  # which no batch came by: engines take it as zero
            if one.requires_grad and one.grad is None:
                one.grad = torch.zeros_like(one)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def eval(self, number: int) -> float:
        self.model.eval()
        with torch.no_grad():
            loss = self.losses(number, False)
        self.model.train()
        return loss

    def write(self, _number: int) -> Any:
        with torch.no_grad():
            for one in self.model.parameters():
                one.mul_(1.01)
        return self.weights()

    def lr(self, _number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.7

    def save(self, _number: int) -> None:
        self.saved = self.weights(), self._copied(self.optimizer.state_dict())

    def load(self, _number: int) -> Any:
        with torch.no_grad():
            for name, one in self.model.named_parameters():
                one.copy_(self.saved[0][name])
        self.optimizer.load_state_dict(self._copied(self.saved[1]))
        return self.weights()

    def one(self, number: int) -> torch.Tensor:
        made: torch.Tensor = chosen(self.model, number).detach().clone()
        return made

    state = one

    @staticmethod
    def _copied(state: Any) -> Any:
        clone = {
            key: {n: v.clone() if torch.is_tensor(v) else v for n, v in one.items()}
            for key, one in state["state"].items()
        }
        return {"state": clone, "param_groups": [dict(one) for one in state["param_groups"]]}


def chosen(model: nn.Module, number: int) -> Any:
    """A parameter that trains."""
    trains = [one for one in model.parameters() if one.requires_grad]
    return trains[number % len(trains)]


class Ours:
    """The deeds by an engine."""

    def __init__(self, story: Story, path: str) -> None:
        import penstock  # noqa: PLC0415

        self.case, self.path = story.case, path
        self.model = story.model()
        self.engine = penstock.initialize(self.model, story.config(path))

    def train(self, number: int) -> float:
        engine = self.engine
        return float(engine.train_batch(meshes.parts_of(self.case, number, engine.data_rank)))

    def eval(self, number: int) -> float:
        engine = self.engine
        return float(engine.eval_batch(meshes.parts_of(self.case, number, engine.data_rank)))

    def look(self, _number: int = 0) -> Any:
        with self.engine.gathered():
            return {name: one.detach().clone() for name, one in self.model.named_parameters()}

    def write(self, _number: int) -> Any:
        with self.engine.gathered(write=True):
            if dist.get_rank() == 0:
                for one in self.model.parameters():
                    one.data.mul_(1.01)
        return self.look()

    def lr(self, _number: int) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] *= 0.7

    def save(self, _number: int) -> None:
        self.engine.save(self.path, "saved")

    def load(self, _number: int) -> Any:
        self.engine.load(self.path, "saved")
        return self.look()

    def state_dict(self, _number: int) -> Any:
        whole = self.engine.state_dict(rank0_only=False)
        return {name: whole[name] for name, _ in self.model.named_parameters()}

    def one(self, number: int) -> torch.Tensor:
        one = chosen(self.model, number)
        with self.engine.gathered([one]):
            made: torch.Tensor = one.detach().clone()
        return made

    def state(self, number: int) -> Any:
        return self.engine.param_state(chosen(self.model, number), "param")


def far(ours: Any, theirs: Any) -> float:
    if isinstance(theirs, dict):
        return max((far(ours[name], one) for name, one in theirs.items()), default=0.0)
    if torch.is_tensor(theirs):
        return meshes.far(ours, theirs)
    return abs(ours - theirs) / max(1.0, abs(theirs)) if isinstance(theirs, float) else 0.0


def live(seed: int, path: str) -> dict[str, Any]:
    """On a rank: how far each deed's result is, on rank 0; a hash of the weights in the end."""
    story = Story(seed)
    ours = Ours(story, path)
    plain = Plain(story) if dist.get_rank() == 0 else None
    apart = []
    for number, deed in enumerate(story.deeds):
        made = getattr(ours, deed)(number)
        if plain is not None:
            apart.append((deed, far(made, getattr(plain, deed)(number))))
    ours.engine.close()
    if plain is not None:
        theirs = dict(plain.model.named_parameters())
        left = max(far(p.detach(), theirs[n].detach()) for n, p in ours.model.named_parameters())
        apart.append(("close", left))
    return {"hash": meshes.hash_of(ours.model), "apart": apart}


def pytest_generate_tests(metafunc):
    if "seed" not in metafunc.fixturenames:
        return
    asked = metafunc.config.getoption("seeds")
    first, _, last = (asked or f"0-{DAILY - 1}").partition("-")
    seeds = range(int(first), int(last or first) + 1)
    metafunc.parametrize("seed", sorted(seeds, key=lambda seed: Story(seed).case.world))


def test_story(seed, pools, tmp_path):
    story = Story(seed)
    told = pools(story.case.world).run(live, seed, str(tmp_path), timeout=200)
    assert len({one["hash"] for one in told}) == 1, f"replicas differ: {story}"
    beyond = [(deed, value) for deed, value in told[0]["apart"] if not value < LIMIT]
    assert not beyond, f"{beyond}\n{story}"
