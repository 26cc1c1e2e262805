"""At the border with users' code: what a rank, a thread or a process does by itself, and what torch
does not count.

A function that runs on the ranks is called like the test that starts it, without "test".
"""

from __future__ import annotations

import concurrent.futures
import os

import models
import pytest
import torch
import torch.distributed as dist
from ranks import Failure
from test_border import FEATURES, Net, assert_close, build, data, every_strategy, loss_of, mine
from test_border import start as start_sgd
from torch import nn

# ---- edits that torch does not count


class Edited(Net):
    """Changes a weight through `.data`: where, is said by `when`."""

    when = "forward"

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.when == "forward":
            self.lift.weight.data.mul_(0.9)
        return super().forward(features)


def edit_by_hook(model: nn.Module, *_: object) -> None:
    model.up.weight.data.mul_(0.9)


HOOKS = {
    "forward": lambda _: None,
    "pre-hook": lambda m: m.blocks[1].register_forward_pre_hook(edit_by_hook),
    "hook": lambda m: m.blocks[1].register_forward_hook(edit_by_hook),
    "backward-hook": lambda m: m.blocks[1].register_full_backward_hook(edit_by_hook),
}


def edited() -> Edited:
    return models.fill(Edited())


def data_is_edited_on_the_way(strategy, when):
    model = edited()
    model.when = when
    HOOKS[when](model)
    engine = start_sgd(strategy, model=model)
    for step in range(2):
        engine.backward(loss_of(engine, *mine(step)))
        engine.step()
    state = engine.state_dict()
    engine.close()
    return state


@pytest.mark.parametrize("when", HOOKS)
@every_strategy
def test_data_is_edited_on_the_way(strategy, when, pools):
    outcome = pools(2).attempt(data_is_edited_on_the_way, strategy, when)
    if strategy == "zero3":
        words = "is sharded and" if when == "backward-hook" else "was changed in place in forward"
        for failure in outcome:
            assert isinstance(failure, Failure) and words in failure.text
        return
    model = edited()
    model.when = when
    HOOKS[when](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, *data(step)).backward()
        optimizer.step()
    assert_close(outcome[0], model.state_dict())


def one_element_is_edited(at):
    """A rank compares its whole shard, and of other shards a sample that misses most elements."""
    model = nn.Sequential(
        nn.Linear(FEATURES, 96), nn.Sequential(nn.Linear(96, 96)), nn.Linear(96, 1)
    )
    engine = start_sgd("zero3", model=model, units={"modules": ["Sequential"]})

    def edit(block: nn.Module, *_: object) -> None:
        block[0].weight.data.view(-1)[at] += 1

    engine.module[1].register_forward_hook(edit)
    engine.backward(engine(mine(0)[0]).mean())


@pytest.mark.parametrize("at", [0, 4000, 9215])
def test_one_element_is_edited(at, pools):
    for failure in pools(2).attempt(one_element_is_edited, at):
        assert isinstance(failure, Failure) and "was changed in place in forward" in failure.text


# ---- optimizers of your own


class Own(torch.optim.Optimizer):
    """Reads an attribute of its own and one of parameters; has an option that is an object."""

    def __init__(self, params, scale=2.0):
        super().__init__(params, {"lr": 0.05, "decay": 0.3, "rule": object()})
        self.scale = scale

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not getattr(p, "no_decay", False):
                    p.mul_(1 - group["lr"] * group["decay"])
                p.add_(p.grad, alpha=-group["lr"] * self.scale * self.factor(p))

    def factor(self, p):
        return 1.0


class Sized(Own):
    def factor(self, p):
        return 2.0 if p.numel() >= 40 else 1.0


def marked() -> Net:
    model = build()
    for name, p in model.named_parameters():
        p.no_decay = name.endswith("bias")
    return model


def train_with(strategy, make):
    import penstock  # noqa: PLC0415

    model = marked()
    engine = penstock.initialize(model, {"strategy": strategy}, optimizer=make(model.parameters()))
    for step in range(3):
        engine.backward(loss_of(engine, *mine(step)))
        engine.step()
    state = engine.state_dict()
    engine.close()
    return state


def plain_with(make):
    model = marked()
    optimizer = make(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, *data(step)).backward()
        optimizer.step()
    return model.state_dict()


@every_strategy
def test_an_optimizer_that_reads_attributes(strategy, pools):
    assert_close(pools(2).run(train_with, strategy, Own)[0], plain_with(Own))


@every_strategy
def test_an_optimizer_with_a_rule_by_size(strategy, pools):
    outcome = pools(2).attempt(train_with, strategy, Sized)
    if strategy in ("ddp",):
        assert_close(outcome[0], plain_with(Sized))
        return
    for failure in outcome:
        assert isinstance(failure, Failure) and "Sized is not elementwise (for a" in failure.text


# ---- other values by rank


def another_lr(strategy, make):
    import penstock  # noqa: PLC0415

    model = build()
    engine = penstock.initialize(model, {"strategy": strategy}, optimizer=make(model.parameters()))
    for step in range(2):
        engine.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step * dist.get_rank())
        engine.backward(loss_of(engine, *mine(step)))
        engine.step()


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop])
@every_strategy
def test_another_lr(strategy, make, pools):
    for failure in pools(2).attempt(another_lr, strategy, make):
        assert isinstance(failure, Failure)
        assert "options (the learning rate" in failure.text and "rank 1" in failure.text


GIVEN = {
    "by-rank": (lambda grads: {n: g + dist.get_rank() for n, g in grads.items()}, "every rank"),
    "none": (lambda grads: dict.fromkeys(grads), '"lift.weight" is a NoneType'),
    "number": (lambda grads: dict.fromkeys(grads, 0.0), '"lift.weight" is a float'),
    "unknown": (lambda grads: {"head": grads["lift.bias"]}, '"head" is not a trainable parameter'),
    "nan": (lambda grads: {n: g * torch.nan for n, g in grads.items()}, "given to set_grads()"),
}


def given_gradients(strategy, what):
    engine = start_sgd(strategy)
    engine.backward(loss_of(engine, *mine(0)))
    engine.set_grads(GIVEN[what][0](engine.full_grads()))
    engine.step()


@pytest.mark.parametrize("what", GIVEN)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_given_gradients(strategy, what, pools):
    for failure in pools(2).attempt(given_gradients, strategy, what):
        assert isinstance(failure, Failure) and GIVEN[what][1] in failure.text


# ---- other threads and processes


class Parallel(Net):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = self.lift(features)
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            x = sum(threads.map(lambda block: block(x), self.blocks))
        return self.leave(x).squeeze(-1)


def branches_in_threads(strategy):
    engine = start_sgd(strategy, model=models.fill(Parallel()))
    engine.backward(loss_of(engine, *mine(0)))
    engine.step()
    state = engine.state_dict()
    engine.close()
    return state


@every_strategy
def test_branches_in_threads(strategy, pools):
    outcome = pools(2).attempt(branches_in_threads, strategy)
    if strategy == "zero3":
        for failure in outcome:
            assert isinstance(failure, Failure) and "called from another thread" in failure.text
        return
    model = models.fill(Parallel())
    loss_of(model, *data(0)).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert_close(outcome[0], model.state_dict())


def in_a_forked_process():
    engine = start_sgd("zero3")
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            engine(mine(0)[0])
            said = "went on"
        except BaseException as error:  # noqa: BLE001 - told to the parent
            said = f"{type(error).__name__}: {error}"
        os.write(writes, said.encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    engine.close()
    return said


def test_in_a_forked_process(pools):
    for said in pools(2).run(in_a_forked_process):
        assert said.startswith("RuntimeFault") and "in a process other than" in said


def is_shared():
    engine = start_sgd("zero3")
    with pytest.raises(RuntimeError, match='"lift.weight" is sharded'):
        engine.module.lift.weight.is_shared()
    with engine.gathered():
        shared = engine.module.lift.weight.is_shared()
    engine.close()
    return shared


def test_is_shared(pools):
    assert pools(2).run(is_shared) == [False, False]
    assert torch.zeros(2).share_memory_().is_shared()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_scripted_module_is_refused(strategy):
    import penstock  # noqa: PLC0415

    model = nn.Sequential(nn.Linear(FEATURES, 4), torch.jit.script(nn.Linear(4, 1)))
    with pytest.raises(penstock.ConfigError, match='module "1" is scripted'):
        penstock.initialize(model, {"strategy": strategy})
    model[1](torch.zeros(2, 4)).sum().backward()  # as it was


class Packed(nn.Module):
    """Blocks that pass a PackedSequence on."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.mix = nn.GRU(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

        def forward(self, packed):
            out = self.cell(packed)[0]
            return out._replace(data=self.mix(out.data))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_sequence([features, features[:1]])
        for block in self.blocks:
            packed = block(packed)
        return packed.data.sum(-1)


def packed_sequences(strategy):
    recompute = {"checkpoint": "unit"}
    engine = start_sgd(strategy, model=models.fill(Packed()), activations=recompute)
    x, _ = mine(0)
    engine.backward(engine(x).square().mean())
    engine.step()
    state = engine.state_dict()
    engine.close()
    return state


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_packed_sequences(strategy, pools):
    state = pools(2).run(packed_sequences, strategy)[0]
    model = models.fill(Packed())
    x, _ = data(0)
    sum(model(half).square().mean() / 2 for half in (x[:2], x[2:])).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert_close(state, model.state_dict())
