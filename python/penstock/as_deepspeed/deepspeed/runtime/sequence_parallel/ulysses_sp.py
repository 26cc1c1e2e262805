"""DeepSpeed's sequence parallelism for transformers (ALST, arXiv:2506.13996).

UlyssesSPDataLoaderAdapter gives each rank its tokens of a sequence. Attention exchanges tokens for
heads, so that each rank has whole sequences of some heads. The script combines the losses of the
ranks. The engine treats these ranks as data ranks. (`mesh.sequence` of `penstock.initialize()` does
the same with whole sequences as input.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from penstock import ConfigError
from penstock.parallel.sequence_parallel import length_dependent_rotary

from ... import _missing_name
from ...comm.comm import _of_ranks
from ...sequence.layer import to_heads, to_tokens
from ...utils.logging import logger
from . import parallel_state_sp
from .tiled_compute import AutogradComputeMLP as AutogradComputeMLP
from .tiled_compute import TiledFusedLogitsLoss as TiledFusedLogitsLoss
from .tiled_compute import TiledMLP as TiledMLP
from .tiled_compute import sequence_tiled_compute as sequence_tiled_compute

SequenceTiledCompute = _missing_name.cls("SequenceTiledCompute", "call sequence_tiled_compute()")

_CORE = "sdpa"
_IGNORED = -100  # the label that losses of torch and transformers ignore


def _fail(text: str) -> NoReturn:
    raise ConfigError(f"[deepspeed::UlyssesSPAttentionHF] {text}")


class UlyssesSPAttentionHF(torch.nn.Module):
    """Causal attention for transformers' models over sequences that are cut among ranks.

    The mask follows from `position_ids`, padding and sliding windows. A position that does not
    follow the previous one begins a new sequence, unless the row has padding.

    Args:
        attn: a function in transformers' ALL_ATTENTION_FUNCTIONS.
        batch_size, attn_head_size, num_hidden_layers: accepted, without effect.
        attn_head_count: the number of query heads.
        kv_head_count: the number of key and value heads.
        process_group: a torch group; its ranks have the parts in rank order.
        seq_length_is_variable: whether lengths may differ from the next two arguments.
        local_seq_length: tokens of a part.
        global_seq_length: tokens of a whole sequence.
        disable_in_eval: modules in eval mode get whole sequences and use `attn` directly.

    Raises:
        ConfigError: the numbers of heads are not divisible by the number of ranks.
    """

    def __init__(  # noqa: PLR0913 - DeepSpeed's signature
        self,
        attn: Callable[..., Any],
        batch_size: int,
        attn_head_count: int,
        attn_head_size: int,
        kv_head_count: int,
        num_hidden_layers: int,
        process_group: Any,
        seq_length_is_variable: bool = False,
        local_seq_length: int | None = None,
        global_seq_length: int | None = None,
        disable_in_eval: bool = False,
    ) -> None:
        super().__init__()
        self.attn, self.process_group = attn, process_group
        self.world_size, self.sp_rank = (
            dist.get_world_size(process_group),
            dist.get_rank(process_group),
        )
        self.seq_length_is_variable = seq_length_is_variable
        self.local_seq_length, self.global_seq_length = local_seq_length, global_seq_length
        self.disable_in_eval = disable_in_eval
        self._known: tuple[torch.Tensor, Any, torch.Tensor | None] | None = None
        self._warned = False
        self._check_heads(attn_head_count, kv_head_count)

    def _check_heads(self, heads: int, keys: int) -> None:
        ranks = self.world_size
        if heads % ranks or (keys % ranks and ranks % keys):
            _fail(
                f"there are {heads} attention heads and {keys} key and value heads, but "
                f"sequence_parallel_size is {ranks}. This size must divide the number of attention "
                f"heads, and must divide the number of key and value heads or be a multiple of it"
            )

    def forward(  # noqa: PLR0913 - transformers' arguments
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Computes the attention of this rank's tokens over the whole sequences.

        query is [batch, heads, own tokens, size], the output [batch, own tokens, heads, size].

        Raises:
            ConfigError: the attention is not causal, has no `position_ids`, or is not supported.
        """
        if self.disable_in_eval and not module.training:
            return self.attn(module, query, key, value, attention_mask, *args, **kwargs)  # type: ignore[no-any-return]
        self._check(module, query, key, kwargs)
        positions, valid = self._gathered(query, kwargs.get("position_ids"), attention_mask)
        kwargs["position_ids"] = positions
        window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
        mask = self._mask_of(positions, valid, window)
        self._compare(attention_mask, mask, valid)
        if key.shape[1] < self.world_size:
            more = self.world_size // key.shape[1]
            key, value = (one.repeat_interleave(more, dim=1) for one in (key, value))
        heads = [one.shape[1] // self.world_size for one in (query, key)]
        query, key, value = (self._whole(one) for one in (query, key, value))
        groups = getattr(module, "num_key_value_groups", None)
        if groups is not None:
            module.num_key_value_groups = heads[0] // heads[1]
        try:
            output, weights = self.attn(module, query, key, value, mask, *args, **kwargs)
        finally:
            if groups is not None:
                module.num_key_value_groups = groups
        shares = [heads[0]] * self.world_size
        return to_tokens(output, self.process_group, shares, 1), weights

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        shares = [part.shape[1] // self.world_size] * self.world_size
        return to_heads(part.transpose(1, 2), self.process_group, shares, 1).transpose(1, 2)

    def _check(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]
    ) -> None:
        self._check_heads(query.shape[1], key.shape[1])
        if query.shape[2] != key.shape[2]:
            _fail(
                f"there are {query.shape[2]} queries but {key.shape[2]} keys. To generate, "
                f"register with disable_in_eval=True and call model.eval()"
            )
        if not self.seq_length_is_variable and query.shape[2] != self.local_seq_length:
            _fail(
                f"a part has {query.shape[2]} tokens, but {self.local_seq_length} were expected: "
                f"pass seq_length_is_variable=True"
            )
        causal = options.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            _fail(f"{type(module).__name__} is not causal: only causal attention is supported")
        for name in ("position_bias", "s_aux"):
            if options.get(name) is not None:
                _fail(f"{type(module).__name__} has {name}, which is not supported")

    def _gathered(
        self, query: torch.Tensor, positions: Any, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gathers the positions and the mask of non-padding tokens, both [batch, tokens]."""
        batch, tokens = query.shape[0], query.shape[2]
        if not torch.is_tensor(positions) or positions.dim() != 2:
            _fail("pass position_ids [batch, own tokens] to the model, which must pass them on")
        if mask is None:
            valid = torch.ones((batch, tokens), dtype=torch.long, device=query.device)
        else:
            looked_at = mask[:, 0].diagonal(dim1=-2, dim2=-1)  # padding does not attend to itself
            valid = (looked_at if mask.dtype == torch.bool else looked_at == 0).long()
        own = torch.stack([one.expand(batch, -1).long() for one in (positions, valid)])
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(parts, own.contiguous(), group=self.process_group)
        begins = torch.stack([part[0, :, 0] for part in parts])
        if not self._warned and tokens > 1 and bool((begins == 0).all()):
            self._warned = True
            logger.warning(
                "position_ids begin with 0 on every rank: the tokens of each rank are treated as a "
                "separate sequence"
            )
        whole, known = torch.cat(parts, dim=-1)
        return whole, known.bool()

    def _mask_of(
        self, positions: torch.Tensor, valid: torch.Tensor, window: int | None
    ) -> torch.Tensor | None:
        """Returns the mask [batch, 1, tokens, tokens], True for attended tokens; None: causal."""
        given = torch.stack([positions, valid.long()])
        if self._known is not None and self._known[1] == window:
            if torch.equal(self._known[0], given):
                return self._known[2]
        tokens, places = positions.shape[1], torch.arange(positions.shape[1], device=valid.device)
        begins = (positions.diff(dim=1) != 1) & valid.all(dim=1, keepdim=True)
        mask = None
        if not bool(valid.all()) or bool(begins.any()) or (window is not None and window < tokens):
            which = torch.nn.functional.pad(begins.long().cumsum(dim=1), (1, 0))
            back = places[:, None] - places[None, :]
            seen = (back >= 0) & (back < (tokens if window is None else window))
            mask = seen & (which[:, :, None] == which[:, None, :]) & valid[:, None, :]
            mask = mask[:, None]  # a row without True gives zeros, as with the model's own mask
        self._known = (given, window, mask)
        return mask

    def _compare(
        self, given: torch.Tensor | None, whole: torch.Tensor | None, valid: torch.Tensor
    ) -> None:
        """Raises ConfigError if the model's own mask of this part, which is not used, differs."""
        if given is None:
            return
        size = given.shape[-1]
        own = slice(self.sp_rank * size, (self.sp_rank + 1) * size)
        causal = torch.ones(size, size, dtype=torch.bool, device=given.device).tril()
        expected = causal if whole is None else whole[:, :, own, own]
        seen = given if given.dtype == torch.bool else given == 0
        if bool(((seen != expected) & valid[:, None, own, None]).any()):
            _fail(
                "the model's mask differs from the mask of positions, padding and sliding windows "
                "(with a cache, transformers ignores packed rows: pass use_cache=False)"
            )

    @classmethod
    def register_with_transformers(  # noqa: PLR0913 - DeepSpeed's signature
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Any:
        """Registers this attention for all models of the process with this implementation.

        All ranks must call it, after init_distributed().

        Args:
            model_name_or_path: a model, or the name or path of one; only its config is used.
            core_attn_implementation: must be "sdpa".
            sequence_parallel_size: number of neighbouring ranks that share a sequence; with 1
                nothing is registered.
            micro_batch_size: accepted, without effect.
            seq_length: the length of all sequences, if it is fixed.
            seq_length_is_variable: whether the length may vary.
            disable_in_eval: modules in eval mode get whole sequences.
            max_length: an older name of `seq_length`.

        Returns:
            An mpu for deepspeed.initialize(); None with a size of 1.

        Raises:
            ConfigError: the model, its attention or the length is not supported.
        """
        if sequence_parallel_size == 1:
            return None
        length = max_length if seq_length is None else seq_length
        if not seq_length_is_variable and length is None:
            _fail("seq_length is needed if seq_length_is_variable is False")
        if length is not None and length % sequence_parallel_size:
            _fail(f"seq_length {length} is not divisible by {sequence_parallel_size} ranks")
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415

        config = _config_of(model_name_or_path, core_attn_implementation)
        mpu, had = parallel_state_sp, ALL_ATTENTION_FUNCTIONS[core_attn_implementation]
        mpu.initialize_sequence_parallel(sequence_parallel_size)
        heads = config.num_attention_heads
        made = cls(
            attn=getattr(had, "core", had),
            batch_size=micro_batch_size,
            attn_head_count=heads,
            attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            kv_head_count=getattr(config, "num_key_value_heads", None) or heads,
            num_hidden_layers=config.num_hidden_layers,
            process_group=mpu.get_sequence_parallel_group(),
            seq_length_is_variable=seq_length_is_variable,
            local_seq_length=length and length // sequence_parallel_size,
            global_seq_length=length,
            disable_in_eval=disable_in_eval,
        )
        ALL_ATTENTION_FUNCTIONS[core_attn_implementation] = _as_function(made)
        return mpu


def _as_function(attention: UlyssesSPAttentionHF) -> Callable[..., Any]:
    def attend(*args: Any, **kwargs: Any) -> Any:
        return attention(*args, **kwargs)

    attend.core = attention.attn  # type: ignore[attr-defined]
    return attend


def _config_of(model: Any, attention: str) -> Any:
    """Returns the config of a text model. Raises ConfigError if it is not supported."""
    config = getattr(model, "config", None)
    if config is None:
        from transformers import AutoConfig  # noqa: PLC0415

        config = AutoConfig.from_pretrained(model)
    elif getattr(config, "_attn_implementation", attention) != attention:
        _fail(
            f'core_attn_implementation is "{attention}", but the model\'s attention is '
            f'"{config._attn_implementation}": use the same for both'
        )
    if attention != _CORE:
        _fail(f'core_attn_implementation is "{attention}"; allowed: "{_CORE}"')
    text = config.get_text_config()
    if length_dependent_rotary(text):
        _fail(
            "the model's rotary embedding depends on the sequence length, but a rank has only a "
            "part of the sequence"
        )
    if getattr(text, "attention_chunk_size", None) is not None:
        _fail("attention in chunks (attention_chunk_size) is not supported")
    return text


class UlyssesSPDataLoaderAdapter:
    """Gives each rank its tokens of all batches that the ranks of its group load.

    Each loaded batch is cut for all ranks, so there are `sp_world_size` times as many batches.
    Tensors are cut along dim 1. `labels` become `shift_labels`, the targets of the same tokens. All
    ranks of the group must iterate in step.

    Args:
        dl: loads dicts with `input_ids`, `position_ids` and (to train) `labels`, [batch, tokens].
        sp_rank, sp_group, sp_world_size: this rank's place, as given by an mpu.
        device: accepted, without effect: parts are on the CPU, as in DeepSpeed.

    Raises:
        ConfigError: a batch cannot be cut; all ranks of the group raise it.
    """

    def __init__(  # noqa: PLR0913 - DeepSpeed's signature
        self, dl: Iterable[Any], sp_rank: int, sp_group: Any, sp_world_size: int, device: Any
    ) -> None:
        self.dl, self.device = dl, device
        self.sp_rank, self.sp_group, self.sp_world_size = sp_rank, sp_group, sp_world_size
        self.iter = iter(dl)
        self.micro_batches: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def refill(self) -> None:
        """Exchanges one batch of each rank. Raises StopIteration if no rank has one."""
        own = next(self.iter, None)
        given = _of_ranks(None if own is None else self._checked(own), self.sp_group)
        for error in given:
            if isinstance(error, str):
                raise ConfigError(f"[deepspeed::UlyssesSPDataLoaderAdapter] {error}")
        there = [batch for batch in given if batch is not None]
        if not there:
            self.iter = iter(self.dl)  # the next epoch
            raise StopIteration
        self.micro_batches.extend(self._part_of(batch) for batch in there)

    def _checked(self, batch: Any) -> Any:
        """Returns the batch on the CPU, or an error text that all ranks of the group raise."""
        missing = [key for key in ("input_ids", "position_ids") if key not in batch]
        if missing:
            return (
                f"a batch has no {missing[0]}. Give input_ids and, for the place of each token in "
                f"its sequence, position_ids such as torch.arange(tokens).expand(batch, -1)"
            )
        whole = {key: one.cpu() if torch.is_tensor(one) else one for key, one in batch.items()}
        tokens = whole["input_ids"].shape[1]
        if tokens % self.sp_world_size:
            return (
                f"a batch has {tokens} tokens, which do not divide evenly among the "
                f"{self.sp_world_size} ranks of a sequence: pad the sequences"
            )
        for key, one in whole.items():
            if torch.is_tensor(one) and (one.dim() < 2 or one.shape[1] != tokens):
                return (
                    f'"{key}" is {list(one.shape)}, but must be [batch, {tokens}, ...], like '
                    f"input_ids"
                )
        return whole

    def _part_of(self, batch: dict[str, Any]) -> dict[str, Any]:
        size = batch["input_ids"].shape[1] // self.sp_world_size
        labels = batch.pop("labels", None)
        if labels is not None:
            padded = torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)
            batch["shift_labels"] = padded[:, 1:]
        return {
            key: one.narrow(1, size * self.sp_rank, size).contiguous()
            if torch.is_tensor(one)
            else one
            for key, one in batch.items()
        }
