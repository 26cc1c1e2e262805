"""Whole training loops."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from idioms import nets
from idioms.table import Group, either, refused
from idioms.trial import adamw

rows = Group("Loops")
ONE = (1,)
FP32 = ("fp32",)


@rows("the ordinary loop")
def ordinary(t: Any) -> None:
    t.start()
    t.train(4)


@rows("accumulation by hand: the loss over k, k backwards, a step", accumulate=ONE)
def by_hand(t: Any) -> None:
    t.start()
    for step in range(3):
        for micro in range(3):
            t.engine.backward(t.loss(3 * step + micro) / 3)
        t.engine.step()


@rows("several losses with a backward each")
def several_losses(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        x, y = t.batch(step)
        output = t.engine(x).float()
        t.engine.backward(F.mse_loss(output, y), retain_graph=True)
        t.engine.backward(0.1 * output.pow(2).mean())
        t.engine.step(force=True)


@rows("a contrastive loss of several forwards", precision=FP32)
def contrastive(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        x, _ = t.batch(step)
        anchor, near, far = (t.engine(x + shift).float() for shift in (0.0, 0.1, 2.0))
        loss = F.softplus((anchor - near).pow(2) - (anchor - far).pow(2)).mean()
        t.engine.backward(t.note(loss))
        t.engine.step()


@rows("a siamese loss with `stop-gradient`: one branch detached")
def siamese(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        x, _ = t.batch(step)
        gap = t.engine(x).float() - t.engine(x + 0.5).float().detach()
        t.engine.backward(t.note(gap.pow(2).mean()))
        t.engine.step()


@rows("windows that end early: `step(force=True)`", accumulate=(2,))
def forced(t: Any) -> None:
    t.start()
    for step in range(5):
        t.engine.backward(t.loss(step))
        t.engine.step(force=step == 4)


@rows("frozen and thawed epoch by epoch, with evaluations between")
def epochs(t: Any) -> None:
    t.start()
    for epoch in range(2):
        t.model.blocks[0].requires_grad_(epoch == 1)
        t.engine.train()
        t.train(2, start=2 * epoch)
        t.engine.eval()
        with torch.no_grad():
            for step in range(2):
                t.loss(20 + step)


@rows("early stopping: the loop ends before a step")
def stops_early(t: Any) -> None:
    t.start()
    t.train(2)
    with torch.no_grad():
        t.loss(8)
    t.loss(9)


@rows("an iterator of batches that ends in the middle of a window", accumulate=(2,))
def short_epoch(t: Any) -> None:
    t.start()
    for epoch in range(2):
        for step in range(3):
            t.engine.backward(t.loss(3 * epoch + step))
            t.engine.step()
        t.engine.step(force=True)


# ---- several models


class Judge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nets.Mlp() for _ in range(2)))
        self.enter, self.leave = nn.Linear(1, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x[:, None].to(self.enter.weight.dtype))
        return self.leave(self.blocks(x)).squeeze(-1)


def adversaries(t: Any) -> tuple[Any, Any]:
    return t.start(), t.start(nets.build(Judge))


@rows("GAN: two engines; the generator's turn drops the discriminator's gradients", accumulate=ONE)
def gan(t: Any) -> None:
    maker, judge = adversaries(t)
    for step in range(3):
        x, y = t.batch(step)
        made = maker(x).float()
        judge.zero_grad()
        judge.backward(F.softplus(judge(made.detach())).mean() + F.softplus(-judge(y)).mean())
        judge.step()
        loss = t.note(F.softplus(-judge(made)).mean())
        maker.backward(loss)
        maker.step()


@rows("GAN: the discriminator frozen with `requires_grad_` in the generator's turn", accumulate=ONE)
def gan_frozen(t: Any) -> None:
    maker, judge = adversaries(t)
    for step in range(3):
        x, y = t.batch(step)
        made = maker(x).float()
        judge.module.requires_grad_(True)
        judge.backward(F.softplus(judge(made.detach())).mean() + F.softplus(-judge(y)).mean())
        judge.step()
        judge.module.requires_grad_(False)
        maker.backward(t.note(F.softplus(-judge(made)).mean()))
        maker.step()
    judge.module.requires_grad_(True)


@rows("WGAN: the critic's weights clipped after each step", sharded=refused("gathered"))
def wgan(t: Any) -> None:
    maker, judge = adversaries(t)
    for step in t.steps(2):
        x, y = t.batch(step)
        judge.backward(judge(maker(x).float().detach()).mean() - judge(y).mean())
        judge.step()
        with torch.no_grad():
            for p in judge.module.parameters():
                p.clamp_(-0.1, 0.1)


@rows("WGAN with a gradient penalty")
def wgan_penalty(t: Any) -> None:
    maker, judge = adversaries(t)
    for step in t.steps(2):
        x, y = t.batch(step)
        mixed = (0.5 * maker(x).float().detach() + 0.5 * y).requires_grad_()
        (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
        judge.backward(t.note((slope.abs() - 1).pow(2).mean() - judge(y).float().mean()))
        judge.step()


@rows("a generator and its discriminator in one model and one engine", accumulate=ONE)
def one_engine_gan(t: Any) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker, self.judge = nets.Net(), Judge()

        def forward(self, x: torch.Tensor, turn: str) -> torch.Tensor:
            made = self.maker(x)
            return self.judge(made.detach() if turn == "judge" else made)

    t.start(nets.build(Both))
    for step, turn in enumerate(["judge", "maker"] * 2):
        t.model.judge.requires_grad_(turn == "judge")
        output = t.engine(t.batch(step)[0], turn).float()
        sign = 1 if turn == "judge" else -1
        t.engine.backward(t.note(F.softplus(sign * output).mean()))
        t.engine.step()


class ActorCritic(nets.Net):
    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Linear(8, 3)

    def forward(self, features: torch.Tensor) -> Any:
        x = self.trunk(features)
        return self.policy(x).float(), self.leave(x).float().squeeze(-1)


@rows("actor and critic: one trunk, two heads, two losses")
def actor_critic(t: Any) -> None:
    t.start(nets.build(ActorCritic))
    for step in t.steps(3):
        x, y = t.batch(step)
        with torch.no_grad():
            old, _ = t.engine(x)
        policy, value = t.engine(x)
        advantage = (y - value).detach()
        ratio = (policy.log_softmax(-1)[:, 0] - old.log_softmax(-1)[:, 0]).exp()
        t.engine.backward(t.note((-ratio * advantage).mean() + F.mse_loss(value, y)))
        t.engine.step()


@rows("two heads trained in turns, the other one unused")
def heads_in_turns(t: Any) -> None:
    class Heads(ActorCritic):
        def forward(self, features: torch.Tensor, head: str) -> torch.Tensor:
            return getattr(self, head)(self.trunk(features))

    t.start(nets.build(Heads))
    for step in t.steps(4):
        head = ("policy", "leave")[step % 2]
        t.engine.backward(t.note(t.engine(t.batch(step)[0], head).float().pow(2).mean()))
        t.engine.step()


@rows("two engines, one loss of both", accumulate=ONE)
def two_engines_one_loss(t: Any) -> None:
    first, second = adversaries(t)
    for step in t.steps(3):
        x, y = t.batch(step)
        loss = F.mse_loss(second(first(x).float()).float(), y)
        first.backward(t.note(loss))
        first.step()
        second.step()


@rows("two engines with two optimizers, step by step in turns")
def two_engines(t: Any) -> None:
    first = t.start()
    second = t.start(nets.build(Judge), lambda params: torch.optim.SGD(params, lr=0.05))
    for step in t.steps(3):
        x, y = t.batch(step)
        first.backward(t.note(F.mse_loss(first(x).float(), y)))
        second.backward(t.note(second(y).float().pow(2).mean()))
        second.step()
        first.step()


@rows("distillation from an engine's model in evaluation")
def distillation(t: Any) -> None:
    teacher = t.start()
    student = t.start(nets.build(nets.Net, 1))
    teacher.eval()
    for step in t.steps(3):
        x, _ = t.batch(step)
        with torch.no_grad():
            aim = teacher(x).float()
        student.backward(t.note(F.mse_loss(student(x).float(), aim)))
        student.step()


# ---- adapters


class LowRank(nn.Module):
    """A frozen layer and an adapter."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.first = nn.Linear(layer.in_features, 2, bias=False)
        self.second = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.second(self.first(x))

    @torch.no_grad()
    def merge(self, sign: int) -> None:
        self.layer.weight += sign * (self.second.weight @ self.first.weight)


def adapted() -> nn.Module:
    model = nets.build().requires_grad_(False)
    for block in model.blocks:
        block.up = LowRank(block.up)
    return nets.models.fill(model)


@rows("low-rank adapters on a frozen model")
def adapters(t: Any) -> None:
    t.start(adapted())
    t.train(3)


@rows(
    "adapters merged for an evaluation and unmerged",
    sharded=refused("gathered"),
    precision=FP32,
)
def merged(t: Any) -> None:
    t.start(adapted())
    t.train(1)
    for sign in (1, -1):
        for block in t.model.blocks:
            block.up.merge(sign)
        with torch.no_grad():
            t.loss(5)
    t.train(2, start=1)


@rows("adapters merged and unmerged inside one `gathered(write=True)`", precision=FP32)
def merged_gathered(t: Any) -> None:
    t.start(adapted())
    t.train(1)
    with t.engine.gathered(write=True):
        for block in t.model.blocks:
            block.up.merge(1)
        with torch.no_grad():
            t.loss(5)
        for block in t.model.blocks:
            block.up.merge(-1)
    t.train(2, start=1)


@rows("adapters merged and taken off after `close()`", accumulate=ONE)
def merged_at_the_end(t: Any) -> None:
    t.start(adapted())
    t.train(2)
    t.close()
    for block in t.model.blocks:
        block.up.merge(1)
        block.up = block.up.layer


# ---- that change weights or gradients in the middle


def sharpen(t: Any, sign: int, gradients: Any) -> None:
    with t.engine.gathered(write=True), torch.no_grad():
        for name, p in t.model.named_parameters():
            p.add_(sign * 0.05 * gradients[name].to(p.dtype))


@rows("sharpness-aware: weights moved by `full_grads`, a second backward, moved back",
      accumulate=ONE, precision=FP32)  # fmt: skip
def sharpness(t: Any) -> None:
    t.start()
    for step in range(3):
        t.engine.backward(t.loss(step))
        gradients = t.engine.full_grads()
        t.engine.zero_grad()
        sharpen(t, 1, gradients)
        t.engine.backward(t.loss(step))
        sharpen(t, -1, gradients)
        t.engine.step()


@rows("sharpness-aware by `p.grad`", refused("full_grads"), accumulate=ONE)
def sharpness_by_grad(t: Any) -> None:
    t.start()
    t.engine.backward(t.loss(0))
    with t.engine.gathered(write=True), torch.no_grad():
        for p in t.model.parameters():
            p.add_(0.05 * p.grad)
    t.engine.step()


@rows("two tasks' gradients projected with `full_grads` and `set_grads`", accumulate=ONE)
def projected(t: Any) -> None:
    t.start()
    for step in range(2):
        t.engine.backward(t.loss(step))
        first = t.engine.full_grads()
        t.engine.zero_grad()
        t.engine.backward(t.loss(step + 10))
        second = t.engine.full_grads()
        t.engine.set_grads({name: first[name] + 0.5 * second[name] for name in first})
        t.engine.step()


@rows("weight noise in the forward, taken back before the step", sharded=refused("gathered"))
def weight_noise(t: Any) -> None:
    t.start()
    for step in t.steps(2):
        saved = [p.detach().clone() for p in t.model.parameters()]
        with torch.no_grad():
            for p in t.model.parameters():
                p.mul_(1.125)
        loss = t.loss(step)
        t.engine.backward(loss)
        for p, value in zip(t.model.parameters(), saved, strict=True):
            p.data.copy_(value)
        t.engine.step()


@rows("a step that is undone, then repeated until the loss falls", sharded=either())
def undone(t: Any) -> None:
    t.start(optimizer=lambda params: torch.optim.SGD(params, lr=0.05))
    for step in t.steps(2):
        with t.engine.gathered():
            saved = {name: v.clone() for name, v in t.model.state_dict().items()}
        t.engine.backward(t.loss(step))
        if t.engine.step() and step % 2:
            with t.engine.gathered(write=True):
                t.model.load_state_dict(saved)
        with torch.no_grad():
            t.loss(step)


# ---- exceptions


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@rows("Ctrl-C in a block's forward; training goes on", accumulate=ONE)
def interrupted_forward(t: Any) -> None:
    t.start()
    for step in range(4):
        handle = None
        if step == 1:
            handle = t.model.blocks[1].register_forward_hook(interrupt)
        try:
            t.engine.backward(t.loss(step))
        except KeyboardInterrupt:
            handle.remove()
            continue
        t.engine.step()


@rows("Ctrl-C between forward and backward; training goes on", accumulate=ONE)
def interrupted_between(t: Any) -> None:
    t.start()
    for step in range(4):
        try:
            loss = t.loss(step)
            if step == 1:
                raise KeyboardInterrupt
            t.engine.backward(loss)
        except KeyboardInterrupt:
            continue
        t.engine.step()


@rows("Ctrl-C in a gradient hook, gradients dropped; training goes on", either())
def interrupted_backward(t: Any) -> None:
    t.start()
    for step in t.steps(3):
        handle = None
        if step == 1:
            handle = t.model.blocks[1].up.weight.register_hook(interrupt)
        try:
            t.engine.backward(t.loss(step))
        except KeyboardInterrupt:
            handle.remove()
            t.engine.zero_grad()
            t.engine.backward(t.loss(step))
        t.engine.step(force=True)


@rows("Ctrl-C between backward and step, gradients dropped; training goes on", accumulate=ONE)
def interrupted_before_step(t: Any) -> None:
    t.start()
    for step in range(4):
        try:
            t.engine.backward(t.loss(step))
            if step == 1:
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            t.engine.zero_grad()
            continue
        t.engine.step()


@rows("Ctrl-C in a step post-hook; training goes on", accumulate=ONE)
def interrupted_step(t: Any) -> None:
    t.start()
    for step in range(3):
        handle = None
        if step == 1:
            handle = t.optimizer.register_step_post_hook(interrupt)
        t.engine.backward(t.loss(step))
        try:
            t.engine.step()
        except KeyboardInterrupt:
            handle.remove()
            t.engine.zero_grad()


@rows("Ctrl-C in an evaluation; training goes on", accumulate=ONE)
def interrupted_evaluation(t: Any) -> None:
    t.start()
    t.train(1)
    handle = t.model.blocks[1].register_forward_hook(interrupt)
    try:
        with torch.no_grad():
            t.loss(5)
    except KeyboardInterrupt:
        handle.remove()
    t.train(2, start=1)


@rows("a batch that raises in the loss is skipped", accumulate=ONE)
def bad_batch(t: Any) -> None:
    t.start()
    for step in range(4):
        try:
            output = t.engine(t.batch(step)[0])
            if step == 1:
                output.view(-1, 3, 5, 7)
            t.engine.backward(t.note(output.float().pow(2).mean()))
            t.engine.step()
        except RuntimeError:
            continue


@rows("`itertools.cycle` over a fixed list of batches")
def cycled(t: Any) -> None:
    t.start()
    batches = itertools.cycle([t.batch(0), t.batch(1)])
    for _, (x, y) in zip(t.steps(4), batches, strict=False):
        t.engine.backward(t.note(F.mse_loss(t.engine(x).float(), y)))
        t.engine.step()


@rows("a learned temperature beside the model, with an optimizer of its own", accumulate=ONE)
def temperature(t: Any) -> None:
    t.start()
    scale = nn.Parameter(torch.ones(()))
    own = torch.optim.SGD([scale], lr=0.0)
    for step in range(3):
        own.zero_grad()
        t.engine.backward(t.loss(step, lambda x: t.engine(x) * scale))
        assert scale.grad is not None
        own.step()
        t.engine.step()


@rows("two models in one `ModuleDict`, one of which never trains")
def two_in_one(t: Any) -> None:
    model = nn.ModuleDict({"first": nets.build(), "second": nets.build(Judge)})
    model.forward = lambda x: model["first"](x)  # type: ignore[method-assign]
    t.start(model, adamw(model.parameters()))
    t.train(3)
