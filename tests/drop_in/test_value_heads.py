"""Models whose class changes state_dict() (TRL's value heads), saved under every stage."""

from __future__ import annotations

from typing import Any

import pipe_models as pipes
import pytest
import torch


class ValueHead(torch.nn.Module):
    """Merges the state of its parts, which must then not share a destination."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.v_head = torch.nn.Linear(4, 1)
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("left", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.v_head(self.body(x))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        body = self.body.state_dict(*args, **kwargs)
        head = self.v_head.state_dict(*args, **kwargs)
        for name, value in head.items():
            body[f"v_head.{name}"] = value
        return body


class Wrapped(torch.nn.Module):
    """A policy with a value head in it and a tied, frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.value = ValueHead()
        self.first = torch.nn.Linear(4, 4).requires_grad_(False)
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value(self.again(self.first(x)))


def in_tree(model: torch.nn.Module, frozen_too: bool) -> dict[str, torch.Tensor]:
    """The persistent tensors by their names in the tree of modules."""
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, one in (*module._parameters.items(), *module._buffers.items()):
            kept = name not in module._non_persistent_buffers_set
            frozen = isinstance(one, torch.nn.Parameter) and not one.requires_grad
            if one is not None and kept and (frozen_too or not frozen):
                found[f"{path}.{name}" if path else name] = one.detach().clone()
    return found


def saved(kind: type[torch.nn.Module], stage: int, bf16: bool, folder: str) -> None:
    """Asserts that the file has the model's weights after a step."""
    ds = pipes.deepspeed()
    torch.manual_seed(0)
    model = kind()
    engine = ds.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": bf16},
        },
    )[0]
    dtype = torch.bfloat16 if bf16 else torch.float32
    loss = engine(torch.eye(4, dtype=dtype)).float().sum()
    engine.backward(loss)
    engine.step()
    for frozen_too in (True, False):
        engine.save_16bit_model(folder, exclude_frozen_parameters=not frozen_too)
        found = torch.load(f"{folder}/pytorch_model.bin")
        with ds.zero.GatheredParameters(list(model.parameters())):
            wanted = in_tree(model, frozen_too)
        assert list(found) == list(wanted)
        for name, one in wanted.items():
            assert found[name].dtype == one.dtype and torch.equal(found[name], one), name
        torch.distributed.barrier()
    state = engine._zero3_consolidated_16bit_state_dict()
    if torch.distributed.get_rank() == 0 and kind is Wrapped:
        assert state["first.weight"] is state["again.weight"]
    engine.destroy()


def loaded(kind: type[torch.nn.Module], stage: int, folder: str) -> None:
    """Asserts that what a trained model saves gives the same values in a new engine."""
    ds = pipes.deepspeed()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    x, outputs = torch.eye(4), []
    for load in (False, True):
        torch.manual_seed(int(load))
        with ds.zero.Init(enabled=stage == 3):
            model = kind()
        state = torch.load(f"{folder}/pytorch_model.bin") if load else {}
        for name, module in model.named_modules() if load else ():
            own = [*module.parameters(recurse=False)]
            with ds.zero.GatheredParameters(own, modifier_rank=0):
                prefix = f"{name}." if name else ""
                module._load_from_state_dict(state, prefix, {}, False, [], [], [])
        engine = ds.initialize(model=model, config=config)[0]
        if not load:
            engine.backward(engine(x).sum())
            engine.step()
            engine.save_16bit_model(folder)
            torch.distributed.barrier()
        engine.eval()
        with torch.no_grad():
            outputs.append(engine(x))
        engine.destroy()
    assert torch.equal(*outputs)


@pytest.mark.parametrize("stage", (0, 2, 3))
@pytest.mark.parametrize("kind", (ValueHead, Wrapped))
def test_loaded_by_its_names(kind, stage, drop_in_pools, tmp_path):
    drop_in_pools(2).run(loaded, kind, stage, str(tmp_path))


@pytest.mark.parametrize(("stage", "bf16"), ((0, False), (2, True), (3, False), (3, True)))
@pytest.mark.parametrize("kind", (ValueHead, Wrapped))
def test_saved_by_its_names(kind, stage, bf16, drop_in_pools, tmp_path):
    drop_in_pools(2).run(saved, kind, stage, bf16, str(tmp_path))
