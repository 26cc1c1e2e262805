"""Translates `tensor_parallel.partition_config` to Penstock's rules (docs/deepspeed.md)."""

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
    """Returns the rules for the layers in the specs, by name; None without a partition_config.

    Args:
        model: the uncut model.
        section: the config section `tensor_parallel`, with checked sizes.
        tensor: the number of tensor ranks.

    Raises:
        ConfigError: a spec is wrong, or this model's layers do not support it.
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
            '[deepspeed::initialize] "tensor_parallel.partition_config" matches no layer of this '
            "model. A pattern must match from the beginning of a weight's name"
        )
    return rules


def _others(model: torch.nn.Module, rules: Rules, known: Rules) -> Rules:
    """Returns the model's own rules for names that the specs do not cover."""
    left = [name for name, _ in model.named_modules() if name not in rules]
    left += [name for name, _ in model.named_parameters()]
    left += list(parallel_plans.attributes(model))
    return {
        pattern: style
        for pattern, style in known.items()
        if any(parallel_plans.matches(name, pattern) for name in left)
    }


class _Spec:
    """One entry of `layer_specs`."""

    def __init__(self, given: Any, index: int) -> None:
        self._key = f"tensor_parallel.partition_config.layer_specs[{index}]"
        wrong = sorted(set(given) - set(_KEYS.split()))
        if wrong:
            self._fail(f'"{wrong[0]}" is not a key; allowed: {_KEYS.replace(" ", ", ")}')
        self.type = str(given.get("partition_type", "column")).lower()
        if self.type not in _TYPES:
            self._fail(f'partition_type is "{self.type}"; allowed: {", ".join(_TYPES)}')
        types = given.get("model_types")
        self.model_types = [str(one).lower() for one in types] if types else None
        try:
            self._patterns = [re.compile(one) for one in given.get("patterns", [])]
        except re.error as error:
            self._fail(f"a pattern is not a regular expression: {error}")
        self.grad_allreduce = bool(given.get("grad_allreduce", False))
        self._gather = bool(given.get("gather_output", False))
        self._dim = int(self.type == "row")
        if given.get("partition_dim") not in (None, self._dim) and self.type != "skip":
            self._fail(
                f"partition_dim is {given['partition_dim']}; allowed: {self._dim} for "
                f'{self.type}. For other cuts use the native key "parallel.rules"'
            )
        self._parts = self._parts_of(given.get("shape"))
        if self.grad_allreduce and self.type != "skip":
            self._fail('grad_allreduce is allowed only with partition_type "skip" (a whole weight)')
        if self._gather and (self._parts or self.type != "column"):
            self._fail('gather_output needs partition_type "column" without a shape')

    def _fail(self, text: str) -> NoReturn:
        raise ConfigError(f'[deepspeed::initialize] "{self._key}": {text}')

    def _parts_of(self, shape: Any) -> str:
        """Returns the suffix of the style: ":3", ":64,16,16", or ""."""
        if shape is None or self.type == "skip":
            return ""
        sizes = shape[self._dim] if len(shape) == 2 else None
        others = [one for dim, one in enumerate(shape) if dim != self._dim]
        if sizes is None or others != [-1]:
            self._fail(
                f"shape is {shape}; allowed: 2 dimensions, with -1 for the one that is not "
                f"partition_dim"
            )
        if isinstance(sizes, list | tuple):
            return ":" + ",".join(str(one) for one in sizes)
        return f":{sizes}" if sizes > 1 else ""

    def matches(self, name: str) -> bool:
        """Whether a pattern matches the beginning of a parameter's name, as in DeepSpeed."""
        return any(one.match(name) for one in self._patterns)

    def style(self, name: str, module: torch.nn.Module) -> str:
        if self.type == "skip":
            return "partial" if self.grad_allreduce else "whole"
        if isinstance(module, torch.nn.Embedding):
            self._fail(
                f'"{name}" is an Embedding: leave it out, or give it the style "vocab" in the '
                f'native key "parallel.rules"'
            )
        return "column_gather" if self._gather else self.type + self._parts


def _first(specs: list[_Spec], name: str) -> _Spec | None:
    return next((one for one in specs if one.matches(name)), None)


def _agreed(name: str, style: str, known: Rules) -> str:
    """Returns the style, or the model's own style if ranks share heads.

    Raises ConfigError if the model's forward needs another style.
    """
    own = next((known[one] for one in known if parallel_plans.matches(name, one)), style)
    if style == "column" and own.startswith("shared"):
        return own  # fewer heads than ranks
    if style.startswith("column") and own.startswith("column:") and style != own:
        raise ConfigError(
            f'[deepspeed::initialize] "tensor_parallel.partition_config" gives "{name}" the style '
            f'"{style}", but its output has several parts, so this model needs "{own}": add '
            f'the key "shape" to the spec, or remove the spec'
        )
    return style


def _partial(model: torch.nn.Module, specs: list[_Spec]) -> Rules:
    """Returns rules for whole parameters whose gradients are summed over tensor ranks."""
    found = {}
    for name, _ in model.named_parameters():
        spec = _first(specs, name)
        if spec is not None and spec.grad_allreduce:
            found[name] = "partial"
    return found


def _divided(model: torch.nn.Module, rules: Rules, known: Rules) -> Rules:
    """Returns rules that divide attributes (numbers of heads) of modules with cut layers."""
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
                f'[deepspeed::initialize] "tensor_parallel.partition_config" has strict_mode, but '
                f'no spec for "{name}": add one'
            )
