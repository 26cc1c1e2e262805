"""safe_get_* and safe_set_*: what is read, replaced and trained on after it, beside a torch
optimizer that is given the same gradients and the same edits. Of the kind of loops.py."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from loops import Model
from raised import raised
from reporting import report

_HOST = {"device": "cpu"}
_DISK = {"device": "nvme", "nvme_path": "/tmp"}
CASES: dict[str, dict[str, Any]] = {f"stage{stage}": {"stage": stage} for stage in range(4)}
CASES |= {
    "host": {"stage": 2, "offload_optimizer": _HOST},
    "disk": {"stage": 3, "offload_optimizer": _DISK, "offload_param": _DISK},
}


class Beside:
    """torch's AdamW on copies of the masters, with the engine's own gradients."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.params = params
        self.copies = [torch.nn.Parameter(safe_get_full_fp32_param(one)) for one in params]
        self.optimizer = torch.optim.AdamW(self.copies, lr=0.01, weight_decay=0.0)

    def step(self) -> None:
        for copy, param in zip(self.copies, self.params, strict=True):
            copy.grad = safe_get_full_grad(param)
        self.optimizer.step()

    def state(self, index: int, name: str) -> torch.Tensor:
        return self.optimizer.state[self.copies[index]][name]

    def gap(self) -> float:
        """The largest difference of a master, a moment, or of a weight beyond its rounding."""
        most = 0.0
        for index, param in enumerate(self.params):
            here = safe_get_full_fp32_param(param)
            most = max(most, (here - self.copies[index]).abs().max().item())
            for name in ("exp_avg", "exp_avg_sq"):
                kept = safe_get_full_optimizer_state(param, name)
                most = max(most, (kept - self.state(index, name)).abs().max().item())
            with deepspeed.zero.GatheredParameters([param]):
                rounded = here.to(param.dtype)
                most = max(most, (param.detach() - rounded).abs().max().item())
        return most


def _pieces(params: list[torch.nn.Parameter]) -> float:
    """Whether the ranks' parts put together are the whole: the largest sum that differs."""
    most = 0.0
    for param in params:
        whole = safe_get_full_optimizer_state(param, "exp_avg")
        part = safe_get_local_optimizer_state(param, "exp_avg")
        sums = torch.tensor([part.double().sum().item(), float(part.numel())])
        torch.distributed.all_reduce(sums)
        copies = sums[1].item() / param.numel()
        most = max(most, abs(sums[0].item() / copies - whole.double().sum().item()))
        assert copies in (1.0, 2.0)
        assert safe_get_local_grad(param).numel() == safe_get_local_fp32_param(param).numel()
    return most


def _edit(beside: Beside) -> None:
    first, second = beside.params[1], beside.params[2]
    half = safe_get_full_fp32_param(first) * 0.5
    safe_set_full_fp32_param(first, half)
    moment = torch.full_like(half, 0.01)
    safe_set_full_optimizer_state(first, moment, "exp_avg")
    safe_set_local_fp32_param(second, safe_get_local_fp32_param(second) + 1.0)
    kept = safe_get_local_optimizer_state(second, "exp_avg_sq")
    safe_set_local_optimizer_state(second, kept * 4.0, "exp_avg_sq")
    with torch.no_grad():
        beside.copies[1].mul_(0.5)
        beside.state(1, "exp_avg").fill_(0.01)
        beside.copies[2].add_(1.0)
        beside.state(2, "exp_avg_sq").mul_(4.0)


def _edit_gradients(params: list[torch.nn.Parameter]) -> float:
    """Replaces gradients, whole and this rank's parts. Returns how far the new ones are from what
    was asked for."""
    target, other, third = params[3], params[0], params[1]
    safe_set_full_grad(target, torch.full_like(safe_get_full_grad(target), 0.25))
    before = safe_get_full_grad(other)
    safe_set_local_grad(other, safe_get_local_grad(other).clamp(-0.01, 0.01))
    whole = safe_get_full_grad(third)
    safe_update_full_grad_vectorized(iter([third]), lambda gradient, param: gradient.sign())
    pairs = (
        (safe_get_full_grad(target), torch.full_like(whole.new_zeros(target.shape), 0.25)),
        (safe_get_full_grad(other), before.clamp(-0.01, 0.01)),
        (safe_get_full_grad(third), whole.sign()),
    )
    return max((a - b).abs().max().item() for a, b in pairs)


def refusals(stage: int) -> dict[str, Any]:
    """Frozen parameters, values that differ between ranks, and calls on one rank alone."""
    torch.manual_seed(0)
    rank, model = deepspeed.comm.get_rank(), Model()
    params = list(model.parameters())
    params[0].requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    engine, _, _, _ = deepspeed.initialize(model=model, config=config)
    ids = torch.randint(0, 17, (2, 9))
    engine.backward(engine(ids).square().mean())
    frozen, one = params[:2]
    getters = (safe_get_full_fp32_param, safe_get_full_grad, safe_get_local_fp32_param)
    found: dict[str, Any] = {"frozen": [get(frozen) for get in (*getters, safe_get_local_grad)]}
    for get in (safe_get_full_optimizer_state, safe_get_local_optimizer_state):
        found["frozen"].append(get(frozen, "exp_avg"))
    gradient, part = safe_get_full_grad(one), safe_get_local_grad(one)
    safe_update_full_grad_vectorized([frozen, one], lambda gradient, param: 2 * gradient)
    found["doubled"] = torch.equal(safe_get_full_grad(one), 2 * gradient)
    found["said"] = [
        raised(safe_set_full_grad, one, 2 * gradient + rank),
        raised(safe_set_local_grad, one, torch.zeros(part.numel() + rank)),
        raised(safe_set_local_grad, frozen, torch.zeros(0)),
        raised(safe_get_full_fp32_param, torch.nn.Parameter(torch.ones(1))),
        raised(safe_get_full_optimizer_state, one, "typo"),
    ]
    if stage:  # each rank has set its part
        mixed = 2 * gradient.flatten() + torch.arange(gradient.numel()).ge(
            -(-gradient.numel() // 2)
        )
        found["mixed"] = torch.equal(safe_get_full_grad(one).flatten(), mixed)
        safe_set_full_grad(one, 2 * gradient)
    found["kept"] = torch.equal(safe_get_full_grad(one), 2 * gradient)
    if rank == 0:  # alone
        found["alone"] = [safe_get_local_fp32_param(one).numel(), part.numel()]
        found["alone"].append(safe_get_local_optimizer_state(one, "exp_avg").numel())
    engine.step()
    engine.destroy()
    return found


def run(case: str, bf16: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": CASES[case],
    }
    engine, _, _, _ = deepspeed.initialize(model=model, config=config)
    beside = Beside(list(model.parameters()))
    generator = torch.Generator().manual_seed(1 + deepspeed.comm.get_rank())
    gaps, pieces = [], 0.0
    for step in range(5):
        ids = torch.randint(0, 17, (2, 9), generator=generator)
        out = engine(ids[:, :-1]).float()
        engine.backward(torch.nn.functional.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten()))
        if step == 3:
            edits = _edit_gradients(beside.params)
        beside.step()
        if step == 2:
            pieces = _pieces(beside.params)
        engine.step()
        if step == 2:
            _edit(beside)
        gaps.append(beside.gap())
    engine.destroy()
    return {"gaps": gaps, "pieces": pieces, "edits": edits}


def main() -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    names = [f"{case}-{dtype}" for case in CASES for dtype in ("fp32", "bf16")]
    names += [f"refusals-{stage}" for stage in range(4)]

    def case(name: str) -> dict[str, Any]:
        kind, _, rest = name.partition("-")
        return refusals(int(rest)) if kind == "refusals" else run(kind, rest == "bf16")

    report(names, case)


if __name__ == "__main__":
    main()
