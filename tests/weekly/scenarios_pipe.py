"""Pipelines, tensor ranks of an mpu, activation checkpointing with its random numbers."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "drop_in"))
import megatron_models as megatron

STEPS, MICRO, WIDTH, VOCAB, ROWS, LENGTH = 10, 4, 16, 24, 2, 6


def fill(module: nn.Module, seed: int) -> nn.Module:
    """Gives a module values that do not depend on what was built before it."""
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        param.data.normal_(0.0, 0.3, generator=generator)
    return module


class Tokens(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(VOCAB, WIDTH)
        fill(self, 1)

    @property
    def table(self) -> nn.Parameter:
        return self.weight


class Block(nn.Module):
    def __init__(self, seed: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        fill(self, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


def head(seed: int = 99) -> nn.Module:
    return fill(nn.Linear(WIDTH, VOCAB), seed)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(step: int, data_rank: int, micro: int, length: int = LENGTH) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + 10 * data_rank + micro)
    both = torch.randint(0, VOCAB, (2, ROWS, length), generator=generator)
    return both[0], both[1]


def config_of(stage: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    } | changes


def data_of(engine: Any, step: int, length: int = LENGTH, micro: int = MICRO) -> Iterator[Any]:
    rank = engine.grid.get_data_parallel_rank()
    return iter([batch(step, rank, one, length) for one in range(micro)])


def plain_layers(dropout: float = 0.0) -> list[nn.Module]:
    return [Tokens(), *(Block(10 + index, dropout) for index in range(4)), head()]


def tied_layers(deepspeed: Any, attribute: Any = "weight") -> list[Any]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec  # noqa: PLC0415

    def as_head(module: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, module.weight)

    return [
        TiedLayerSpec("tokens", Tokens, tied_weight_attr=attribute),
        lambda x: x * 1.5,
        *(LayerSpec(Block, 10 + index) for index in range(4)),
        TiedLayerSpec("tokens", Tokens, forward_fn=as_head, tied_weight_attr=attribute),
    ]


def engine_of(deepspeed: Any, layers: list[Any], config: dict[str, Any], **options: Any) -> Any:
    if "topology" not in options:
        options.setdefault("num_stages", 2)
    model = deepspeed.pipe.PipelineModule(layers, **{"loss_fn": loss_of} | options)
    params = [one for one in model.parameters() if one.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=params, config=config)[0]


def losses_of(engine: Any, steps: int = STEPS) -> list[float]:
    return [float(engine.train_batch(data_of(engine, step))) for step in range(steps)]


def norms_of(engine: Any) -> list[float]:
    found = []
    for step in range(STEPS):
        found.append(float(engine.train_batch(data_of(engine, step))))
        found.append(float(engine.get_global_grad_norm()))
    return found


def pipe_modules(deepspeed: Any, rank: int, world: int) -> list[float]:
    return losses_of(engine_of(deepspeed, plain_layers(), config_of()))


def pipe_zero1_clipped(deepspeed: Any, rank: int, world: int) -> list[float]:
    engine = engine_of(deepspeed, plain_layers(), config_of(1, gradient_clipping=0.1))
    return norms_of(engine)


def pipe_clipped(deepspeed: Any, rank: int, world: int) -> list[float]:
    engine = engine_of(deepspeed, plain_layers(), config_of(0, gradient_clipping=0.1))
    return losses_of(engine)


def pipe_tied(deepspeed: Any, rank: int, world: int) -> list[float]:
    config = config_of(1, gradient_clipping=0.1)
    return norms_of(engine_of(deepspeed, tied_layers(deepspeed), config))


def pipe_tied_attributes(deepspeed: Any, rank: int, world: int) -> list[float]:
    return losses_of(engine_of(deepspeed, tied_layers(deepspeed, ["weight"]), config_of()))


def pipe_tied_property(deepspeed: Any, rank: int, world: int) -> list[float]:
    engine = engine_of(
        deepspeed, tied_layers(deepspeed, "table"), config_of(), partition_method="type:block"
    )
    return losses_of(engine)


def pipe_data_ranks(deepspeed: Any, rank: int, world: int) -> list[float]:
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology  # noqa: PLC0415

    topology = PipeDataParallelTopology(num_pp=2, num_dp=2)
    return losses_of(engine_of(deepspeed, plain_layers(), config_of(1), topology=topology))


def recomputed(**section: Any) -> Callable[[Any, int, int], list[float]]:
    def run(deepspeed: Any, rank: int, world: int) -> list[float]:
        config = config_of(pipeline={"activation_checkpoint_interval": 1, **section})
        return losses_of(engine_of(deepspeed, plain_layers(), config))

    return run


def pipe_some_recomputed(deepspeed: Any, rank: int, world: int) -> list[float]:
    engine = engine_of(
        deepspeed,
        plain_layers(),
        config_of(),
        activation_checkpoint_interval=1,
        checkpointable_layers=["Block"],
    )
    return losses_of(engine)


def pipe_seeded_dropout(deepspeed: Any, rank: int, world: int) -> list[float]:
    engine = engine_of(
        deepspeed,
        plain_layers(0.5),
        config_of(),
        seed_layers=True,
        base_seed=7,
        partition_method="uniform",
    )
    return losses_of(engine)


def pipe_shapes(deepspeed: Any, rank: int, world: int) -> list[float]:
    engine = engine_of(deepspeed, plain_layers(), config_of(), dynamic_shape=True)
    return [
        float(engine.train_batch(data_of(engine, step, LENGTH + step % 3))) for step in range(STEPS)
    ]


def pipe_evaluated(deepspeed: Any, rank: int, world: int) -> list[float]:
    """Every form of eval_batch(), on the ranks that have its result."""
    engine = engine_of(deepspeed, plain_layers(), config_of())
    losses_of(engine, 3)
    last = engine.is_last_stage()
    found = [float(engine.eval_batch(data_of(engine, 9)))]
    loss, logits = engine.eval_batch(data_of(engine, 9), return_logits=True)
    found += [float(loss), float(logits.sum()) if last else 0.0]
    own = engine.eval_batch(data_of(engine, 9), bcast_loss=False)
    found.append(float(own) if last else 0.0)
    listed = engine.eval_batch(data_of(engine, 9), reduce_output=None, bcast_loss=False)
    found += [float(one) for one in listed] if last else []
    found.append(float(engine.eval_batch(data_of(engine, 9, micro=2), num_micro_batches=2)))
    return [*found, float(engine.train_batch(data_of(engine, 4)))]


def pipe_outputs(deepspeed: Any, rank: int, world: int) -> list[float]:
    """Outputs instead of losses; DeepSpeed can return them only from a new engine."""
    found = []
    for reduce in (None, "avg"):
        engine = engine_of(deepspeed, plain_layers(), config_of())
        made = engine.eval_batch(data_of(engine, 9), compute_loss=False, reduce_output=reduce)
        if engine.is_last_stage():
            found += [float(one.square().sum()) for one in made]
    return found


def pipe_outputs_of_data_ranks(deepspeed: Any, rank: int, world: int) -> list[float]:
    engine = engine_of(deepspeed, plain_layers(), config_of(), num_stages=1)
    mean = engine.eval_batch(data_of(engine, 9), compute_loss=False)
    return [float(one) for one in mean.flatten()[:8]]


def pipe_iterators(deepspeed: Any, rank: int, world: int) -> list[float]:
    """set_dataloader(), set_dataiterator(), set_batch_fn() and a new iterator for one batch."""
    engine = engine_of(deepspeed, plain_layers(), config_of())
    loader = deepspeed.utils.RepeatingLoader([batch(0, 0, micro) for micro in range(3)])
    engine.set_dataloader(loader)
    found = [float(engine.train_batch()) for _ in range(3)]
    engine.set_dataiterator(iter([batch(1, 0, micro) for micro in range(2 * MICRO)]))
    found += [float(engine.train_batch()) for _ in range(2)]
    engine.set_batch_fn(lambda given: (given["ids"], given["labels"]))
    ids, labels = batch(2, 0, 0)
    found.append(float(engine.train_batch(iter([{"ids": ids, "labels": labels}] * MICRO))))
    return found


def pipe_samples(deepspeed: Any, rank: int, world: int) -> list[float]:
    data = [tuple(one[0] for one in batch(0, 0, index)) for index in range(20)]
    model = deepspeed.pipe.PipelineModule(plain_layers(), num_stages=2, loss_fn=loss_of)
    engine = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        training_data=data,
        config=config_of(),
    )[0]
    return [float(engine.train_batch()) for _ in range(STEPS)]


def pipe_scheduled(deepspeed: Any, rank: int, world: int) -> list[float]:
    params = {"warmup_num_steps": 5, "warmup_max_lr": 0.01}
    config = config_of(scheduler={"type": "WarmupLR", "params": params})
    engine = engine_of(deepspeed, plain_layers(), config)
    found = []
    for step in range(STEPS):
        found += [float(engine.train_batch(data_of(engine, step))), engine.get_lr()[0]]
    return found


def schedules(deepspeed: Any, rank: int, world: int) -> list[str]:
    from deepspeed.runtime.pipe import schedule  # noqa: PLC0415

    return [
        f"{kind.__name__} {stages} {stage} {micro}: {[*kind(micro, stages, stage)]}"
        for kind in (schedule.TrainSchedule, schedule.InferenceSchedule)
        for stages in range(1, 5)
        for stage in range(stages)
        for micro in range(1, 9)
    ]


def partitioned_tensor(deepspeed: Any, rank: int, world: int) -> list[Any]:
    from deepspeed.runtime.utils import PartitionedTensor  # noqa: PLC0415

    group = torch.distributed.group.WORLD
    made = PartitionedTensor(torch.arange(10.0).view(5, 2), group)
    again = PartitionedTensor.from_meta(made.to_meta(), made.data(), group)
    return [made.to_meta().tolist(), made.data().tolist(), again.full().flatten().tolist()]


# ---- tensor ranks of an mpu


def cut(
    stage: int, recompute: str = "", accumulate: int = 1
) -> Callable[[Any, int, int], list[float]]:
    def run(deepspeed: Any, rank: int, world: int) -> list[float]:
        mpu = megatron.Mpu(2)
        checkpointing = deepspeed.checkpointing
        torch.manual_seed(3)
        place = megatron.Place(mpu.get_model_parallel_group(), megatron.Tracked())
        model = megatron.Net(place, getattr(checkpointing, recompute, None))
        checkpointing.configure(mpu)
        checkpointing.model_parallel_cuda_manual_seed(megatron.SEED)
        config = config_of(stage, gradient_accumulation_steps=accumulate, gradient_clipping=0.1)
        engine = deepspeed.initialize(
            model=model, mpu=mpu, model_parameters=list(model.parameters()), config=config
        )[0]
        found = []
        for step in range(STEPS):
            for micro in range(accumulate):
                ids, labels = megatron.batch(step, mpu.get_data_parallel_rank(), micro)
                loss = megatron.loss_of(engine(ids), labels)
                engine.backward(loss)
                engine.step()
                found.append(float(loss.detach()))
            if stage > 0:  # DeepSpeed has no norm at stage 0
                found.append(float(engine.get_global_grad_norm()))
        return found

    return run


def cut_in_stages(stage: int, **options: Any) -> Callable[[Any, int, int], list[float]]:
    def run(deepspeed: Any, rank: int, world: int) -> list[float]:
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology  # noqa: PLC0415

        topology = PipeModelDataParallelTopology(num_pp=world // 2, num_mp=2, num_dp=1)
        mpu = megatron.Mpu(2)
        deepspeed.checkpointing.configure(mpu)
        place = megatron.Place(mpu.get_model_parallel_group(), megatron.Tracked())
        torch.manual_seed(3)
        layers = [megatron.VocabEmbedding(place), *(megatron.Block(place, 0.0) for _ in range(4))]
        layers += [megatron.Head(place)]
        deepspeed.checkpointing.model_parallel_cuda_manual_seed(megatron.SEED + 100 * (rank // 2))
        config = config_of(stage, gradient_clipping=0.1)
        engine = engine_of(
            deepspeed, layers, config, topology=topology, loss_fn=megatron.loss_of,
            partition_method="uniform", **options,
        )  # fmt: skip
        return norms_of(engine)

    return run


def tracker(deepspeed: Any, rank: int, world: int) -> list[float]:
    """What tensor ranks draw inside and outside of the tracker."""
    mpu, checkpointing = megatron.Mpu(2), deepspeed.checkpointing
    checkpointing.configure(mpu)
    checkpointing.model_parallel_cuda_manual_seed(5)
    found = torch.rand(3).tolist()
    for name in ("model-parallel-rng", "other"):
        if name == "other":
            checkpointing.get_cuda_rng_tracker().add(name, 77)
        with checkpointing.get_cuda_rng_tracker().fork(name):
            found += torch.rand(3).tolist()
    checkpointing.model_parallel_reconfigure_tp_seed(5)
    with checkpointing.get_cuda_rng_tracker().fork():
        found += torch.rand(3).tolist()
    return found + torch.rand(3).tolist()


SCENARIOS = {
    "pipe modules": pipe_modules,
    "pipe zero1 clipped": pipe_zero1_clipped,
    "pipe clipped": pipe_clipped,
    "pipe tied": pipe_tied,
    "pipe tied attributes": pipe_tied_attributes,
    "pipe tied property": pipe_tied_property,
    "pipe data ranks": pipe_data_ranks,
    "pipe recomputed, not reentrant": recomputed(use_reentrant=False),
    "pipe some recomputed": pipe_some_recomputed,
    "pipe seeded dropout": pipe_seeded_dropout,
    "pipe shapes": pipe_shapes,
    "pipe evaluated": pipe_evaluated,
    "pipe outputs": pipe_outputs,
    "pipe outputs of data ranks": pipe_outputs_of_data_ranks,
    "pipe iterators": pipe_iterators,
    "pipe samples": pipe_samples,
    "pipe scheduled": pipe_scheduled,
    "schedules": schedules,
    "partitioned tensor": partitioned_tensor,
    "mpu zero0": cut(0),
    "mpu zero1, recomputed": cut(1, "checkpoint"),
    "mpu zero2, recomputed, accumulated": cut(2, "non_reentrant_checkpoint", 2),
    "mpu zero3": cut(3),
    "mpu data ranks": cut(1, "checkpoint"),
    "mpu in stages": cut_in_stages(1),
    "mpu in stages, recomputed": cut_in_stages(
        1, activation_checkpoint_interval=1, checkpointable_layers=["Block"]
    ),
    "tracker": tracker,
}
RANKS = {
    "pipe data ranks": 4,
    "mpu data ranks": 4,
    "mpu in stages": 4,
    "mpu in stages, recomputed": 4,
}
DIFFERS = {
    "pipe clipped": "at stage 0 DeepSpeed's norm leaves out the parameters of later stages",
}
