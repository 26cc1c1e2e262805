"""Cuts hidden states between layers along their tokens, into one part per tensor rank. So norms,
dropout and residuals are computed once and not by every rank (arXiv:2205.05198, section 4.2.2).

Before the first block of a stack, the full hidden states [batch, tokens, size] are cut along their
tokens. Modules that begin with cut weights ("gather_tokens": attention, an MLP) gather the tokens.
The row layers at the ends of these modules ("row_tokens") sum the states and cut them again. After
the last block, the states are gathered. These gathers and sums move as many bytes as the sums of
full hidden states, which they replace.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault
from penstock.front import module_tree
from penstock.front.forward_guard import Forward, in_backward
from penstock.parallel import parallel_plans

_INSIDE = ("column", "shared", "row_tokens", "partial")
_OF_FRONT = ("tokens", "gather_tokens", "divide")
_TOKENS = 1  # dim of the tokens


class TokenParts:
    """The stacks of one engine's model that keep tokens cut between their blocks.

    Attributes:
        shapes_alone: whether outputs have shapes without values, and nothing is exchanged.
    """

    def __init__(self, model: torch.nn.Module, rules: Any, ranks: Any, pipeline: bool) -> None:
        self.shapes_alone = False
        self._ranks, self._pipeline = ranks, pipeline
        self._open = False  # whether a forward of the model runs
        self._on: bool | None = None  # whether this forward cuts tokens; None: no stack has begun
        self._parts = False  # whether hidden states are parts now
        names = dict(module_tree.modules_of(model))
        styles = {name: _style_of(name, rules) for name in names}
        self._stacks = [name for name, style in styles.items() if style == "tokens"]
        self._gathering = [name for name, style in styles.items() if style == "gather_tokens"]
        self._all = False  # whether a block's module computes all tokens (all_tokens())
        self._uncut = {
            one.name: one.with_style("row" if one.style == "row_tokens" else one.style)
            for one in ranks.modules
            if self._is_inside(one.name, self._stacks)
        }
        for name in self._stacks:
            stack = names[name]
            if not isinstance(stack, torch.nn.ModuleList) or len(stack) == 0:
                raise ConfigError(
                    f'[front::initialize] "parallel.rules" set "tokens" for "{name}", a '
                    f"{type(stack).__name__}. This style is only for a ModuleList of blocks"
                )
            if len(set(stack)) < len(stack):
                raise ConfigError(
                    f'[front::initialize] "parallel.rules" set "tokens" for "{name}", which has '
                    f"the same block several times, so its first and last blocks cannot be told "
                    f"apart"
                )
        self._check(ranks.modules)

    @classmethod
    def of(cls, model: torch.nn.Module, config: Any, ranks: Any) -> "TokenParts | None":
        """Returns the stacks of the config's rules, or None if the rules cut no tokens.

        Raises ConfigError if rules contradict each other.
        """
        rules = dict(config.parallel.rules)
        styles = {style.partition(":")[0] for style in rules.values()}
        if not styles & {"tokens", "gather_tokens", "row_tokens"}:
            if config.parallel.norms == "tokens":
                raise ConfigError(
                    '[front::initialize] "parallel.norms" is "tokens", but no rule in '
                    '"parallel.rules" has the style "tokens"'
                )
            return None
        return cls(model, rules, ranks, config.mesh.pipeline > 1)

    def _check(self, modules: list[Any]) -> None:
        used = False
        for how in modules:
            inside = self._is_inside(how.name, self._gathering)
            between = self._is_inside(how.name, self._stacks)
            used |= how.style == "row_tokens"
            wrong = (
                (how.style == "row_tokens" and not between)
                or (between and inside and how.style not in _INSIDE)
                or (between and not inside and how.style not in ("row_tokens", "partial"))
                or (inside and not between)
            )
            if wrong:
                raise ConfigError(
                    f'[front::initialize] "parallel.rules" cut tokens, but "{how.name}" is '
                    f'"{how.style}". Allowed in a "tokens" module: "row_tokens" and "partial". '
                    f'Allowed in a "gather_tokens" module inside it: {", ".join(_INSIDE)}. '
                    f"These styles are allowed nowhere else"
                )
        if not (used and self._stacks and self._gathering):
            raise ConfigError(
                '[front::initialize] "parallel.rules" cut tokens, which needs modules of all three '
                'styles, "tokens", "gather_tokens" and "row_tokens"'
            )

    @staticmethod
    def _is_inside(name: str, others: list[str]) -> bool:
        return any(name == one or name.startswith(f"{one}.") for one in others)

    def marked(self, how: Any) -> Any:
        """Returns the module's cut, with `gathered` set if its input is gathered."""
        how.gathered = how.style != "row_tokens" and self._is_inside(how.name, self._gathering)
        return how

    def now(self, how: Any) -> Any:
        """Returns the module's cut in the running forward, which may compute all tokens."""
        return how if how.name not in self._uncut or self.cut else self._uncut[how.name]

    def is_between(self, name: str) -> bool:
        """Whether the module is in a stack and computes only a part of the tokens."""
        return self._is_inside(name, self._stacks) and not self._is_inside(name, self._gathering)

    @contextlib.contextmanager
    def all_tokens(self, module: torch.nn.Module, name: str, given: Any) -> Iterator[Any]:
        """In the context the module `name` computes all tokens on every rank. Yields its arguments
        (args, kwargs), with the full hidden states.

        A module that already computes all tokens computes as usual. All tensor ranks must enter
        this context.
        """
        if not self._is_inside(name, self._stacks) or not self.cut:
            yield given
            return
        if self.is_between(name):
            with torch.no_grad():
                given = _with_first(_first_name(module), given[0], given[1], self._as_input)
        self._all = True
        try:
            yield given
        finally:
            self._all = False

    def _as_input(self, part: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = self._ranks.whole_tokens(part)
        return whole.detach().requires_grad_(part.requires_grad)

    def install(self, model: torch.nn.Module, installed: list[Any]) -> None:
        """Replaces the forwards of blocks and gathering modules."""
        for name in self._stacks:
            stack: Any = module_tree.submodule(model, name)
            blocks = list(stack)
            for block in blocks:
                around = self._around(block, block is blocks[0], block is blocks[-1])
                installed.append(Forward(block, around))
        for name in self._gathering:
            module = module_tree.submodule(model, name)
            installed.append(Forward(module, self._gather(module, name)))

    # ---- a forward

    @property
    def cut(self) -> bool:
        """Whether the running forward cuts tokens."""
        if self._all:
            return False
        if in_backward() or self.shapes_alone:
            return True
        self._check_open()
        if self._on is None:
            raise RuntimeFault(
                "[front::forward] a block was called before the first block of its stack, which "
                'cuts the tokens ("parallel.norms": "tokens"). Begin every forward with that block'
            )
        return self._on

    def _check_open(self) -> None:
        """Raises RuntimeFault if no forward of the model runs."""
        if not (self._open or in_backward() or self.shapes_alone):
            raise RuntimeFault(
                "[front::forward] a module of the model was called by itself, but with "
                '"parallel.norms": "tokens" it computes a part of the tokens. Call the model'
            )

    def begin(self, model: torch.nn.Module, inputs: Any) -> None:
        """Called when a forward of the model begins.

        Raises RuntimeFault if the call or the model's config asks for hidden states.
        """
        self._open, self._parts = True, False
        self._on = True if self._pipeline else None
        given = inputs[1] if isinstance(inputs, tuple) and len(inputs) == 2 else {}
        asked = given.get("output_hidden_states") if isinstance(given, dict) else None
        if asked or (
            asked is None and getattr(getattr(model, "config", None), "output_hidden_states", False)
        ):
            raise RuntimeFault(
                "[front::forward] output_hidden_states is not supported with "
                '"parallel.norms": "tokens", because between layers each rank has the hidden '
                "states of only its part of the tokens"
            )

    def end(self) -> None:
        """Called when the forward ends. Raises RuntimeFault if tokens are still cut."""
        self._open = False
        if self._parts and not self._pipeline:
            raise RuntimeFault(
                "[front::forward] tokens were cut before the first block of a stack "
                '("parallel.norms": "tokens"), but the last block, which gathers them, was not '
                "called. Call it in every forward, and call the model, not a block by itself"
            )

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns a tensor without values, with the shape of a rank's part of `whole`:
        [batch, tokens / ranks, ...]."""
        count = int(self._ranks.count)
        return whole.new_empty((whole.shape[0], whole.shape[1] // count, *whole.shape[2:]))

    def _enter(self, whole: torch.Tensor) -> torch.Tensor:
        count = int(self._ranks.count)
        if whole.dim() != _TOKENS + 2 or whole.shape[_TOKENS] % count:
            if torch.is_grad_enabled() or self._pipeline or in_backward():
                raise RuntimeFault(
                    f"[front::forward] hidden states of shape {list(whole.shape)} cannot be cut "
                    f'along their tokens over {count} tensor ranks ("parallel.norms" is '
                    f'"tokens"). Pad sequences to a multiple of {count}'
                )
            self._on = False
            return whole
        if not (in_backward() or self.shapes_alone):
            self._on = self._parts = True
        return self.part_of(whole) if self.shapes_alone else self._ranks.cut_tokens(whole)

    def _leave(self, part: torch.Tensor) -> torch.Tensor:
        if not self.cut:
            return part
        if self.shapes_alone:
            return self._whole_of(part)
        if not in_backward():
            self._parts = False
        whole: torch.Tensor = self._ranks.whole_tokens(part)
        return whole

    def _whole_of(self, part: torch.Tensor) -> torch.Tensor:
        """Returns a tensor without values, with the shape that `part` has when gathered:
        [batch, tokens, ...]."""
        tokens = part.shape[_TOKENS] * int(self._ranks.count)
        return part.new_empty((part.shape[0], tokens, *part.shape[2:]))

    def _around(self, block: Any, first: bool, last: bool) -> Callable[..., Any]:
        name = _first_name(block)

        def run(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._check_open()
            if first:
                args, kwargs = _with_first(name, args, kwargs, self._enter)
            output = inner(*args, **kwargs)
            if not last:
                return output
            if torch.is_tensor(output):
                return self._leave(output)
            changed = list(output)
            changed[0] = self._leave(changed[0])
            return type(output)(changed)

        return run

    def _gather(self, module: Any, module_name: str) -> Callable[..., Any]:
        name = _first_name(module)

        def gather(part: torch.Tensor) -> torch.Tensor:
            if self.shapes_alone:
                return self._whole_of(part)
            whole: torch.Tensor = self._ranks.gather_tokens(module_name, part)
            return whole

        def run(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.cut:
                args, kwargs = _with_first(name, args, kwargs, gather)
            return inner(*args, **kwargs)

        return run


def _style_of(name: str, rules: Any) -> str:
    """Returns the style of the first rule that matches, "" if none does."""
    found = (style for pattern, style in rules.items() if parallel_plans.matches(name, pattern))
    return next(found, "").partition(":")[0]


def partial_rules(model: torch.nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """Returns "partial" rules for parameters that are in stacks with cut tokens and match no rule.

    On each rank, these parameters apply to a part of the tokens, or to all tokens of some heads. So
    each rank has an addend of their gradient.
    """
    stacks = [n for n, _ in module_tree.modules_of(model) if _style_of(n, rules) == "tokens"]
    ours = {p: s for p, s in rules.items() if s.partition(":")[0] not in _OF_FRONT}
    made = {}
    for name, _ in module_tree.params_of(model):
        owner = name.rpartition(".")[0]
        inside = any(name.startswith(f"{stack}.") for stack in stacks)
        if inside and not _style_of(owner, ours) and not _style_of(name, ours):
            made[name] = "partial"
    return made


def _first_name(module: torch.nn.Module) -> str:
    """Returns the name of the first argument of the module's forward, "" if there is none."""
    names = list(inspect.signature(type(module).forward).parameters)
    return names[1] if len(names) > 1 else ""


def _with_first(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], made: Callable[..., torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (made(args[0]), *args[1:]), kwargs
    if name not in kwargs:
        raise RuntimeFault(
            f"[front::forward] a module whose tokens are cut was called without its first "
            f'argument, "{name}", which must be the hidden states'
        )
    return args, kwargs | {name: made(kwargs[name])}
