"""`tensor_parallel.partition_config` of a config, as rules of Penstock's (docs/deepspeed.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from penstock import ConfigError
from penstock.parallel import parallel_plans

Rules = dict[str, str]
_KEYS = "patterns partition_type shape partition_dim model_types gather_output grad_allreduce"
_TYPES = ("column", "row", "skip")


def rules_of(model: torch.nn.Module, section: Mapping[str, Any], tensor: int) -> Rules | None:
    """The rules for what specs name, by the names of modules; None without a partition_config.

    Args:
        model: whole, not cut yet.
        section: `tensor_parallel` of the config; its sizes are checked already.
        tensor: number of tensor ranks.

    Raises:
        ConfigError: a spec that cannot be, or that this model's layers do not work with.
    """
    given = section.get("partition_config")
    if not given or tensor == 1:
        return None
    kind = str(getattr(getattr(model, "config", None), "model_type", "")).lower()
    specs = [_Spec(one, index) for index, one in enumerate(given.get("layer_specs") or [])]
    specs = [one for one in specs if one.model_types is None or kind in one.model_types]
    known = parallel_plans.rules_for(model, tensor)
    rules: Rules = {}
    for name, module in model.named_modules():
        spec = _first(specs, f"{name}.weight")
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            continue
        if spec is not None:
            rules[name] = _agreed(name, spec.style(name, module), known)
    rules |= _partial(model, specs)
    merged = bool(section.get("preset_model")) and given.get("use_default_specs", True)
    if given.get("strict_mode", False):
        _check_all(model, rules, known if merged else {})
    rules |= _others(model, rules, known) if merged else _divided(model, rules, known)
    if not rules:
        raise ConfigError(
            '[deepspeed::initialize] "tensor_parallel.partition_config" names no layer of this '
            "model: a pattern is matched from the beginning of a weight's name"
        )
    return rules


def _others(model: torch.nn.Module, rules: Rules, known: Rules) -> Rules:
    """The model's own rules that specs leave something for."""
    left = [name for name, _ in model.named_modules() if name not in rules]
    left += [name for name, _ in model.named_parameters()]
    left += list(parallel_plans.attributes(model))
    return {
        pattern: style
        for pattern, style in known.items()
        if any(parallel_plans.matches(name, pattern) for name in left)
    }


class _Spec:
    """One of `layer_specs`."""

    def __init__(self, given: Any, index: int) -> None:
        self._key = f"tensor_parallel.partition_config.layer_specs[{index}]"
        wrong = sorted(set(given) - set(_KEYS.split()))
        if wrong:
            self._fail(f'"{wrong[0]}" is no key of it; allowed: {_KEYS.replace(" ", ", ")}')
        self.type = str(given.get("partition_type", "column")).lower()
        if self.type not in _TYPES:
            self._fail(f'partition_type is "{self.type}"; allowed: {", ".join(_TYPES)}')
        types = given.get("model_types")
        self.model_types = [str(one).lower() for one in types] if types else None
        try:
            self._patterns = [re.compile(one) for one in given.get("patterns", [])]
        except re.error as error:
            self._fail(f"a pattern is no regular expression: {error}")
        self.grad_allreduce = bool(given.get("grad_allreduce", False))
        self._gather = bool(given.get("gather_output", False))
        self._dim = int(self.type == "row")
        if given.get("partition_dim") not in (None, self._dim) and self.type != "skip":
            self._fail(
                f"partition_dim is {given['partition_dim']}; allowed: {self._dim} for "
                f'{self.type}; other cuts: the native key "parallel.rules"'
            )
        self._parts = self._parts_of(given.get("shape"))
        if self.grad_allreduce and self.type != "skip":
            self._fail('grad_allreduce is of what stays whole: partition_type "skip"')
        if self._gather and (self._parts or self.type != "column"):
            self._fail("gather_output is of a column without a shape")

    def _fail(self, text: str) -> NoReturn:
        raise ConfigError(f'[deepspeed::initialize] "{self._key}": {text}')

    def _parts_of(self, shape: Any) -> str:
        """What follows the style: ":3", ":64,16,16", or nothing."""
        if shape is None or self.type == "skip":
            return ""
        sizes = shape[self._dim] if len(shape) == 2 else None
        others = [one for dim, one in enumerate(shape) if dim != self._dim]
        if sizes is None or others != [-1]:
            self._fail(f"shape is {shape}; allowed: -1 where partition_dim is not, 2 dimensions")
        if isinstance(sizes, list | tuple):
            return ":" + ",".join(str(one) for one in sizes)
        return f":{sizes}" if sizes > 1 else ""

    def matches(self, name: str) -> bool:
        """As there: from the name's beginning, of a parameter."""
        return any(one.match(name) for one in self._patterns)

    def style(self, name: str, module: torch.nn.Module) -> str:
        if self.type == "skip":
            return "partial" if self.grad_allreduce else "whole"
        if isinstance(module, torch.nn.Embedding):
            self._fail(
                f'"{name}" is an Embedding: leave it out, or say "vocab" of it in the native key '
                f'"parallel.rules"'
            )
        return "column_gather" if self._gather else self.type + self._parts


def _first(specs: list[_Spec], name: str) -> _Spec | None:
    return next((one for one in specs if one.matches(name)), None)


def _agreed(name: str, style: str, known: Rules) -> str:
    """The style, where the model's own rules do not say that its forward wants another one."""
    own = next((known[one] for one in known if parallel_plans.matches(name, one)), style)
    if style == "column" and own.startswith("shared"):
        return own  # fewer heads than ranks
    if style.startswith("column") and own.startswith("column:") and style != own:
        raise ConfigError(
            f'[deepspeed::initialize] "tensor_parallel.partition_config" says "{style}" of '
            f'"{name}", whose outputs are parts: this model wants "{own}" (shape says it), or no '
            f"spec for it"
        )
    return style


def _partial(model: torch.nn.Module, specs: list[_Spec]) -> Rules:
    """Parameters that stay whole and whose gradients are added up over tensor ranks."""
    found = {}
    for name, _ in model.named_parameters():
        spec = _first(specs, name)
        if spec is not None and spec.grad_allreduce:
            found[name] = "partial"
    return found


def _divided(model: torch.nn.Module, rules: Rules, known: Rules) -> Rules:
    """Numbers of heads and the like, of modules whose layers specs cut."""
    heads = ("column", "shared")
    cut = [
        name
        for name, style in rules.items()
        if style.startswith(heads) and style != "column_gather"
    ]
    found: Rules = {}
    for name in parallel_plans.attributes(model):
        style = next((known[one] for one in known if parallel_plans.matches(name, one)), "")
        owner = name.rpartition(".")[0] + "."
        if style.startswith("divide") and any(one.startswith(owner) for one in cut):
            found[name] = style
    return found


def _check_all(model: torch.nn.Module, rules: Rules, known: Rules) -> None:
    for name, module in model.named_modules():
        found = name in rules or any(parallel_plans.matches(name, one) for one in known)
        if isinstance(module, torch.nn.Linear) and not found:
            raise ConfigError(
                f'[deepspeed::initialize] "tensor_parallel.partition_config" has strict_mode, and '
                f'no spec for "{name}"'
            )
