"""Plain `loss.backward()` under accumulation, case by case, beside one process of plain torch.

Started on each rank; see reporting.py. A case trains its models for a few windows and says how far
the weights are from those of one process that has the micro-batches of all ranks.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from reporting import report
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WINDOWS = 3
WIDTH = 8


class Net(torch.nn.Module):
    """Blocks with a residual and a head; returns what `how` says."""

    def __init__(self, how: str = "tuple", recompute: bool | None = None) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, WIDTH)
        self.how, self.recompute = how, recompute

    def _block(self, block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.recompute is None:
            return x + torch.tanh(block(x))
        return x + torch.tanh(checkpoint(block, x, use_reentrant=self.recompute))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = []
        for block in self.blocks:
            x = self._block(block, x)
            hidden.append(x)
        logits = self.head(x)
        loss = logits.square().mean()
        if self.how == "logits":
            return logits
        if self.how == "dict":
            return {"loss": loss, "logits": logits, "hidden": hidden}
        if self.how == "views":
            return logits.view(-1), logits.view(-1).square().mean(), hidden[0][:2]
        return loss, logits, hidden


# What a micro-batch does, given the models (engines, or plain modules) and its input: it returns
# losses, whose sum is differentiated, or each of them on its own if the case is in EACH.
Micro = Callable[[list[Any], torch.Tensor], list[torch.Tensor]]


def _loss_alone(nets: list[Any], x: torch.Tensor) -> list[torch.Tensor]:
    return [nets[0](x)[0]]


def _all_outputs(nets: list[Any], x: torch.Tensor) -> list[torch.Tensor]:
    loss, logits, hidden = nets[0](x)
    return [loss, logits.mean(), hidden[0].square().mean()]


def _dict(nets: list[Any], x: torch.Tensor) -> list[torch.Tensor]:
    out = nets[0](x)
    return [out["loss"] + out["hidden"][1].mean()]


def _views(nets: list[Any], x: torch.Tensor) -> list[torch.Tensor]:
    flat, loss, part = nets[0](x)
    return [flat.square().mean() + loss + part.square().sum()]


def _module(nets: list[Any], x: torch.Tensor) -> list[torch.Tensor]:
    return [getattr(nets[0], "module", nets[0])(x)[0]]


def _parts(nets: list[Any], x: torch.Tensor) -> list[torch.Tensor]:
    whole = nets[0](x)[0]
    module = getattr(nets[0], "module", nets[0])
    return [whole + module.head(module.blocks[1](x)).square().mean()]


def _chained(nets: list[Any], x: torch.Tensor) -> list[torch.Tensor]:
    return [nets[1](nets[0](x)).square().mean()]


def _around(nets: list[Any], x: torch.Tensor) -> list[torch.Tensor]:
    """The first engine's model is called before and after the second's."""
    return [nets[0](torch.tanh(nets[1](nets[0](x)))).square().mean()]


def _mutual(nets: list[Any], x: torch.Tensor) -> list[torch.Tensor]:
    """Two students that learn from each other by one loss."""
    one, other = nets[0](x), nets[1](x)
    return [functional.mse_loss(one, other) + one.square().mean() + other.square().mean()]


def _modules(nets: list[Any], x: torch.Tensor) -> list[torch.Tensor]:
    """One loss of two models that are called without their engines."""
    return _mutual([getattr(one, "module", one) for one in nets], x)


def _distilled(nets: list[Any], x: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        wanted = nets[1](x)
    return [functional.mse_loss(nets[0](x), wanted), 0 * nets[1](x).sum() + nets[1](x).mean()]


def _gan(nets: list[Any], x: torch.Tensor) -> list[torch.Tensor]:
    made = nets[0](x)
    judged = (nets[1](x) - 1).square().mean() + nets[1](made.detach()).square().mean()
    return [judged, (nets[1](made) - 1).square().mean()]


def _two_losses(nets: list[Any], x: torch.Tensor) -> list[torch.Tensor]:
    loss, logits, _ = nets[0](x)
    return [loss, logits.mean()]


def _penalty(nets: list[Any], x: torch.Tensor) -> list[torch.Tensor]:
    """The gradient of an output is a number of the loss, as it is for a saliency map."""
    x = x.clone().requires_grad_()
    loss, logits, _ = nets[0](x)
    (slope,) = torch.autograd.grad(logits.square().mean(), x, retain_graph=True)
    return [loss * (1 + slope.square().sum())]


def _hooked(nets: list[Any], x: torch.Tensor) -> list[torch.Tensor]:
    loss, logits, _ = nets[0](x)
    logits.register_hook(lambda gradient: 3 * gradient)
    return [loss + logits.mean()]


def _made(how: str, count: int = 1, **options: Any) -> Callable[[], list[Net]]:
    return lambda: [Net(how, **options) for _ in range(count)]


CASES: dict[str, tuple[Callable[[], list[Net]], Micro]] = {
    "loss-alone": (_made("tuple"), _loss_alone),
    "loss-logits-hidden": (_made("tuple"), _all_outputs),
    "dict": (_made("dict"), _dict),
    "views": (_made("views"), _views),
    "engine.module": (_made("tuple"), _module),
    "parts-of-the-module": (_made("tuple"), _parts),
    "chained": (_made("logits", 2), _chained),
    "around-another": (_made("logits", 2), _around),
    "mutual": (_made("logits", 2), _mutual),
    "distilled": (_made("logits", 2), _distilled),
    "gan": (_made("logits", 2), _gan),
    "two-backwards": (_made("tuple"), _two_losses),
    "gradient-of-an-output": (_made("tuple"), _penalty),
    "hook-on-an-output": (_made("tuple"), _hooked),
    "recomputed": (_made("tuple", recompute=False), _all_outputs),
    "recomputed-reentrant": (_made("tuple", recompute=True), _all_outputs),
    "chained-by-the-engine": (_made("logits", 2), _chained),
    "mutual-by-the-engine": (_made("logits", 2), _mutual),
    "other-windows": (_made("logits", 2), _mutual),
    "other-windows-by-the-engine": (_made("logits", 2), _mutual),
    "window-grows": (_made("tuple"), _all_outputs),
    "bf16": (_made("tuple"), _all_outputs),
    "fp16-modules": (_made("logits", 2), _modules),
    "fp16-modules-by-the-engine": (_made("logits", 2), _modules),
    "fp16-modules-scaled": (_made("logits", 2), _modules),
}
EACH = {"two-backwards", "gan"}
FP16 = {name for name in CASES if name.startswith("fp16")}
NAMES = [f"{case}-stage{stage}" for stage, case in itertools.product(range(4), CASES)]


def _inputs(window: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * window + 10 * micro + rank)
    x = torch.randn(4, WIDTH, generator=generator)
    x.requires_grad_("recomputed" in _inputs.case)  # reentrant checkpoints want it
    return x


_inputs.case = ""  # type: ignore[attr-defined]


def _steps(case: str, index: int, window: int) -> int:
    """Micro-batches per window of a model."""
    if case.startswith("other-windows"):
        return 2 if index == 0 else 4
    return 4 if case == "window-grows" and window > 1 else 2


def _differentiate(case: str, losses: list[torch.Tensor], backward: Callable[..., Any]) -> None:
    if case not in EACH:
        return backward(sum(losses))
    for left, loss in enumerate(reversed(losses)):
        backward(loss, retain_graph=left < len(losses) - 1)
    return None


def _plain(case: str, models: list[Net], micro: Micro) -> None:
    """One process with the micro-batches of all ranks."""
    world = dist.get_world_size()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]
    for window in range(WINDOWS):
        most = max(_steps(case, i, window) for i in range(len(models)))
        for step, rank in itertools.product(range(most), range(world)):
            losses = micro(models, _inputs(window, step, rank))
            before = [[_copied(p.grad) for p in one.parameters()] for one in models]
            _differentiate(case, losses, lambda loss, **options: loss.backward(**options))
            for i, one in enumerate(models):
                for p, old in zip(one.parameters(), before[i], strict=True):
                    if p.grad is not None:
                        added = p.grad - (0 if old is None else old)
                        p.grad = added / (_steps(case, i, window) * world) + (
                            0 if old is None else old
                        )
            if rank == world - 1:
                for i, optimizer in enumerate(optimizers):
                    if (step + 1) % _steps(case, i, window) == 0:
                        optimizer.step()
                        optimizer.zero_grad()


def _copied(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()


def _backward_of(case: str, engine: Any) -> Callable[..., Any]:
    if case.endswith("-by-the-engine"):
        return engine.backward  # type: ignore[no-any-return]
    if case.endswith("-scaled"):
        return lambda loss, **options: engine.scale(loss).backward(**options)
    return lambda loss, **options: loss.backward(**options)


def _engines(case: str, stage: int, models: list[Net], micro: Micro) -> None:
    import deepspeed  # noqa: PLC0415 - the tests that import this module do without

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "steps_per_print": 0,
    }
    if case == "bf16":
        config["bf16"] = {"enabled": True}
    engines = []
    for i, one in enumerate(models):
        changes: dict[str, Any] = {"gradient_accumulation_steps": _steps(case, i, 0)}
        if case in FP16:  # each engine has its own loss scale
            changes["fp16"] = {"enabled": True, "initial_scale_power": 6 + i}
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        engines.append(
            deepspeed.initialize(model=one, optimizer=optimizer, config=config | changes)[0]
        )
    rank = dist.get_rank()
    for window in range(WINDOWS):
        if case == "window-grows" and window == 2:
            engines[0].set_gradient_accumulation_steps(4)
        most = max(_steps(case, i, window) for i in range(len(engines)))
        for step in range(most):
            x = _inputs(window, step, rank)
            x = x.half() if case in FP16 else x.bfloat16() if case == "bf16" else x
            _differentiate(case, micro(engines, x), _backward_of(case, engines[0]))
            for engine in engines:
                if case == "mutual":
                    engine._backward_epilogue()  # as scripts do that share a loss
                engine.step()
    for engine in engines:
        engine.destroy()


def run(name: str) -> dict[str, Any]:
    case, _, stage = name.rpartition("-stage")
    _inputs.case = case  # type: ignore[attr-defined]
    make, micro = CASES[case]
    torch.manual_seed(0)
    models = make()
    plain = copy.deepcopy(models)
    _engines(case, int(stage), models, micro)
    start = copy.deepcopy(plain)
    _plain(case, plain, micro)

    def weights(nets: list[Net]) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for one in nets for p in one.parameters()])

    moved = (weights(plain) - weights(start)).abs().max().item()
    return {"off": (weights(models) - weights(plain)).abs().max().item() / moved}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    wanted = os.environ.get("CASES")
    report(wanted.split(",") if wanted else NAMES, run)
