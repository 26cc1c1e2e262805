"""The engine's methods that return or change settings of its config."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DistributedSampler

from penstock import ConfigError

from ..comm.comm import get_rank
from ..utils.loaders import DeepSpeedDataLoader
from .zero.config import DeepSpeedZeroConfig
from .zero.offload_states import check_offload

ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT = "train", "eval", "predict"


def _key(path: str, default: Any) -> Callable[[Any], Any]:
    """Returns a function that reads a key of a config, "KEY" or "SECTION.KEY"."""
    *section, key = path.split(".")

    def look(config: Any) -> Any:
        values = config._values if not section else config._values.get(section[0]) or {}
        found = values.get(key)
        return default if found is None or found == "auto" else found

    return look


def _offload(*devices: str) -> Callable[[Any], Any]:
    section = _key("zero_optimization.offload_optimizer", None)
    return lambda config: (section(config) or {}).get("device") in devices


def _never(config: Any) -> bool:
    return False


# Attributes of the config.
_ATTRIBUTES = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps fp16_enabled "
    "zero_optimization_stage bfloat16_enabled managed_gradient_accumulation gradient_clipping "
    "optimizer_name optimizer_params scheduler_name scheduler_params wall_clock_breakdown "
    "memory_breakdown log_level dataloader_drop_last"
).split()
# Keys of zero_optimization, which zero_KEY() returns. DeepSpeedZeroConfig has their defaults.
_ZERO = (
    "compute_grad_norm allgather_sequential model_persistence_threshold reduce_scatter "
    "module_granularity_threshold reduce_bucket_size allgather_bucket_size sub_group_size "
    "allgather_partitions contiguous_gradients prefetch_bucket_size param_persistence_threshold "
    "max_live_parameters max_reuse_distance round_robin_gradients ignore_unused_parameters "
    "elastic_checkpoint load_from_fp32_weights offload_param offload_optimizer"
).split()
_UNSUPPORTED = (
    "amp_enabled sparse_gradients_enabled bf16_master_weights_and_gradients autotuning_enabled "
    "fp16_master_weights_and_gradients optimizer_legacy_fusion pld_enabled "
    "eigenvalue_enabled torch_autocast_enabled is_deepcompile_enabled"
).split()
_PROFILER = {
    "enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True,
    "output_file": None,
}  # fmt: skip


def _zero_getters() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    for key in _ZERO:
        _, default, *other = DeepSpeedZeroConfig._KEYS[key]
        yield f"zero_{key}", _key(f"zero_optimization.{(*other, key)[0]}", default)


# Methods without arguments that return a value of the config.
_GETTERS: dict[str, Callable[[Any], Any]] = {
    **{name: operator.attrgetter(name) for name in _ATTRIBUTES},
    **dict(_zero_getters()),
    **dict.fromkeys(_UNSUPPORTED, _never),
    **{
        f"flops_profiler_{key}": _key(f"flops_profiler.{key}", one)
        for key, one in _PROFILER.items()
    },
    "zero_optimization": lambda config: config.zero_enabled,
    "zero_optimization_partition_gradients": lambda c: c.zero_optimization_stage >= 2,
    "zero_optimization_partition_weights": lambda c: c.zero_optimization_stage >= 3,
    "steps_per_print": lambda config: config.steps_per_print or None,
    "dynamic_loss_scale": lambda c: not _key("fp16.loss_scale", 0)(c),
    "initial_dynamic_scale": lambda c: 2.0 ** _key("fp16.initial_scale_power", 16)(c),
    "loss_scale_value": _key("fp16.loss_scale", 0),
    "postscale_gradients": lambda c: not _key("prescale_gradients", False)(c),
    "gradient_predivide_factor": _key("gradient_predivide_factor", 1.0),
    "zero_allow_untested_optimizer": _key("zero_allow_untested_optimizer", False),
    "zero_force_ds_cpu_optimizer": _key("zero_force_ds_cpu_optimizer", True),
    "loss_scale": lambda config: config.float16_config.loss_scale,
    "fp16_auto_cast": lambda config: config.auto_cast,
    "dump_state": _key("dump_state", False),
    "bf16_optimizer_states": _key("bf16.bf16_optimizer_states", False),
    "autotp_size": _key("tensor_parallel.autotp_size", 0),
    "zero_overlap_comm": lambda c: _key(
        "zero_optimization.overlap_comm", c.zero_optimization_stage == 3
    )(c),
    "zero_hpz_partition_size": _key("zero_optimization.zero_hpz_partition_size", 1),
    "zero_quantized_weights": _key("zero_optimization.zero_quantized_weights", False),
    "zero_quantized_gradients": _key("zero_optimization.zero_quantized_gradients", False),
    "mics_shard_size": _key("zero_optimization.mics_shard_size", -1),
    "zero_gather_16bit_weights_on_model_save": lambda c: bool(
        _key("zero_optimization.stage3_gather_16bit_weights_on_model_save", None)(c)
        or _key("zero_optimization.stage3_gather_fp16_weights_on_model_save", False)(c)
    ),
    "zero_cpu_offload": _offload("cpu"),
    "zero_nvme_offload_optimizer": _offload("nvme"),
    "zero_use_cpu_optimizer": _offload("cpu", "nvme"),
    "load_universal_checkpoint": _key("checkpoint.load_universal", False),
    "use_node_local_storage": _key("checkpoint.use_node_local_storage", False),
    "checkpoint_tag_validation_enabled": lambda c: (
        _key("checkpoint.tag_validation", "warn")(c) != "ignore"
    ),
    "checkpoint_tag_validation_fail": lambda c: (
        _key("checkpoint.tag_validation", "warn")(c) == "fail"
    ),
    "elasticity_enabled": _key("elasticity.enabled", False),
    "curriculum_enabled_legacy": _key("curriculum_learning.enabled", False),
    "communication_data_type": _key("communication_data_type", None),
    "swap_tensor_config": _key("aio", None),
    "aio_config": _key("aio", None),
}


class EngineSettings:
    """The part of DeepSpeedEngine that returns or changes settings."""

    _config: Any
    native: Any
    basic_optimizer: Any
    module: torch.nn.Module
    dp_world_size: int
    world_size: int
    sequence_parallel_size: int

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def get_batch_info(self) -> tuple[int, int, int]:
        """Returns samples per step, samples per micro-batch, and micro-batches per step."""
        config = self._config
        return (
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
        )

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes gradient_accumulation_steps, at once, so that a step has this batch size.

        Call it between accumulation windows. Raises ConfigError if the size is not a multiple of
        micro-batch size times data ranks.
        """
        config = self._config
        per_step = config.train_micro_batch_size_per_gpu * self.dp_world_size
        if per_step == 0 or train_batch_size % per_step != 0:
            raise ConfigError(
                f"[deepspeed::set_train_batch_size] the batch size {train_batch_size} is not a "
                f"multiple of {per_step} (micro-batch size times data ranks)"
            )
        config.gradient_accumulation_steps = train_batch_size // per_step
        config.train_batch_size = train_batch_size
        self._weigh(1.0)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the size of a micro-batch, and with it the batch size."""
        config = self._config
        config.train_micro_batch_size_per_gpu = micro_batch_size
        ranks = self.dp_world_size
        config.train_batch_size = micro_batch_size * config.gradient_accumulation_steps * ranks

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Changes the number of micro-batches per step, and with it the batch size."""
        config = self._config
        config.gradient_accumulation_steps = steps
        ranks = self.dp_world_size
        config.train_batch_size = config.train_micro_batch_size_per_gpu * steps * ranks
        self._weigh(1.0)

    def _of_groups(self, key: str) -> list[Any]:
        groups = [] if self.basic_optimizer is None else self.basic_optimizer.param_groups
        return [group.get(key, 0.0) for group in groups]

    def get_lr(self) -> list[float]:
        """Returns the learning rate of each parameter group."""
        return self._of_groups("lr")

    def get_type(self) -> list[Any]:
        """Returns the option "type" of each parameter group; 0.0 for a group without it."""
        return self._of_groups("type")

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Returns the times of the last step in milliseconds, if wall_clock_breakdown is set."""
        times: dict[str, float] = self._clock.cache
        return times

    def set_lr(self, lr: float) -> None:
        for group in self.basic_optimizer.param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Returns the betas of each group; for the config's SGD and RMSprop, the momentum."""
        by_momentum = self.optimizer_name() in ("sgd", "rmsprop")
        return self._of_groups("momentum" if by_momentum else "betas")

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """The modules whose gradients are sparse: none, because sparse gradients are refused."""
        return set()

    @property
    def cur_scale(self) -> float:
        return float(self.native.loss_scale)

    def deepspeed_io(  # noqa: PLR0913 - DeepSpeed's signature
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = ROUTE_TRAIN,
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Returns a loader over this rank's samples of a dataset.

        Raises ConfigError without a batch size, or with sequence ranks and no data_sampler.
        """
        size = batch_size or self._config.train_micro_batch_size_per_gpu
        if data_sampler is None and self.sequence_parallel_size > 1:
            raise ConfigError(
                "[deepspeed::deepspeed_io] with sequence ranks, pass a data_sampler. It determines "
                "whether these ranks load the same samples, which the script then cuts, or "
                "different samples (UlyssesSPDataLoaderAdapter)"
            )
        if data_sampler is None and (route != ROUTE_TRAIN or self.dp_world_size < self.world_size):
            data_sampler = self._sampler(dataset, shuffle=route == ROUTE_TRAIN)
        if not size:
            raise ConfigError(
                "[deepspeed::deepspeed_io] the config has no train_micro_batch_size_per_gpu: set "
                "it, or pass batch_size"
            )
        return DeepSpeedDataLoader(
            dataset,
            size,
            pin_memory,
            collate_fn=collate_fn or getattr(self, "collate_fn", None),
            num_local_io_workers=num_local_io_workers or 0,
            data_sampler=data_sampler,
            dataloader_drop_last=self._config.dataloader_drop_last,
        )

    def _sampler(self, dataset: Any, shuffle: bool) -> Any:
        """Returns a sampler of this data rank's samples."""
        rank = get_rank(self.data_parallel_group)
        return DistributedSampler(dataset, self.dp_world_size, rank, shuffle)

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Does nothing: gradients are averaged in backward."""

    def empty_partition_cache(self) -> None:
        """Does nothing: gathered parameters are released after their use."""

    def offload_states(
        self,
        include: Any = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Only checks its arguments, because on a CPU all states are already in host memory.

        Raises ConfigError on other devices, and with offload_param.
        """
        check_offload(self, include, device)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Does nothing: see offload_states()."""


def _method(look: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: look(self._config)


for _name, _look in _GETTERS.items():
    _getter = _method(_look)
    _getter.__name__ = _name
    setattr(EngineSettings, _name, _getter)
