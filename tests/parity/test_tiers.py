"""Where state rests changes no bit: offloaded runs against the same run in memory.

`pytest tests/parity/test_tiers.py --full` takes every model of the zoo through every combination.
"""

from __future__ import annotations

import pathlib

import pytest
import torch.distributed as dist
import training
import zoo
from training import Case

HOST, DISK = "host", "disk"
LATE = {"late_update": True}
CHUNKS = {"window_bytes": 1}  # as many as there can be
ALL_ON_DISK = {"optimizer": DISK, "params": DISK, "gradients": DISK}
# Strategy, precision, accumulate, world, offload.
CASES = [
    ("ddp", "bf16", 1, 2, {"optimizer": HOST}),
    ("zero1", "fp32", 1, 2, {"optimizer": DISK}),
    ("zero1", "bf16", 3, 2, CHUNKS | {"optimizer": DISK}),
    ("zero2", "fp32", 3, 2, {"optimizer": HOST}),
    ("zero2", "bf16", 1, 3, {"optimizer": DISK}),
    ("zero3", "fp32", 1, 1, CHUNKS | {"optimizer": DISK, "params": DISK}),
    ("zero3", "fp32", 1, 2, {"optimizer": HOST, "params": HOST}),
    ("zero3", "fp32", 3, 2, {"optimizer": DISK, "params": HOST}),
    ("zero3", "bf16", 1, 2, CHUNKS | {"optimizer": DISK, "params": DISK}),
    ("zero3", "bf16", 3, 4, {"optimizer": DISK, "params": DISK}),
    ("zero3", "fp32", 1, 3, {"params": DISK}),
    ("zero3", "fp16", 1, 2, {"optimizer": DISK, "params": DISK}),
    ("mics", "fp32", 1, 4, CHUNKS | {"optimizer": DISK, "params": DISK}),
    ("hpz", "bf16", 1, 4, CHUNKS | {"optimizer": DISK, "params": HOST}),
    ("zero2", "bf16", 3, 2, {"optimizer": HOST, "gradients": DISK}),
    ("zero2", "bf16", 1, 2, {"gradients": HOST}),
    ("zero3", "fp32", 3, 2, {"gradients": HOST}),
    ("zero3", "fp32", 1, 2, ALL_ON_DISK),
    ("zero3", "bf16", 3, 3, CHUNKS | ALL_ON_DISK),
    ("zero3", "fp16", 1, 1, LATE | CHUNKS | ALL_ON_DISK),
    ("mics", "fp32", 3, 4, LATE | ALL_ON_DISK),
    ("mics", "fp32", 1, 4, LATE | CHUNKS | ALL_ON_DISK),
    ("zero3", "fp32", 1, 1, LATE | {"optimizer": HOST}),
    ("zero3", "fp32", 1, 2, LATE | {"optimizer": HOST}),
    ("zero3", "bf16", 3, 2, LATE | {"optimizer": HOST, "params": HOST}),
    ("zero3", "bf16", 1, 3, LATE | {"optimizer": DISK, "params": DISK}),
    ("zero3", "fp16", 1, 2, LATE | CHUNKS | {"optimizer": DISK, "params": HOST}),
    ("hpz", "bf16", 1, 4, LATE | {"optimizer": HOST}),
    ("mics", "fp32", 3, 4, LATE | {"optimizer": DISK, "params": DISK}),
]
BF16_MOMENTS = {"moments_dtype": "bf16"}
CASES += [
    ("ddp", "fp32", 1, 2, BF16_MOMENTS | {"optimizer": HOST}),
    ("zero1", "bf16", 1, 2, BF16_MOMENTS | {"optimizer": DISK}),
    ("zero2", "fp32", 3, 3, BF16_MOMENTS | {"optimizer": DISK}),
    ("zero3", "bf16", 1, 2, BF16_MOMENTS | CHUNKS | {"optimizer": DISK, "params": DISK}),
    ("mics", "fp32", 1, 4, BF16_MOMENTS | {"optimizer": HOST, "params": HOST}),
]
DAILY = ["gpt", "awkward"]


def run_offloaded(case: Case, offload: dict[str, object], folder: str, moments: str):
    """Gradients and weights on rank 0 only; and the ledger."""
    if DISK in offload.values():
        offload = offload | {"path": folder}
    optimizer = case.config()["optimizer"] | {"moments_dtype": moments}
    run, digest = training.train(case, offload=offload, optimizer=optimizer)
    assert not list(pathlib.Path(folder).iterdir()), "a swap file has a name"
    return run, digest, dist.get_rank()


def name_of(chosen):
    if isinstance(chosen, str):
        return chosen
    strategy, precision, accumulate, world, offload = chosen
    where = ", ".join(f"{key} {value}" for key, value in offload.items())
    return f"{strategy}-{precision}-accumulate{accumulate}-world{world}-{where}"


def pytest_generate_tests(metafunc):
    full = metafunc.config.getoption("full")
    models = zoo.EVERYWHERE if full else DAILY
    pairs = [
        pytest.param(chosen, model, id=f"{name_of(chosen)}-{model}")
        for chosen in CASES
        for model in models
        if chosen[1] in zoo.ENTRIES[model].precisions
    ]
    metafunc.parametrize(("chosen", "model"), pairs)


def assert_ledger(case: Case, memory: dict, ours: dict, offload: dict[str, object]) -> None:
    assert memory["measured"]["optim"] == memory["predicted"][case.strategy]["optim"]
    counted, predicted = ours["measured"]["disk"], ours["predicted"][case.strategy]["disk"]
    assert (counted > 0) == (DISK in offload.values())
    assert counted >= predicted
    if case.model == "gpt":  # copies are whole blocks there, which is most of what a tiny one takes
        assert counted <= 1.15 * predicted


def test_bits_are_those_of_memory(chosen, model, pools, tmp_path):
    *axes, offload = chosen
    offload = dict(offload)
    moments = offload.pop("moments_dtype", "fp32")
    case = Case(*axes, model=model, clip=model in training.CLIP)
    memory = pools(case.world).run(run_offloaded, case, {}, str(tmp_path), moments)
    ours = pools(case.world).run(run_offloaded, case, offload, str(tmp_path), moments)
    for (run, digest, rank), (expected, theirs, _) in zip(ours, memory, strict=True):
        assert run.losses == expected.losses
        assert run.norms == expected.norms
        assert digest == theirs
        for kind in ("gradients", "weights"):
            got, wanted = getattr(run, kind), getattr(expected, kind)
            assert got.keys() == wanted.keys() and (wanted or rank > 0)
            for name, value in got.items():
                assert value.equal(wanted[name]), f"{kind} of {name}"
    assert_ledger(case, memory[0][0].ledger, ours[0][0].ledger, offload)
