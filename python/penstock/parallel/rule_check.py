"""Checks once that a module with cut layers computes what the uncut module computes.

[Note: Checked rules] A rule can be wrong without an error: a softmax over a cut dim, a norm over a
part of the features, heads that are not divided. So a module that encloses a closed group of cut
layers (from "column" to "row") runs twice before its first training forward. The first run uses the
ranks' parts, the second run uses full weights; the arguments are the same. The outputs and the
gradients of inputs and parameters must agree. The probe leaves random numbers, buffers, attributes
and gradients as they are. Dropout is off in the probe. The probe runs before each module, so only
the full weights of one module exist at a time.

If a module encloses units whose parameters are gathered and released, it is compared without
gradients, in an evaluation before the first training forward.
"""

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault
from penstock.front import module_tree
from penstock.front.forward_guard import Forward, in_backward
from penstock.parallel.probe import Probe, Results, same_everywhere
from penstock.parallel.stand_in import is_absent
from penstock.parallel.token_parts import TokenParts

_OPENING, _CLOSING = ("column", "shared"), ("row", "row_tokens")
_NAMED = 6  # rules in an error
_OF_MODULES = (AssertionError, IndexError, RuntimeError, TypeError, ValueError)


@dataclasses.dataclass(eq=False)
class Region:
    """The smallest module that encloses a closed group of cut layers.

    Attributes:
        layers: the cuts of the group. Layers of enclosed regions are not part of it.
        inner: names of the enclosed regions.
        gathers: whether it encloses units whose parameters are gathered and released.
    """

    name: str
    module: torch.nn.Module
    layers: list[Any]
    inner: list[str] = dataclasses.field(default_factory=list)
    gathers: bool = False

    def owns(self, name: str) -> bool:
        """Whether a parameter or an attribute belongs to the region, not to an enclosed one."""
        return _is_inside(name, self.name) and not self.encloses(name)

    def encloses(self, name: str) -> bool:
        """Whether a parameter or an attribute belongs to an enclosed region."""
        return any(_is_inside(name, one) for one in self.inner)


def regions_of(model: torch.nn.Module, layers: Iterable[Any]) -> list[Region]:
    """Returns the regions of these cut layers.

    Layers without a partner ("column" without "row", "partial" outside of such a pair) belong to
    the module that calls them.
    """
    by_name = {one.name: one for one in layers}
    found: dict[str, Region] = {}

    def visit(name: str, module: torch.nn.Module) -> list[Any]:
        open_layers = [by_name.pop(name)] if name in by_name else []
        for key, child in module._modules.items():
            if child is not None:
                open_layers += visit(f"{name}.{key}" if name else key, child)
        styles = {one.style for one in open_layers}
        closed = styles.intersection(_OPENING) and styles.intersection(_CLOSING)
        if not closed or not _is_called(module):
            return open_layers
        found[name] = Region(name, module, open_layers)
        return []

    for one in visit("", model):
        name = one.name.rpartition(".")[0]
        while name and not _is_called(module_tree.submodule(model, name)):
            name = name.rpartition(".")[0]
        made = Region(name, module_tree.submodule(model, name), [])
        found.setdefault(name, made).layers.append(one)
    for region in found.values():
        others = (name for name in found if name != region.name)
        region.inner = [name for name in others if _is_inside(name, region.name)]
    return list(found.values())


class RuleCheck:
    """The regions of one engine's model that have not been compared yet."""

    def __init__(self, model: torch.nn.Module, core: Any, config: Any, probe: Probe) -> None:
        self._model, self._probe, self._tokens = model, probe, probe.tokens
        self._ahead = False  # the evaluation before the first training forward runs
        self._shapes_alone = probe.shapes_alone
        self._unchecked: dict[str, str] = {}  # region -> reason
        tokens = probe.tokens
        between = tokens.is_between if tokens is not None else (lambda _: False)
        layers = [
            one
            for one in probe.ranks.modules
            if one.style in (*_OPENING, *_CLOSING)
            or (one.style == "partial" and not between(one.name))
        ]
        events = core.needs_unit_events or any(unit.recomputed for unit in core.units)
        units = [unit.module for unit in core.units if unit.module and not unit.is_tile]
        self._due: dict[str, Region] = {}
        for region in regions_of(model, layers):
            encloses = any(_is_inside(unit, region.name) and unit != region.name for unit in units)
            region.gathers = events and encloses
            if encloses and config.mesh.pipeline > 1:
                self._unchecked[region.name] = "it encloses modules of several stages"
            else:
                self._due[region.name] = region
        self._region_of = {
            one.name: region for region in self._due.values() for one in region.layers
        }

    def install(self, installed: list[Any]) -> None:
        """Replaces the forward of each region's module by one that compares first."""
        for region in self._due.values():
            around = functools.partial(self._call, region)
            installed.append(Forward(region.module, around))

    def before(self, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Called before a forward of the model, `run`. Compares the regions that enclose units.

        Raises ConfigError if one of them differs from the uncut module.
        """
        waits = any(region.gathers for region in self._due.values())
        if self._ahead or not waits or not self._trains(self._model):
            return
        self._ahead = True
        try:
            with torch.no_grad(), self._probe.left_alone(self._model, (args, kwargs)):
                run(*args, **kwargs)
        finally:
            self._ahead = False

    def called(self, layer: str) -> None:
        """Called when a cut layer is called. Notes a region whose forward was not called."""
        region = self._region_of.get(layer)
        if region is None or region.name not in self._due or self._probe.running:
            return
        if self._ahead == region.gathers and self._trains(region.module):
            del self._due[region.name]
            self._unchecked[region.name] = "its layers were called, but its forward was not"

    def end(self) -> None:
        """Called when a forward of the model has ended. Warns once of regions that could not be
        compared."""
        if self._ahead or not self._unchecked or not self._trains(self._model):
            return
        told = "; ".join(f'"{name}": {why}' for name, why in self._unchecked.items())
        self._unchecked.clear()
        warnings.warn(
            f'[front::forward] "parallel.verify" could not compare these modules with uncut ones. '
            f"{told}. Compare the loss with that of a run in one process",
            RuntimeWarning,
            stacklevel=2,
        )

    def _trains(self, module: torch.nn.Module) -> bool:
        if in_backward() or self._shapes_alone() or torch.is_inference_mode_enabled():
            return False
        return self._ahead or torch.is_grad_enabled() or module.training

    def _call(self, region: Region, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if region.name in self._due and not torch.compiler.is_compiling():
            if self._is_turn(region, (args, kwargs)):
                del self._due[region.name]
                self._compare(region, inner, (args, kwargs))
        return inner(*args, **kwargs)

    def _is_turn(self, region: Region, given: Any) -> bool:
        if self._probe.running or self._ahead != region.gathers or not self._trains(region.module):
            return False
        return not any(is_absent(one) for one in module_tree.take_out(given)[0])

    def _compare(self, region: Region, inner: Callable[..., Any], given: Any) -> None:
        """Raises ConfigError on all tensor ranks if the cut module differs from the uncut one."""
        with self._probe.checking(), self._all_tokens(region, given) as probed:
            if not same_everywhere(self._probe.ranks, probed):
                self._unchecked[region.name] = "its arguments differ between tensor ranks"
                return
            runs = self._runs(region, inner, probed)
            if isinstance(runs, str):
                self._unchecked[region.name] = runs
                return
            worst = self._probe.compared(region, *runs)
        if worst is not None:
            what, difference, allowed = worst
            by = f" by {difference:.2g} (relative; allowed: {allowed:.0e})"
            raise ConfigError(
                f'[front::forward] "parallel.rules" cuts "{region.name or "the model"}" '
                f"({_rules(region)}), and {what} then differs from that of the uncut module"
                f"{by if math.isfinite(difference) else ''}.\n{_remedy(what)} If the "
                f'module is right, set "parallel.verify" to "off"'
            )

    def _runs(
        self, region: Region, inner: Callable[..., Any], given: Any
    ) -> tuple[Results, Results] | str:
        """Returns the results of a run with the ranks' parts and one with full weights; or the
        reason why the module cannot run with full weights."""
        run = functools.partial(self._probe.run, region, inner, given)
        if not region.gathers:
            try:
                return run(whole=False, wide=True), run(whole=True, wide=True)
            except (ConfigError, RuntimeFault):
                raise
            except _OF_MODULES:
                pass  # code that names a dtype cannot run in another one
        parts = run(whole=False, wide=False)
        try:
            return parts, run(whole=True, wide=False)
        except (ConfigError, RuntimeFault):
            raise
        except _OF_MODULES as error:
            return f"with full weights it raised {type(error).__name__}: {error}"

    def _all_tokens(self, region: Region, given: Any) -> contextlib.AbstractContextManager[Any]:
        tokens: TokenParts | None = self._tokens
        if tokens is None:
            return contextlib.nullcontext(given)
        return tokens.all_tokens(region.module, region.name, given)


def _rules(region: Region) -> str:
    names = [f'{_below(one.name, region.name)} "{one.style}"' for one in region.layers[:_NAMED]]
    return ", ".join(names + ["..."] * (len(region.layers) > _NAMED))


def _below(name: str, outer: str) -> str:
    return name.removeprefix(f"{outer}.") if outer else name


def _remedy(what: str) -> str:
    if what.startswith(Results.GRADIENT_OF_PARAMETER):
        return (
            'Use the style "partial" for a module whose input is a part, and "whole" for a module '
            "whose input is whole."
        )
    return (
        "Code in it uses a rank's part as if it were whole: a softmax, norm, mean or view over a "
        'cut dim, heads without "divide", or a "column" output without a "row" layer. Use '
        '"divide", "column:3" for fused weights, or "column_gather" and "row_cut".'
    )


def _is_inside(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def _is_called(module: torch.nn.Module) -> bool:
    """Whether the module has a forward, unlike a ModuleList."""
    return type(module).forward is not torch.nn.Module.forward
