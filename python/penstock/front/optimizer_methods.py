"""The public methods of a user's optimizer outside step().

[Note: Methods outside step()] Such a method (`eval()` of schedule-free optimizers, `backup()` of a
Lookahead) may write weights, which rest in this rank's shards. The engine runs it on the shards and
publishes the weights at once, on all ranks. It first runs the same call on a twin: a small
optimizer of the same class that has taken the same steps and calls. The twin's values are equal on
all ranks, so before anything changes, all ranks make the same two decisions. If the call touches
weights, it is a collective; if it does not work on shards, it is refused. Each step, too, is first
taken on the twin and its slices, because a rule that was elementwise in the trial of initialize()
may change later.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from penstock._native import RuntimeFault
from penstock.front import optimizer_trial as trial

Optimizer = torch.optim.Optimizer
_SAVES = ("state_dict", "load_state_dict")


def _names(made: type[Optimizer]) -> tuple[list[str], list[str]]:
    """Returns the public methods of a user's class, and those of _SAVES that it overrides."""
    names: dict[str, None] = {}
    for base in made.__mro__:
        if base not in Optimizer.__mro__:
            own = [name for name, value in vars(base).items() if inspect.isfunction(value)]
            names |= dict.fromkeys(own)
    # Leaves out overrides of step(), the hooks and add_param_group(), which the engine handles.
    public = [
        n for n in names if n == "zero_grad" or not (n.startswith("_") or hasattr(Optimizer, n))
    ]
    return public, [name for name in _SAVES if name in names]


class _Call:
    """A call of a method by name, with copies of its arguments."""

    def __init__(self, name: str, args: Any, kwargs: Any) -> None:
        self._name, self._args, self._kwargs = name, args, kwargs

    def __call__(self, optimizer: Optimizer, seed: int = 0) -> list[Any]:
        torch.default_generator.manual_seed(seed)  # the forked one
        method = getattr(optimizer, self._name)
        result = method(*copy.deepcopy(self._args), **copy.deepcopy(self._kwargs))
        if hasattr(result, "__enter__") or hasattr(result, "__next__"):
            raise trial.CannotTry(
                "returns a context or a generator, whose code runs after the call"
            )
        return list(trial.leaves([result]))


class Twin:
    """The small optimizer that follows the user's optimizer.

    Copies of it, its parts, have what ranks have: slices of its parameters.
    """

    PARTS = "slices of parameters"  # what the parts have, for error texts
    DIFFERS = "changes a parameter and its slices differently"

    def __init__(self, optimizer: Optimizer) -> None:
        self._given = optimizer
        self._draws = torch.Generator().manual_seed(2)
        self._groups = sorted({*trial.first_groups(optimizer)})  # those that the twin has
        samples = self._samples(optimizer)
        starts = [torch.randn(sample.shape, generator=self._draws) for sample in samples]
        params = [[torch.nn.Parameter(start)] for start in starts]
        self.optimizer = trial.on(optimizer, [*zip(samples, params, strict=True)])
        self._failure = ""
        # Whether the last call dropped the gradients, and whether it set them to None.
        self.clears = self.to_none = True

    def loaded(self) -> None:
        """Called on all ranks after the user's optimizer got the state of a checkpoint."""

    def _samples(self, optimizer: Optimizer) -> list[trial.Sample]:
        return trial.samples(optimizer)

    def _parts(self, optimizer: Optimizer) -> list[Optimizer]:
        return trial.halves(optimizer)

    def _of_part(self, values: list[torch.Tensor], which: int) -> list[torch.Tensor]:
        """Returns the values, one for each parameter, of the parameters of a part."""
        return [trial.cut(value, trial.CUT)[-which] for value in values]

    def _agrees(self, whole: Optimizer, parts: list[Optimizer]) -> bool:
        """Whether the parts have the values of the whole."""
        state = list(trial.leaves(whole))
        joined = trial.joined([list(trial.leaves(part)) for part in parts], state, trial.NUMEL)
        return trial.same(joined, state)

    def _same_results(self, parts: list[list[Any]], whole: list[Any]) -> bool:
        """Whether the results of a call on the parts are those of a call on the whole."""
        return trial.same(trial.joined(parts, whole, trial.NUMEL), whole)

    def _gradients(self) -> list[torch.Tensor]:
        params = trial.params_of(self.optimizer)
        return [torch.randn(param.shape, generator=self._draws) for param in params]

    def _follow(self) -> None:
        groups = [self._given.param_groups[index] for index in self._groups]
        kept = {  # some optimizers also keep a value under a string
            piece: state
            for piece, state in self._given.state.items()
            if isinstance(piece, torch.Tensor) and piece.numel() != 1 and state
        }
        for group, given in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(trial.options_of(given))
            # This rank may have no element of the group, but all ranks must decide alike.
            found = [piece for piece in given["params"] if piece in kept] or [*kept]
            for param in group["params"] if found else ():
                self._follow_state(param, found[0], kept[found[0]])

    def _follow_state(
        self, param: torch.Tensor, piece: torch.Tensor, state: dict[str, Any]
    ) -> None:
        if state.keys() == self.optimizer.state[param].keys():
            return
        # After a load: the same keys as in the loaded state, with any values.
        made = {
            key: torch.randn(param.shape, generator=self._draws)
            if isinstance(value, torch.Tensor) and value.shape == piece.shape
            else copy.deepcopy(value)
            for key, value in state.items()
        }
        self.optimizer.state[param] = made | {
            key: value for key, value in self.optimizer.state[param].items() if key in made
        }

    def step(self) -> None:
        """Takes a step. Raises RuntimeFault if slices and the whole get different values."""
        if self._failure:
            return
        self._follow()
        # A sum that rounds differently may flip a sign once, but not three times.
        for _ in range(3):
            try:
                with torch.random.fork_rng(devices=[]):
                    whole, same = self._stepped()
            except Exception as error:  # noqa: BLE001 - the user's step() raises it, too
                self._failure = f"its step() raised {trial.told(error)}"
                return
            if same:
                self.optimizer = whole
                return
        raise RuntimeFault(
            f"[front::step] until now {type(self._given).__name__} updated {self.PARTS} like "
            f"all of them, but in a trial this step updates them differently, so it "
            f"cannot run on shards. The step changed nothing. Use an optimizer whose rule stays"
        )

    def _stepped(self) -> tuple[Optimizer, bool]:
        """Takes a step on a copy of the twin. Returns the copy, and whether its parts have the same
        values."""
        whole, parts = trial.same_as(self.optimizer), self._parts(self.optimizer)
        gradients = self._gradients()
        of_parts = [self._of_part(gradients, which) for which in range(len(parts))]
        all_of_them = zip([whole, *parts], [gradients, *of_parts], strict=True)
        for index, (one, values) in enumerate(all_of_them):
            # Other random numbers for each part, as on other ranks.
            torch.default_generator.manual_seed(index)
            try:
                trial.step(one, zip(trial.params_of(one), values, strict=True))
            except Exception:
                if one is whole:
                    raise  # the user's step() raises it, too
                return whole, False
        return whole, self._agrees(whole, parts)

    def call(self, name: str, args: Any, kwargs: Any) -> tuple[str, bool]:
        """Returns why the call cannot run on shards, or "", and whether it touches weights."""
        if self._failure:
            return f"cannot be tried, because in a trial {self._failure}", False
        if not trial.is_plain([list(args), kwargs]):
            return "takes a function or an object, so the engine cannot try it first", False
        self._follow()
        whole = trial.same_as(self.optimizer)
        watch = trial.Watch(trial.params_of(whole))
        try:
            with torch.random.fork_rng(devices=[]):
                problem = self._compared(whole, watch, _Call(name, args, kwargs))
        except trial.CannotTry as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - any error of the user's method
            problem = f"raised in a trial {trial.told(error)}"
        if not problem:
            self.optimizer = whole
        return problem, watch.seen

    def _compared(self, whole: Optimizer, watch: trial.Watch, call: _Call) -> str:
        """Calls the method on copies of the twin; returns how their values differ, or ""."""
        windows = trial.windows(trial.params_of(whole))
        with watch:
            result = call(whole)
        if trial.windows(trial.params_of(whole)) != windows:
            return "gives a parameter new memory (p.data = x); use p.data.copy_(x)"
        state = list(trial.leaves(whole))
        given = trial.same_as(self.optimizer)
        for param, gradient in zip(trial.params_of(given), self._gradients(), strict=True):
            param.grad = gradient
        if not trial.same(call(given) + list(trial.leaves(given)), result + state):
            return "uses gradients, which shards have only inside step()"
        left = [p.grad is not None and bool(p.grad.any()) for p in trial.params_of(given)]
        self.clears = not any(left)
        self.to_none = all(p.grad is None for p in trial.params_of(given))
        if any(left) and not all(left):
            return "drops the gradients of only some parameters"
        parts = self._parts(self.optimizer)
        # Other random numbers for each part, as on other ranks.
        results = [call(part, seed) for seed, part in enumerate(parts, 1)]
        if not self._agrees(whole, parts):
            return self.DIFFERS
        if watch.seen and not self._same_results(results, result):
            return "returns a value that depends on all elements, but a rank has only some of them"
        return ""


class Methods:
    """Wraps the public methods that a user's class adds to torch's optimizer."""

    def __init__(self, optimizer: Optimizer, values: Any, twin: type[Twin] = Twin) -> None:
        self._optimizer = optimizer
        self._values = values
        self._inside = False  # in step() or in a method, which uses the shards directly
        self._names, self._saves = _names(type(optimizer))
        self.drop: Callable[[bool], None] = _nothing  # drops the engine's gradients
        # The rules of torch's own classes never change, and these classes have no other methods.
        of_torch = type(optimizer).__module__.startswith("torch.optim.")
        self._twin = None if of_torch else twin(optimizer)

    def single_keys(self) -> set[Any]:
        """Returns the keys of state with one value for a parameter of several elements."""
        if self._twin is None:
            return set()
        twin = self._twin.optimizer
        return {
            key
            for param in trial.params_of(twin)
            for key, value in twin.state.get(param, {}).items()
            if param.numel() > 1 and isinstance(value, torch.Tensor) and value.numel() == 1
        }

    def loaded(self) -> None:
        """Must be called after a load, on all ranks."""
        if self._twin is not None:
            self._twin.loaded()

    def install(self) -> None:
        """Replaces the methods on the object. Must follow the engine's other changes to it."""
        for name in self._names:
            if name not in vars(self._optimizer):
                method = getattr(self._optimizer, name)
                vars(self._optimizer)[name] = self._wrapped(name, method)
        for name in self._saves:
            vars(self._optimizer)[name] = refuse_save

    def _wrapped(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(_self: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call(name, method, args, kwargs)

        return types.MethodType(call, self._optimizer)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """In this context the optimizer steps, and its methods run without the checks."""
        if self._twin is not None:
            self._twin.step()
        with self._alone():
            yield

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def _call(self, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._inside or self._twin is None:
            return method(*args, **kwargs)
        what = f"{type(self._optimizer).__name__}.{name}()"
        problem, touches = self._twin.call(name, args, kwargs)
        if problem:
            raise RuntimeFault(
                f"[front::optimizer] {what} {problem}. Outside step() the engine runs only methods "
                f"that work on shards. Do this in step(), or change the model's "
                f"parameters inside engine.gathered(write=True)"
            )
        results: list[Any] = []
        with self._alone():
            if touches:
                self._values.change_shards(what, lambda: results.append(method(*args, **kwargs)))
            else:
                results.append(method(*args, **kwargs))
        if name == "zero_grad" and self._twin.clears:
            self.drop(self._twin.to_none)
        return results[0]


def _nothing(_set_to_none: bool) -> None:
    pass


def refuse_save(*_: Any, **__: Any) -> None:
    raise RuntimeFault(
        "[front::optimizer] the optimizer's state is sharded in the engine, so state_dict() and "
        "load_state_dict() of the optimizer do not save or load it. Use engine.save() and "
        "engine.load()"
    )
