"""Sequence parallelism: each rank has a part of the tokens of the same samples.

Each rank of `mesh.sequence` computes its part of every sequence. In attention, the ranks exchange
tokens for heads (DeepSpeed-Ulysses, arXiv:2309.14509), so that each rank has full sequences of some
heads. Or they pass keys and values around ("parallel.sequence": "ring", arXiv:2310.01889).
With "both", neighbours exchange tokens for heads, and their groups form the ring. The C++ core runs
the exchanges (`_penstock.SequenceRanks`); this module makes transformers models call them.
"""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault, _penstock
from penstock.front import module_tree
from penstock.front.forward_guard import in_backward
from penstock.parallel import stand_in
from penstock.parallel.pipeline_parallel import Handed

# Supported causal models by `config.model_type`. Their positions come from `position_ids`, their
# attention is in transformers' registry, and their loss is the model's `loss_function`.
# test_sequence.py trains each of them.
KNOWN = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2")
_ALONG_TOKENS = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids", "labels")
_IGNORED = -100  # label that the loss ignores, in torch and transformers


class SequenceParallel:
    """Cuts one engine's batches along their tokens, and replaces the attention of its model."""

    def __init__(
        self, model: torch.nn.Module, core: Any, config: Any, installed: list[Any]
    ) -> None:
        self._count: int = config.mesh.sequence
        if self._count == 1:
            return
        self._model, self._tensor = model, config.mesh.tensor
        # Numbers of ranks that exchange tokens for heads, and of their groups, which pass on keys.
        self._num_neighbours = self._check(config.parallel.sequence)
        self._num_groups = self._count // self._num_neighbours
        self._ranks = _penstock.SequenceRanks(core, self._num_neighbours)
        self._modules = {module for _, module in module_tree.modules_of(model)}
        self._cut = False  # whether the running forward computes a part
        self._mask: torch.Tensor | None = None  # attention mask of full sequences
        installed.append(_Attention(self, model))

    @property
    def active(self) -> bool:
        return bool(self._count > 1)

    def _loss_name(self) -> str:
        return getattr(getattr(self._model, "loss_function", None), "__name__", "")

    def _refuse(self, what: str) -> None:
        raise ConfigError(f'[front::initialize] "mesh.sequence" is {self._count}: {what}')

    def _check(self, way: str) -> int:
        """Returns how many ranks exchange tokens for heads; `way` is "parallel.sequence"."""
        config = getattr(self._model, "config", None)
        kind = getattr(config, "model_type", type(self._model).__name__)
        if kind not in KNOWN or self._loss_name() != "ForCausalLMLoss":
            self._refuse(
                f"the model is a {type(self._model).__name__}, but only transformers' causal "
                f"models {', '.join(KNOWN)} are supported"
            )
        if config._attn_implementation != "sdpa":  # type: ignore[union-attr]
            self._refuse(
                f'the model\'s attention is "{config._attn_implementation}", but only "sdpa" '  # type: ignore[union-attr]
                f"is supported"
            )
        if length_dependent_rotary(config):
            self._refuse(
                "the rotary embedding depends on the sequence length, but a rank has only a part "
                "of the sequence"
            )
        if way == "ring":
            return 1
        heads = config.num_attention_heads  # type: ignore[union-attr]
        keys = getattr(config, "num_key_value_heads", None) or heads
        own, own_keys = heads // self._tensor, max(1, keys // self._tensor)
        if way == "both":
            return math.gcd(self._count, own, own_keys)
        if own % self._count or (own_keys % self._count and self._count % own_keys):
            self._refuse(
                f"the model has {own} attention heads and {own_keys} key and value heads (on "
                f'each tensor rank). Both must be multiples of "mesh.sequence"; the number of key '
                f'and value heads may also be a divisor of it. With "parallel.sequence": "both" '
                f'or "ring" any numbers are allowed'
            )
        return self._count

    # ---- a forward

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Runs `forward` on this rank's part of the batch.

        Returns the model's output. Its loss is the loss over the full sequences. Raises ConfigError
        for inputs that cannot be cut.
        """
        if args:
            raise ConfigError(
                "[front::forward] with mesh.sequence > 1, pass inputs by name: engine(**batch)"
            )
        part = self._part_of({name: value for name, value in kwargs.items() if value is not None})
        self._cut = True
        try:
            output = forward(**part)
        finally:
            self._cut, self._mask = False, None
        if isinstance(output, Handed):  # not the last stage of a pipeline
            return output
        loss = getattr(output, "loss", None)
        if "labels" in part and loss is None:
            raise ConfigError(
                "[front::forward] with mesh.sequence > 1, the model must return its outputs by "
                "name. Do not pass return_dict=False"
            )
        if loss is None:
            return output
        output = copy.copy(output)
        output["loss"] = self._ranks.sum_losses(loss)
        return output

    def _part_of(self, batch: dict[str, Any]) -> dict[str, Any]:
        tensors = {name: value for name, value in batch.items() if torch.is_tensor(value)}
        known = {*_ALONG_TOKENS, "attention_mask", "num_items_in_batch"}
        self._ranks.compare([tensors[name] for name in sorted(tensors)], " ".join(sorted(tensors)))
        unknown = set(tensors) - known
        if unknown or batch.get("past_key_values") is not None:
            name = min(unknown, default="past_key_values")
            raise ConfigError(
                f'[front::forward] with mesh.sequence > 1, "{name}" cannot be cut. Allowed: '
                f"{', '.join(sorted(known))}"
            )
        first = batch.get("input_ids", batch.get("inputs_embeds"))
        if first is None:
            raise ConfigError(
                "[front::forward] neither input_ids nor inputs_embeds is given. Pass one of them"
            )
        length = first.shape[1]
        self._check_positions(batch, length)
        window = getattr(self._model.config, "sliding_window", None)
        if window is not None and length > window:
            raise ConfigError(
                f"[front::forward] with mesh.sequence > 1, attention covers full sequences of "
                f"{length} tokens, but this model's attention window is {window} tokens"
            )
        chunks = self._count if self._num_groups == 1 else 2 * self._count
        padded = -(-length // chunks) * chunks
        self._mask = self._whole_mask(batch.pop("attention_mask", None), first, padded)
        if "labels" in batch:
            self._count_labels(batch)
        positions = torch.arange(length, device=first.device).expand(first.shape[0], -1)
        batch.setdefault(
            "position_ids", positions
        )  # padding gets position 0, which every model has
        own = self._chunks_of(self._ranks.index)
        for name in (*_ALONG_TOKENS, "shift_labels"):
            if torch.is_tensor(batch.get(name)):
                fill = _IGNORED if "labels" in name else 0
                parts = _padded(batch[name], padded, fill).chunk(chunks, dim=1)
                batch[name] = torch.cat([parts[chunk] for chunk in own], dim=1)
        return batch

    def _chunks_of(self, index: int) -> list[int]:
        """Returns which chunks of a sequence a rank has."""
        if self._num_groups == 1:
            return [index]
        # The first chunks of a ring have less to compute than its last ones, so each group gets
        # some of each ([Note: Zigzag] in ring_attention.h).
        group, place = divmod(index, self._num_neighbours)
        num = self._num_neighbours
        begins = group * num, (2 * self._num_groups - 1 - group) * num
        shared = [begin + i for begin in begins for i in range(num)]
        return shared[2 * place : 2 * place + 2]

    def _count_labels(self, batch: dict[str, Any]) -> None:
        """Sets labels so that the loss is this rank's sum, divided by the number of all labels."""
        # Shift before the cut: the last token of a part has its target in the next part.
        labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=_IGNORED)
        batch["labels"] = batch["shift_labels"] = labels
        if batch.get("num_items_in_batch") is None:
            batch["num_items_in_batch"] = (labels != _IGNORED).sum()

    def _check_positions(self, batch: dict[str, Any], length: int) -> None:
        positions = batch.get("position_ids")
        if positions is None:
            return
        if (
            batch.get("attention_mask") is None
            and length > 1
            and (positions.diff(dim=-1) != 1).any()
        ):
            raise ConfigError(
                "[front::forward] with mesh.sequence > 1, position_ids that restart (several "
                "sequences in one) are not supported yet"
            )

    def _whole_mask(self, given: Any, first: torch.Tensor, padded: int) -> torch.Tensor | None:
        """Returns the mask [batch, 1, tokens, tokens] bool, True if the first token attends to the
        second one. None: a token attends to itself and all tokens before it. For a ring:
        [batch, tokens], True if later tokens attend to the token."""
        if given is not None and given.dim() != 2:
            raise ConfigError(
                f"[front::forward] attention_mask has {given.dim()} dims; allowed: 2 dims, "
                f"[batch, tokens]"
            )
        if given is None or bool(given.bool().all()):
            return None  # padding comes last, so no token attends to it
        attended = _padded(given.bool(), padded, False)
        if self._num_groups > 1:
            return attended
        mask = attended[:, None, None, :].expand(-1, 1, padded, -1)
        # If a token comes before the first unmasked one, it attends to no token, and torch returns
        # zeros for it.
        return mask & torch.ones(padded, padded, dtype=torch.bool, device=first.device).tril()

    # ---- attention

    def mask(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces transformers' mask function, because that function would make the mask of a
        part.

        Raises RuntimeFault in a backward, because the mask of the full sequences is gone.
        """
        if in_backward():
            raise RuntimeFault(
                "[front::backward] with mesh.sequence > 1 a recomputed unit needs the "
                "attention mask of whole sequences, but the mask no longer exists in backward. "
                "Recompute the unit's layers instead"
            )
        return self._mask if self._cut else inner(*args, **kwargs)

    def attention(  # noqa: PLR0913 - transformers' arguments
        self,
        inner: Callable[..., Any],
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **options: Any,
    ) -> Any:
        """Computes attention: query [batch, heads, own tokens, size] -> [batch, own tokens, heads,
        size], and the weights.

        A recomputation in backward computes a part. Full sequences (in `generate`) have no
        gradients.
        """
        if module not in self._modules:  # a copy of the model
            return inner(module, query, key, value, mask, **options)
        if stand_in.is_stand_in(query):  # a module of another stage
            batch, heads, tokens, _ = query.shape
            return query.new_empty((batch, tokens, heads, value.shape[-1])), None
        if not self._cut and not in_backward():
            if query.requires_grad:
                raise RuntimeFault(
                    "[front::forward] with mesh.sequence > 1, the model was called with gradients. "
                    "Call the engine, not the model: the engine cuts the batch"
                )
            return inner(module, query, key, value, mask, **options)
        if options.get("position_bias") is not None:
            raise ConfigError(
                "[front::forward] with mesh.sequence > 1, a position bias is not supported yet"
            )
        _check_causal(options.get("is_causal"), module)
        count = self._num_neighbours
        if key.shape[1] % count:  # fewer key heads than ranks
            more = count // key.shape[1]
            key, value = (part.repeat_interleave(more, dim=1) for part in (key, value))
        query, key, value = (self._exchanged(part) for part in (query, key, value))
        if self._num_groups > 1:
            return self._exchanged(self._in_ring(query, key, value, mask, options)), None
        groups = getattr(module, "num_key_value_groups", None)
        if groups is not None:
            module.num_key_value_groups = query.shape[1] // key.shape[1]
        try:
            output, weights = inner(module, query, key, value, mask, **options)
        finally:
            if groups is not None:
                module.num_key_value_groups = groups
        return self._exchanged(output), weights

    def _exchanged(self, part: torch.Tensor) -> torch.Tensor:
        """Exchanges parts of dim 2 for parts of dim 1 among neighbours."""
        return self._ranks.all_to_all(part, 1, 2) if self._num_neighbours > 1 else part

    def _in_ring(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        if options.get("dropout"):
            raise ConfigError(
                "[front::forward] the model has dropout of attention weights, which a ring "
                '("parallel.sequence": "ring" or "both") does not support. Set it to 0'
            )
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        output: torch.Tensor = self._ranks.ring_attention(query, key, value, mask, scale)
        return output.transpose(1, 2)


class _Attention:
    """Registers a separate attention for the model in transformers, until remove()."""

    def __init__(self, owner: SequenceParallel, model: Any) -> None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: PLC0415
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415

        self._config, self._had = model.config, model.config._attn_implementation
        self._tables = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
        inner, mask = self._inner = [table[self._had] for table in self._tables]
        self._name = f"penstock-{id(self)}"
        ALL_ATTENTION_FUNCTIONS.register(
            self._name, lambda *args, **kwargs: owner.attention(inner, *args, **kwargs)
        )
        ALL_MASK_ATTENTION_FUNCTIONS.register(
            self._name, lambda *args, **kwargs: owner.mask(mask, *args, **kwargs)
        )
        self._config._attn_implementation = self._name

    def remove(self) -> None:
        """Restores the model's attention. Copies of the model refer to the registered attention by
        its name, so this name now calls the original attention."""
        self._config._attn_implementation = self._had
        for table, inner in zip(self._tables, self._inner, strict=True):
            table.register(self._name, inner)


def _check_causal(asked: bool | None, module: Any) -> None:
    if getattr(module, "is_causal", True) if asked is None else asked:
        return
    raise ConfigError(
        "[front::forward] with mesh.sequence > 1, only causal attention is supported, but "
        "is_causal is False"
    )


def length_dependent_rotary(config: Any) -> bool:
    """Whether the rotary embedding of a transformers config depends on the sequence length."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return bool({"dynamic", "longrope"} & set(_texts_in(rope)))


def _padded(values: torch.Tensor, length: int, fill: Any) -> torch.Tensor:
    missing = length - values.shape[1]
    if missing == 0:
        return values
    shape = (values.shape[0], missing, *values.shape[2:])
    return torch.cat([values, values.new_full(shape, fill)], dim=1)


def _texts_in(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [text for one in value.values() for text in _texts_in(one)]
    return [value] if isinstance(value, str) else []
