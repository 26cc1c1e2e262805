"""Lives of engines, drawn at random: made, trained, hurt once by an exception, then closed or just
dropped; beside each a twin in plain torch, which does what the engine has done.

A life is a pure function of its seed and world size. `live()` runs one and returns what its user
kept of it; `Kept.check()`, any number of lives later, reads that again.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import resource
import warnings
from collections.abc import Callable
from typing import Any

import models
import torch
import training
import zoo
from life_faults import EVERYWHERE, FAULTS, LINES, STARTS, Blow, Planned, dist_rank, interrupted
from torch import nn

STEPS = 4
TIMEOUT_S = 60
ENTRY = zoo.Entry(models.Gpt, "gpt")
KEEPS = ("params", "views", "state_dict", "engine", "model", "graph", "grads", "optimizer")
# Relative L2 of all weights: rounding is well below, one step more or less well above.
LIMITS = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
MOVES_PARAMS = {"zero3", "hpz", "mics"}


@dataclasses.dataclass(frozen=True)
class Life:
    seed: int
    world: int
    strategy: str
    precision: str
    accumulate: int
    offload: tuple[tuple[str, Any], ...]
    activations: str  # "none", or where what is recomputed waits
    tiling: tuple[tuple[str, int], ...]
    optimizer: str  # "config", "object", or "external": another class of torch's
    sharded_build: bool
    fault: str
    step: int  # before or in which it strikes
    line: int  # of an interrupt: how many lines of the front later
    ranks: tuple[int, ...]  # that it strikes
    goes_on: bool
    end: str  # "close", "drop" (close without gathering) or "collect"
    keeps: tuple[str, ...]

    @property
    def moves_params(self) -> bool:
        return self.strategy in MOVES_PARAMS

    def config(self, folder: str) -> dict[str, Any]:
        offload = dict(self.offload)
        if self.activations != "none":
            offload["activations"] = self.activations
        if "disk" in offload.values():
            offload["path"] = folder
        return {
            "strategy": self.strategy,
            "precision": self.precision,
            "batch": {"accumulate": self.accumulate},
            "offload": offload,
            "activations": {} if self.activations == "none" else {"checkpoint": "unit"},
            "tiling": dict(self.tiling),
            "units": {"modules": ["Block"]},
            "comm": {"timeout_s": TIMEOUT_S},
            "loss_scale": {"initial": 1024} if self.precision == "fp16" else {},
            "mesh": {"node": self.world} if self.strategy in training.BY_NODE else {},
        }


def draw(seed: int, world: int) -> Life:
    rng = random.Random(f"life {seed} of {world}")
    strategy = rng.choice(["ddp", "zero1", "zero2", "zero3", "zero3", "zero3", "hpz", "mics"])
    optimizer = rng.choice(["config", "object", "external"])
    offload = {}
    if optimizer != "external" and rng.random() < 0.5:
        offload["optimizer"] = rng.choice(["host", "disk"])
        if strategy == "zero3" and rng.random() < 0.5:
            offload["late_update"] = True
    if strategy == "zero3" and rng.random() < 0.5:
        offload["params"] = rng.choice(["host", "disk"])
    if strategy in ("zero2", "zero3") and offload.get("optimizer") == "disk" and rng.random() < 0.5:
        offload["gradients"] = "disk"
    tiling = [(), (), (("max_bytes", 4096),), (("max_bytes", 4096), ("loss_tokens", 8))]
    fault = rng.choice(sorted(FAULTS))
    if fault == "disk" and "disk" not in offload.values():
        offload["optimizer"] = "disk"
        optimizer = "config"
    everywhere = tuple(range(world))
    ranks = rng.choice([everywhere, everywhere, (rng.randrange(world),)])
    if fault in EVERYWHERE:
        ranks = everywhere
    if fault == "interrupted start" and world > 1:
        fault = "none"  # the others would wait for this rank
    if fault.startswith("interrupt") and world > 1:
        ranks = (rng.randrange(world),)
    end = rng.choice(["close", "close", "drop", "collect"])
    if end == "collect" and ranks != everywhere:
        end = "close"  # the others would wait until this rank lets go
    return Life(
        seed=seed,
        world=world,
        strategy=strategy,
        precision=rng.choice(["fp32", "fp32", "bf16", "fp16"]),
        accumulate=rng.choice([1, 1, 2, 3]),
        offload=tuple(offload.items()),
        activations=rng.choice(["none", "none", "none", "host", "disk"]),
        tiling=rng.choice(tiling),
        optimizer=optimizer,
        sharded_build=rng.random() < 0.2,
        fault=fault,
        step=rng.randrange(STEPS),
        line=rng.randrange(LINES.get(fault, 1)),
        ranks=ranks,
        goes_on=ranks == everywhere and fault != "disk" and rng.random() < 0.7,
        end=end,
        keeps=tuple(keep for keep in KEEPS if rng.random() < 0.4),
    )


# ---- the twin


class Twin:
    """The same training in plain torch."""

    def __init__(self, life: Life) -> None:
        self.life, self.steps = life, 0
        self.plain = training.Reference(models.fill(models.Gpt(blocks=2)), life.precision, 1)
        self.optimizer = optimizer_of(life, self.plain.master.parameters())
        self.seen = 0

    def backward(self, parts: list[Any]) -> None:
        self.plain.backward(ENTRY, parts, 0)
        self.seen += 1

    def step(self) -> None:
        for param in self.plain.master.parameters():
            if param.grad is not None:
                param.grad /= self.seen
        self.optimizer.step()
        self.zero_grad()
        self.steps += 1

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.seen = 0

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.plain.master.named_parameters()}


def optimizer_of(life: Life, params: Any) -> torch.optim.Optimizer:
    params = [param for param in params if param.requires_grad]
    if life.optimizer == "external":
        return torch.optim.RMSprop(params, lr=1e-3, eps=1e-2)
    return torch.optim.AdamW(params, **training.ADAMW)


def deviation(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    apart = sum(float((ours[n].double() - theirs[n].double()).square().sum()) for n in theirs)
    return (apart / sum(float(t.double().square().sum()) for t in theirs.values())) ** 0.5


# ---- a life


class Trial:
    """One life under way."""

    def __init__(self, life: Life, folder: str) -> None:
        self.life, self.folder = life, folder
        self.twin = Twin(life)
        self.model = build(life)
        self.engine: Any = None
        self.hooks: list[Any] = []
        self.blow: Blow | None = None
        self.interrupts: int | None = None
        self.struck = dist_rank() in life.ranks
        self.apart = len(life.ranks) < life.world  # the ranks are where they cannot go on together
        # The twin knows the weights, unless a step was cut short: shards of another optimizer are
        # new on some ranks only, or before the engine has taken them over.
        cut = life.fault == "after update"
        cut |= self.apart and life.fault in ("before update", "interrupt")
        self.exact = not (cut and life.optimizer == "external")
        self.at = "start"
        self.file_limit: tuple[int, int] | None = None
        samples = life.world * life.accumulate * training.MICRO
        self.batches = models.batches("gpt", STEPS + 1, samples)

    def parts(self) -> list[Any]:
        first = self.twin.seen % self.life.accumulate * self.life.world
        return training.split(self.batches[self.twin.steps])[first : first + self.life.world]

    def part(self) -> Any:
        return self.parts()[dist_rank()]

    def add(self, hook: Any) -> None:
        if self.struck:
            self.hooks.append(hook)
        else:
            hook.remove()

    def fill_disk(self) -> None:
        self.file_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, self.file_limit[1]))

    def disarm(self) -> None:
        if self.file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, self.file_limit)
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.file_limit = self.interrupts = self.blow = None

    # ---- beginning

    def begin(self, hurt: bool = True) -> None:
        import penstock  # noqa: PLC0415

        life, others = self.life, {}
        config, model = life.config(self.folder), self.model
        fault = life.fault if hurt else ""
        optimizer = optimizer_of(life, model.parameters())
        if fault == "no such folder":
            config["offload"] |= {"optimizer": "disk", "path": "/nowhere/at/all"}
        elif fault == "two schedules":
            config["schedule"] = {"type": "constant"}
            others["lr_scheduler"] = Blow()
        elif fault == "compiled" and life.activations != "none":
            model = torch.compile(model)
        elif fault == "optimizer of others":
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        elif fault == "raising scheduler":
            others["lr_scheduler"] = lambda _: Blow()()
        elif fault == "raising set-up":
            optimizer.register_load_state_dict_pre_hook = Blow()
        if life.optimizer == "config" and not fault.endswith(("others", "set-up")):
            config["optimizer"] = {"type": "AdamW"} | training.ADAMW
        else:
            others["optimizer"] = optimizer
        with interrupted(life.line if fault == "interrupted start" and self.struck else None):
            self.engine = penstock.initialize(model, config, **others)

    def refused_to_begin(self, error: BaseException) -> None:
        """Checks that the model is as it was; then it may begin again."""
        import penstock  # noqa: PLC0415

        expected = (Planned, KeyboardInterrupt, penstock.ConfigError)
        if not isinstance(error, expected) or self.life.fault not in STARTS:
            raise error
        error.__traceback__ = None  # holds what was being made
        gc.collect()
        if self.life.sharded_build:
            return
        after = {name: read(param) for name, param in self.model.named_parameters()}
        weights = self.twin.weights()
        for name, value in after.items():
            assert not isinstance(value, str), f"after a failed start: {value}"
            assert value.equal(weights[name].to(value.dtype)), f"{name} has changed"
        plain = self.twin.plain.master
        with torch.no_grad():
            dtype = next(self.model.parameters()).dtype
            loss, its = self.model(*self.part()), plain.to(dtype)(*self.part())
            plain.float()
        assert loss.equal(its), "after a failed start the model computes something else"

    # ---- training

    def train_through(self) -> None:
        """All windows, or up to where it is hurt."""
        try:
            self.train(range(STEPS))
        except BaseException as error:
            self.understand(error)
            if not self.life.goes_on:
                raise Ended from error
        while self.twin.steps < STEPS:
            self.window()

    def window(self) -> None:
        """Trains until the weights have changed."""
        life, twin = self.life, self.twin
        while twin.seen < life.accumulate:
            self.at = "forward"
            loss = self.engine(*self.part())
            self.at = "loss"
            if self.blow is not None and self.struck:
                self.blow()
            self.at = "backward"
            self.engine.backward(loss)
            twin.backward(self.parts())
        self.at = "step"
        if self.engine.step():
            twin.step()
        else:
            assert self.life.precision == "fp16" and self.life.fault == "not finite"
            twin.zero_grad()
            self.disarm()

    def train(self, windows: range) -> None:
        for window in windows:
            arm = FAULTS[self.life.fault]
            self.at = "elsewhere"
            if window == self.life.step and arm is not None:
                arm(self)
            with interrupted(self.interrupts if self.struck else None):
                self.window()

    def understand(self, error: BaseException) -> None:
        """The twin does what the engine has done when this was raised."""
        import penstock  # noqa: PLC0415

        self.disarm()
        expected = (Planned, KeyboardInterrupt)
        if self.life.fault in ("not finite", "disk", "refused") or not self.struck:
            expected += (penstock.RuntimeFault, penstock.ConfigError)
        if not isinstance(error, expected):
            raise AssertionError(f"at {self.at}: {error!r}") from error
        cut = self.life.optimizer == "external" and self.at == "step"
        if self.life.fault == "disk" or (cut and self.life.fault == "interrupt"):
            self.exact = False
        if self.engine.steps > self.twin.steps:
            self.twin.step()
        elif self.at == "backward":
            self.twin.zero_grad()
            self.engine.zero_grad()
        elif self.at == "step" and all(p.grad is None for p in self.model.parameters()):
            self.twin.zero_grad()

    # ---- the end

    def end(self) -> None:
        life = self.life
        if life.end == "collect":
            return
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                with interrupted(life.line if life.fault == "interrupted end" else None):
                    self.engine.close(gather=life.end == "close")
            except KeyboardInterrupt:
                self.engine.close(gather=life.end == "close")
        if any("cut short" in str(one.message) for one in said):
            self.exact = False


def build(life: Life) -> models.Gpt:
    import penstock  # noqa: PLC0415

    if not life.sharded_build:
        return models.fill(models.Gpt(blocks=2))
    with penstock.init():
        return models.fill(models.Gpt(blocks=2))


def live(seed: int, world: int, folder: str) -> Kept:
    """Runs a life; what is kept of it."""
    life = draw(seed, world)
    try:
        kept = _live(Trial(life, folder))
        gc.collect()
        kept.look()
    except Exception as error:
        raise AssertionError(f"{error}\nin {life}") from error
    return kept


class Ended(Exception):
    """A loop ends with an error that was planned."""


def _live(trial: Trial) -> Kept:
    try:
        trial.begin()
    except BaseException as error:
        trial.refused_to_begin(error)
    if trial.engine is None:
        trial.begin(hurt=False)
    things: dict[str, list[Any]] = {"views": views_of(trial.model)}
    try:
        trial.train_through()
        trial.at = "the end"
        try:
            take(trial, things)
        except RuntimeError as error:  # another rank was hurt in its last step
            trial.understand(error)
            raise Ended from error
    except Ended:
        trial.end()  # knows of the error, as in a `finally`
    else:
        trial.end()
    return Kept(trial, things)


def views_of(model: nn.Module) -> list[torch.Tensor]:
    param = model.blocks[1].up.weight
    return [param.detach(), param.data, param[1:], param.t(), model.state_dict()["tokens.weight"]]


def take(trial: Trial, things: dict[str, list[Any]]) -> None:
    """What a user may keep of an engine that is about to end."""
    engine, keeps = trial.engine, trial.life.keeps
    if "state_dict" in keeps:
        things["state_dict"] = list(engine.state_dict(rank0_only=False).items())
        things["state_dict expected"] = [trial.twin.weights()]
    if "grads" in keeps:
        engine.backward(engine(*trial.part()))
        things["grads"] = [p.grad for p in engine.module.parameters() if p.grad is not None]
        assert things["grads"]
    if "graph" in keeps:
        things["graph"] = [engine(*trial.part())]


def read(tensor: torch.Tensor) -> torch.Tensor | str:
    """A copy of its values, or the error that says why there are none."""
    try:
        return tensor.detach().clone()
    except RuntimeError as error:
        return str(error)


class Kept:
    """What is left of an engine: tensors, the model, the engine itself."""

    def __init__(self, trial: Trial, things: dict[str, list[Any]]) -> None:
        life = trial.life
        self.life, self.apart = life, trial.apart and life.fault != "none"
        model, engine, twin = trial.model, trial.engine, trial.twin
        self.gone = life.moves_params and life.end != "close"
        # An engine that is collected later: until then it has them.
        self.gone |= bool(life.tiling) and life.end == "collect"
        self.closed = life.end != "collect"
        dtype = training.DTYPES[life.precision]
        self.expected = {name: w.to(dtype) for name, w in twin.weights().items()}
        self.exact = trial.exact
        self.part = trial.part()
        self.loss = self.gradients = None
        if trial.exact:
            twin.zero_grad()
            twin.plain.backward(ENTRY, [self.part], 0)
            self.gradients = {
                name: param.grad.clone()
                for name, param in twin.plain.master.named_parameters()
                if param.grad is not None
            }
        names = dict(model.named_parameters())
        self.model = model if {"model", "graph"} & set(life.keeps) else None
        self.engine = engine if "engine" in life.keeps else None
        self.optimizer = engine.optimizer if "optimizer" in life.keeps else None
        self.params = {name: names[name] for name in self.expected}
        self.views = things.get("views", []) if "views" in life.keeps else []
        self.state_dict = things.get("state_dict", [])
        self.state_expected = things.get("state_dict expected")
        self.grads, self.graph = things.get("grads", []), things.get("graph", [])
        self.seen: list[Any] = []

    def tensors(self) -> list[torch.Tensor]:
        return [*self.params.values(), *self.views, *(t for _, t in self.state_dict)]

    def look(self) -> None:
        """The first reading, against the twin."""
        life = self.life
        if "params" not in life.keeps and self.model is None:
            if self.closed or not life.moves_params:
                self.compare(self.params)
            self.params = {}
        else:
            self.compare(self.params)
        if self.state_expected is not None and self.exact:
            apart = deviation(dict(self.state_dict), self.state_expected[0])
            assert apart < LIMITS[life.precision], f"state_dict() is {apart} off"
        for gradient in self.grads:
            assert isinstance(read(gradient), str), "a hollow gradient has values"
        self.seen = [read(tensor) for tensor in self.tensors()]

    def compare(self, params: dict[str, torch.Tensor]) -> None:
        values = {name: read(param) for name, param in params.items()}
        texts = [value for value in values.values() if isinstance(value, str)]
        if texts:
            assert self.gone or not self.exact, f"values are gone: {texts[0]}"
            told = ("has no values", "does not have its values", "are gone", "is not in memory")
            assert all(any(words in text for words in told) for text in texts), texts[0]
            return
        gone = self.gone and self.closed and self.life.world > 1 and self.life.strategy == "zero3"
        assert not gone, "whose values are these?"
        assert all(bool(value.isfinite().all()) for value in values.values())
        if self.exact:
            apart = deviation(values, self.expected)
            assert apart < LIMITS[self.life.precision], f"the weights are {apart} off"

    def check(self) -> None:
        """Reads it all again, some lives later."""
        try:
            self._check()
        except Exception as error:
            raise AssertionError(f"{error}\nkept of {self.life}") from error

    def _check(self) -> None:
        for before, tensor in zip(self.seen, self.tensors(), strict=True):
            now = read(tensor)
            same = now == before if isinstance(before, str) else torch.equal(now, before)
            assert same, "what was kept has changed"
        for gradient in self.grads:
            assert isinstance(read(gradient), str), "a hollow gradient has values"
        for group in self.optimizer.param_groups if self.optimizer is not None else []:
            for param in group["params"]:
                read(param)
        if self.apart:
            return
        if self.graph:
            self.go_backward()
        if self.model is not None:
            self.go_forward()
        if self.engine is not None and self.closed:
            for call in (self.engine.step, self.engine.full_grads, self.engine.state_dict):
                refused_when_closed(call)

    def go_backward(self) -> None:
        """A graph that outlived its engine gives torch's gradients, or an error."""
        for param in self.params.values():
            param.grad = None
        try:
            self.graph[0].backward()
        except RuntimeError as error:
            whole = self.life.strategy == "ddp" and self.life.activations == "none"
            assert not whole or self.life.tiling or not self.closed, error
            return
        if not self.closed or not self.exact:
            return
        grads = {name: self.params[name].grad for name in self.gradients}
        apart = deviation(grads, self.gradients)
        assert apart < 10 * LIMITS[self.life.precision], f"gradients are {apart} off"

    def go_forward(self) -> None:
        try:
            with torch.no_grad():
                loss = self.model(*self.part)
        except RuntimeError:
            assert self.gone or not self.exact
            return
        assert bool(loss.isfinite())


def refused_when_closed(call: Callable[[], Any]) -> None:
    try:
        call()
    except RuntimeError as error:
        assert "the engine is closed" in str(error), error
        return
    raise AssertionError(f"{call} of a closed engine went through")
