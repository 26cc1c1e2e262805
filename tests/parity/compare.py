"""How far apart two runs are, and how far they may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import training
import zoo
from training import Case, Run, Tensors

# tests/parity and docs/design.md, section 7: what must always hold.
GRADIENT_LIMIT, WEIGHT_LIMIT, SCALAR_LIMIT = 1e-6, 1e-5, 1e-5
FP32_LIMITS = {
    "gradients": GRADIENT_LIMIT,
    "weights": WEIGHT_LIMIT,
    "losses": SCALAR_LIMIT,
    "norms": SCALAR_LIMIT,
}
BF16_RATIO = 1.5
# Gradients and weights average rounding over many elements, 20 losses or norms do not: two runs
# that differ in the last fp32 bit part after ten steps. Fractions of a bf16 step (2^-8).
BF16_SLACK = {"gradients": 1e-6, "weights": 1e-6, "losses": 2**-12, "norms": 2**-9}
# The average over ranks is rounded to fp16 once more than the reference's fp32 sum is: on models of
# a few dozen parameters that one rounding (2^-11 at most) shows.
FP16_SLACK = BF16_SLACK | {"gradients": 2**-12}


def norm(tensors: Tensors) -> float:
    return float(torch.stack([t.double().pow(2).sum() for t in tensors.values()]).sum().sqrt())


def common(ours: Tensors, theirs: Tensors) -> Tensors:
    """ours - theirs; every tensor of either must be in both."""
    assert set(ours) == set(theirs), f"names differ: {sorted(set(ours) ^ set(theirs))}"
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape, f"{name}: {tensor.shape}"
    return {name: ours[name].double() - theirs[name].double() for name in ours}


def gradient_deviation(ours: Tensors, theirs: Tensors) -> float:
    """Relative L2 of all gradients together, which bounds that of each against the global norm. A
    parameter that was not used has no gradient in torch, and none or zeros in ours."""
    used = {name: tensor for name, tensor in ours.items() if name in theirs or tensor.any()}
    return norm(common(used, theirs)) / norm(theirs)


def weight_deviation(ours: Tensors, theirs: Tensors) -> float:
    """The largest difference, absolute below 1 and relative above."""
    apart = common(ours, theirs)
    return max(
        float((apart[name].abs() / theirs[name].abs().double().clamp(min=1.0)).max())
        for name in apart
    )


def change_deviation(ours: Tensors, theirs: Tensors, start: Tensors) -> float:
    """Relative L2 against how far training went from `start`."""
    went = {name: theirs[name] - start[name] for name in start}
    return norm({name: ours[name].double() - theirs[name].double() for name in start}) / norm(went)


def relative(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference of two curves."""
    assert len(ours) == len(theirs)
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def rms(ours: list[float], theirs: list[float]) -> float:
    """The root mean square of the relative differences of two curves."""
    squares = [((a - b) / b) ** 2 for a, b in zip(ours, theirs, strict=True)]
    return (sum(squares) / len(squares)) ** 0.5


def fp32_deviations(ours: Run, plain: Run) -> dict[str, float]:
    return {
        "gradients": gradient_deviation(ours.gradients, plain.gradients),
        "weights": weight_deviation(ours.weights, plain.weights),
        "losses": relative(ours.losses, plain.losses),
        "norms": relative(ours.norms, plain.norms),
    }


def bf16_deviations(run: Run, plain: Run, start: Tensors) -> dict[str, float]:
    """Of a bf16 (or fp16) run from the fp32 one."""
    return {
        "gradients": gradient_deviation(run.gradients, plain.gradients),
        "weights": change_deviation(run.weights, plain.weights, start),
        "losses": rms(run.losses, plain.losses),
        "norms": rms(run.norms, plain.norms),
    }


def check(
    largest: dict[str, float], key: str, limits: dict[str, float], deviations: dict[str, float]
) -> None:
    for name, deviation in deviations.items():
        largest[f"{key} {name}"] = max(largest.get(f"{key} {name}", 0.0), deviation)
    beyond = {n: (d, limits[n]) for n, d in deviations.items() if not d <= limits[n]}
    assert not beyond, f"(deviation, limit): {beyond}; all: {deviations}"


def check_untrained(case: Case, ours: Run) -> None:
    """Frozen and unused parameters keep their values; frozen ones have no fp32 master."""
    for name, tensor in training.initial_weights(case.model, trained=False).items():
        low = tensor.to(training.DTYPES.get(case.precision, tensor.dtype)).float()
        assert ours.weights[name].equal(tensor.float()) or ours.weights[name].equal(low), name


def check_buffers(case: Case, runs: list[Run], plain: Run) -> None:
    """Each rank's buffers: never cast; what was counted is equal."""
    for rank, run in enumerate(runs):
        for name, theirs in plain.buffers[rank % len(plain.buffers)].items():
            ours = run.buffers[0][name]
            assert ours.dtype == theirs.dtype, name
            if case.precision == "fp32" or not theirs.is_floating_point():
                apart = float((ours.double() - theirs.double()).abs().max())
                assert apart <= WEIGHT_LIMIT, f"{name} on rank {rank} is {apart} off"


def references(case: Case, precision: str) -> tuple[Any, ...]:
    """What training.reference() is asked for."""
    clip = training.CLIP[case.model] if case.clip else 0.0
    ranks = case.world if zoo.ENTRIES[case.model].by_rank else 1
    return case.model, case.samples, clip, precision, ranks


def assert_parity(case: Case, pools: Any, largest: dict[str, float]) -> None:
    """Trains `case` on a pool's ranks and by plain torch, and compares all they leave."""
    outcomes = pools(case.world).run(training.train, case)
    assert_equal(case, outcomes, largest, lambda asked: training.reference(*asked))


def assert_equal(
    case: Case,
    outcomes: list[tuple[Run, str]],
    largest: dict[str, float],
    reference: Callable[[tuple[Any, ...]], Run],
) -> None:
    """Compares all that training.train() left, by rank, with what plain torch does."""
    plain = reference(references(case, "fp32"))
    clip = training.CLIP[case.model] if case.clip else 0.0
    assert not case.clip or min(plain.norms[:5]) > clip, "the case does not clip"
    runs = [run for run, _ in outcomes]
    assert len({digest for _, digest in outcomes}) == 1, "ranks hold different models after close()"
    assert all(run.norms == runs[0].norms for run in runs), "ranks differ in grad_norm"
    assert all(not run.weights for run in runs[1:]), "state_dict() is not empty elsewhere"
    ours = runs[0]
    by_step = zip(*(run.losses for run in runs), strict=True)
    ours.losses = [sum(losses) / case.world for losses in by_step]
    check_untrained(case, ours)
    check_buffers(case, runs, plain)
    if case.precision == "fp32":
        check(largest, "fp32", FP32_LIMITS, fp32_deviations(ours, plain))
        return
    theirs = reference(references(case, case.precision))
    start = training.initial_weights(case.model, trained=True)
    own = bf16_deviations(theirs, plain, start)
    slack = FP16_SLACK if case.precision == "fp16" else BF16_SLACK
    limits = {n: BF16_RATIO * d + slack[n] for n, d in own.items()}
    deviations = bf16_deviations(ours, plain, start)
    for name in ("gradients", "weights"):
        ratio = f"{case.precision}/reference {name}"
        largest[ratio] = max(largest.get(ratio, 0.0), deviations[name] / own[name])
    check(largest, case.precision, limits, deviations)


def lossy_runs(
    case: Case, pools: Any, settings: dict[str, Any], limit: float
) -> tuple[list[Run], Run]:
    """Trains `case` twice with `settings`, which round what travels. Both times the same bits,
    ranks with equal weights and norms, and losses that differ from those of plain torch by at most
    `limit` (rms of the relative differences). Returns the runs by rank and the plain run."""
    plain = training.reference(*references(case, case.precision))
    run = pools(case.world).run
    first, again = (run(training.train_with, case, settings) for _ in range(2))
    for one, two in zip(first, again, strict=True):
        assert one[1] == two[1] == first[0][1]
        assert one[0].losses == two[0].losses
        assert one[0].norms == first[0][0].norms
    runs = [one for one, _ in first]
    losses = [sum(one) / len(runs) for one in zip(*(run.losses for run in runs), strict=True)]
    assert losses != plain.losses
    assert rms(losses, plain.losses) < limit
    return runs, plain
