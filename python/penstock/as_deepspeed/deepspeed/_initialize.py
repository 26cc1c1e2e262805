"""deepspeed.initialize()."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from logging import WARNING
from typing import Any

import torch

from penstock import ConfigError

from ._refusal import DeepSpeedRefusal
from .comm.comm import get_world_size, init_distributed
from .git_version_info import git_hash, version
from .runtime.config import as_dict
from .runtime.engine import DeepSpeedEngine
from .runtime.hybrid_engine import DeepSpeedHybridEngine
from .runtime.pipe.engine import PipelineEngine
from .runtime.pipe.module import PipelineModule
from .runtime.sequence_parallel.parallel_state_sp import SequenceGrid
from .utils.bwc import bwc_pipeline_parallel_world_size
from .utils.logging import log_dist, log_dist_once


def initialize(  # noqa: PLR0913 - DeepSpeed's signature
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Creates an engine. All ranks must call it.

    Args:
        args: the script's arguments; `args.deepspeed_config` is the config if no other is given.
        model: an nn.Module, possibly built in `zero.Init`. A PipelineModule gives a PipelineEngine;
            any other gives a DeepSpeedHybridEngine if the config sets `hybrid_engine.enabled`.
        optimizer: a torch optimizer, or a callable that creates one from the parameters; default:
            the config's optimizer.
        model_parameters: parameters or groups for the config's optimizer; default: all trainable.
        training_data, collate_fn: the returned loader's dataset, and the function that batches it.
        lr_scheduler: a scheduler (it is stepped after each update), or a callable that creates
            one from the optimizer; default: the config's scheduler.
        distributed_port: rank 0's port if no launcher sets it.
        mpu: has the groups of sequence ranks, or of the tensor ranks over which the model's own
            modules cut parameters (docs/deepspeed.md). It must have one stage.
        dist_init_required: if it is False, an error is raised unless a process group exists.
        config, config_params: a dict, a path, JSON text, or base64 of JSON text.
        mesh_param: (data ranks, sequence ranks), instead of an mpu.

    Returns:
        The engine, its optimizer (None without one), the loader (None without training_data) and
        the scheduler (None without one).

    Raises:
        ConfigError: an argument or a setting is missing, contradictory or not supported.
    """
    log_dist(f"DeepSpeed info: version={version}, git-hash={git_hash}", ranks=[0])
    _check(model, mpu, mesh_param)
    assert model is not None
    given = _one_config(args, config, config_params)
    if not torch.distributed.is_initialized():
        init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    engine = _kind(model, given)(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu if mesh_param is None else _of_mesh(mesh_param),
        collate_fn=collate_fn,
        config=given,
    )
    _say_taken(engine)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _kind(model: torch.nn.Module, config: Any) -> type[DeepSpeedEngine]:
    section = as_dict(config).get("hybrid_engine")
    hybrid = isinstance(section, Mapping) and section.get("enabled") in (True, 1)
    if isinstance(model, PipelineModule):
        if hybrid:
            log_dist("hybrid_engine has no effect for a PipelineModule", ranks=[0], level=WARNING)
        return PipelineEngine
    return DeepSpeedHybridEngine if hybrid else DeepSpeedEngine


def _say_taken(engine: DeepSpeedEngine) -> None:
    """Logs once, on rank 0, the keys in effect and the native settings that they become."""
    taken = [f"{one.key}: {one.note}" for one in engine._config.translated.given
             if one.fate == "taken" and one.note]  # fmt: skip
    if taken:
        log_dist_once("keys of the config in effect: " + "; ".join(taken), ranks=[0])


def _one_config(args: Any, config: Any, config_params: Any) -> Any:
    of_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    given = [one for one in (config, config_params, of_args) if one is not None]
    if not given:
        raise DeepSpeedRefusal(
            "[deepspeed::initialize] no config was given: pass config=, or args with the attribute "
            "deepspeed_config"
        )
    if len(given) > 1 and of_args is not None:
        raise ConfigError(
            "[deepspeed::initialize] a config is given both as an argument and as "
            "args.deepspeed_config: keep one"
        )
    return given[0]


def _check(model: Any, mpu: Any, mesh_param: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise DeepSpeedRefusal(
            f"[deepspeed::initialize] model is a {type(model).__name__}, not an nn.Module"
        )
    if isinstance(model, PipelineModule) and (mpu or mesh_param) is not None:
        raise ConfigError(
            "[deepspeed::initialize] a PipelineModule has its own mpu (model.mpu()): remove the "
            "arguments mpu and mesh_param"
        )
    if mpu is not None and mesh_param is not None:
        raise ConfigError(
            "[deepspeed::initialize] mpu and mesh_param are both given, and each sets the groups "
            "of ranks: pass only one of them"
        )
    sequence = getattr(mpu, "get_sequence_parallel_world_size", None)
    for name in ("get_sequence_parallel_group", "get_sequence_parallel_rank"):
        if sequence is not None and sequence() > 1 and not hasattr(mpu, name):
            raise ConfigError(
                "[deepspeed::initialize] the mpu has sequence ranks, but it lacks the method "
                f"{name}(): add it"
            )
    stages = bwc_pipeline_parallel_world_size(mpu)
    if stages > 1:
        raise ConfigError(
            f"[deepspeed::initialize] the mpu has {stages} stages, but only 1 is supported. For "
            f"more, use a deepspeed.pipe.PipelineModule"
        )


def _of_mesh(mesh_param: Any) -> SequenceGrid:
    world = get_world_size()
    sizes = tuple(mesh_param) if isinstance(mesh_param, list | tuple) else ()
    if len(sizes) != 2 or sizes[0] * sizes[1] != world:
        raise ConfigError(
            f"[deepspeed::initialize] mesh_param is {mesh_param}; allowed: (data ranks, sequence "
            f"ranks) whose product is the number of ranks, {world}"
        )
    return SequenceGrid(sizes[1])
