"""How far apart two runs are."""

from __future__ import annotations

import torch
from training import Run, Tensors

# tests/parity and docs/design.md, section 7: what must always hold.
GRADIENT_LIMIT, WEIGHT_LIMIT, SCALAR_LIMIT = 1e-6, 1e-5, 1e-5
BF16_RATIO = 1.5
# Gradients and weights average rounding over many elements, 20 losses or norms do not: two runs
# that differ in the last fp32 bit part after ten steps. Fractions of a bf16 step (2^-8).
BF16_SLACK = {"gradients": 1e-6, "weights": 1e-6, "losses": 2**-12, "norms": 2**-9}


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
    """Of a bf16 run from the fp32 one."""
    return {
        "gradients": gradient_deviation(run.gradients, plain.gradients),
        "weights": change_deviation(run.weights, plain.weights, start),
        "losses": rms(run.losses, plain.losses),
        "norms": rms(run.norms, plain.norms),
    }
