"""Parameter groups and the optimizers that update them.

The user's torch optimizer keeps its parameter groups, so any torch scheduler works on it. The kinds
of `_penstock.OPTIMIZER_KINDS` run on the engine's kernels. Any other class steps on fp32 shards:
slices of parameters if it is elementwise, else whole parameters.
"""

import functools
import inspect
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from penstock._native import ConfigError, RuntimeFault, _penstock
from penstock.front.optimizer_checks import check_elementwise, check_sizes
from penstock.front.optimizer_methods import Methods, Twin, refuse_save
from penstock.front.optimizer_trial import fresh_state, own_entries
from penstock.front.optimizer_whole import WholeTwin, problem_on_whole

_KINDS: dict[str, Any] = {kind.name: kind for kind in _penstock.OPTIMIZER_KINDS}
_LION: dict[str, Any] = _KINDS["Lion"].defaults


def update_each(
    optimizer: torch.optim.Optimizer,
    closure: Callable[[], Any] | None,
    update: Callable[[torch.Tensor, dict[str, Any]], None],
) -> Any:
    """Calls `update(parameter, group)` for each parameter that has a `.grad`, after the closure,
    and returns the closure's loss."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                update(param, group)
    return loss


class Lion(torch.optim.Optimizer):
    """Lion (arXiv:2302.06675) with decoupled weight decay. Inside an engine its kernel computes it.

    Args:
        params: parameters or groups, as for any torch optimizer.
        lr: learning rate, a third to a tenth of AdamW's.
        betas: coefficients of the update and of the momentum.
        weight_decay: as in AdamW.
    """

    def __init__(
        self,
        params: Any,
        lr: float = _LION["lr"],
        betas: tuple[float, float] = (_LION["betas"][0], _LION["betas"][1]),
        weight_decay: float = _LION["weight_decay"],
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates the parameters that have a `.grad`, and returns the closure's loss."""
        return update_each(self, closure, self._update)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[param], group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
        moment = state["exp_avg"]
        direction = moment.mul(first).add_(param.grad, alpha=1 - first).sign_()
        param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
        moment.mul_(second).add_(param.grad, alpha=1 - second)


# The public class of each kind: torch's class, or Penstock's if torch has none.
_OURS: dict[str, type[torch.optim.Optimizer]] = {"Lion": Lion}
_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    kind: _OURS.get(kind) or getattr(torch.optim, kind) for kind in _KINDS
}
_KIND_OF = {made: kind for kind, made in _CLASSES.items()}


def register(made: type[torch.optim.Optimizer], kind: str) -> None:
    """Registers a class whose group options mean the same as those of torch's class of `kind`."""
    _KIND_OF[made] = kind


# Keys of the section "optimizer" that are allowed beside an optimizer object.
_BESIDES = {"moments_dtype", "layout"}

# Options that the kernels lack. If one is set, the torch class itself steps on shards.
_INEFFECTIVE = ("amsgrad", "maximize", "differentiable", "initial_accumulator_value")


def _kernels() -> str:
    return ", ".join(_KINDS)


def prepare(
    given: Any, model: torch.nn.Module, config: dict[str, Any]
) -> tuple[torch.optim.Optimizer | None, dict[str, Any]]:
    """Returns the optimizer passed to `initialize()`, and the config. If a kernel computes the
    optimizer's update, the config has the optimizer's settings.

    The optimizer is None if it comes from the config. Raises ConfigError if it cannot be used.
    """
    section = config.get("optimizer")
    if config.get("inference") and (given is not None or section is not None):
        raise ConfigError(
            '[front::initialize] "inference" is true, so nothing trains. Pass no optimizer'
        )
    if given is None:
        return None, {**config, "optimizer": {} if section is None else section}
    if not isinstance(given, torch.optim.Optimizer) and callable(given):
        given = given(model.parameters())
    if not isinstance(given, torch.optim.Optimizer):
        raise ConfigError(
            f"[front::initialize] the optimizer is a {type(given).__name__}, not a "
            f"torch.optim.Optimizer. Pass one, a callable that returns one, or a dict"
        )
    own_step = vars(given).get("step")
    if own_step is not None and not getattr(own_step, "_wrapped_by_lr_sched", False):
        raise ConfigError(
            "[front::initialize] the optimizer's step() was replaced, but the engine does not call "
            "the replacement. Use optimizer.register_step_pre_hook() and register_step_post_hook()"
        )
    for name in ("zero_grad", "state_dict", "load_state_dict"):
        own = vars(given).get(name)
        if own is not None and not getattr(own, "_of_penstock", False):
            raise ConfigError(
                f"[front::initialize] the optimizer's {name}() was replaced on the object, but the "
                f"engine does not call the replacement. Override it in a class of your own"
            )
    if section is not None and not (isinstance(section, dict) and section.keys() <= _BESIDES):
        raise ConfigError(
            "[front::initialize] an optimizer is given both as an argument and as the key "
            '"optimizer". Remove one (only optimizer.moments_dtype and optimizer.layout are '
            "allowed with an argument)"
        )
    if is_native(given):
        _check_fresh(given, uncounted=1)
        given.state.clear()  # the engine keeps the state
        config = {**config, "optimizer": _section_of(given) | (section or {})}
    else:
        _check_keys(given)
        layout = _layout_for(given, (section or {}).get("layout"))
        config = {**config, "optimizer": (section or {}) | {"layout": layout}}
    return given, config


def _layout_for(given: torch.optim.Optimizer, asked: str | None) -> str:
    """Returns the layout in which an optimizer that computes in Python can step: the one that is
    asked for, or "flat" if the optimizer is elementwise, else "whole".

    Raises ConfigError if it cannot step on shards.
    """
    name = type(given).__name__
    why = f'[front::initialize] "optimizer.layout" is "{asked}", but {name} is refused'
    if asked in (None, "flat"):
        try:
            check_elementwise(given, _kernels())
            return "flat"
        except ConfigError as error:
            if asked == "flat":
                raise
            why = str(error)
    problem = problem_on_whole(given)
    if problem:
        raise ConfigError(f"{why}. With whole parameters on each rank: {problem}")
    return asked or "whole"


def _inside(value: Any) -> Iterable[Any]:
    """Returns what a container, a function or an object refers to, one level deep."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if isinstance(value, weakref.ref):
        return [id(value())]  # the reference identifies its object, as an id does
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__func__]
    if isinstance(value, types.FunctionType):
        cells = inspect.getclosurevars(value).nonlocals
        return [*cells.values(), *(value.__defaults__ or ())]
    plain = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, type, types.ModuleType)
    return [] if isinstance(value, plain) else getattr(value, "__dict__", {}).values()


def _check_keys(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError if the optimizer identifies its parameters in a way that shards break.

    Looks for ids of parameters, and for parameters themselves in the options of groups, down to
    five levels of containers.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    ids, ours = {id(p) for p in params}, ("param_groups", "state", "step")
    places: dict[str, Any] = {"state": own_entries(optimizer)}
    for name, value in vars(optimizer).items():
        if name not in ours and not name.endswith("_hooks"):
            places[f'attribute "{name}"'] = value
    for group in optimizer.param_groups:
        places |= {f'option "{k}" of a group': v for k, v in group.items() if k != "params"}
    for place, held in places.items():
        level: list[Any] = [held]
        seen: set[int] = set()
        for _ in range(6):
            options = place.startswith("option") and any(id(one) in ids for one in level)
            if options or any(type(one) is int and one in ids for one in level):
                raise ConfigError(
                    f"[front::initialize] {type(optimizer).__name__} keeps "
                    f"{'parameters' if options else 'ids of its parameters'} in its {place}. Its "
                    f"step() gets shards instead, which are different tensors. Give such "
                    f"parameters a group of their own with an option, or an attribute "
                    f"(p.decays = False), which shards also have"
                )
            seen |= {id(one) for one in level}
            level = [one for outer in level for one in _inside(outer) if id(one) not in seen]


def from_config(model: torch.nn.Module, section: Any) -> torch.optim.Optimizer:
    """Builds a torch optimizer with the settings of the config's `optimizer` section."""
    return build(section, [p for p in model.parameters() if p.requires_grad])


def build(
    section: Any, params: Any, kind: Any = None, more: Mapping[str, Any] | None = None
) -> torch.optim.Optimizer:
    """Builds the torch optimizer of a config's `optimizer` section for parameters or groups.

    Allocates no state, although the constructors of some torch classes would.

    Args:
        kind: another registered class with the same update; default: torch's own.
        more: options for `kind` besides those that it takes from the section.
    """
    keys = [key for key in _KINDS[section.type].keys if key not in _BESIDES]
    make: Any = kind or _CLASSES[section.type]
    takes = inspect.signature(make.__init__).parameters if kind else keys
    options = {key: getattr(section, key) for key in keys if key in takes} | dict(more or {})
    made: Any = make.__new__(make)
    # torch's own method would import torch's compiler (66 MiB), only to exclude itself from
    # compiled code.
    made.add_param_group = types.MethodType(inspect.unwrap(make.add_param_group), made)
    made.__init__([torch.nn.Parameter(torch.zeros(1))], **options)
    made.state.clear()
    made.param_groups.clear()
    chosen = list(params)
    if not chosen or not isinstance(chosen[0], dict):
        chosen = [{"params": chosen}]
    for group in chosen:
        made.add_param_group(dict(group))
    del made.add_param_group  # the instance's; torch's method stays
    optimizer: torch.optim.Optimizer = made
    return optimizer


def _kind_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str | None:
    """Returns the kind whose kernel computes the optimizer's update of this group, or None."""
    if any(group.get(option) for option in _INEFFECTIVE):
        return None
    kind = _KIND_OF.get(type(optimizer))
    # torch's AdamW is an Adam with this option.
    if kind is not None and "decoupled_weight_decay" in group:
        return "AdamW" if group["decoupled_weight_decay"] else "Adam"
    return kind


def is_native(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the engine's kernels compute the same update as this optimizer."""
    return all(_kind_of(optimizer, group) is not None for group in optimizer.param_groups)


def _num_steps(state: dict[str, Any], uncounted: int) -> float:
    """Returns the count of steps. Zeros without a count mean the state before the first step."""
    values = [one for one in state.values() if isinstance(one, torch.Tensor)]
    zeros = bool(values) and not any(bool(one.any()) for one in values)
    return float(state.get("step", 0 if zeros else uncounted))


def _check_fresh(optimizer: torch.optim.Optimizer, uncounted: int) -> None:
    """Raises ConfigError if the optimizer has taken steps.

    `uncounted`: the steps of a state without a count. 0 for an optimizer that computes in Python,
    whose state a trial has checked.
    """
    # The constructors of some optimizers (Adagrad) make the state, with step 0.
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    # With dampening, torch's first step from zeros is not that of a new optimizer.
    dampens = uncounted and any(g.get("dampening") for g in optimizer.param_groups)
    if any(_num_steps(state, uncounted) > 0 or (dampens and state) for state in states):
        raise ConfigError(
            "[front::initialize] the optimizer has taken steps already, or its state was set. Pass "
            "a new optimizer, and set its state with engine.set_param_state()"
        )


def group_members(optimizer: torch.optim.Optimizer) -> list[tuple[int, ...]]:
    """Returns the ids of each group's parameters. The value changes if groups change."""
    return [tuple(map(id, group["params"])) for group in optimizer.param_groups]


def _section_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the config section of the group with the most moments per parameter.

    This is the first group, except for SGD, whose groups may have momentum or not.
    """
    section: dict[str, Any] = max(settings(optimizer), key=lambda one: one.num_moments).section
    return section


def settings(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns the groups' current hyperparameters for one step. A tensor counts as its value.

    Raises ConfigError if a group has an option without a kernel.
    """
    all_settings = []
    for group in optimizer.param_groups:
        kind = _kind_of(optimizer, group)
        if kind is None:
            options = [option for option in _INEFFECTIVE if group.get(option)]
            raise ConfigError(
                f'[front::step] "{options[0]}" of a parameter group was set after initialize(). '
                f"Set it in the constructor of {type(optimizer).__name__}: then torch's own step "
                f"runs on the shards"
            )
        all_settings.append(_penstock.OptimizerConfig(kind, group))
    return all_settings


def group_of(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
) -> dict[torch.Tensor, int]:
    """Returns the group of each parameter. `names` has the names of the model's parameters.

    Raises ConfigError for a trainable parameter in no group, and for a parameter that does not
    belong to the model.
    """
    groups = {
        param: index
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    for param, index in groups.items():
        if param not in names:
            raise ConfigError(
                f"[front::initialize] group {index} of the optimizer holds a parameter of shape "
                f"{tuple(param.shape)} that is not in the model, so the engine would not train it. "
                f"Make it a Parameter of the model, or give it an optimizer of its own"
            )
    for param, name in names.items():
        if param.requires_grad and param not in groups:
            raise ConfigError(
                f'[front::initialize] parameter "{name}" is in no group of the optimizer. '
                f"Add it, or freeze it with requires_grad_(False)"
            )
    return groups


def _plain(value: Any) -> bool:
    """Whether repr() is equal on all ranks. The repr() of other objects may have an address."""
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.Tensor))


def options_text(optimizer: torch.optim.Optimizer) -> str:
    """Returns the groups' options as a text that ranks compare: numbers, texts and tensors."""
    return repr(
        [
            {key: value for key, value in group.items() if key != "params" and _plain(value)}
            for group in optimizer.param_groups
        ]
    )


class _State(defaultdict[Any, Any]):
    """Takes the place of an optimizer's state if the engine computes the update. Any access raises
    an error."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeFault(
            "[front::optimizer] the optimizer's state (its moments, its step counts) is sharded "
            "in the engine, and optimizer.state is empty. Use engine.param_state(), "
            "engine.set_param_state() and engine.save()"
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse
    __bool__ = get = keys = values = items = pop = popitem = clear = update = _refuse
    setdefault = copy = _refuse
    __hash__ = None  # type: ignore[assignment]


def take_over(optimizer: torch.optim.Optimizer, external: "ShardStep | None", core: Any) -> None:
    """Replaces the optimizer's step(), zero_grad() and state by the engine's.

    A class's own zero_grad() runs, too. If it drops gradients, the engine also drops its own.
    """
    kept = weakref.ref(core)

    def step(_self: Any, closure: Any = None) -> Any:
        raise RuntimeFault(
            "[front::optimizer] optimizer.step() of an engine's optimizer updates nothing. Call "
            "engine.step()"
        )

    def zero_grad(_self: Any, set_to_none: bool = True) -> None:
        own = kept()
        if own is not None:
            own.zero_grad(set_to_none)

    # torch's schedulers warn if a step() that they wrapped loses this attribute.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    step._of_penstock = True  # type: ignore[attr-defined]
    changed: Any = optimizer
    changed.step = types.MethodType(step, optimizer)
    zero_grad._of_penstock = True  # type: ignore[attr-defined]
    if "zero_grad" not in vars(optimizer):
        changed.zero_grad = types.MethodType(zero_grad, optimizer)
    if external is not None:
        external.drops_gradients_by(lambda set_to_none: zero_grad(optimizer, set_to_none))
    optimizer.register_state_dict_pre_hook(refuse_save)
    optimizer.register_load_state_dict_pre_hook(refuse_save)
    if external is None:
        changed.state = _State()


def check_ours(optimizer: Any, given: torch.optim.Optimizer, native: bool) -> None:
    """Raises RuntimeFault if the user replaced the optimizer, its step() or its state."""
    if optimizer is not given:
        raise RuntimeFault(
            "[front::optimizer] engine.optimizer was replaced, but an engine keeps the optimizer "
            "of initialize(). Change its param_groups, or close() and initialize again"
        )
    step = getattr(vars(optimizer).get("step"), "__func__", None)
    if not getattr(step, "_of_penstock", False):
        raise RuntimeFault(
            "[front::optimizer] optimizer.step was replaced, but engine.step() does not call the "
            "replacement. Use optimizer.register_step_pre_hook() and register_step_post_hook()"
        )
    if native and not isinstance(optimizer.state, _State):
        raise RuntimeFault(
            "[front::optimizer] optimizer.state was replaced, which resets nothing, because the "
            "moments are in the engine. To reset them, close() the engine and initialize again"
        )


def call_hooks(optimizer: torch.optim.Optimizer, before: bool) -> None:
    """Calls the optimizer's step hooks and torch's global ones, before or after a step."""
    both: list[Any]
    if before:
        both = [_global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks]
    else:
        both = [optimizer._optimizer_step_post_hooks, _global_optimizer_post_hooks]
    for hooks in both:
        for hook in list(hooks.values()):
            hook(optimizer, (), {})


def steps_alone(scheduler: Any) -> bool:
    """Whether the engine can call step() without arguments. ReduceLROnPlateau needs a metric, so
    the user calls it as in torch."""
    parameters = inspect.signature(scheduler.step).parameters.values()
    return all(
        one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        for one in parameters
    )


class ShardStep:
    """Runs a torch optimizer on this rank's fp32 shards.

    Attributes:
        whole: the layout is "whole", so shards are parameters in their own shapes. Otherwise they
            are flat slices, and the optimizer is elementwise.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, core: Any, world: int) -> None:
        _check_fresh(optimizer, uncounted=0)
        self._optimizer = optimizer
        self._values = values = core.values
        self.whole = core.config.optimizer.layout == "whole"
        # A tiled parameter has several masters.
        shards: dict[torch.Tensor, list[torch.Tensor]] = defaultdict(list)
        self._masters: list[torch.Tensor] = []
        self._params: list[torch.Tensor] = []
        self.places: list[tuple[str, int]] = []  # per master: parameter name and first element
        names: dict[torch.Tensor, str] = {}
        self._indices: list[int] = []  # per master: index among the engine's shards
        for index, (name, param, master, begin) in enumerate(values.shards()):
            names[param] = name
            if self.whole and master.numel() == 0:
                continue  # the parameter is on another rank, or has no elements
            shards[param].append(master)
            self._indices.append(index)
            self._masters.append(master)
            self._params.append(param)
            self.places.append((name, begin))
        cut = sum(master.numel() for master in self._masters) < sum(p.numel() for p in shards)
        if not self.whole:
            check_sizes(optimizer, world if cut else 1, _kernels())
        self._methods = Methods(optimizer, values, WholeTwin if self.whole else Twin)
        # Keys of the loaded state that have one value per parameter.
        self.single_keys: set[Any] = set()
        # Names of the trained parameters in each group, including those on other ranks.
        self.group_names = [
            sorted({names[p] for p in group["params"] if p in names})
            for group in optimizer.param_groups
        ]
        for group in optimizer.param_groups:
            group["params"] = [piece for p in group["params"] for piece in shards.get(p, ())]
        self._step = optimizer.step
        pairs = zip(self._masters, self._params, strict=True)
        fresh = {master: fresh_state(optimizer, master, param) for master, param in pairs}
        own = own_entries(optimizer)
        optimizer.state.clear()
        optimizer.state.update(own | {one: state for one, state in fresh.items() if state})
        self._methods.install()

    def loaded(self) -> None:
        """Must be called after a load, on all ranks."""
        self._methods.loaded()

    def drops_gradients_by(self, drop: Callable[[bool], None]) -> None:
        """`drop(set_to_none)` runs when the optimizer's own zero_grad() has dropped gradients."""
        self._methods.drop = drop

    def check_saved(self) -> None:
        """Raises ConfigError if `optimizer.state`, which checkpoints contain, lacks some state."""
        own = self._optimizer
        for name, inner in vars(own).items():
            if not isinstance(inner, torch.optim.Optimizer) or inner.state is own.state:
                continue
            if inner.state:
                raise ConfigError(
                    f"[front::save] {type(own).__name__} keeps another optimizer in its attribute "
                    f'"{name}", whose state would not be saved. Let both share one state: '
                    f"self.{name}.state = self.state in the constructor"
                )

    def is_single(self, key: Any, value: Any, master: torch.Tensor) -> bool:
        """Whether a state is one value for the whole parameter, and not a value per element."""
        if not isinstance(value, torch.Tensor) or (value.dim() == 0 and master.dim() > 0):
            return True
        # If the master has one element, too, the number of elements does not tell the two apart.
        known = self.single_keys | self._methods.single_keys()
        return value.numel() == 1 and (master.numel() != 1 or key in known)

    def pieces(self) -> Iterator[tuple[str, int, torch.Tensor, torch.Tensor]]:
        """Yields name, first element, parameter and master [numel] fp32 of each slice that this
        rank updates."""
        for (name, begin), param, master in zip(
            self.places, self._params, self._masters, strict=True
        ):
            yield name, begin, param, master

    def __call__(self) -> None:
        every = self._values.shard_gradients()
        gradients = [every[index] for index in self._indices]
        for master, param, gradient in zip(self._masters, self._params, gradients, strict=True):
            vars(master).update(vars(param))  # attributes that the optimizer may read
            master.grad = gradient if gradient is None else gradient.view(master.shape)
        with self._methods.step():
            self._step()
        for master in self._masters:
            master.grad = None
