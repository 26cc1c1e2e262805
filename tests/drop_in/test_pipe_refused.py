"""What DeepSpeed's pipelines refuse, and where."""

from __future__ import annotations

from typing import Any

import pipe_models as pipes
import pytest
import torch
from pipe_models import MICRO
from ranks import Failure

pytestmark = pytest.mark.timeout(480)


def hands_on_text() -> str:
    """Layers that pass on what no stage can be given."""
    ds = pipes.deepspeed()
    layers = [torch.nn.Embedding(41, 16), lambda x: (x, "text"), torch.nn.Linear(16, 16)]
    model = ds.pipe.PipelineModule(layers, num_stages=2)
    config = pipes.config_of(penstock={"comm": {"timeout_s": 12}})
    engine = ds.initialize(model=model, config=config)[0]
    try:
        engine.train_batch(pipes.batches("modules", 0, 0))
    except RuntimeError as error:
        return str(error)
    finally:
        engine.native.close(gather=False)
    return ""


def test_only_tensors_go_from_stage_to_stage(drop_in_pools):
    told = drop_in_pools(2).run(hands_on_text)
    assert "return a tensor or a tuple of tensors" in told[1] and told[0], told


def calls() -> dict[str, str]:
    """What an engine refuses."""
    ds = pipes.deepspeed()
    model = pipes.built("modules", num_stages=2)
    engine = ds.initialize(model=model, config=pipes.config_of())[0]
    ids = torch.zeros(1, 2, dtype=torch.long)
    told = {}
    for name, call in {
        "forward": lambda: engine(ids),
        "backward": lambda: engine.backward(ids),
        "step": lambda: engine.step(),
        "accumulation": lambda: engine.set_gradient_accumulation_steps(2),
        "no iterator": lambda: engine.train_batch(),
        "a loader": lambda: engine.train_batch([(ids, ids)]),
        "a batch": lambda: engine.train_batch(iter([ids] * MICRO)),
        "inputs": lambda: engine.train_batch(iter([({"a": ids}, ids)] * MICRO)),
        "the model": lambda: model(ids),
        "reduce": lambda: engine.eval_batch(iter([]), reduce_output="sum"),
        "list": lambda: engine.eval_batch(iter([]), reduce_output=None),
        "micro": lambda: engine.eval_batch(iter([]), num_micro_batches=0),
    }.items():
        try:
            call()
        except (ValueError, RuntimeError) as error:
            told[name] = str(error)
    with torch.no_grad():
        try:
            engine.train_batch(pipes.batches("modules", 0, 0))
        except ValueError as error:
            told["no grad"] = str(error)
    ended = False
    try:
        engine.train_batch(iter([]))
    except StopIteration:
        ended = True
    loss = float(engine.train_batch(pipes.batches("modules", 0, 0)))  # it still trains
    engine.destroy()
    return told | {"ended": str(ended), "loss": str(loss > 0)}


CALLS = {
    "forward": "only train_batch()",
    "backward": "only train_batch()",
    "step": "only train_batch()",
    "accumulation": "has fixed the value at 4",
    "no iterator": "need an iterator: pass iter(loader)",
    "a loader": "the data iterator is a list",
    "a batch": "allowed: a tuple (inputs, labels)",
    "inputs": "inputs are a dict",
    "the model": "Train with engine.train_batch(), which runs all stages",
    "reduce": "reduce_output is 'sum'",
    "list": "pass bcast_loss=False",
    "micro": "parts is 0",
    "no grad": "call eval_batch()",
    "ended": "True",
    "loss": "True",
}


def test_refused_calls(drop_in_pools):
    for told in drop_in_pools(2).run(calls):
        assert set(told) == set(CALLS)
        for name, expected in CALLS.items():
            assert expected in told[name], (name, told[name])


def set_later(engine: Any) -> None:
    try:
        engine.module.set_checkpoint_interval(1)
    finally:
        engine.destroy()


def made(name: str) -> None:
    """What cannot be made."""
    ds = pipes.deepspeed()
    from deepspeed.runtime.pipe import topology  # noqa: PLC0415

    linear = torch.nn.Linear(4, 4)
    norm = torch.nn.BatchNorm1d
    pipe = ds.pipe
    model = pipes.built("modules", num_stages=2)
    tied = [pipe.TiedLayerSpec("a", torch.nn.Linear, 4, 4) for _ in range(2)]
    other = pipe.TiedLayerSpec("a", torch.nn.Embedding, 4, 4)
    inner = topology.ProcessTopology(["pipe", "depth"], [1, 2])
    swapped = topology.ProcessTopology(["data", "pipe"], [2, 1])
    {
        "no stages": lambda: pipes.built("modules"),
        "three stages": lambda: pipes.built("modules", num_stages=3),
        "few layers": lambda: pipe.PipelineModule([linear, torch.relu], num_stages=2),
        "method": lambda: pipes.built("modules", num_stages=2, partition_method="profile"),
        "no type": lambda: pipes.built("modules", num_stages=2, partition_method="type:gru"),
        "order": lambda: pipes.built("modules", topology=inner),
        "other sizes": lambda: pipes.built("modules", num_stages=2, topology=swapped),
        "twice": lambda: pipe.PipelineModule([linear, linear], num_stages=2),
        "a class": lambda: pipe.PipelineModule([torch.nn.ReLU, linear], num_stages=1),
        "a spec": lambda: pipe.LayerSpec(torch.relu),
        "classes": lambda: pipe.PipelineModule([*tied, other], num_stages=2),
        "no weight": lambda: pipe.PipelineModule(
            [pipe.TiedLayerSpec("a", torch.nn.Linear, 4, 4, tied_weight_attr="w"), linear], 2
        ),
        "running": lambda: pipe.PipelineModule(
            [pipe.TiedLayerSpec("a", norm, 4), pipe.TiedLayerSpec("a", norm, 4)], 2
        ),
        "a loss": lambda: pipe.PipelineModule([linear], 1, loss_fn=torch.nn.Linear(1, 1)),
        "function": lambda: pipes.built(
            "modules", num_stages=2, activation_checkpoint_interval=1,
            activation_checkpoint_func=torch.relu,
        ),
        "some layers": lambda: pipes.built(
            "modules", num_stages=2, activation_checkpoint_interval=1, checkpointable_layers="A"
        ),
        "interval": lambda: pipes.built(
            "modules", num_stages=2, activation_checkpoint_interval=-1
        ),
        "later": lambda: set_later(ds.initialize(model=model, config=pipes.config_of())[0]),
        "mpu": lambda: ds.initialize(model=model, config=pipes.config_of(), mpu=model.mpu()),
        "tensor": lambda: ds.initialize(
            model=pipes.built("modules", num_stages=1),
            config=pipes.config_of(tensor_parallel={"autotp_size": 2}),
        ),
        "key": lambda: ds.initialize(model=model, config=pipes.config_of(pipeline={"stage": 2})),
        "no section": lambda: ds.initialize(model=model, config=pipes.config_of(pipeline=3)),
        "windows": lambda: ds.initialize(
            model=model, config=pipes.config_of(managed_gradient_accumulation=False)
        ),
        "mesh": lambda: ds.initialize(
            model=model, config=pipes.config_of(penstock={"mesh": {"pipeline": 1}})
        ),
    }[name]()  # fmt: skip


MADE = {
    "no stages": "neither num_stages nor topology is given",
    "three stages": "a divisor of the number of ranks, 2",
    "few layers": "2 stages and 1 layers with parameters",
    "method": 'partition_method is "profile"',
    "no type": "matches none of the layers: Embedding, Block",
    "order": 'allowed: "pipe", "data" and "model", in this order',
    "other sizes": "num_stages is 2",
    "twice": "is in the list twice",
    "a class": "layer 0 is <class",
    "a spec": "not a subclass of nn.Module",
    "classes": "Use one class",
    "no weight": 'no parameter "w"',
    "running": "whose running statistics change",
    "a loss": "loss_fn is a Linear with parameters",
    "function": "is a custom function",
    "some layers": "checkpointable_layers is a str",
    "interval": "activation_checkpoint_interval is -1",
    "later": "call set_checkpoint_interval() before initialize()",
    "mpu": "has its own mpu (model.mpu())",
    "tensor": 'the axis "model" of its topology',
    "key": '"pipeline.stage" is not a key',
    "no section": '"pipeline" is 3; allowed: a section',
    "windows": "train_batch() sets the windows",
    "mesh": "mesh.pipeline 1, but the PipelineModule has 2 stages",
}


@pytest.mark.parametrize("name", MADE)
def test_refused(name, drop_in_pools):
    for failed in drop_in_pools(2).attempt(made, name):
        assert isinstance(failed, Failure) and failed.is_a("ConfigError"), failed
        assert MADE[name] in failed.text, failed.text
