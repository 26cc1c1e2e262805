"""Budgets and `offload: "auto"`: what does not fit goes elsewhere, changes no bit, and is refused
where nothing helps."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import models
import pytest
import torch
import training
from ranks import Failure
from torch import nn
from training import Case

STEPS = 3


def start(case: Case, **others):
    import penstock  # noqa: PLC0415

    return penstock.initialize(models.build(case.model), case.config() | others)


def bytes_of(case: Case, **others):
    """What initialize() foresees for the strategy, without training."""
    engine = start(case, **others)
    entry = engine.ledger()["predicted"][case.strategy]
    engine.close()
    return entry


def trained(case: Case, **others):
    engine = start(case, **others)
    losses = []
    for batch in models.batches(case.model, STEPS, case.samples):
        losses.append(training.backwards(engine, batch, case.accumulate))
        engine.step()
    measured, text = engine.ledger()["measured"], engine.explain()
    engine.close()
    return losses, training.digest(engine.module), measured, text


AUTO = [
    # The device's budget, as a share of what everything there takes; where the optimizer may go.
    ("zero3", 1, 2, 0.7),
    ("zero3", 3, 2, 0.75),
    ("zero2", 1, 2, 0.8),
    ("zero3", 1, 1, 0.6),
]


@pytest.mark.parametrize("chosen", AUTO, ids=str)
def test_auto_trains_within_the_budget_with_the_same_bits(chosen, pools, tmp_path):
    strategy, accumulate, world, share = chosen
    case = Case(strategy, "fp32", accumulate, world)
    pool = pools(world)
    memory = pool.run(trained, case)
    needed = pool.run(bytes_of, case)[0]["device"]
    budget = {"device_bytes": int(share * needed), "host_bytes": "1GiB"}
    ours = pool.run(_auto, case, budget, str(tmp_path))
    for (losses, digest, measured, text), theirs in zip(ours, memory, strict=True):
        assert (losses, digest) == theirs[:2]
        assert 0 < measured["device"] <= budget["device_bytes"] < theirs[2]["device"]
        assert measured["host"] > 0
        assert "offload chosen: optimizer" in text and "fastest that fits" in text


def _auto(case: Case, budget, folder: str):
    offload = {"optimizer": "auto", "params": "auto", "path": folder}
    return trained(case, memory=budget, offload=offload)


def test_everything_goes_to_disk_when_nothing_else_fits(pools, tmp_path):
    case = Case("zero3", "fp32", 1, 2)
    on_disk = {"optimizer": "disk", "params": "disk", "path": str(tmp_path)}
    entry = pools(2).run(bytes_of_offload, case, on_disk)[0]
    budget = {"device_bytes": entry["device"], "host_bytes": entry["host"]}
    for losses, digest, measured, _ in pools(2).run(_auto, case, budget, str(tmp_path)):
        assert measured["disk"] > 0
        assert measured["host"] <= budget["host_bytes"]
        assert measured["device"] <= budget["device_bytes"]
        assert losses and digest


def bytes_of_offload(case: Case, offload):
    return bytes_of(case, offload=offload)


# ---- every alternative


def plan_of(case: Case):
    """The alternatives of `penstock plan` for the case's model and config."""
    from penstock._native import _penstock  # noqa: PLC0415
    from penstock.front import module_tree  # noqa: PLC0415

    config = _penstock.Config(case.config())
    described = module_tree.model_tree(models.build(case.model), {})
    machine = _penstock.Machine()
    return _penstock.plan_report(described, config, case.world, 64.0, machine)["alternatives"]


def within(case: Case, alternative, folder: str):
    tiers = {role: alternative[role] for role in ("optimizer", "params")}
    path = {"path": folder} if "disk" in tiers.values() else {}
    budget = {"device_bytes": alternative["device"], "host_bytes": max(1, alternative["host"])}
    return trained(case, memory=budget, offload=tiers | path, strategy=alternative["strategy"])[2]


@pytest.mark.parametrize("chosen", [("fp32", 1), ("bf16", 3)], ids=str)
def test_what_the_plan_foresees_is_enough(chosen, pools, tmp_path):
    """Each alternative of a GPT trains with budgets of the very bytes that were foreseen.

    (Units that run in another order than the assumed one, or twice, may need more.)
    """
    precision, accumulate = chosen
    case = Case("zero3", precision, accumulate, 2)
    alternatives = plan_of(case)
    names = {(one["strategy"], one["optimizer"], one["params"]) for one in alternatives}
    assert len(names) == len(alternatives) >= 3 * 3 + 9
    for one in alternatives:
        measured = pools(2).run(within, case, one, str(tmp_path))[0]
        for tier in ("device", "host"):
            assert measured[tier] <= one[tier], (one, measured)
            assert measured[tier] >= 0.9 * one[tier], (one, measured)
        assert measured["disk"] >= one["disk"]


# ---- refusals


def test_a_prediction_over_the_budget_is_refused_on_all_ranks(pools):
    case = Case("zero3", "fp32", 1, 2)
    needed = pools(2).run(bytes_of, case)[0]["device"]
    for outcome in pools(2).attempt(refused, case, {"device_bytes": needed - 1}):
        assert outcome["error"] == "ConfigError"
        for word in ("of device, but", "is allowed", 'offload.gradients "host"', "zero3"):
            assert word in outcome["text"], outcome["text"]
        assert outcome["whole"]  # the model is as it was
    for outcome in pools(2).attempt(refused, case, {"device_bytes": 5000}):
        assert "no strategy and no offload fits" in outcome["text"]


def refused(case: Case, budget):
    import penstock  # noqa: PLC0415

    model = models.build(case.model)
    digest = training.digest(model)
    try:
        penstock.initialize(model, case.config() | {"memory": budget})
    except penstock.ConfigError as error:
        kind, text = type(error).__name__, str(error)
    return {"error": kind, "text": text, "whole": training.digest(model) == digest}


def test_what_nobody_foresaw_is_refused_by_the_arena_on_all_ranks(pools):
    case = Case("zero3", "fp32", 1, 2)
    config = {"prefetch_bytes": 0}
    needed = pools(2).run(bytes_of_lean, case, config)[0]["device"]
    for kind, text, seconds in pools(2).run(hungry, case, needed, config):
        assert kind == "RuntimeFault"
        for word in ("device memory (memory.device_bytes)", "in use on this rank", "is over the"):
            assert word in text, text
        assert "needs less of it" in text
        assert seconds < 20  # none of them waited for another


def bytes_of_lean(case: Case, config):
    return bytes_of(case, **config)


def hungry(case: Case, needed: int, config):
    """Gathers the whole model while its gradients are there."""
    engine = start(case, memory={"device_bytes": needed}, **config)
    began = time.monotonic()
    try:
        training.backwards(engine, models.batches(case.model, 1, case.samples)[0], 1)
        with engine.gathered():
            pass
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return None


def test_ranks_with_different_budgets_are_told(pools):
    outcomes = pools(2).attempt(unequal)
    for outcome in outcomes:
        assert isinstance(outcome, Failure) and outcome.is_a("RuntimeFault")
        assert "/memory/device_bytes" in outcome.text


def unequal():
    import torch.distributed as dist  # noqa: PLC0415

    start(Case(), memory={"device_bytes": 10**9 + dist.get_rank()}, offload="auto").close()


# ---- what is said


def test_the_choice_is_printed_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import penstock, torch
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        engine = penstock.initialize(model, {"offload": "auto", "memory": {"host_bytes": "1GiB"}})
        assert "offload chosen: optimizer" in engine.explain()
        engine.close()
        """)
    )
    command = [sys.executable, "-m", "penstock", "run", "--nproc", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('offload chosen: optimizer "none", params "none"') == 1, done.stderr
    assert "device and host together 1.00 GiB" in done.stderr


def test_explain_names_an_optimizer_that_was_given():
    import torch  # noqa: PLC0415

    import penstock  # noqa: PLC0415

    model = models.build("gpt")
    engine = penstock.initialize(
        model, {}, optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-3)
    )
    assert "optimizer torch.optim.rmsprop.RMSprop, as given\n" in engine.explain()
    engine.close()


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(16))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def train_beside_refusals(folder: str, budget: int | None):
    """Losses; with a budget, `gathered()` of everything is over it at every step."""
    import penstock  # noqa: PLC0415

    torch.manual_seed(0)
    offload = {"optimizer": "disk", "params": "disk", "path": folder}
    config = {"units": {"modules": ["Linear"]}, "offload": offload, "prefetch_bytes": 0}
    config |= {"optimizer": {"type": "AdamW", "lr": 0.1}, "comm": {"bucket_bytes": 0}}
    if budget is not None:
        config["memory"] = {"device_bytes": budget}
    engine = penstock.initialize(Deep(), config)
    losses, refusals = [], 0
    for step in range(3):
        torch.manual_seed(step)
        loss = engine(torch.randn(2, 64))
        engine.backward(loss)
        if budget is not None:
            try:
                with engine.gathered():
                    pass
            except RuntimeError as error:
                refusals += "memory.device_bytes" in str(error)
            with pytest.raises(RuntimeError, match="is sharded"):  # what had come has gone again
                engine.module.layers[0].weight.sum()
        engine.step()
        losses.append(loss.item())
    needed = engine.ledger()["predicted"]["zero3"]["device"]
    engine.close(gather=False)
    return losses, refusals, needed


def test_what_a_refusal_left_in_memory_is_not_used_after_the_update(pools, tmp_path):
    (expected, _, needed), _ = pools(2).run(train_beside_refusals, str(tmp_path), None)
    for losses, refusals, _ in pools(2).run(train_beside_refusals, str(tmp_path), needed + 20000):
        assert refusals == 3
        assert losses == expected
