"""Inference inside training: greedy text is that of plain torch, and training goes on to the last
bit as if there had been no inference."""

from __future__ import annotations

import functools
import re
from typing import Any

import hugging_face as hf
import pipeline_models
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.timeout(480)
FAMILIES = ("llama", "gpt2", "qwen3", "phi3", "opt", "mistral")
NEW, ODD = 12, {"vocab_size": 67}

HOST = {"optimizer": "host", "params": "host"}
DISK = {"optimizer": "disk", "params": "disk"}
# Name: number of ranks, and keys of the config.
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "zero1": (2, {"strategy": "zero1"}),
    "zero2": (2, {"strategy": "zero2"}),
    "zero3 alone": (1, {"strategy": "zero3"}),
    "zero3": (2, {"strategy": "zero3"}),
    "zero3 of 4": (4, {"strategy": "zero3"}),
    "hpz": (4, {"strategy": "hpz", "mesh": {"node": 2}}),
    "host": (2, {"strategy": "zero3", "offload": HOST}),
    "host alone": (1, {"strategy": "zero3", "offload": HOST}),
    "host of 4": (4, {"strategy": "zero3", "offload": HOST}),
    "disk": (2, {"strategy": "zero3", "offload": DISK}),
    "disk alone": (1, {"strategy": "zero3", "offload": DISK}),
    "disk of 4": (4, {"strategy": "zero3", "offload": DISK}),
    "T2": (2, {"strategy": "zero3", "mesh": {"tensor": 2}}),
    "T2D2": (4, {"strategy": "zero3", "mesh": {"tensor": 2}}),
    "S2": (2, {"strategy": "zero3", "mesh": {"sequence": 2}}),
    "S2D2": (4, {"strategy": "zero3", "mesh": {"sequence": 2}}),
    "P2": (2, {"strategy": "zero1", "mesh": {"pipeline": 2}}),
    "P2D2": (4, {"strategy": "zero3", "mesh": {"pipeline": 2}}),
    "P2T2": (4, {"strategy": "zero1", "mesh": {"pipeline": 2, "tensor": 2}}),
    "late": (2, {"strategy": "zero1", "offload": {"optimizer": "host", "late_update": True}}),
    "coded": (2, {"strategy": "zero3", "comm": {"codec": "int8"}}),
}
IN_SEQUENCES = ("llama", "gpt2", "qwen3", "phi3", "mistral")


def start(family: str, place: str, path: str, device: str = "cpu") -> Any:
    import penstock  # noqa: PLC0415

    _, config = PLACES[place]
    made = {"batch": {"accumulate": 2}, "optimizer": {"type": "AdamW"} | hf.ADAMW}
    made |= {"units": {} if "P" in place else {"layer_bytes": 1}, "clip": 1.0}
    made |= config | {"comm": {"timeout_s": 60} | config.get("comm", {})}
    if place.startswith("disk"):
        made["offload"] = DISK | {"path": path}
    return penstock.initialize(hf.build(family, **ODD).to(device), made)


def prompts(rank: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3 + rank)
    return torch.randint(1, 60, (2, 5), generator=generator)


def text(model: Any, ids: torch.Tensor, new: int = NEW) -> torch.Tensor:
    made: torch.Tensor = model.generate(
        ids.to(model.device),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
    )
    return made.cpu()


def samples_of(engine: Any, family: str, number: int) -> dict[str, torch.Tensor]:
    batch = hf.batch(family, number, engine.data_rank)
    return {name: one.to(engine.module.device) for name, one in batch.items()}


def micro(engine: Any, family: str, number: int) -> None:
    engine.backward(engine(**samples_of(engine, family, number)).loss)


def window(engine: Any, family: str, first: int, between: Any = lambda part: None) -> None:
    """A step of two micro-batches. Calls `between(part)` after each; in a pipeline, after the
    step."""
    if engine.config.mesh.pipeline > 1:
        parts = [samples_of(engine, family, first + part) for part in range(2)]
        engine.train_batch(iter(parts))
        for part in range(2):
            between(part)
        return
    for part in range(2):
        micro(engine, family, first + part)
        between(part)
    engine.step()


def trained(family: str, place: str, path: str, mode: str, device: str = "cpu") -> list[Any]:
    """Losses and weights of three steps. With a mode, the engine generates between the steps and in
    the middle of a window."""
    engine = start(family, place, path, device)

    def generate(step: int, part: int) -> None:
        if mode and (step, part) in ((0, 0), (1, 1), (2, 0)):
            with engine.inference(mode):
                assert not engine.module.training
                text(engine.module, prompts(engine.data_rank), 3)
            assert engine.module.training

    for step in range(3):
        window(engine, family, 10 * step, functools.partial(generate, step))
    told = [one.cpu() for one in engine.state_dict(rank0_only=False).values()]
    engine.close()
    return told


def generates(family: str, place: str, mode: str, path: str, device: str = "cpu") -> dict[str, Any]:
    engine = start(family, place, path, device)
    for step in range(2):
        window(engine, family, 2 * step)
    whole = engine.state_dict(rank0_only=False)
    shared = dist.get_world_size() == engine.data_size
    ids = prompts(engine.data_rank)
    with engine.inference(mode):
        calls = _Calls(engine.module)
        # Ranks of one model run alike; others stop when they want to.
        new = NEW - (engine.data_rank if shared and mode == "resident" else 0)
        ours = text(engine.module, ids, new)
        told = {"forwards": (calls.count, new)}
    engine.close()
    plain = hf.build(family, **ODD).to(device).eval()
    plain.load_state_dict(whole)
    told["same"] = torch.equal(ours, text(plain, ids, new))
    return told


class _Calls:
    def __init__(self, model: torch.nn.Module) -> None:
        self.count = 0
        model.register_forward_pre_hook(lambda *_: self._add())

    def _add(self) -> None:
        self.count += 1


def cases() -> list[Any]:
    made = []
    for f, family in enumerate(FAMILIES):
        for p, place in enumerate(PLACES):
            if "S2" in place and family not in IN_SEQUENCES:
                continue
            mode = ("auto", "resident", "stream")[(f + p) % 3]
            made.append(pytest.param(family, place, mode, id=f"{family}-{place}-{mode}"))
    return made


def pytest_generate_tests(metafunc):
    if "mode" in metafunc.fixturenames and "family" in metafunc.fixturenames:
        full = metafunc.config.getoption("full")
        chosen = cases() if full else cases()[::7]
        metafunc.parametrize(("family", "place", "mode"), chosen)


def test_generates(family, place, mode, pools, tmp_path):
    world = PLACES[place][0]
    for told in pools(world).run(generates, family, place, mode, str(tmp_path), timeout=200):
        assert told["same"]
        assert told["forwards"][0] == told["forwards"][1]


@pytest.mark.parametrize("mode", ["resident", "stream"])
@pytest.mark.parametrize(
    "place", ["zero1", "zero3", "hpz", "disk", "T2", "S2", "P2", "P2D2", "late", "coded"]
)
def test_training_goes_on(place, mode, pools, tmp_path):
    pool = pools(PLACES[place][0])
    without = pool.run(trained, "llama", place, str(tmp_path), "", timeout=200)
    for ours, plain in zip(
        pool.run(trained, "llama", place, str(tmp_path), mode, timeout=200), without, strict=True
    ):
        assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


# ---- contexts in contexts


def nests(place: str, path: str) -> None:
    engine = start("llama", place, path)
    model, ids = engine.module, prompts(engine.data_rank)
    plain = hf.build("llama", **ODD).eval()
    expected = text(plain, ids, 3)
    model.lm_head.eval()
    modes = [one.training for one in model.modules()]
    for _ in range(2):
        with engine.inference("resident"):
            with engine.gathered():
                assert model.lm_head.weight.shape == plain.lm_head.weight.shape
            given = dict(engine.weights(bucket_bytes=1))
            assert torch.equal(given["lm_head.weight"], plain.lm_head.weight)
            with engine.inference("resident"):
                pass
            assert torch.equal(text(model, ids, 3), expected)
            model.train()
        assert [one.training for one in model.modules()] == modes
        with engine.gathered(), engine.inference("stream"):
            pass
        with engine.gathered(write=True):
            try:
                with engine.inference("resident"):
                    raise KeyError
            except KeyError:
                pass
            try:
                with engine.gathered():
                    raise KeyError
            except KeyError:
                pass
        whole = engine.state_dict(rank0_only=False)
        assert torch.equal(whole["lm_head.weight"], plain.lm_head.weight)
        for _ in engine.weights():
            break
    try:
        model.eval = _fails
        with engine.inference("resident"):
            pass
    except KeyError:
        del model.eval
    micro(engine, "llama", 0)
    micro(engine, "llama", 1)
    engine.step()
    engine.close()


def _fails() -> None:
    raise KeyError


@pytest.mark.parametrize("place", ["ddp", "zero3", "T2", "disk"])
def test_nests(place, pools, tmp_path):
    pools(2).run(nests, place, str(tmp_path))


# ---- ranks of different lengths


def lengths(seed: int, rounds: int) -> list[int]:
    engine = start("llama", "zero3", "")
    own = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    counts = []
    for _ in range(rounds):
        news = torch.randint(1, 9, (1 + dist.get_rank(),), generator=own).tolist()
        with engine.inference("resident"):  # as many calls as each rank likes
            calls = _Calls(engine.module)
            for new in news:
                text(engine.module, prompts(), new)
        counts.append(calls.count - sum(news))
        engine.module._forward_pre_hooks.clear()
    engine.close()
    return counts


def test_ranks_of_different_lengths_run_no_dummies(pools, pytestconfig):
    rounds = 200 if pytestconfig.getoption("full") else 20
    for told in pools(4).run(lengths, 1, rounds, timeout=400):
        assert len(told) == rounds and not any(told)


# ---- weights for other programs


def handed(place: str, path: str, dtype: Any, bucket: int) -> dict[str, Any]:
    engine = start("llama", place, path)
    for step in range(2):
        micro(engine, "llama", step)
    engine.step()
    whole = engine.state_dict(rank0_only=False)
    given = dict(engine.weights(dtype, bucket))
    for step in range(2):  # what was given stays
        micro(engine, "llama", 5 + step)
    engine.step()
    names = [name for name, _ in engine.module.named_parameters()]
    named = {name: (torch.equal(one, whole[name].to(one.dtype)), one.dtype) for name, one in
             given.items()}  # fmt: skip
    engine.close()
    return {"names": sorted(given) == sorted(names), "named": named}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("place", ["ddp", "zero3", "disk", "T2", "T2D2"])
def test_weights(place, dtype, pools, tmp_path):
    for bucket in (1, 1 << 30):
        for told in pools(PLACES[place][0]).run(handed, place, str(tmp_path), dtype, bucket):
            assert told["names"]
            assert all(same and kind == (dtype or torch.float32)
                       for same, kind in told["named"].values())  # fmt: skip


def _count(block: Any, *_: Any) -> None:
    block.count += 1


def counts_of_stages() -> list[float]:
    """Buffers that each stage changes, as weights() gives them."""
    import penstock  # noqa: PLC0415

    model = pipeline_models.Chain(layers=2)
    for block in model.blocks:
        block.register_buffer("count", torch.zeros(()))
    engine = penstock.initialize(
        model, {"strategy": "zero1", "mesh": {"pipeline": 2}, "batch": {"accumulate": 2}}
    )
    for block in model.blocks:
        block.register_forward_hook(_count)
    engine.train_batch(iter([pipeline_models.batch(0, part, 1) for part in range(2)]))
    given = dict(engine.weights())
    whole = engine.state_dict(rank0_only=False)
    engine.close()
    assert given.keys() == whole.keys()
    assert all(torch.equal(one, whole[name]) for name, one in given.items())
    return [float(given[f"blocks.{block}.count"]) for block in range(2)]


def test_weights_have_the_buffers_of_all_stages(pools):
    assert pools(2).run(counts_of_stages) == [[2.0, 2.0]] * 2


# ---- errors


def steps_inside(engine):
    micro(engine, "llama", 0)
    micro(engine, "llama", 1)
    with engine.inference("resident"):
        engine.step()


def edits_inside(engine):
    with engine.inference("resident"):
        engine.module.lm_head.weight.data.add_(1.0)


def unknown_mode(engine):
    with engine.inference("fast"):
        pass


def no_bytes(engine):
    list(engine.weights(bucket_bytes=0))


def whole_numbers(engine):
    list(engine.weights(torch.int8))


ERRORS = [
    (steps_inside, "inside gathered\\(\\) or inference\\(\\)"),
    (edits_inside, "was changed in place inside"),
    (unknown_mode, 'mode is "fast"; allowed: auto, resident, stream'),
    (no_bytes, "bucket_bytes is 0"),
    (whole_numbers, "Pass a floating dtype"),
]


def raises(story: Any) -> str:
    engine = start("llama", "zero3", "")
    try:
        story(engine)
        said = ""
    except (RuntimeError, ValueError) as error:
        said = str(error)
    with engine.inference():
        text(engine.module, prompts(), 2)
    engine.zero_grad()
    micro(engine, "llama", 2)
    micro(engine, "llama", 3)
    engine.step()
    engine.close()
    return said


@pytest.mark.parametrize(("story", "expected"), ERRORS, ids=lambda v: getattr(v, "__name__", ""))
def test_error(story, expected, pools):
    for said in pools(2).run(raises, story):
        assert re.search(expected, said), said


def streams_what_is_too_large(tight: bool) -> tuple[str, bool, int, int, int]:
    import penstock  # noqa: PLC0415

    def deep() -> Any:
        return hf.build("llama", num_hidden_layers=12, **ODD)

    model, plain = deep(), text(deep().eval(), prompts())
    config: dict[str, Any] = {"inference": True, "units": {"layer_bytes": 1}}
    config |= {"prefetch_bytes": 0, "comm": {"bucket_bytes": 1}}  # one unit at a time
    engine = penstock.initialize(deep(), config)
    room = engine.ledger()["predicted"]["zero3"]["memory"] + 4096
    engine.close()
    if tight:
        config["memory"] = {"device_bytes": room}
    engine = penstock.initialize(model, config)
    try:
        with engine.inference("resident"):
            said = ""
    except RuntimeError as error:
        said = str(error)
    with engine.inference():
        same = torch.equal(plain, text(model, prompts()))
    measured = engine.ledger()["measured"]
    engine.close()
    return said, same, measured["memory"], room, measured["optim"]


def test_streams_what_is_too_large(pools):
    for tight in (False, True):
        for said, same, peak, room, optim in pools(2).run(streams_what_is_too_large, tight):
            assert same and optim == 0
            assert (peak <= room) == tight
            assert tight == ("too little memory to keep all parameters whole" in said), said


# ---- engines for inference

RESTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "alone": (1, {}),
    "zero3": (2, {}),
    "zero3 of 4": (4, {}),
    "hpz": (4, {"strategy": "hpz", "mesh": {"node": 2}}),
    "host": (2, {"offload": {"params": "host"}}),
    "disk": (2, {"offload": {"params": "disk"}}),
    "bf16": (2, {"precision": "bf16"}),
    "T2": (2, {"mesh": {"tensor": 2}}),
    "P2": (2, {"mesh": {"pipeline": 2}}),
    "T2 host": (4, {"mesh": {"tensor": 2}, "offload": {"params": "host"}}),
    "S2": (2, {"mesh": {"sequence": 2}}),
}


def only_runs(rest: str, path: str) -> dict[str, Any]:
    import penstock  # noqa: PLC0415

    config: dict[str, Any] = {"inference": True, "units": {"layer_bytes": 1}} | RESTS[rest][1]
    if "disk" in config.get("offload", {}).values():
        config["offload"] = config["offload"] | {"path": path}
    model = hf.build("llama", num_hidden_layers=8, **ODD)
    model.model.embed_tokens.requires_grad_(False)
    engine = penstock.initialize(model, config)
    trains = any(one.requires_grad for one in model.parameters())
    ids = prompts(engine.data_rank)
    plain = hf.build("llama", num_hidden_layers=8, **ODD).eval()
    if rest == "bf16":
        plain.bfloat16()
    ours = [text(engine, ids), text(model, ids, 3)]
    with torch.no_grad():
        logits = engine(input_ids=ids).logits
    ledger = engine.ledger()
    both = ledger["measured"], ledger["predicted"][engine.config.strategy]
    told: dict[str, Any] = {
        "same": torch.equal(ours[0], text(plain, ids))
        and torch.equal(ours[1], text(plain, ids, 3)),
        "kinds": {kind: (both[0][kind], both[1][kind]) for kind in ("param", "memory")},
        "none": [both[at][kind] for at in (0, 1) for kind in ("grad", "optim")],
        "modes": (trains, model.training),
        "logits": 0.0,
    }
    if rest != "S2":  # there, logits are those of a part
        told["logits"] = hf_far(logits, plain(input_ids=ids).logits.detach())
    said = []
    for call in (lambda: engine.backward(logits.sum()), engine.step):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    engine.close()
    told["said"] = said
    told["again"] = [name for name, one in model.named_parameters() if not one.requires_grad] == [
        "model.embed_tokens.weight"
    ]
    return told


def hf_far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).float().norm() / theirs.float().norm())


@pytest.mark.parametrize("rest", RESTS)
def test_only_runs(rest, pools, tmp_path):
    for told in pools(RESTS[rest][0]).run(only_runs, rest, str(tmp_path)):
        assert told["same"] and told["again"]
        assert told["modes"] == (False, False)
        assert told["none"] == [0, 0, 0, 0]
        assert told["logits"] < (1e-2 if rest == "bf16" else 1e-6)
        for measured, predicted in told["kinds"].values():
            assert abs(measured - predicted) <= 0.1 * predicted, told["kinds"]
        assert len(told["said"]) == 2
        assert all("the engine is for inference" in one for one in told["said"])


def loads(path: str) -> bool:
    import penstock  # noqa: PLC0415

    engine = start("llama", "zero3", path)
    micro(engine, "llama", 0)
    micro(engine, "llama", 1)
    engine.step()
    engine.save(path, "one")
    whole = engine.state_dict(rank0_only=False)
    engine.close()
    model = hf.build("llama", **ODD)
    engine = penstock.initialize(model, {"inference": True})
    engine.load(path, "one")
    loaded = engine.state_dict(rank0_only=False)
    engine.close()
    assert model.training
    return all(torch.equal(one, loaded[name]) for name, one in whole.items())


def test_loads_a_training_run(pools, tmp_path):
    assert all(pools(2).run(loads, str(tmp_path)))


KEYS = {
    "clip": {"clip": 1.0},
    "batch.accumulate": {"batch": {"accumulate": 2}},
    "offload.optimizer": {"offload": {"optimizer": "host"}},
    "activations.checkpoint": {"activations": {"checkpoint": "unit"}},
    "nothing trains": {"optimizer": {"type": "AdamW"}},
}


def refuses(config: dict[str, Any]) -> str:
    import penstock  # noqa: PLC0415

    try:
        penstock.initialize(hf.build("llama"), {"inference": True} | config)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("key", KEYS)
def test_refuses_keys_of_training(key, pools):
    for said in pools(1).run(refuses, KEYS[key]):
        assert key in said and "nothing trains" in said


def takes_an_optimizer() -> str:
    import penstock  # noqa: PLC0415

    model = hf.build("llama")
    try:
        penstock.initialize(model, {"inference": True}, optimizer=torch.optim.AdamW)
    except ValueError:
        pass
    try:
        penstock.initialize(
            model, {"inference": True}, optimizer=torch.optim.AdamW(model.parameters())
        )
    except (RuntimeError, ValueError) as error:
        assert all(one.requires_grad for one in model.parameters())
        return str(error)
    return ""


def test_takes_no_optimizer(pools):
    for said in pools(1).run(takes_an_optimizer):
        assert '"inference" is true, so nothing trains' in said
