"""What is said to fit runs: predictions, advice and budgets against the peaks of real steps."""

from __future__ import annotations

import random
import re
from typing import Any

import memory_draw
import pytest
from memory_draw import SHARDS_PARAMS, Draw, Shape, draw

STEPS = 2
DAILY, ALL = 24, 300


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        count = ALL if metafunc.config.getoption("full") else DAILY
        metafunc.parametrize("seed", range(count))


# ---- on the ranks


def need(chosen: Draw, folder: str, **others: Any) -> dict[str, int]:
    """Returns the predicted entry of the ledger, without training."""
    engine = memory_draw.start(chosen, folder, **others)
    entry = engine.ledger()["predicted"][engine.config.strategy]
    engine.close()
    return dict(entry)


def budget_of(chosen: Draw, entry: dict[str, int]) -> dict[str, int]:
    """Returns limits around the predicted bytes."""
    whole = {"device": entry["device"], "host": entry["memory"]}
    return {f"{tier}_bytes": int(share * whole[tier]) + 1 for tier, share in chosen.limits.items()}


def advised(config: dict[str, Any], text: str) -> dict[str, Any]:
    """Returns the config with the settings that an error names after "this fits:"."""
    settings = dict(re.findall(r'(?:offload\.)?(\w+) "(\w+)"', text.partition("this fits: ")[2]))
    return with_tiers(config, settings.pop("strategy"), settings)


def with_tiers(config: dict[str, Any], strategy: str, tiers: dict[str, str]) -> dict[str, Any]:
    """Returns the config without the offload keys that have no effect with these tiers."""
    offload = {key: value for key, value in config["offload"].items() if key not in tiers} | tiers
    if tiers["optimizer"] != "disk":
        offload.pop("window_bytes", None)
    if tiers["optimizer"] == "none" or strategy not in SHARDS_PARAMS:
        offload.pop("late_update", None)
    return config | {"strategy": strategy, "offload": offload}


def run(chosen: Draw, folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """Trains under the config and returns the measured ledger."""
    engine = memory_draw.start(chosen, folder, **config)
    memory_draw.train(engine, chosen, STEPS)
    measured = engine.ledger()["measured"]
    engine.close()
    return dict(measured)


def outcome(seed: int, folder: str) -> str:
    """Follows the advice of one draw; raises if it does not hold."""
    import penstock  # noqa: PLC0415

    chosen = draw(seed)
    try:
        budget = budget_of(chosen, need(chosen, folder))
    except penstock.ConfigError as error:
        return f"no engine: {error}"
    config = chosen.config | {"memory": budget}
    try:
        run(chosen, folder, config)
    except penstock.ConfigError as error:
        text = str(error)
    else:
        return "fits"
    assert "[plan::refuse]" in text, text
    if "this fits: " in text:
        run(chosen, folder, advised(config, text))
        return "advised"
    assert "no strategy and no offload fits" in text, text
    for strategy, tiers in _others(seed):
        try:
            memory_draw.start(chosen, folder, **with_tiers(config, strategy, tiers)).close()
        except penstock.ConfigError:
            continue
        raise AssertionError(f"{strategy} {tiers} fits {budget}, but the error says: {text}")
    return "nothing fits"


def _others(seed: int) -> list[tuple[str, dict[str, str]]]:
    rng = random.Random(seed)
    tiers = ["none", "host", "disk"]
    roles = ["optimizer", "params", "gradients"]
    return [
        (rng.choice(["zero3", "zero3", "zero2", "hpz_host"]), {r: rng.choice(tiers) for r in roles})
        for _ in range(4)
    ]


# ---- the fuzz


def test_what_is_said_to_fit_runs(seed, pools, tmp_path):
    said = pools(draw(seed).world).run(outcome, seed, str(tmp_path))
    assert len(set(said)) == 1, said


# Frozen layers beside tiles; frozen norms in step one; a gradient that returns to the device.
@pytest.mark.parametrize("found", [378, 457, 475, 476, 541])
def test_draws_that_failed_once(found, pools, tmp_path):
    said = pools(draw(found).world).run(outcome, found, str(tmp_path))
    assert len(set(said)) == 1, said


HOST = {"optimizer": "host", "params": "host"}
# strategy, world, offload, other settings; frozen
BESIDE_FROZEN = [
    ("hpz_host", 2, {"optimizer": "host"}, {}, "norms"),
    ("hpz_host", 2, {"optimizer": "host"}, {}, "blocks"),
    ("zero3", 2, HOST, {}, "norms"),
    ("zero3", 2, HOST, {"tiling": {"max_bytes": 8192}}, "norms"),
    ("zero3", 2, HOST, {"tiling": {"max_bytes": 8192}}, "blocks"),
    ("zero3", 1, {}, {"units": {"layer_bytes": 1}}, "all but last"),
    ("zero2", 1, {"gradients": "host"}, {}, "norms"),
    ("zero2", 1, {"gradients": "host"}, {}, ""),
    ("zero3", 1, {"gradients": "host"}, {}, ""),
    ("mics", 2, {"gradients": "host"}, {}, "norms"),
]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("case", BESIDE_FROZEN, ids=str)
def test_no_peak_is_over_its_prediction(case, accumulate, pools, tmp_path):
    strategy, world, offload, others, frozen = case
    config = CONFIG | {"strategy": strategy, "offload": offload} | others
    config |= {"batch": {"micro": 2, "accumulate": accumulate}, "units": {"layer_bytes": 1000}}
    shape = Shape(width=40, widths=[4, 2, 1], tied=False, frozen=frozen, own="fp32")
    chosen = Draw(world, shape, config | others, by_torch=False, limits={})
    for predicted, measured in pools(world).run(peaks, chosen, str(tmp_path)):
        for part in ("memory", "device", "host"):
            assert measured[part] <= predicted[part], (part, measured, predicted)


def peaks(chosen: Draw, folder: str) -> tuple[dict[str, int], dict[str, Any]]:
    return need(chosen, folder), run(chosen, folder, {})


# ---- the case that was reported, smaller

GPT = Shape(width=64, widths=[4] * 4, tied=True, frozen="", own="fp32")
CONFIG = {
    "strategy": "zero3",
    "offload": {},
    "batch": {"micro": 2, "accumulate": 1},
    "prefetch_bytes": 0,
    "comm": {"timeout_s": 30, "bucket_bytes": 0},
}
REPORTED = Draw(2, GPT, CONFIG, by_torch=False, limits={})
ON_DISK = {"optimizer": "disk", "params": "disk"}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("gradients", ["none", "disk"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_predicted_bytes_are_enough(gradients, late, accumulate, pools, tmp_path):
    """On disk everything, with a budget of the very bytes; the parts agree too."""
    offload = ON_DISK | {"gradients": gradients, "late_update": late, "path": str(tmp_path)}
    config = {"offload": offload, "batch": {"micro": 2, "accumulate": accumulate}}
    chosen = Draw(2, GPT, CONFIG | config, by_torch=False, limits={})
    entry = pools(2).run(need, chosen, str(tmp_path))[0]
    budget = {"memory": {"host_bytes": entry["memory"]}}
    for measured in pools(2).run(run, chosen, str(tmp_path), budget):
        assert measured["memory"] <= entry["memory"]
        if late:
            continue  # how far an update gets during a forward depends on the disk
        for part in ("memory", "device", "host", "param", "grad", "optim", "buffers"):
            assert 0.9 * entry[part] <= measured[part] <= entry[part], (part, measured, entry)


def test_the_advice_tries_gradients_too(pools, tmp_path):
    folder = str(tmp_path)
    waiting = pools(2).run(need_on_disk, folder, "none")[0]["memory"]
    least = pools(2).run(need_on_disk, folder, "disk")[0]["memory"]
    assert least < waiting
    text = pools(2).run(refusal, folder, least)[0]
    assert 'offload.gradients "disk"' in text.partition("this fits: ")[2], text
    pools(2).run(take_advice, folder, least, text)
    for text in pools(2).run(refusal, folder, least // 4):
        assert "no strategy and no offload fits" in text


def need_on_disk(folder: str, gradients: str) -> dict[str, int]:
    return need(REPORTED, folder, offload=ON_DISK | {"gradients": gradients})


def refusal(folder: str, budget: int) -> str:
    import penstock  # noqa: PLC0415

    try:
        memory_draw.start(REPORTED, folder, memory={"host_bytes": budget}).close()
    except penstock.ConfigError as error:
        return str(error)
    return ""


def take_advice(folder: str, budget: int, text: str) -> None:
    config = advised(REPORTED.config, text)
    run(REPORTED, folder, config | {"memory": {"host_bytes": budget}})


def test_a_run_beyond_its_prediction_is_told_why(pools, tmp_path):
    for failure in pools(2).run(gather_everything, str(tmp_path)):
        assert "is over the" in failure and "the prediction does not include gathered()" in failure


def gather_everything(folder: str) -> str:
    import penstock  # noqa: PLC0415

    offload = ON_DISK | {"gradients": "disk"}
    entry = need(REPORTED, folder, offload=offload)
    engine = memory_draw.start(
        REPORTED,
        folder,
        offload=offload,
        memory={"device_bytes": entry["device"], "host_bytes": "1GiB"},
    )
    try:
        with engine.gathered():
            return "no error"
    except penstock.RuntimeFault as error:
        return str(error)
    finally:
        engine.close()
