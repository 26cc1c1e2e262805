"""offload.cache: cached tokens on another tier give the text of plain torch."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import hugging_face as hf
import pytest
import test_inference as inference
import torch
import torch.distributed as dist
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import penstock

pytestmark = pytest.mark.timeout(480)
# A chunk of these models has 256 tokens, so prompts have several chunks.
PROMPT, NEW, LENGTH = 520, 12, 1024
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {"inference": True, "strategy": "ddp"}),
    "ddp": (2, {"strategy": "ddp"}),
    "zero3": (2, {"inference": True, "strategy": "zero3"}),
    "trained zero3": (2, {"strategy": "zero3"}),
    "params on disk": (1, {"inference": True, "offload": {"params": "disk"}}),
    "kept": (1, {"inference": True, "offload": {"params": "host", "keep_bytes": 30000}}),
    "hpz": (4, {"strategy": "hpz", "mesh": {"node": 2}}),
    "T2": (2, {"strategy": "zero3", "mesh": {"tensor": 2}}),
    "P2": (2, {"inference": True, "strategy": "zero3", "mesh": {"pipeline": 2}}),
    "P2T2": (
        4,
        {"strategy": "zero1", "mesh": {"pipeline": 2, "tensor": 2}, "batch": {"accumulate": 2}},
    ),
}


def build(family: str) -> Any:
    length = "n_positions" if family == "gpt2" else "max_position_embeddings"
    return hf.build(family, vocab_size=67, **{length: LENGTH}).eval()


def start(model: nn.Module, folder: str, tier: str = "disk", **config: Any) -> Any:
    offload = {"cache": tier} | config.pop("offload", {})
    if "disk" in offload.values():
        offload["path"] = folder
    if not config.get("inference"):
        config |= {"optimizer": {"type": "AdamW"} | hf.ADAMW}
    config |= {"comm": {"timeout_s": 60}, "offload": offload}
    if "pipeline" not in config.get("mesh", {}):
        config["units"] = {"layer_bytes": 1}
    return penstock.initialize(model, config)


def prompts(batch: int = 2, length: int = PROMPT, rank: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5 + rank)
    return torch.randint(3, 60, (batch, length), generator=generator)


def text(model: Any, ids: torch.Tensor, new: int = NEW, **more: Any) -> torch.Tensor:
    ids = ids.to(model.device)
    made: torch.Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        **more,
    )
    return made.cpu()


def measured(engine: Any) -> dict[str, int]:
    entry = engine.ledger()["measured"]
    return {"memory": int(entry["cache"]), "disk": int(entry["disk"])}


def generates(family: str, place: str, tier: str, folder: str, device: str = "cpu") -> Any:
    plain = build(family).to(device)
    model = build(family).to(device)
    engine = start(model, folder, tier, **dict(PLACES[place][1]))
    ids = prompts(rank=engine.data_rank if engine.config.mesh.tensor == 1 else 0)
    ids = prompts() if engine.config.mesh.pipeline > 1 else ids
    model.eval()
    ours = text(model, ids)
    again = text(model, ids[:1], 3)
    told = measured(engine) | {"plan": engine.explain().count(" cache copy(")}
    engine.close()
    plain.load_state_dict(model.state_dict())
    told["same"] = torch.equal(ours, text(plain, ids)) and torch.equal(
        again, text(plain, ids[:1], 3)
    )
    return told


def cases() -> list[Any]:
    made = []
    for family in inference.FAMILIES:
        for place in PLACES:
            tier = ("host", "disk")[len(made) // 7 % 2]
            made.append(pytest.param(family, place, tier, id=f"{family}-{place}-{tier}"))
    return made


def pytest_generate_tests(metafunc):
    if "family" in metafunc.fixturenames:
        chosen = cases() if metafunc.config.getoption("full") else cases()[::7]
        metafunc.parametrize(("family", "place", "tier"), chosen)


def test_generates(family, place, tier, pools, tmp_path):
    world = PLACES[place][0]
    for told in pools(world).run(generates, family, place, tier, str(tmp_path), timeout=200):
        assert told["same"]
        assert told["memory"] > 0 and told["plan"] > 0, told
        if tier == "disk" and "P2" not in place:
            assert told["disk"] > 0, told


# Name, sequences, new tokens, options of generate().
WAYS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("beams", 2, NEW, {"num_beams": 3}),
    ("several sequences", 2, NEW, {"num_beams": 2, "num_return_sequences": 2}),
    ("chunks of the prompt", 2, NEW, {"prefill_chunk_size": 200}),
    ("lookup", 1, NEW, {"prompt_lookup_num_tokens": 3}),
    ("no cache", 2, 2, {"use_cache": False}),
]


def stories(folder: str, tier: str, world: int, device: str = "cpu") -> dict[str, bool]:
    plain, model = build("llama").to(device), build("llama").to(device)
    engine = start(model, folder, tier, inference=True, strategy="zero3" if world > 1 else "ddp")
    ids, told = prompts(), {}

    def given(*what: int) -> torch.Tensor:
        return prompts(*what).to(device)

    for name, sequences, new, options in WAYS:
        texts = [text(one, ids[:sequences], new, **options) for one in (model, plain)]
        told[name] = torch.equal(*texts)
    # One cache for several prompts: the common part is computed once, then repeated.
    made = []
    for one in (model, plain):
        cache = DynamicCache(config=one.config)
        with torch.no_grad():
            one(input_ids=given()[:1], past_key_values=cache)
        used = copy.deepcopy(cache)
        used.batch_repeat_interleave(3)
        more = torch.cat([ids[:1].repeat(3, 1), prompts(3, 7)], dim=1)
        made.append(text(one, more, past_key_values=used))
        used.batch_select_indices(torch.tensor([-1, 0], device=device))
        used.batch_select_indices(torch.tensor([False, True], device=device))
        more = torch.cat([ids[:1], prompts(1, NEW + 7)], dim=1)
        made.append(text(one, more, past_key_values=used))
        made.append(text(one, torch.cat([ids[:1], prompts(1, 3)], dim=1), past_key_values=cache))
    told["repeated"] = all(torch.equal(one, made[3 + i]) for i, one in enumerate(made[:3]))
    # Caches in turn, one of which begins without the engine, and forwards without a cache.
    outputs = []
    for one in (model, plain):
        first, second = DynamicCache(), DynamicCache(config=one.config)
        logits = []
        with torch.no_grad():
            plain(input_ids=given(), past_key_values=first)
            for part in (given(2, 300, 1), given(2, 1, 2), given(2, 257, 3), given(2, 1, 4)):
                for cache in (first, second):
                    logits.append(one(input_ids=part, past_key_values=cache).logits[:, -1])
                    logits.append(one(input_ids=part, use_cache=False).logits[:, -1])
            first.crop(-400)
            logits.append(one(input_ids=given(2, 3), past_key_values=first).logits[:, -1])
            second.reset()
            logits.append(one(input_ids=given(4, 3), past_key_values=second).logits[:, -1])
        outputs.append(torch.cat(logits))
    told["in turn"] = torch.allclose(*outputs, atol=1e-5)
    told["moved"] = measured(engine)["memory"] > 0
    # Without torch.no_grad(), nothing of an engine for inference needs a backward.
    cache = DynamicCache()
    model(input_ids=given(), past_key_values=cache)
    told["without no_grad()"] = type(cache.layers[0]).__name__ == "MovedLayer"
    both = (cache, copy.deepcopy(cache))
    outs = [model(input_ids=given()[:, :1], past_key_values=one).logits for one in both]
    told["copy of a cache made without a config"] = torch.equal(*outs)
    told["copied models are plain"] = torch.equal(
        text(copied(model, engine), ids, 2), text(plain, ids, 2)
    )
    engine.close()
    told["after close()"] = torch.equal(text(model, ids), text(plain, ids))
    return told


def copied(model: nn.Module, engine: Any) -> nn.Module:
    with engine.gathered():
        return copy.deepcopy(model)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_ways_to_use_a_cache(tier, world, pools, tmp_path):
    for told in pools(world).run(stories, str(tmp_path), tier, world, timeout=300):
        assert [name for name, same in told.items() if not same] == []


def with_windows(folder: str, tier: str, window: int, layers: int) -> bool:
    """The first layers attend to all tokens, the others have a sliding window."""
    texts = []
    for engine_runs in (True, False):
        model = hf.build(
            "qwen2",
            vocab_size=67,
            max_position_embeddings=LENGTH,
            use_sliding_window=True,
            sliding_window=window,
            max_window_layers=layers,
        ).eval()
        if engine_runs:
            engine = start(model, folder, tier, inference=True, strategy="ddp")
        ids = prompts()
        texts += [text(model, ids), text(model, ids[:1], prompt_lookup_num_tokens=3)]
        if engine_runs:
            assert measured(engine)["memory"] > 0
            engine.close()
    return torch.equal(texts[0], texts[2]) and torch.equal(texts[1], texts[3])


@pytest.mark.parametrize(("window", "layers"), [(100, 1), (300, 0), (513, 1)])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_sliding_windows(tier, window, layers, pools, tmp_path):
    assert pools(1).run(with_windows, str(tmp_path), tier, window, layers) == [True]


def one_block(folder: str) -> list[bool]:
    """A model whose only unit is the root; a model without units around its attention; compiled
    blocks; a pipeline is in test_windows_in_stages."""
    told = []
    for layers, units in ((1, {}), (2, {"modules": ["LlamaMLP"]}), (2, {"compiled": True})):
        models = [
            hf.build(
                "llama", vocab_size=67, max_position_embeddings=LENGTH, num_hidden_layers=layers
            ).eval()
            for _ in range(2)
        ]
        if units.pop("compiled", False):
            for block in models[0].model.layers:
                block.compile(backend="eager")
        config = {"inference": True, "offload": {"cache": "host"}, "units": units}
        engine = penstock.initialize(models[0], config | {"strategy": "ddp"})
        texts = [text(one, prompts(), 5) for one in models]
        told.append(torch.equal(*texts) and measured(engine)["memory"] > 0)
        engine.close()
    return told


def test_other_units(pools, tmp_path):
    assert pools(1).run(one_block, str(tmp_path)) == [[True] * 3]


def windows_in_stages(folder: str) -> bool:
    texts = []
    for engine_runs in (True, False):
        model = hf.build(
            "mistral", vocab_size=67, max_position_embeddings=LENGTH, sliding_window=100
        ).eval()
        if engine_runs:
            engine = start(model, folder, "disk", inference=True, mesh={"pipeline": 2})
        texts.append(text(model, prompts()))
        if engine_runs:
            engine.close()
    return torch.equal(*texts)


def test_windows_in_stages(pools, tmp_path):
    assert pools(2).run(windows_in_stages, str(tmp_path)) == [True, True]


def with_encoder(folder: str) -> bool:
    plain, model = hf.build("t5").eval(), hf.build("t5").eval()
    engine = start(model, folder, "host", inference=True, strategy="ddp")
    ids = prompts(2, 9)
    ours = text(model, ids, 300)
    used = measured(engine)["memory"]
    engine.close()
    return used > 0 and torch.equal(ours, text(plain, ids, 300))


def test_decoders_of_encoders(pools, tmp_path):
    assert pools(1).run(with_encoder, str(tmp_path)) == [True]


def quantized(
    folder: str, dtype: str, tier: str, device: str = "cpu"
) -> tuple[float, dict[str, int], dict[str, int]]:
    """The largest error of the logits, relative to the largest of them, and the bytes without and
    with the key."""
    ids, told, logits = prompts(16).to(device), [], []
    for key in ("none", dtype):
        model = build("llama").to(device)
        engine = start(model, folder, tier, inference=True, quantize={"cache": key})
        cache = DynamicCache()
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
            logits.append(model(input_ids=ids[:, :1], past_key_values=cache).logits)
        told.append(measured(engine))
        engine.close()
    error = (logits[0] - logits[1]).abs().max() / logits[0].abs().max()
    return float(error), told[0], told[1]


@pytest.mark.parametrize(("dtype", "limit", "smaller"), [("int8", 0.02, 3.8), ("int4", 0.2, 7.0)])
def test_quantized(dtype, limit, smaller, pools, tmp_path):
    [(error, plain, coded)] = pools(1).run(quantized, str(tmp_path), dtype, "disk")
    assert 0 < error < limit
    assert plain["disk"] > 0.95 * smaller * coded["disk"], (plain, coded)


def trained(folder: str, tier: str) -> list[Any]:
    """Weights of three steps, between which the engine generates."""
    model = build("llama").train()
    more = {} if tier == "none" else {"offload": {"cache": tier, "path": folder}}
    if tier == "host":
        more["offload"].pop("path")
    config = {"strategy": "zero3", "optimizer": {"type": "AdamW"} | hf.ADAMW} | more
    engine = penstock.initialize(model, config)
    for step in range(3):
        for mode in ("resident", "stream") if tier != "none" else ():
            with engine.inference(mode):
                text(model, prompts(), 2)
            assert measured(engine)["memory"] > 0
        engine.backward(engine(**hf.batch("llama", step, dist.get_rank())).loss)
        engine.step()
    told = [one.cpu() for one in engine.state_dict(rank0_only=False).values()]
    engine.close()
    return told


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_training_goes_on(tier, pools, tmp_path):
    without = pools(2).run(trained, str(tmp_path), "none")
    with_tier = pools(2).run(trained, str(tmp_path), tier)
    for ours, plain in zip(with_tier, without, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


def errors(folder: str) -> dict[str, str]:
    ids, told = prompts(), {}
    model = build("llama")
    engine = start(model, folder, "host", inference=True)

    def error_of(name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001
            told[name] = f"{type(error).__name__}: {error}"
        else:
            told[name] = ""

    error_of("static", lambda: text(model, ids, cache_implementation="static"))
    error_of("offloaded", lambda: text(model, ids, cache_implementation="offloaded"))

    def given(cache: Any, batch: int = 2) -> None:
        with torch.no_grad():
            model(input_ids=prompts(batch, 3), past_key_values=cache)

    error_of("given static", lambda: given(StaticCache(config=model.config, max_cache_len=9)))
    cache, early = DynamicCache(), DynamicCache()
    error_of("no such token", lambda: model(torch.tensor([[10**6]]), past_key_values=early))
    given(cache)
    error_of("offloading", lambda: given(DynamicCache(offloading=True)))
    error_of("keys", lambda: cache.layers[0].keys)
    error_of("pickled", lambda: pickle.dumps(cache))
    error_of("other batch", lambda: given(cache, 3))
    given(cache)
    told["tokens"] = str(cache.get_seq_length())
    engine.close()
    error_of("after close()", lambda: given(cache))
    error_of("early, after close()", lambda: given(early))
    return told


def test_errors(pools, tmp_path):
    [told] = pools(1).run(errors, str(tmp_path))
    assert "got a StaticCache of StaticLayer. Leave cache_implementation out" in told["static"]
    assert "of DynamicLayer that offloads by itself" in told["offloaded"]
    assert "StaticLayer" in told["given static"]
    assert "do not fit the 3 tokens of 2 sequences" in told["other batch"]
    assert "offloads by itself" in told["offloading"]
    assert "AttributeError" in told["keys"] and "only update() returns" in told["keys"]
    assert "cannot be pickled" in told["pickled"]
    assert told["tokens"] == "6"
    assert "close() of the engine has freed the cached tokens" in told["after close()"]


def trains_with_a_cache(folder: str) -> list[str]:
    model = build("llama").train()
    engine = start(model, folder, "host", strategy="zero3")
    ids, told = prompts(2, 5), []
    cache = DynamicCache()
    engine.backward(engine(input_ids=ids, labels=ids, past_key_values=cache).loss)  # plain torch's
    told.append(type(cache.layers[0]).__name__)
    with torch.no_grad():
        engine(input_ids=ids, past_key_values=cache)
    told.append(type(cache.layers[0]).__name__)
    try:
        engine(input_ids=ids, past_key_values=cache)
    except penstock.ConfigError as error:
        told.append(str(error))
    engine.step()
    engine.close()
    return told


def test_forwards_with_a_backward_keep_their_caches(pools, tmp_path):
    [told] = pools(1).run(trains_with_a_cache, str(tmp_path))
    assert told[:2] == ["DynamicLayer", "MovedLayer"]
    assert "is for forwards under torch.no_grad()" in told[2]


def test_needs_transformers(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers")
    with pytest.raises(penstock.ConfigError, match="has not imported transformers"):
        penstock.initialize(nn.Linear(3, 3), inference=True, offload={"cache": "host"})


def test_refuses_compiled_models():
    config = LlamaConfig(**hf.LLAMA)
    model = torch.compile(LlamaForCausalLM(config))
    with pytest.raises(penstock.ConfigError, match='"offload.cache" moves the tokens'):
        penstock.initialize(model, inference=True, strategy="ddp", offload={"cache": "host"})
