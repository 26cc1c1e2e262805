"""Tensor parallelism: replaces layers by ones that compute with this rank's part of the weights.

The C++ core has the mathematics and the exchanges (`_penstock.TensorRanks`). This module selects
the layers that call them, and divides attributes that depend on the part, such as numbers of heads.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault, _penstock
from penstock.front import generators, module_tree
from penstock.front.forward_guard import Forward, Hook
from penstock.parallel import parallel_plans
from penstock.parallel.lazy_logits import CutHead, LazyLogits
from penstock.parallel.probe import Probe
from penstock.parallel.rule_check import RuleCheck
from penstock.parallel.token_parts import TokenParts, partial_rules


def with_rules(model: torch.nn.Module, config: Any) -> Any:
    """Returns the config. If it has tensor ranks and no rules, adds the rules for this model.

    "parallel.verify" is then "off" instead of "own", because the config has no rules of its own.
    """
    if config.mesh.tensor == 1:
        return config
    rules, verify = dict(config.parallel.rules), config.parallel.verify
    if not rules:
        rules = parallel_plans.rules_for(model, config.mesh.tensor)
        if rules and config.parallel.norms == "tokens":
            rules = parallel_plans.with_tokens(model, rules)
        verify = "off" if verify == "own" else verify
    rules |= partial_rules(model, rules)
    return config.with_rules(list(rules.items()), verify)


class TensorParallel:
    """The cut layers of one engine, and whether the model's parameters are full tensors now.

    Attributes:
        whole: number of open contexts (such as `gathered()`) that make parameters full tensors.
    """

    def __init__(
        self, model: torch.nn.Module, core: Any, config: Any, installed: list[Any]
    ) -> None:
        self.whole = 0
        self._shapes_alone = False
        self._tokens: TokenParts | None = None
        self._cut_logits = config.parallel.cut_logits
        self._core, self._count = core, config.mesh.tensor
        self._attributes: list[_Attribute] = []
        self._check: RuleCheck | None = None
        self._axis = "mesh.tensor" if self._count > 1 else "mesh.expert"
        self._parts: list[tuple[str, torch.nn.Parameter]] = []
        self._guard(model, dict(core.values.shapes()), installed)
        if self._count == 1:
            return
        self._ranks = _penstock.TensorRanks(core)
        self._draws = _Draws(module_tree.device_of(model))
        self._tokens = TokenParts.of(model, config, self._ranks)
        self._divide(model, config.parallel.rules, installed)
        # The order matters. The check is inside the gathers of tokens, because it needs their
        # results. It is outside the code that divides arguments among heads.
        if config.parallel.verify != "off":
            self._verify(model, config, installed)
        if self._tokens is not None:
            self._tokens.install(model, installed)
        for how in self._ranks.modules:
            module = module_tree.submodule(model, how.name)
            self._cut(module, how, installed)
            if how.style != "whole":
                outer = module_tree.submodule(model, how.name.rpartition(".")[0])
                _see_calls(outer, how, installed)
                self._parts += _named(how.name, module)
        if self._cut_logits and not any(_is_head(model, how) for how in self._ranks.modules):
            raise ConfigError(
                '[front::initialize] "parallel.cut_logits" is set, but no Linear has the style '
                '"vocab", so the rules do not cut this model\'s logits'
            )

    def _verify(self, model: torch.nn.Module, config: Any, installed: list[Any]) -> None:
        self._probe = Probe(
            model, self._ranks, self._tokens, self._attributes, lambda: self._shapes_alone
        )
        self._check = RuleCheck(model, self._core, config, self._probe)
        self._check.install(installed)

    def _cut(self, module: Any, how: Any, installed: list[Any]) -> None:
        if how.style in ("partial", "whole"):
            return
        _refuse(module, how)
        installed.append(Forward(module, self._standing_in(module, how)))

    def _guard(self, model: torch.nn.Module, full: dict[str, Any], installed: list[Any]) -> None:
        """Makes state_dict() and copies of modules raise while this rank has parts of their
        parameters.

        Args:
            model: the model.
            full: the full shapes of parameters, by name.
        """
        cut = {
            id(param)
            for name, param in model.named_parameters()
            if full.get(name) not in (None, list(param.shape))
        }
        for name, module in model.named_modules():
            own = [(key, param) for key, param in _named(name, module) if id(param) in cut]
            if not own:
                continue
            self._parts += own
            installed.append(
                torch.nn.Module.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                    module, _PartHook(module, self)
                )
            )

    def _standing_in(self, module: Any, how: Any) -> Callable[..., Any]:
        ranks, tokens = self._ranks, self._tokens
        if tokens is not None:
            how = tokens.marked(how)

        def embedding(inner: Any, input: torch.Tensor) -> Any:
            if self._shapes_alone:
                return module.weight.new_empty((*input.shape, module.weight.shape[1]))
            if self._is_uncut(how.name):
                return self._probe.call_uncut(module, inner, input)
            padding = -1 if module.padding_idx is None else module.padding_idx
            return ranks.embedding(how, input, module.weight, padding)

        def linear(inner: Any, input: torch.Tensor) -> Any:
            if self._shapes_alone:
                made = input.new_empty((*input.shape[:-1], _columns(module, how)))
                return tokens.part_of(made) if tokens and how.style == "row_tokens" else made
            if self._is_uncut(how.name):
                return self._probe.call_uncut(module, inner, input)
            if self._cut_logits and how.style == "vocab":
                own = ranks.cut_logits(how, input, module.weight, module.bias)
                return LazyLogits.of(CutHead(ranks, how, how.size), own)
            now = how if tokens is None else tokens.now(how)
            return ranks.linear(now, input, module.weight, module.bias)

        return embedding if isinstance(module, torch.nn.Embedding) else linear

    def _is_uncut(self, layer: str) -> bool:
        """Whether a cut layer computes with its full weights, to be compared with its parts."""
        if self._check is None or torch.compiler.is_compiling():
            return False
        self._check.called(layer)
        return self._probe.uncut(layer)

    @contextlib.contextmanager
    def shapes_alone(self) -> Iterator[None]:
        """In this context layers return outputs with shapes and without values, and exchange
        nothing."""
        self._set_shapes_alone(True)
        try:
            yield
        finally:
            self._set_shapes_alone(False)

    def _set_shapes_alone(self, alone: bool) -> None:
        self._shapes_alone = alone
        if self._tokens is not None:
            self._tokens.shapes_alone = alone

    def _divide(self, model: torch.nn.Module, rules: Any, installed: list[Any]) -> None:
        known = parallel_plans.attributes(model)
        for pattern, style in rules.items():
            name, _, by = style.partition(":")
            if name != "divide":
                continue
            count = int(by or self._count)
            found = [one for one in known if parallel_plans.matches(one, pattern)]
            if not found:
                raise ConfigError(
                    f'[front::initialize] "parallel.rules.{pattern}" is "{style}", but no module '
                    f"has an attribute of that name that is a whole number"
                )
            for one in found:
                made = _Attribute(*known.pop(one), one, count)
                self._attributes.append(made)
                installed.append(made)
                if made.is_of("BloomAttention", "num_heads"):
                    installed.append(_cut_slopes(made, self._ranks.index))
                if made.is_of("FalconAttention", "num_heads"):
                    _refuse_falcon(made.module)

    def refuse_parts(self) -> None:
        """Raises RuntimeFault if parameters are parts, so that a copy would not be complete."""
        if self.whole == 0:
            raise RuntimeFault(
                f"[front::parameters] this rank has a part of some parameters ({self._axis}), "
                f"so a copy or a state_dict() of the model itself is incomplete. "
                f"Use engine.state_dict(), or copy inside `with engine.gathered():`"
            )

    def __enter__(self) -> None:
        """Sets attributes to their full values, for a context in which parameters are full."""
        self.whole += 1
        if self.whole == 1:
            for one in self._attributes:
                one.make_whole()

    def __exit__(self, *_: Any) -> None:
        self.whole -= 1
        if self.whole == 0:
            for one in self._attributes:
                one.divide()

    def before(self, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Must be called before the model's forward, `run(*args, **kwargs)`. This method may itself
        call `run`.

        Raises ConfigError if "parallel.verify" finds a rule with which the model does not compute
        what the uncut model computes.
        """
        if self._check is not None:
            self._check.before(run, args, kwargs)

    def begin(self, model: torch.nn.Module, inputs: Any) -> None:
        """Called when a forward begins. Raises RuntimeFault if the ranks got different inputs."""
        self._refuse_hooks()
        if self._count == 1:
            return
        if self._tokens is not None:
            self._tokens.begin(model, inputs)
        # Tensors in other objects (a key-value cache) may be a rank's part, so do not compare them.
        given, _ = module_tree.take_out(inputs)
        others = f"{model.training} {torch.is_grad_enabled()}"
        self._draws.begin(self._ranks.compare(given, others, self._draws.now()))

    def _refuse_hooks(self) -> None:
        """Raises ConfigError for a parameter hook, which would get a part of the gradient."""
        for name, param in self._parts:
            if param._backward_hooks or param._post_accumulate_grad_hooks:
                raise ConfigError(
                    f'[front::forward] "{name}" has a hook, which would get only this rank\'s part '
                    f"of its gradient ({self._axis}). Use engine.full_grads() and "
                    f"engine.set_grads() before step()"
                )

    def end(self) -> None:
        """Called when a forward ends. Raises RuntimeFault if tensor ranks drew different random
        numbers."""
        if self._tokens is not None:
            self._tokens.end()
        if self._count > 1:
            self._draws.end()
        if self._check is not None:
            self._check.end()


class _SlowPath:
    """Makes torch's TransformerEncoderLayer call its layers also in evaluation.

    Its fast path computes with those layers' weights directly. With activation 0 torch does not
    use that path.
    """

    def __init__(self, module: torch.nn.TransformerEncoderLayer) -> None:
        self._module, self._had = module, module.activation_relu_or_gelu
        module.activation_relu_or_gelu = 0

    def remove(self) -> None:
        self._module.activation_relu_or_gelu = self._had


def _named(name: str, module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Returns the module's own parameters with their full names."""
    return [
        (f"{name}.{key}" if name else key, param)
        for key, param in module._parameters.items()
        if param is not None
    ]


def _see_calls(parent: torch.nn.Module, how: Any, installed: list[Any]) -> None:
    """Makes the parent of a cut layer call the layer, instead of computing with its weight.

    Raises ConfigError if the parent never calls it.
    """
    if isinstance(parent, torch.nn.MultiheadAttention):
        raise ConfigError(
            f'[front::initialize] "parallel.rules" set "{how.style}" for "{how.name}", but '
            f"torch.nn.MultiheadAttention computes with its weights directly and cannot be cut"
        )
    if isinstance(parent, torch.nn.TransformerEncoderLayer) and parent.activation_relu_or_gelu:
        installed.append(_SlowPath(parent))


def _is_head(model: torch.nn.Module, how: Any) -> bool:
    module = module_tree.submodule(model, how.name)
    return how.style == "vocab" and not isinstance(module, torch.nn.Embedding)


def _columns(module: torch.nn.Module, how: Any) -> int:
    """Returns the number of columns of a layer's output on this rank."""
    own = module.weight.shape[1 if how.transposed else 0]  # type: ignore[index]
    if how.style in ("column_gather", "vocab"):
        return int(how.size)
    return int(own) // how.heads if how.style == "shared" else int(own)


def _refuse(module: torch.nn.Module, how: Any) -> None:
    kinds = (torch.nn.Linear, torch.nn.Embedding)
    plain = [kind.forward for kind in kinds]
    # FalconLinear's forward is torch's, with one more rounding before the bias.
    known = type(module).__name__ in ("Conv1D", "FalconLinear")
    own = "forward" in vars(module) or not known
    if type(module).forward not in plain and own:
        raise ConfigError(
            f'[front::initialize] "parallel.rules" set "{how.style}" for "{how.name}", a '
            f"{type(module).__name__} with a forward of its own. Only torch's Linear and Embedding "
            f"and transformers' Conv1D and FalconLinear can be cut"
        )
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option, None):
            raise ConfigError(
                f'[front::initialize] "parallel.rules" set "{how.style}" for "{how.name}", which '
                f"has {option}. This option needs the full weight on every rank"
            )


class _PartHook(Hook):
    """A state_dict hook of a module with parts of parameters. Refuses copies of the module, too."""

    def __init__(self, module: torch.nn.Module, owner: TensorParallel) -> None:
        super().__init__(module, lambda *_: owner.refuse_parts())
        self._owner = owner

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._owner.refuse_parts()
        return super().__deepcopy__(memo)

    def __reduce__(self) -> Any:
        self._owner.refuse_parts()
        return super().__reduce__()


class _Attribute:
    """An integer attribute of a module that is divided by the number of tensor ranks."""

    def __init__(self, module: torch.nn.Module, key: str, name: str, count: int) -> None:
        self.module, self.name, self._key, self._count = module, name, key, count
        self.whole = getattr(module, key)
        if self.whole % count:
            raise ConfigError(
                f'[front::initialize] "{name}" is {self.whole}, which is not divisible by the '
                f"{count} tensor ranks"
            )
        self.divide()

    def is_of(self, kind: str, key: str) -> bool:
        return type(self.module).__name__ == kind and self._key == key

    def divide(self) -> None:
        setattr(self.module, self._key, self.whole // self._count)

    def make_whole(self) -> None:
        setattr(self.module, self._key, self.whole)

    def remove(self) -> None:
        """Restores the full value, when the engine closes."""
        self._count = 1
        self.make_whole()


def _cut_slopes(heads: _Attribute, rank: int) -> Forward:
    """Cuts BLOOM's bias to this rank's heads. Returns the replaced forward, with remove().

    BLOOM's model makes one bias of all heads, `alibi` [batch x heads, 1, keys], and passes it to
    each attention. Raises ConfigError if attention reads slices of its weight directly
    (`slow_but_exact`).
    """
    module: Any = heads.module
    if module.slow_but_exact and module.pretraining_tp > 1:
        raise ConfigError(
            "[front::initialize] this BLOOM has slow_but_exact, which reads full weights, but with "
            '"mesh.tensor" each rank has a part. Set slow_but_exact to False'
        )

    def cut(inner: Callable[..., Any], *args: Any, **given: Any) -> Any:
        own, alibi, batch = module.num_heads, given.get("alibi"), args[0].shape[0]
        if alibi is None or alibi.shape[0] != batch * heads.whole:
            raise RuntimeFault(
                f"[front::forward] BLOOM's attention was not given an `alibi` of {heads.whole} "
                f"heads by name. Divide num_heads of attention only, not num_heads of the model"
            )
        if own == heads.whole:
            return inner(*args, **given)
        parts = alibi.view(batch, heads.whole, *alibi.shape[1:])
        part = parts[:, rank * own : (rank + 1) * own].flatten(0, 1)
        return inner(*args, **given | {"alibi": part})

    return Forward(module, cut)


def _refuse_falcon(module: Any) -> None:
    """Raises ConfigError for a Falcon whose attention cannot be cut by heads."""
    if module.multi_query and not module.new_decoder_architecture:
        raise ConfigError(
            "[front::initialize] this Falcon has multi_query without new_decoder_architecture. Its "
            "one key and value head is inside query_key_value, and every tensor rank needs it in "
            'full. Set "mesh.tensor" to 1'
        )
    if module.config.alibi:
        raise ConfigError(
            "[front::initialize] this Falcon has alibi. Its model makes one bias for all heads, "
            'but with "mesh.tensor" each rank has only some of the heads. Set "mesh.tensor" to 1'
        )


class _Draws:
    """Checks that tensor ranks draw the same random numbers in a forward."""

    def __init__(self, device: torch.device) -> None:
        self._alike, self._before = True, ""
        self._device = device

    def now(self) -> str:
        found = hashlib.blake2b()
        for state in generators.of_forward(self._device):
            found.update(state.numpy().tobytes())
        return found.hexdigest()

    def begin(self, alike: bool) -> None:
        self._alike = alike
        self._before = "" if alike else self.now()

    def end(self) -> None:
        if not self._alike and self._before != self.now():
            raise RuntimeFault(
                "[front::forward] the model drew random numbers (for example dropout), but tensor "
                "ranks that compute it together drew different ones. Set the same seed on them, "
                'with the config\'s "seed" or torch.manual_seed(seed + engine.data_rank)'
            )
