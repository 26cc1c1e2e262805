"""DeepSpeedCPUAdam outside an engine: the dtypes of its moments, its values, and a saved state."""

from __future__ import annotations

import copy
from typing import Any

import pipe_models as pipes
import pytest
import torch

STEPS = 6
DECAY = {"lr": 1e-2, "weight_decay": 0.1}


def steps(dtype: torch.dtype, wide: bool, adamw: bool) -> tuple[list[torch.dtype], list[float]]:
    """Returns the dtypes of the moments, and the largest deviations of parameter and moments.

    The reference is torch in fp32, whose values are rounded after each step to the dtypes in which
    DeepSpeed keeps them.
    """
    ds = pipes.deepspeed()
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(64).to(dtype))
    plain = torch.nn.Parameter(param.detach().float().clone())
    made = ds.ops.adam.DeepSpeedCPUAdam(
        [param], adamw_mode=adamw, fp32_optimizer_states=wide, **DECAY
    )
    other = (torch.optim.AdamW if adamw else torch.optim.Adam)([plain], **DECAY)
    kept = torch.float32 if wide else dtype
    for _ in range(STEPS):
        param.grad = torch.randn(64).to(dtype)
        plain.grad = param.grad.float().clone()
        made.step()
        other.step()
        with torch.no_grad():
            plain.copy_(plain.to(dtype))
            for name in ("exp_avg", "exp_avg_sq"):
                other.state[plain][name].copy_(other.state[plain][name].to(kept))
    ours, theirs = made.state[param], other.state[plain]
    pairs = [(param, plain), *((ours[n], theirs[n]) for n in ("exp_avg", "exp_avg_sq"))]
    off = [float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs]
    return [ours[name].dtype for name in ("exp_avg", "exp_avg_sq")], off


@pytest.mark.parametrize("adamw", [True, False])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moments_have_their_dtype_and_the_values_of_fp32(dtype, wide, adamw, drop_in_pools):
    ((dtypes, off),) = drop_in_pools(1).run(steps, dtype, wide, adamw)
    assert dtypes == [torch.float32 if wide else dtype] * 2
    ulp = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-6}
    limits = [ulp[dtype], *[1e-6 if wide else ulp[dtype]] * 2]
    assert all(one <= limit for one, limit in zip(off, limits, strict=True)), off


def reloaded() -> list[Any]:
    """Returns, after a load, the dtype of a moment, and whether training goes on as without it."""
    ds = pipes.deepspeed()
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(8, dtype=torch.bfloat16))
    first = ds.ops.adam.DeepSpeedCPUAdam([param], **DECAY)
    gradients = torch.randn(2, 8, dtype=torch.bfloat16)
    param.grad = gradients[0]
    first.step()
    other = torch.nn.Parameter(param.detach().clone())
    second = ds.ops.adam.DeepSpeedCPUAdam([other], **DECAY)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    dtype = second.state[other]["exp_avg"].dtype
    for one, optimizer in ((param, first), (other, second)):
        one.grad = gradients[1].clone()
        optimizer.step()
    state, loaded = first.state[param], second.state[other]
    same = [torch.equal(state[name], loaded[name]) for name in ("exp_avg", "exp_avg_sq")]
    return [dtype, torch.equal(param, other), *same]


def test_a_loaded_state_keeps_fp32_moments(drop_in_pools):
    assert drop_in_pools(1).run(reloaded) == [[torch.float32, True, True, True]]
