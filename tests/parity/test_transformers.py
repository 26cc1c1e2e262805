"""Models of transformers and adapters of peft: what they do with an engine is what they do with
plain torch in the same process, whose gradients are averaged over the ranks by hand.

A story is a function that an engine and plain torch (hugging_face.Plain) tell alike on every rank.
"""

from __future__ import annotations

import copy
import functools
import re
import tempfile
from typing import Any

import hugging_face as hf
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from hugging_face import KINDS, batch, build, check, prompts
from ranks import Failure

pytestmark = pytest.mark.timeout(480)
both = pytest.mark.parametrize("strategy", ["zero2", "zero3"])
RECOMPUTED = {"activations": {"checkpoint": "unit"}}


def tuned(engine: Any, kind: str, rank: int, steps: int = 2, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        loss = engine(**batch(kind, step, rank)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def logits(model: Any, kind: str, rank: int) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch(kind, 9, rank)).logits.clone()


def generated(model: Any, kind: str, rank: int, **settings: Any) -> Any:
    """Ranks end at different lengths. The loss of Mixtral's routers wants whole sequences."""
    if kind == "mixtral":
        settings["output_router_logits"] = False
    settings = {"max_new_tokens": 3 + 4 * rank} | settings
    return model.generate(**prompts(rank), **settings)


# ---- training, with everything that changes where things are


def trains(engine, kind, rank):
    losses = tuned(engine, kind, rank, 3)
    engine.eval()
    seen = logits(engine, kind, rank)
    engine.train()
    return {"losses": losses + tuned(engine, kind, rank, 1, 3), "logits": seen}


@pytest.mark.parametrize("kind", KINDS)
@both
def test_trains(strategy, kind, pools):
    check(pools(2).run(hf.compared, trains, kind, strategy))


def checkpointed(kind, **options):
    model = build(kind, **options)
    model.gradient_checkpointing_enable()
    return model


MEMORY = {"optimizer": "host", "params": "disk"}
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "recomputed": (build, RECOMPUTED),
    "recomputed by the model": (checkpointed, {}),
    "recomputed by both": (checkpointed, RECOMPUTED),
    "offloaded": (build, {"offload": MEMORY}),
    "recomputed and offloaded": (build, RECOMPUTED | {"offload": MEMORY | {"activations": "host"}}),
    "tiled": (build, {"tiling": {"max_bytes": 2048, "loss_tokens": 8}}),
}
USED = {
    "llama": SETTINGS,
    "gpt2": ["recomputed", "tiled"],
    "mixtral": ["recomputed and offloaded", "recomputed by the model"],
    "t5": ["recomputed and offloaded", "tiled"],
    "bert": ["recomputed", "offloaded"],
}


def trains_and_generates(engine, kind, rank):
    told = trains(engine, kind, rank)
    if kind == "bert":
        return told
    return told | {"said": generated(engine, kind, rank)}


@pytest.mark.parametrize(
    ("kind", "setting"),
    [(kind, setting) for kind, settings in USED.items() for setting in settings],
)
def test_trains_with(kind, setting, pools, tmp_path):
    make, config = SETTINGS[setting]
    if "offload" in config:
        config = config | {"offload": config["offload"] | {"path": str(tmp_path)}}
    check(pools(2).run(hf.compared, trains_and_generates, kind, "zero3", make, config))


def in_bf16(kind, strategy):
    """Weights by the engine, by plain torch with fp32 masters and in fp32; and those before."""
    rank, start = dist.get_rank(), build(kind).state_dict()
    engine = hf.start(strategy, build(kind), {"precision": "bf16"} | RECOMPUTED)
    ours = hf.told(engine, trains, kind, rank)["weights"]
    mixed = hf.told(hf.Mixed(build(kind)), trains, kind, rank)["weights"]
    return ours, mixed, hf.told(hf.Plain(build(kind)), trains, kind, rank)["weights"], start


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("llama", "zero3"),
        ("gpt2", "zero2"),
        ("mixtral", "zero3"),
        ("t5", "zero3"),
        ("bert", "zero2"),
    ],
)
def test_bf16(kind, strategy, pools):
    import compare  # noqa: PLC0415 - it imports the zoo, which the ranks need not

    ours, mixed, plain, start = pools(2).run(in_bf16, kind, strategy)[0]
    own = compare.change_deviation(mixed, plain, start)
    assert compare.change_deviation(ours, plain, start) <= compare.BF16_RATIO * own + 1e-6


# ---- generating


def generates(engine, kind, rank):
    losses = tuned(engine, kind, rank, 1)
    engine.eval()
    torch.manual_seed(3 + rank)
    said = {
        "greedy": generated(engine, kind, rank),
        "by the model": generated(engine.module, kind, rank),
        "sampled": generated(engine, kind, rank, do_sample=True, top_k=20, temperature=0.8),
        "beams": generated(engine, kind, rank, num_beams=2),
        "no cache": generated(engine, kind, rank, use_cache=False),
        "static cache": generated(engine, kind, rank, cache_implementation="static"),
    }
    engine.train()
    return said | {"losses": losses + tuned(engine, kind, rank, 1, 1)}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "t5"])
@both
def test_generates(strategy, kind, pools):
    check(pools(2).run(hf.compared, generates, kind, strategy))


def decodes_by_hand(engine, kind, rank):
    """A loop of one's own over a cache, and generation with a draft model and from the prompt."""
    tuned(engine, kind, rank, 1)
    told, cache, tokens = prompts(rank), None, []
    mask, new = told["attention_mask"], told["input_ids"]
    with torch.no_grad(), engine.uneven():
        for _ in range(3 + 2 * rank):
            out = engine(input_ids=new, attention_mask=mask, past_key_values=cache, use_cache=True)
            cache, new = out.past_key_values, out.logits[:, -1:].argmax(-1)
            mask = torch.cat([mask, torch.ones_like(new)], 1)
            tokens.append(new)
    draft = build("llama", num_hidden_layers=1).eval()
    one = {"input_ids": told["input_ids"][:1], "max_new_tokens": 4 + 3 * rank}
    engine.eval()
    return {
        "by hand": torch.cat(tokens, 1),
        "assisted": engine.generate(**one, assistant_model=draft),
        "looked up": engine.generate(**one, prompt_lookup_num_tokens=2),
        "synced": engine.generate(**one, synced_gpus=True),
    }


def test_decodes_by_hand(pools):
    check(pools(2).run(hf.compared, decodes_by_hand, "llama", "zero3"))


# ---- export


def exports(kind, strategy, folder):
    """How far the logits of each export are from those of a plain model with the weights."""
    rank, config = dist.get_rank(), build(kind).config
    engine = hf.start(strategy, build(kind), {})
    tuned(engine, kind, rank)
    weights = engine.state_dict(rank0_only=False)
    plain = build(kind)
    plain.load_state_dict(weights)
    engine.module.save_pretrained(f"{folder}/state", state_dict=engine.state_dict())
    engine.save_pretrained(f"{folder}/parts", state_dict=engine.state_dict(), max_shard_size="20KB")
    with engine.gathered():
        engine.module.save_pretrained(f"{folder}/gathered")
    if strategy == "zero2":
        engine.module.save_pretrained(f"{folder}/bare")
    engine.close()
    engine.module.save_pretrained(f"{folder}/closed")
    dist.barrier()  # rank 0 alone writes
    load, expected = KINDS[kind][1].from_pretrained, logits(plain.eval(), kind, rank)
    names = ["state", "parts", "gathered", "closed"] + ["bare"] * (strategy == "zero2")
    loaded = {name: load(f"{folder}/{name}") for name in names}
    loaded["dict"] = load(None, config=config, state_dict=weights)
    return {name: hf.far(logits(model, kind, rank), expected) for name, model in loaded.items()}


@pytest.mark.parametrize(
    ("kind", "strategy"), [(kind, "zero3") for kind in KINDS] + [("gpt2", "zero2")]
)
def test_exports(kind, strategy, pools, tmp_path):
    check(pools(2).run(exports, kind, strategy, str(tmp_path)))


def built_sharded(kind, how, folder):
    """from_pretrained() and a config inside penstock.init(), against plain builds."""
    import penstock  # noqa: PLC0415

    plain = build(kind)
    if how == "loaded":
        plain.save_pretrained(folder)
        dist.barrier()
    with penstock.init():
        if how == "loaded":
            model = KINDS[kind][1].from_pretrained(folder)
        else:
            torch.manual_seed(5)
            model = KINDS[kind][1](plain.config)
    if how == "built":
        torch.manual_seed(5)
        plain = KINDS[kind][1](plain.config)
    rank, engine = dist.get_rank(), hf.start("zero3", model.train(), {})
    ours = hf.told(engine, trains, kind, rank)
    theirs = hf.told(hf.Plain(plain.train()), trains, kind, rank)
    return {name: hf.far(ours[name], theirs[name]) for name in theirs}


@pytest.mark.parametrize(
    ("kind", "how"), [("llama", "loaded"), ("t5", "built"), ("gpt2", "loaded")]
)
def test_built_sharded(kind, how, pools, tmp_path):
    check(pools(2).run(built_sharded, kind, how, str(tmp_path)))


# ---- adapters

TARGETS = {
    "llama": ["q_proj", "v_proj"],
    "gpt2": ["c_attn"],
    "mixtral": ["q_proj", "v_proj"],
    "t5": ["q", "v"],
    "bert": ["query", "value"],
}


def adapted(kind, settings=None, **options):
    """With an adapter that changes what the model says."""
    task = {"t5": "SEQ_2_SEQ_LM", "bert": None}.get(kind, "CAUSAL_LM")
    settings = settings or peft.LoraConfig(r=4, target_modules=TARGETS[kind])
    settings = copy.deepcopy(settings)  # peft fills it in
    settings.task_type = task
    torch.manual_seed(3)
    model = peft.get_peft_model(build(kind, **options), settings)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.05 * torch.randn(param.shape, generator=generator))
    return model


def adapters(engine, kind, rank):
    losses, model = tuned(engine, kind, rank), engine.module
    told = {"with": logits(engine, kind, rank)}
    with engine.disable_adapter():
        told["without"] = logits(engine, kind, rank)
        if kind != "bert":
            told["said without"] = generated(engine, kind, rank)
    if kind != "bert":
        told["said"] = generated(engine, kind, rank)
    with engine.gathered():
        saved = peft.get_peft_model_state_dict(model)
        told["adapter"] = {name: value.clone() for name, value in saved.items()}
        merged = copy.deepcopy(model).merge_and_unload()
    told["merged copy"] = logits(merged, kind, rank)
    with engine.gathered(write=True):
        model.merge_adapter()
    told["merged"] = logits(engine, kind, rank)
    with engine.gathered(write=True):
        model.unmerge_adapter()
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    losses += tuned(engine, kind, rank, 1, 2)
    return told | {"losses": losses, "frozen": frozen}


def lora(kind, strategy, config, folder):
    """`adapters`; what is merged after close(); and the adapter from a file of it."""
    rank = dist.get_rank()
    engine = hf.start(strategy, adapted(kind), config)
    ours = hf.told(engine, adapters, kind, rank)
    theirs = hf.told(hf.Plain(adapted(kind)), adapters, kind, rank)
    assert ours["frozen"] == theirs["frozen"]
    if rank == 0:
        engine.module.save_pretrained(folder)
    dist.barrier()
    back = peft.PeftModel.from_pretrained(build(kind), folder)
    plain = peft.PeftModel.from_pretrained(build(kind), folder).merge_and_unload()
    seen = {
        "file": (logits(back, kind, rank), logits(engine.module, kind, rank)),
        "merged": (logits(engine.module.merge_and_unload(), kind, rank), logits(plain, kind, rank)),
    }
    apart = {name: hf.far(ours[name], theirs[name]) for name in theirs}
    return apart | {f"after, {name}": hf.far(*pair) for name, pair in seen.items()}


@pytest.mark.parametrize(
    ("kind", "strategy", "config"),
    [pytest.param(kind, "zero3", {}, id=f"{kind}-zero3") for kind in KINDS]
    + [pytest.param(kind, "zero2", {}, id=f"{kind}-zero2") for kind in ("llama", "gpt2")]
    + [
        pytest.param("llama", "zero3", RECOMPUTED, id="llama-zero3-recomputed"),
        pytest.param("t5", "zero3", RECOMPUTED | {"offload": MEMORY}, id="t5-zero3-offloaded"),
    ],
)
def test_lora(kind, strategy, config, pools, tmp_path):
    if "offload" in config:
        config = config | {"offload": MEMORY | {"path": str(tmp_path)}}
    check(pools(2).run(lora, kind, strategy, config, str(tmp_path / "adapter")))


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OTHERS: dict[str, tuple[str, Any]] = {
    "prompt tuning": ("llama", peft.PromptTuningConfig(num_virtual_tokens=3)),
    "prefix tuning": ("llama", peft.PrefixTuningConfig(num_virtual_tokens=3)),
    "dora": ("llama", peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj"])),
    "ia3": (
        "llama",
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "modules to save": (
        "llama",
        peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    ),
    # The experts of a layer are one parameter: peft puts a parametrization on it in each forward.
    "experts": (
        "mixtral",
        peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=EXPERTS),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_adapters(name, pools):
    kind, settings = OTHERS[name]
    make = functools.partial(adapted, settings=settings)
    check(pools(2).run(hf.compared, trains_and_generates, kind, "zero3", make, RECOMPUTED))


# ---- what else people do


def windows(engine, kind, rank):
    """Two micro-batches an update, each loss divided by the tokens of both on all ranks."""
    losses = []
    for step in (0, 2):
        parts = [batch(kind, step + micro, rank) for micro in range(2)]
        tokens = sum((part["labels"][:, 1:] != -100).sum() for part in parts)
        dist.all_reduce(tokens)
        for part in parts:
            loss = engine(**part, num_items_in_batch=tokens).loss * dist.get_world_size()
            engine.backward(loss)
            losses.append(float(loss.detach()))
        engine.step()
    return {"losses": losses}


def looks_inside(engine, kind, rank):
    """Hidden states and attentions, in a loss too; tuples for outputs; inference mode."""
    out = engine(**batch(kind, 0, rank), output_hidden_states=True, output_attentions=True)
    engine.backward(out.loss + out.hidden_states[1].square().mean())
    engine.step()
    with torch.inference_mode():
        seen = engine(**batch(kind, 1, rank), output_hidden_states=True, return_dict=False)
    first = {"hidden": list(out.hidden_states), "attentions": list(out.attentions)}
    tensors = {name: [one.detach() for one in ones] for name, ones in first.items()}
    return tensors | {"logits": seen[1].clone(), "losses": tuned(engine, kind, rank, 1, 2)}


def own_embeddings(engine, kind, rank):
    """inputs_embeds of a layer that is called by itself, under autocast; eager attention later."""
    told = batch(kind, 0, rank)
    loss = engine(inputs_embeds=engine.get_input_embeddings()(told.pop("input_ids")), **told).loss
    engine.backward(loss)
    engine.step()
    engine.module.set_attn_implementation("eager")
    with torch.autocast("cpu", torch.bfloat16):
        again = engine(**batch(kind, 1, rank)).loss
    engine.backward(again)
    engine.step()
    return {"losses": [float(loss.detach()), float(again.detach())]}


def ties_again(engine, kind, rank):
    losses = tuned(engine, kind, rank, 1)
    with engine.gathered(write=True):
        engine.module.tie_weights()
    count = engine.num_parameters(), engine.num_parameters(only_trainable=True)
    return {"losses": losses + tuned(engine, kind, rank, 1, 1), "count": count}


def seeded(engine, kind, rank):
    transformers.set_seed(5 + rank)
    return {"losses": tuned(engine, kind, rank, 3)}


def scheduled(engine, kind, rank):
    schedule = transformers.get_cosine_schedule_with_warmup(engine.optimizer, 2, 10)
    losses = []
    for step in range(3):
        losses += tuned(engine, kind, rank, 1, step)
        schedule.step()
    return {"losses": losses, "rates": schedule.get_last_lr()}


def resized(kind):
    model = build(kind)
    model.resize_token_embeddings(hf.VOCAB + 16, mean_resizing=False)
    return hf.models.fill(model)


def reentrant(kind):
    model = build(kind, attention_dropout=0.2)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model


tied = functools.partial(build, tie_word_embeddings=True)
eager = functools.partial(build, attn_implementation="eager")
dropping = functools.partial(build, attention_dropout=0.2)
gpt_dropping = functools.partial(build, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
STORIES: dict[str, tuple[Any, ...]] = {  # the story, its kind, strategy, build and config
    "num_items_in_batch": (windows, "llama", "zero3"),
    "num_items_in_batch, tied": (windows, "gpt2", "zero2"),
    "outputs of layers": (looks_inside, "llama", "zero3", eager),
    "outputs of layers, tied": (looks_inside, "gpt2", "zero2", eager),
    "inputs_embeds, autocast": (own_embeddings, "llama", "zero3"),
    "tie_weights": (ties_again, "llama", "zero3", tied),
    "tie_weights, a bias too": (ties_again, "bert", "zero3"),
    "more tokens": (trains, "gpt2", "zero3", resized),
    "more tokens, untied": (trains, "llama", "zero2", resized),
    "dropout": (seeded, "llama", "zero3", dropping, RECOMPUTED),
    "dropout, its own recomputation": (seeded, "llama", "zero3", reentrant),
    "dropout, tied": (seeded, "gpt2", "zero3", gpt_dropping, RECOMPUTED),
    "a schedule": (scheduled, "llama", "zero3"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, id=f"{name}-{entry[2]}") for name, entry in STORIES.items()]
)
def test_stories(name, pools):
    limit = 1e-4 if "autocast" in name else hf.LIMIT
    check(pools(2).run(hf.compared, *STORIES[name]), limit)


# ---- what cannot be


def more_tokens(engine, _kind, _rank):
    with engine.gathered(write=True):
        engine.module.resize_token_embeddings(hf.VOCAB + 16, mean_resizing=False)


def in_half(engine, kind, rank):
    engine.module.half()
    tuned(engine, kind, rank, 1)


def saved_bare(engine, _kind, _rank):
    with tempfile.TemporaryDirectory() as folder:
        engine.module.save_pretrained(folder)


def another_adapter(engine, kind, rank):
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"])
    engine.module.add_adapter("another", settings)
    tuned(engine, kind, rank, 1)  # it does not train yet
    engine.module.set_adapter("another")
    tuned(engine, kind, rank, 1)


def merged_bare(engine, _kind, _rank):
    engine.module.merge_adapter()


def static_cache(engine, kind, rank):
    cache = transformers.StaticCache(config=engine.module.config, max_cache_len=40)
    engine(**batch(kind, 0, rank), past_key_values=cache)


SHARDED = "is sharded and its unit"
REFUSED = {
    "resize_token_embeddings": (more_tokens, build, {}, "was [64, 32] and is [80, 32] now"),
    "half": (in_half, build, {}, SHARDED),
    "save_pretrained": (saved_bare, build, {}, SHARDED),
    "an adapter that came later": (another_adapter, adapted, {}, "was added after initialize()"),
    "merge_adapter": (merged_bare, adapted, {}, SHARDED),
    "a static cache, recomputed": (static_cache, build, RECOMPUTED, "wrote in place to a tensor"),
}


def refused(name):
    story, make, config, _ = REFUSED[name]
    engine = hf.start("zero3", make("llama"), config)
    try:
        tuned(engine, "llama", dist.get_rank(), 1)
        story(engine, "llama", dist.get_rank())
    finally:
        engine.close()


@pytest.mark.parametrize("name", [pytest.param(name, id=f"{name}-zero3") for name in REFUSED])
def test_refused(name, pools, record_property):
    for rank, failure in enumerate(pools(2).attempt(refused, name)):
        assert isinstance(failure, Failure), f"went on: rank {rank}"
        assert REFUSED[name][3] in failure.text and re.match(r"\[\w+::\w+\] ", failure.text)
    record_property("refused", f"{failure.kind}: {failure.text}")
