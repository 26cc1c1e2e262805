"""Writes the checkpoints of tests/foreign/deepspeed_ranks with a DeepSpeed that is installed.

    torchrun --nproc-per-node 4 tests/foreign/write_deepspeed_ranks.py OUT CASE

A folder for a case of tests/foreign/trained_ranks.py (with as many ranks as it says): a checkpoint
after `BEFORE` steps; `next.json` with the losses of the steps that follow it; `whole.pt` with the
fp32 weights and moments as DeepSpeed gives them to the ranks that have parts of them, joined by
whoever cut them. With LOCAL_SIZE=4 and DS_ACCELERATOR=cpu it runs without a GPU.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import trained_ranks as tr
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state


class Mpu:
    """Ranks of the model innermost, as Megatron's."""

    def __init__(self, model: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        for first in range(0, world, model):
            ranks = list(range(first, first + model))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.model = group
        for first in range(model):
            ranks = list(range(first, world, model))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.data = group

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.model)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.model)

    def get_model_parallel_group(self) -> Any:
        return self.model

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.data)

    def get_data_parallel_group(self) -> Any:
        return self.data


def config(case: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": tr.MICRO,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.endswith("bf16")},
        "zero_optimization": {"stage": tr.CASES[case]["stage"]},
    }


def model_of(case: str) -> tuple[Any, Any, int, int]:
    """The model, its mpu, and this rank's place among data ranks and those of the model."""
    ranks = tr.CASES[case]
    torch.manual_seed(0)
    if ranks["pipe"] == 1:
        mpu = Mpu(ranks["model"])
        place = mpu.get_model_parallel_rank()
        model = tr.Model().cut(place, ranks["model"], mpu.model)
        return model, mpu, mpu.get_data_parallel_rank(), place
    block: Any = tr.Block
    if ranks["model"] > 1:
        topology: Any = PipeModelDataParallelTopology(
            num_pp=ranks["pipe"], num_mp=ranks["model"], num_dp=ranks["data"]
        )
        place = topology.get_coord(dist.get_rank()).model
        groups = [dist.new_group(one) for one in topology.get_axis_comm_lists("model")]
        lists = topology.get_axis_comm_lists("model")
        mine = next(g for g, one in zip(groups, lists, strict=True) if dist.get_rank() in one)
        block = cut_block(place, ranks["model"], mine)
    else:
        topology, place = PipeDataParallelTopology(ranks["pipe"], ranks["data"]), 0
    model = PipelineModule(
        tr.layers(LayerSpec, TiedLayerSpec, block),
        topology=topology,
        loss_fn=tr.loss_of,
        partition_method="uniform",
        seed_layers=True,
    )
    return model, None, topology.get_coord(dist.get_rank()).data, place


def cut_block(rank: int, ranks: int, group: Any) -> type:
    class Part(tr.Block):
        def __init__(self) -> None:
            super().__init__()
            self.cut(rank, ranks, group)

    return Part


def step_of(engine: Any, case: str, step: int, data: int) -> float:
    if tr.CASES[case]["pipe"] > 1:
        micro = [tr.batch(step, i, data) for i in range(tr.MICRO)]
        return float(engine.train_batch(iter([(one[:, :-1], one[:, 1:]) for one in micro])))
    losses = []
    for i in range(tr.MICRO):
        loss = engine(tr.batch(step, i, data))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    mean = torch.tensor(sum(losses) / len(losses))
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def whole_of(engine: Any, place: int) -> dict[str, dict[str, torch.Tensor]]:
    """By name, what is kept of each parameter, joined."""
    mine: dict[str, dict[str, torch.Tensor]] = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            mine[name] = {"param": safe_get_full_fp32_param(param).clone()} | {
                key: safe_get_full_optimizer_state(param, key).clone()
                for key in ("exp_avg", "exp_avg_sq")
            }
    all_of: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_of, (place, mine))
    found: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for rank, parts in all_of:
        for name, kept in parts.items():
            for key, value in kept.items():
                found.setdefault(name, {}).setdefault(key, {})[rank] = value
    return {
        name: {key: joined(name, [parts[i] for i in sorted(parts)]) for key, parts in kept.items()}
        for name, kept in found.items()
    }


def joined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) > 1 and "gate_up" in name:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    if len(parts) > 1 and name.endswith("down.weight"):
        return torch.cat(parts, 1)
    if len(parts) > 1 and name == "embed.weight":
        return torch.cat(parts)
    return parts[0]


def main() -> None:
    case = sys.argv[2]
    out = pathlib.Path(sys.argv[1]) / case
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(out, ignore_errors=True)
    dist.barrier()
    model, mpu, data, place = model_of(case)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, **tr.ADAM)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config(case), mpu=mpu
    )
    losses = []
    for step in range(tr.BEFORE + tr.AFTER):
        losses.append(step_of(engine, case, step, data))
        if step + 1 == tr.BEFORE:
            state: dict[str, Any] = {"epoch": 1}
            if tr.CASES[case]["info"]:
                state["universal_checkpoint_info"] = tr.INFO
            engine.save_checkpoint(str(out), client_state=state)
            whole = whole_of(engine, place)
    if rank == 0:
        for script in out.glob("*.py"):  # that DeepSpeed copies to it
            script.unlink()
        versions = {"deepspeed": deepspeed.__version__, "torch": torch.__version__}
        said = {"losses": losses[tr.BEFORE :], "versions": versions}
        (out / "next.json").write_text(json.dumps(said) + "\n")
        torch.save(whole, out / "whole.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's processes abort at exit on CPU


if __name__ == "__main__":
    main()
