"""`tensor_parallel` of a DeepSpeed config: what plain torch in one process trains."""

from __future__ import annotations

import copy
import tempfile
import types
from typing import Any

import pytest
import torch
from pipe_models import deepspeed
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.timeout(480)
VOCAB, WIDTH, ROWS, LENGTH, STEPS, CLIP = 24, 16, 2, 5, 20, 0.5
# A key's bias has no gradient: 8e-18 in fp64, rounding in fp32, of which the default eps of 1e-8
# makes steps. Up to 5e-3 of them is apart then, in plain torch's fp32 from its own fp64, too.
ADAMW = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}


class Net(nn.Module):
    """Its attention reads [Q|K|V]; its gates are of parts of other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixed, self.down = nn.Linear(WIDTH, WIDTH + 8), nn.Linear(8, WIDTH)
        self.scale = nn.LayerNorm(4)  # of each head's
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        q, k, v = (one.unflatten(-1, (-1, 4)) for one in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(
            *(one.transpose(1, 2) for one in (self.scale(q), k, v)), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        both = self.mixed(x)
        size = both.shape[-1] // 3
        gate, up = both[..., :size], both[..., size : 2 * size]
        return self.head(x + self.down(functional.silu(gate) * up))


SPECS = [
    {"patterns": [r".*down\.weight$", "out"], "partition_type": "row"},
    {"patterns": ["qkv"], "shape": [3, -1], "partition_dim": 0},
    {"patterns": ["mixed"], "shape": [[8, 8, 8], -1], "model_types": ["llama"]},
    {"patterns": ["mixed"], "partition_type": "COLUMN", "shape": [[8, 8, 8], -1]},
    {"patterns": ["head"], "gather_output": True},
    {"patterns": ["scale"], "partition_type": "skip", "grad_allreduce": True},
]


def config_of(stage: int, tensor: int, **section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "tensor_parallel": {"autotp_size": tensor, **section},
    }


def llama(heads: int = 4) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - on a rank

    made = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=heads,
    )
    return LlamaForCausalLM(made)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - on a rank

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=WIDTH,
            n_layer=2,
            n_head=4,
            n_positions=LENGTH,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )  # fmt: skip
    )


ATTENTION = [
    {"patterns": [r".*\.[qkv]_proj\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.o_proj\.weight$"], "partition_type": "row"},
]
FUSED = [
    {"patterns": [r".*\.c_attn\.weight$"], "shape": [3, -1]},
    {"patterns": [r".*\.attn\.c_proj\.weight$"], "partition_type": "row"},
]
MODELS = {"net": Net, "llama": llama, "shared": lambda: llama(1), "gpt2": gpt2}
CASES = {  # model, partition_config and the like
    "specs": ("net", {"partition_config": {"use_default_specs": False, "layer_specs": SPECS}}),
    "found": ("llama", {}),
    "llama": ("llama", {"partition_config": {"layer_specs": ATTENTION}}),
    "shared": ("shared", {"partition_config": {"layer_specs": ATTENTION}}),
    "heads": ("gpt2", {"partition_config": {"layer_specs": FUSED}}),
    "merged": (
        "llama",
        {
            "preset_model": "llama",
            "partition_config": {
                "strict_mode": True,
                "layer_specs": [{"patterns": [".*down_proj", ".*up_proj", ".*gate_proj"],
                                 "partition_type": "skip"}],
            },
        },
    ),
}  # fmt: skip


def built(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[kind]()


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    ids = ids.to(next(model.parameters()).device)
    found = model(ids)
    logits = getattr(found, "logits", found)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def plain(kind: str, ranks: int) -> dict[str, Any]:
    model = built(kind)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    norms, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            (loss_of(model, step, rank) / ranks).backward()
        if step == 0:
            gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return {"norms": norms, "gradients": gradients, "weights": model.state_dict()}


def trained(case: str, stage: int, tensor: int, **zero: int) -> dict[str, Any]:
    """On a rank: how far gradients, norms and weights are from plain torch."""
    ds, (kind, section) = deepspeed(), CASES[case]
    config = config_of(stage, tensor, **section)
    config["zero_optimization"] |= zero
    engine = ds.initialize(model=built(kind), config=config)[0]
    data, norms, gradients = ds.utils.groups, [], {}
    for step in range(STEPS):
        engine.backward(loss_of(engine, step, data.get_data_parallel_rank()))
        if step == 0:
            gradients = engine.native.full_grads()
        engine.step()
        norms.append(engine.get_global_grad_norm())
    weights = engine.native.state_dict(rank0_only=False)
    sizes = [engine.dp_world_size, engine.mp_world_size, data.get_model_parallel_rank()]
    cut, told = engine.native.config.parallel.rules, engine.native.config
    engine.destroy()
    after = [data.get_data_parallel_world_size(), data.get_model_parallel_world_size()]
    theirs = plain(kind, sizes[0])
    return {
        "gradients": _far(gradients, theirs["gradients"]),
        "norms": max(abs(a - b) / b for a, b in zip(norms, theirs["norms"], strict=True)),
        "weights": _far(weights, theirs["weights"]),
        "sizes": sizes,
        "after": after,
        "rules": dict(cut),
        "strategy": [told.strategy, told.mesh.node],
        "device": str(engine.device),
    }


def _far(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert set(theirs) <= set(ours)
    return max(float((ours[one].cpu() - theirs[one]).abs().max()) for one in theirs)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("case", "stage"), [
    ("specs", 0), ("specs", 3), ("found", 2), ("llama", 1), ("shared", 3), ("heads", 0),
    ("merged", 3),
])  # fmt: skip
def test_trains_as_plain_torch(case, stage, ranks, drop_in_pools):
    told = drop_in_pools(ranks).run(trained, case, stage, 2)
    for index, one in enumerate(told):
        assert one["gradients"] < 1e-6 and one["norms"] < 1e-5 and one["weights"] < 1e-5, one
        assert one["sizes"] == [ranks // 2, 2, index % 2] and one["after"] == [ranks, 1]
    rules = told[0]["rules"]
    if case == "specs":
        assert rules["qkv"] == "column:3" and rules["mixed"] == "column:8,8,8"
        assert rules["head"] == "column_gather" and rules["scale.weight"] == "partial"
    if case == "shared":
        assert rules["model.layers.0.self_attn.k_proj"] == "shared:1"
    if case == "heads":
        assert rules["transformer.h.1.attn.num_heads"] == "divide"
        assert "transformer.h.1.mlp.c_fc" not in rules
    if case == "merged":
        assert rules["model.layers.0.mlp.up_proj"] == "whole" and "model.norm" not in rules


def on_nodes(key: str) -> dict[str, Any]:
    return trained("found", 3, 2, **{key: 2})


@pytest.mark.parametrize(("key", "strategy"), [
    ("zero_hpz_partition_size", "hpz"), ("mics_shard_size", "mics"),
])  # fmt: skip
def test_partitions_are_of_data_ranks(key, strategy, drop_in_pools):
    for index, one in enumerate(drop_in_pools(8).run(on_nodes, key)):
        assert one["gradients"] < 1e-6 and one["norms"] < 1e-5 and one["weights"] < 1e-5, one
        assert one["sizes"] == [4, 2, index % 2] and one["strategy"] == [strategy, 2]


def saved() -> dict[str, Any]:
    """On a rank: a checkpoint of two tensor ranks goes on without them."""
    ds, folder = deepspeed(), [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder, 0)
    first = ds.initialize(model=built("llama"), config=config_of(2, 2))[0]
    first.backward(loss_of(first, 0, 0))
    first.step()
    first.save_checkpoint(folder[0])
    weights = first.native.state_dict(rank0_only=False)
    first.destroy()
    again = ds.initialize(model=built("llama"), config=config_of(3, 1))[0]
    again.load_checkpoint(folder[0])
    found = again.native.state_dict(rank0_only=False)
    again.destroy()
    return {"far": _far(found, weights), "steps": again.global_steps}


def test_checkpoint_loads_without_tensor_ranks(drop_in_pools):
    assert drop_in_pools(2).run(saved) == [{"far": 0.0, "steps": 1}] * 2


def loaded_data() -> list[int]:
    """On a rank: the samples that the engine's own loader gives it."""
    dataset = torch.utils.data.TensorDataset(torch.arange(8))
    made = deepspeed().initialize(
        model=built("llama"), config=config_of(1, 2), training_data=dataset
    )
    seen = [int(one) for (batch,) in made[2] for one in batch]
    made[0].destroy()
    return seen


def test_tensor_ranks_are_given_the_same_samples(drop_in_pools):
    told = drop_in_pools(4).run(loaded_data)
    assert told[0] == told[1] and told[2] == told[3]
    assert sorted(told[0] + told[2]) == list(range(8))


def _specs(*specs: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"partition_config": {"layer_specs": list(specs), **others}}


REFUSED = {
    "key": ("net", _specs({"patterns": ["qkv"], "shap": 1}), '"shap" is not a key'),
    "type": ("net", _specs({"patterns": ["qkv"], "partition_type": "both"}), "column, row, skip"),
    "pattern": ("net", _specs({"patterns": ["("]}), "not a regular expression"),
    "dim": ("net", _specs({"patterns": ["qkv"], "partition_dim": 1}), "parallel.rules"),
    "shape": ("net", _specs({"patterns": ["qkv"], "shape": [3, -1, 4]}), "2 dimensions"),
    "gather": (
        "net",
        _specs({"patterns": ["qkv"], "shape": [3, -1], "gather_output": True}),
        "without a shape",
    ),
    "sum": ("net", _specs({"patterns": ["qkv"], "grad_allreduce": True}), "(a whole weight)"),
    "embedding": ("net", _specs({"patterns": ["tokens"]}), "is an Embedding"),
    "strict": ("net", _specs(SPECS[0], strict_mode=True), 'no spec for "qkv"'),
    "parts": ("gpt2", _specs({"patterns": [r".*c_attn"]}), 'needs "column:3"'),
    "none": ("net", {}, "parallel.rules"),
    "nothing": ("llama", _specs({"patterns": ["q_proj"]}), "matches no layer"),
    "size": ("net", {"tp": {"tp_size": 4}}, "1, or autotp_size"),
}


MPU = {  # sizes of an mpu, and what is said of them
    "model": "lacks the method get_model_parallel_group()",
    "tensor_model": "lacks the method get_model_parallel_group()",
    "pipe": "PipelineModule",
    "pipeline_model": "PipelineModule",
    "sequence": "lacks the method get_sequence_parallel_group()",
}


def refused() -> dict[str, str]:
    ds, found = deepspeed(), {}
    for name, (kind, section, _) in REFUSED.items():
        found[name] = _error_of(ds, built(kind), config_of(1, 2, **section))
    both = config_of(1, 2, **_specs(*SPECS)) | {"penstock": {"parallel": {"rules": {"out": "row"}}}}
    found["both"] = _error_of(ds, Net(), both)
    layers = ds.pipe.PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=functional.mse_loss)
    found["pipeline"] = _error_of(ds, layers, config_of(1, 2))
    sequence = config_of(1, 1) | {"penstock": {"mesh": {"sequence": 2}}}
    found["sequence"] = _error_of(ds, built("llama"), sequence)
    for size in MPU:
        mpu = types.SimpleNamespace(**{f"get_{size}_parallel_world_size": lambda: 2})
        found[f"mpu {size}"] = _error_of(ds, Net(), config_of(1, 1), mpu=mpu)
    import penstock  # noqa: PLC0415 - on a rank

    try:
        penstock.initialize(Net(), copy.deepcopy(config_of(1, 2, **_specs(*SPECS))))
    except ValueError as error:
        found["native"] = str(error)
    return found


def _error_of(ds: Any, model: nn.Module, config: dict[str, Any], **others: Any) -> str:
    try:
        ds.initialize(model=model, config=config, **others)
    except ValueError as error:
        return str(error)
    return "none"


def test_what_cannot_be_says_why(drop_in_pools):
    says = {name: text for name, (_, _, text) in REFUSED.items()}
    says |= {"both": "keep one", "pipeline": "PipelineModule", "native": "parallel.rules"}
    says |= {"sequence": "penstock.initialize()"}
    says |= {f"mpu {size}": text for size, text in MPU.items()}
    for told in drop_in_pools(2).run(refused):
        for name, text in says.items():
            assert text in told[name], (name, told[name])
