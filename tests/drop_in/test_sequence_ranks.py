"""DeepSpeed's sequence parallelism: a loop over parts of sequences trains what plain torch trains
over whole ones."""

from __future__ import annotations

import gc
import importlib
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from pipe_models import deepspeed
from torch import nn
from torch.nn import functional

ULYSSES = "runtime.sequence_parallel.ulysses_sp"
STATE = "runtime.sequence_parallel.parallel_state_sp"
pytestmark = pytest.mark.timeout(480)
VOCAB, ROWS, LENGTH, STEPS, CLIP = 24, 2, 8, 10, 0.5
ADAMW = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 4}  # fmt: skip
MODELS = {  # of transformers, and what its config is given
    "llama": ("Llama", {**SIZES, "num_key_value_heads": 2}),
    "window": ("Mistral", {**SIZES, "num_key_value_heads": 4, "sliding_window": 3}),
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4,
                      "n_positions": LENGTH, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
                      "attn_pdrop": 0.0}),
}  # fmt: skip


def part_of(name: str) -> Any:
    """A module of deepspeed's that scripts import by its name. On a rank."""
    return importlib.import_module(f"{deepspeed().__name__}.{name}")


def built(kind: str) -> Any:
    import transformers  # noqa: PLC0415 - on a rank

    name, sizes = MODELS[kind]
    config = getattr(transformers, f"{name}Config")(**sizes)
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")
    return model._from_config(config, attn_implementation="sdpa")


def batch_of(rows: str, step: int, rank: int) -> dict[str, Any]:
    """What a rank loads: rows that are whole, of several sequences, or with padding before."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    labels, places = ids.clone(), torch.arange(LENGTH).expand(ROWS, -1)
    labels[0, 2 + rank % 3 :] = -100  # so that parts have unequal numbers of targets
    made = {"input_ids": ids, "labels": labels, "position_ids": places}
    if rows == "packed":
        made["position_ids"] = torch.cat([places[:, :5], places[:, : LENGTH - 5]], dim=1)
        made["use_cache"] = False  # else plain transformers looks across sequences
    if rows == "padded":
        made["attention_mask"] = torch.ones_like(ids)
        made["attention_mask"][1, : LENGTH // 2 + 1] = 0
        labels[1, : LENGTH // 2 + 1] = -100
    return made


def config_of(stage: int, accumulate: int = 1, **others: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        **others,
    }


def plain(kind: str, rows: str) -> dict[str, Any]:
    model, ranks = built(kind), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        made = [model(**batch_of(rows, step, rank)).loss / ranks for rank in range(ranks)]
        sum(made).backward()
        losses.append(float(sum(made)))
        if step == 0:
            gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": model.state_dict()}


def loss_of(engine: Any, part: dict[str, Any], group: Any) -> torch.Tensor:
    """As scripts write it: a mean over tokens of the group, of which each has some."""
    labels = part.pop("shift_labels")
    logits = engine(**part).logits.flatten(0, 1)
    total = functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    count = (labels != -100).sum()
    dist.all_reduce(count, group=group)
    return differentiable.all_reduce(total, group=group) / count


def trained(kind: str, rows: str, stage: int, size: int) -> dict[str, Any]:
    """On a rank: how far losses, gradients, norms and weights are from plain torch."""
    ds, model, rank = deepspeed(), built(kind), dist.get_rank()
    ulysses = part_of(ULYSSES)
    mpu = ulysses.UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=size,
        micro_batch_size=ROWS,
        seq_length=LENGTH,
        seq_length_is_variable=size != 4,
    )
    engine = ds.initialize(model=model, config=config_of(stage, size), mpu=mpu)[0]
    known = ds.utils.groups
    loader = ulysses.UlyssesSPDataLoaderAdapter(
        [batch_of(rows, step, rank) for step in range(STEPS)],
        sp_rank=known._get_sequence_parallel_rank(),
        sp_group=known._get_sequence_parallel_group(),
        sp_world_size=known._get_sequence_parallel_world_size(),
        device=engine.device,
    )
    losses, norms, gradients = [], [], {}
    for index, part in enumerate(loader):
        here = {name: one.to(engine.device) if torch.is_tensor(one) else one
                for name, one in part.items()}  # fmt: skip
        loss = loss_of(engine, here, mpu.get_sequence_parallel_group())
        engine.backward(loss)
        losses.append(loss.detach())
        if index == size - 1:
            gradients = engine.native.full_grads()
        engine.step()
        if (index + 1) % size == 0:
            norms.append(engine.get_global_grad_norm())
    weights = engine.native.state_dict(rank0_only=False)
    everywhere = torch.stack(losses).view(STEPS, size).mean(1)
    dist.all_reduce(everywhere)
    told = [engine.train_batch_size(), engine.dp_world_size, known.get_data_parallel_rank(),
            len(loader), engine.global_steps, known.get_model_parallel_world_size()]  # fmt: skip
    engine.destroy()
    _as_before()
    theirs = plain(kind, rows)
    return {
        "losses": _apart((everywhere / dist.get_world_size()).tolist(), theirs["losses"]),
        "gradients": _far(gradients, theirs["gradients"]),
        "norms": _apart(norms, theirs["norms"]),
        "weights": _far(weights, theirs["weights"]),
        "told": told,
        "after": known._get_sequence_parallel_world_size(),
        "device": str(engine.device),
    }


def _as_before() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415

    del ALL_ATTENTION_FUNCTIONS["sdpa"]


def _apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))


def _far(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert set(theirs) <= set(ours)
    return max(float((ours[one].cpu() - theirs[one]).abs().max()) for one in theirs)


@pytest.mark.parametrize(("kind", "rows", "stage", "size", "ranks"), [
    ("llama", "whole", 3, 2, 2), ("llama", "whole", 2, 4, 4), ("llama", "packed", 1, 2, 4),
    ("llama", "padded", 0, 2, 2), ("window", "whole", 2, 2, 2), ("gpt2", "whole", 3, 2, 4),
])  # fmt: skip
def test_trains_as_plain_torch(kind, rows, stage, size, ranks, drop_in_pools):
    for index, one in enumerate(drop_in_pools(ranks).run(trained, kind, rows, stage, size)):
        assert one["losses"] < 1e-6 and one["gradients"] < 1e-6, one
        assert one["norms"] < 1e-5 and one["weights"] < 1e-5, one
        data = ranks // size
        assert one["told"] == [ROWS * size * data, data, index // size, STEPS * size, STEPS, 1]
        assert one["after"] == 1


def attended(layout: int, heads: tuple[int, int], dtype: torch.dtype) -> list[float]:
    """On a rank: how far attention over the ranks, and its gradients, are from that over one."""
    layer = part_of("sequence.layer")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator, dim = torch.Generator().manual_seed(1), 1 - layout
    shape = [2, 3 * ranks] if layout == 0 else [3 * ranks, 2]
    whole = [
        torch.randn(*shape, count, 5, generator=generator, dtype=dtype).requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    ]

    into, back = ((0, 2, 1, 3), (0, 2, 1, 3)) if layout == 0 else ((1, 2, 0, 3), (2, 0, 1, 3))

    def local(*parts: torch.Tensor) -> torch.Tensor:
        made = functional.scaled_dot_product_attention(
            *(one.permute(into) for one in parts), is_causal=True, enable_gqa=True
        )
        return made.permute(back)

    own = [one.detach().chunk(ranks, dim)[rank].clone().requires_grad_() for one in whole]
    made = layer.DistributedAttention(local, dist.group.WORLD, 2, 1)(*own, layout)
    wanted = local(*whole)
    weights = torch.randn(wanted.shape, generator=generator, dtype=dtype)
    (wanted * weights).sum().backward()
    (made * weights.chunk(ranks, dim)[rank]).sum().backward()
    pairs = [(made, wanted), *((a.grad, b.grad) for a, b in zip(own, whole, strict=True))]
    return [float((a - b.chunk(ranks, dim)[rank]).detach().abs().max()) for a, b in pairs]


@pytest.mark.parametrize(("layout", "heads", "ranks"), [
    (0, (4, 4), 2), (1, (6, 3), 2), (0, (10, 5), 4), (1, (4, 4), 4),
])  # fmt: skip
def test_attention_over_ranks(layout, heads, ranks, drop_in_pools):
    for far in drop_in_pools(ranks).run(attended, layout, heads, torch.float32):
        assert max(far) < 1e-5, far


def test_attention_over_ranks_in_bf16(drop_in_pools):
    for far in drop_in_pools(2).run(attended, 0, (4, 2), torch.bfloat16):
        assert max(far) < 0.05, far


def places(how: str) -> list[Any]:
    """On a rank: what an engine is told of its place, by each way to say it."""
    ds, given = deepspeed(), config_of(2, 2, train_batch_size=8)
    own = part_of(STATE).SequenceGrid(2)  # has what an mpu of the script's has
    others: dict[str, Any] = {
        "key": {"config": given | {"sequence_parallel_size": 2}},
        "mesh": {"config": given, "mesh_param": (2, 2)},
        "mpu": {"config": given | {"sequence_parallel_size": 2}, "mpu": own},
    }[how]
    engine = ds.initialize(model=nn.Linear(2, 2), **others)[0]
    known = ds.utils.groups
    told = [
        engine.gradient_accumulation_steps(),
        engine.sequence_parallel_size,
        engine.dp_world_size,
        engine.seq_dp_world_size,
        dist.get_process_group_ranks(engine.get_sequence_parallel_group()),
        dist.get_process_group_ranks(known._get_data_parallel_group()),
        dist.get_world_size(known._get_sequence_data_parallel_group()),
        known._get_sequence_parallel_rank(),
    ]
    engine.set_gradient_accumulation_steps(3)
    told.append(engine.train_batch_size())
    engine.destroy()
    return told


@pytest.mark.parametrize("how", ["key", "mesh", "mpu"])
def test_each_way_to_say_it(how, drop_in_pools):
    for rank, told in enumerate(drop_in_pools(4).run(places, how)):
        first = rank - rank % 2
        groups = [[first, first + 1], [rank % 2, rank % 2 + 2], 4, rank % 2]
        assert told == [2, 2, 2, 4, *groups, 12]


def loaded() -> list[Any]:
    """On a rank: parts of batches of other lengths, where rank 1 has one less."""
    adapter = part_of(ULYSSES).UlyssesSPDataLoaderAdapter
    rank = dist.get_rank()
    batches = [
        {"input_ids": ids, "position_ids": ids, "labels": ids, "name": f"{rank}{count}"}
        for count in range(2 - rank)
        for ids in [torch.arange(4 + 2 * rank)[None] + 10 * count]
    ]
    made = adapter(batches, rank, dist.group.WORLD, 2, "cpu")
    epochs = [list(made), list(made)]
    first = {
        key: one.tolist() if torch.is_tensor(one) else one for key, one in epochs[0][0].items()
    }
    return [first, [[one["name"] for one in epoch] for epoch in epochs]]


def test_adapter_cuts_what_each_rank_loads(drop_in_pools):
    told = drop_in_pools(2).run(loaded)
    assert [one[1] for one in told] == [[["00", "10", "01"]] * 2] * 2
    assert told[0][0]["input_ids"] == [[0, 1]] and told[1][0]["input_ids"] == [[2, 3]]
    assert told[0][0]["shift_labels"] == [[1, 2]] and told[1][0]["shift_labels"] == [[3, -100]]
    assert "labels" not in told[0][0]


def refused() -> dict[str, str]:
    """On a rank: what is said of what cannot be."""
    ds, ids = deepspeed(), torch.arange(6)[None]
    ulysses, linear = part_of(ULYSSES), nn.Linear(2, 2)
    register = ulysses.UlyssesSPAttentionHF.register_with_transformers
    key, own = {"sequence_parallel_size": 2}, {"penstock": {"mesh": {"sequence": 2}}}
    mesh = part_of(STATE).SequenceGrid(2)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    dynamic, llama, lone = built("llama"), built("llama"), types.SimpleNamespace
    dynamic.config.rope_parameters = rope

    def start(config: dict[str, Any], **others: Any) -> Any:
        return lambda: ds.initialize(**{"model": linear, "config": config_of(1, **config)} | others)

    def load(**batch: Any) -> Any:
        return lambda: next(ulysses.UlyssesSPDataLoaderAdapter([batch], 0, None, 2, "cpu"))

    def attend(queries: int, keys: int) -> Any:
        made = part_of("sequence.layer").DistributedAttention(None, dist.group.WORLD)
        return lambda: made(*(torch.zeros(1, 2, heads, 4) for heads in (queries, keys, keys)), 0)

    tensor = {"tensor_parallel": {"autotp_size": 2}}
    layers = ds.pipe.PipelineModule([linear], num_stages=1, loss_fn=functional.mse_loss)
    cases = {
        "own": start(own),
        "three": start({"sequence_parallel_size": 3}),
        "two": start({"sequence_parallel_size": 4}, mpu=mesh),
        "mesh": start({}, mesh_param=(3, 2)),
        "both": start({}, mesh_param=(1, 2), mpu=mesh),
        "group": start({}, mpu=lone(get_sequence_parallel_world_size=lambda: 2)),
        "tensor": start(key | tensor, model=llama),
        "pipeline": start(key, model=layers),
        "loader": start(key, training_data=[1, 2]),
        "flash": lambda: register(lone(config=lone()), "flash_attention_2", 2, 1),
        "other": lambda: register(llama, "flex_attention", 2, 1),
        "dynamic": lambda: register(dynamic, "sdpa", 2, 1),
        "heads": lambda: ulysses.UlyssesSPAttentionHF(None, 1, 5, 4, 5, 1, dist.group.WORLD),
        "length": lambda: register(llama, "sdpa", 2, 1, seq_length_is_variable=False),
        "positions": load(input_ids=ids),
        "even": load(input_ids=ids[:, :5], position_ids=ids[:, :5]),
        "shape": load(input_ids=ids, position_ids=ids, weight=torch.ones(1, 3)),
        "few": attend(4, 1),
        "odd": attend(5, 3),
    }
    return {name: _error_of(one) for name, one in cases.items()}


def _error_of(called: Any) -> str:
    try:
        called()
    except ValueError as error:
        return str(error)
    return "none"


SAYS = {
    "own": "sequence_parallel_size",
    "three": "a divisor of the number of data ranks, 2",
    "two": "has 2",
    "mesh": "(data ranks, sequence ranks)",
    "both": "pass only one of them",
    "group": "lacks the method get_sequence_parallel_group()",
    "tensor": "divisor of the number of data ranks, 1",
    "pipeline": "not supported with a PipelineModule",
    "loader": "data_sampler",
    "flash": 'allowed: "sdpa"',
    "other": "use the same",
    "dynamic": "rotary",
    "heads": "sequence_parallel_size is 2",
    "length": "seq_length is needed",
    "positions": "no position_ids",
    "even": "5 tokens, which do not divide",
    "shape": '"weight" is [1, 3]',
    "few": "1 key and value heads on 2 ranks",
    "odd": "a multiple of the number of key and value heads",
}


def test_what_cannot_be_says_why(drop_in_pools):
    for told in drop_in_pools(2).run(refused):
        assert set(told) == set(SAYS)
        for name, text in SAYS.items():
            assert text in told[name], (name, told[name])


def misused() -> dict[str, str]:
    """On a rank: what is said in a forward."""
    ulysses, ranks = part_of(ULYSSES), dist.get_world_size()
    core = lambda *_, **__: None  # noqa: E731
    made = ulysses.UlyssesSPAttentionHF(core, 1, 4, 4, 4, 1, dist.group.WORLD, False, 4, 4 * ranks)
    module, ids = types.SimpleNamespace(training=True), torch.arange(4)[None]
    both = types.SimpleNamespace(training=True, is_causal=False)
    q = torch.zeros(1, 4, 4, 2)
    wide = torch.ones(1, 1, 4, 4, dtype=torch.bool)

    def call(
        of: Any = module, key: Any = q, query: Any = q, mask: Any = None, **others: Any
    ) -> Any:
        return lambda: made(of, query, key, key, mask, **others)

    cases = {
        "generate": call(key=torch.zeros(1, 4, 6, 2)),
        "fixed": call(key=q[:, :, :2], query=q[:, :, :2]),
        "positions": call(),
        "whole": call(both, position_ids=ids),
        "bias": call(position_bias=1),
        "mask": call(mask=wide, position_ids=ids),
    }
    return {name: _error_of(one) for name, one in cases.items()}


def test_what_cannot_be_attended_says_why(drop_in_pools):
    says = {
        "generate": "disable_in_eval",
        "fixed": "seq_length_is_variable=True",
        "positions": "position_ids",
        "whole": "not causal",
        "bias": "position_bias",
        "mask": "the model's mask",
    }
    for told in drop_in_pools(2).run(misused):
        for name, text in says.items():
            assert text in told[name], (name, told[name])


def two_engines() -> list[tuple[int, int]]:
    """Sizes and places while two engines have sequence ranks, after the second, and after the
    first, whom nobody destroys."""
    ds, mpu = deepspeed(), part_of(STATE)
    groups = part_of("utils.groups")
    groups._opened.clear()  # of engines that cases before this one left
    mpu.initialize_sequence_parallel(2)
    engines = [
        ds.initialize(model=nn.Linear(4, 2), config=config_of(3), mpu=mpu)[0] for _ in range(2)
    ]
    told = [_place(groups)]
    engines.pop().destroy()
    told.append(_place(groups))
    engines[0].native.close()  # together; the engine itself is only dropped
    engines.clear()
    gc.collect()
    return [*told, _place(groups)]


def _place(groups: Any) -> tuple[int, int]:
    return groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()


def test_groups_are_those_of_the_engine_that_is_left(drop_in_pools):
    told = drop_in_pools(2).run(two_engines)
    assert told == [[(2, rank), (2, rank), (1, 0)] for rank in range(2)]
