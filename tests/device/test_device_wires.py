"""Lossy wires on devices: the bits do not depend on when queued work runs, ranks have equal
weights, and training is that of the same wires on the CPU but for rounding."""

from __future__ import annotations

import functools
from typing import Any

import compare
import on_device
import pytest
import training
from training import Case

CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "ddp": (Case("ddp", "bf16"), {}),
    "zero1": (Case("zero1"), {}),
    "zero2": (Case("zero2", "bf16", accumulate=2), {}),
    "zero2-host": (Case("zero2"), {"offload": {"optimizer": "host", "gradients": "host"}}),
    "zero1-moved": (
        Case("zero1", "bf16"),
        {"table": {"optim": {"rest": "SS@host:fp32", "update": "SS@device:fp32"}}},
    ),
    "zero3": (Case("zero3", "bf16"), {}),
    "zero3-fp16": (Case("zero3", "fp16", clip=True), {}),
    "zero3-host": (Case("zero3"), {"offload": {"optimizer": "host", "params": "host"}}),
    "zero3-recompute": (Case("zero3", "bf16", recompute="nonreentrant"), {}),
    "hpz": (Case("hpz", "bf16", world=4), {}),
    "mics": (Case("mics", world=4), {}),
}
WIRES = {"int8": {"codec": "int8"}, "int4": {"grad": "int4/64"}}
# Codecs with residuals: on the host, and with signs on the device.
RESIDUALS: dict[str, dict[str, Any]] = {
    "zero++": {"codec": "zero++", "exact_every": 3},
    "1bit": {"codec": "1bit", "exact_first": 1},
}
# Only gathered parameters travel in float8.
GATHERED = {"fp8": {"codec": "fp8"}}
WITHOUT_RESIDUALS = ("ddp", "zero3-fp16", "mics")


def settings(case: Case, wires: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    comm = case.config()["comm"]
    if "codec" in wires:
        return more | {"comm": comm | wires}
    return more | {"comm": comm, "table": more.get("table", {}) | {"wire": wires}}


def every_case() -> list[Any]:
    cases = []
    for name, (case, more) in CASES.items():
        residuals = {} if name in WITHOUT_RESIDUALS else RESIDUALS
        gathered = GATHERED if name in ("zero3", "zero3-host", "hpz", "mics") else {}
        for wire, wires in (WIRES | residuals | gathered).items():
            cases.append(pytest.param(case, more, wires, id=f"{name}-{wire}"))
    return cases


@pytest.mark.parametrize(("case", "more", "wires"), every_case())
def test_wires_on_devices(case, more, wires, device_pools, tmp_path):
    given = settings(case, wires, more)
    train = functools.partial(on_device.train, **given)
    run = functools.partial(device_pools(case.world).run, train, case)
    first, again = run(0, str(tmp_path)), run(1, str(tmp_path))
    there = device_pools(case.world).run(training.train_with, case, given)
    for one, two in zip(first, again, strict=True):
        assert one[1] == two[1] == first[0][1]
        assert one[0].losses == two[0].losses
    for one, two in zip(first, there, strict=True):
        assert compare.rms(one[0].losses, two[0].losses) < 0.02
    deviation = compare.change_deviation(
        first[0][0].weights, there[0][0].weights, training.initial_weights(case.model, trained=True)
    )
    assert deviation < 0.3


@pytest.mark.parametrize(("strategy", "precision"), [("zero1", "fp32"), ("zero3", "bf16")])
def test_outer_steps_on_devices(strategy, precision, device_pools, tmp_path):
    """Nodes that train on their own meet in host memory; their ranks meet on the device."""
    case = Case(strategy, precision, world=4)
    comm = case.config()["comm"] | {"codec": "local", "outer_every": training.STEPS // 4}
    given = {"mesh": {"node": 2}, "comm": comm}
    run = functools.partial(device_pools(4).run, functools.partial(on_device.train, **given), case)
    first, again = run(0, str(tmp_path)), run(1, str(tmp_path))
    there = device_pools(4).run(training.train_with, case, given)
    for one, two, cpu in zip(first, again, there, strict=True):
        assert one[1] == two[1] == first[0][1], "the last step is an outer step"
        assert one[0].losses == two[0].losses
        assert compare.rms(one[0].losses, cpu[0].losses) < 0.02
