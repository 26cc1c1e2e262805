"""What loops.py and calls.py do, case by case."""

from __future__ import annotations

import copy
from typing import Any

STEPS = 20
_SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": 0.01, "warmup_num_steps": 6},
    "WarmupDecayLR": {"total_num_steps": 15, "warmup_num_steps": 4, "warmup_type": "linear"},
    "WarmupCosineLR": {"total_num_steps": 18, "warmup_num_steps": 4},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 6},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 4},
}


def _cases() -> dict[str, dict[str, Any]]:
    """Changes of the config by case."""
    found: dict[str, dict[str, Any]] = {}
    for stage in range(4):
        zero = {"zero_optimization": {"stage": stage}}
        found[f"zero{stage}-fp32"] = zero
        found[f"zero{stage}-bf16"] = zero | {"bf16": {"enabled": True}}
        found[f"zero{stage}-accumulate"] = zero | {"gradient_accumulation_steps": 4}
        found[f"zero{stage}-clip"] = zero | {"gradient_clipping": 0.05}
        found[f"zero{stage}-no-clip"] = zero | {"gradient_clipping": 0.0}
    for name, params in _SCHEDULES.items():
        found[f"schedule-{name}"] = {"scheduler": {"type": name, "params": params}}
    host = {"device": "cpu"}
    found["offload-zero2"] = {"zero_optimization": {"stage": 2, "offload_optimizer": host}}
    found["offload-zero3"] = {
        "zero_optimization": {"stage": 3, "offload_optimizer": host, "offload_param": host}
    }
    found["adam-l2"] = {
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False},
        }
    }
    found["sgd"] = {"optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}}
    found["of-torch"] = {
        "optimizer": {"type": "RMSprop", "params": {"lr": 0.001}},
        "zero_allow_untested_optimizer": True,
    }
    found["fixed-scale"] = {"fp16": {"enabled": True, "loss_scale": 128}}
    for stage in (1, 2, 3):  # loss.backward(), and zero_grad() before each micro-batch
        zero = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 4}
        found[f"plain-backward-zero{stage}"] = zero
        found[f"zero-grad-zero{stage}"] = zero
        found[f"built-bf16-zero{stage}"] = {"zero_optimization": {"stage": stage}}
    for stage in (1, 2, 3):  # one loss that is not finite, on rank 1
        zero = {"zero_optimization": {"stage": stage}}
        found[f"nan-zero{stage}-fp32"] = zero
        found[f"nan-zero{stage}-bf16"] = zero | {"bf16": {"enabled": True}}
    found["dynamic-scale"] = {"fp16": {"enabled": True, "initial_scale_power": 30}}
    return found


CASES = _cases()


def config_of(case: str) -> dict[str, Any]:
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 2},
        "steps_per_print": 10,
    }
    return base | copy.deepcopy(CASES[case])


# Expressions; `e` is the engine, `p` its first parameter, `ds` the package.
CALLS = """
e.train_batch_size() | e.train_micro_batch_size_per_gpu() | e.gradient_accumulation_steps()
e.get_batch_info() | e.zero_optimization() | e.zero_optimization_stage()
e.zero_optimization_partition_gradients() | e.zero_optimization_partition_weights()
e.fp16_enabled() | e.bfloat16_enabled() | e.amp_enabled() | e.gradient_clipping()
e.optimizer_name() | e.scheduler_name() | e.steps_per_print() | e.wall_clock_breakdown()
e.dynamic_loss_scale() | e.postscale_gradients() | e.gradient_predivide_factor()
e.zero_allow_untested_optimizer() | e.memory_breakdown() | e.sparse_gradients_enabled()
e.zero_reduce_scatter() | e.zero_overlap_comm() | e.zero_reduce_bucket_size()
e.zero_allgather_bucket_size() | e.zero_contiguous_gradients() | e.zero_sub_group_size()
e.zero_max_live_parameters() | e.zero_gather_16bit_weights_on_model_save()
e.zero_load_from_fp32_weights() | e.zero_elastic_checkpoint() | e.zero_round_robin_gradients()
e.is_gradient_accumulation_boundary() | e.get_lr() | e.get_mom() | e.global_steps
e.micro_steps | e.skipped_steps | e.global_samples | e.world_size | e.dp_world_size
e.mp_world_size | e.local_rank | e.global_rank | e.training | e.eval().training
e.train().training | type(e).__name__ | type(e.optimizer).__name__
type(e.lr_scheduler).__name__ | type(e.module).__name__ | isinstance(e, torch.nn.Module)
e.optimizer.overflow | len(e.optimizer.param_groups) | e.optimizer.param_groups[0]['lr']
e.lr_scheduler.get_last_lr() | e.lr_scheduler.state_dict() | e.was_step_applied()
list(e.module.state_dict()) | list(e.state_dict())[:2] | sum(x.numel() for x in e.parameters())
[n for n, _ in e.named_parameters()][:2] | e.training_dataloader
round(e.get_global_grad_norm(), 4)
e.config['gradient_clipping'] | e.optimizer.loss_scale
len(e.optimizer.single_partition_of_fp32_groups)
round(ds.utils.safe_get_full_fp32_param(p).double().sum().item(), 3)
round(ds.utils.safe_get_full_optimizer_state(p, 'exp_avg').double().norm().item(), 4)
round(ds.utils.safe_get_full_optimizer_state(p, 'exp_avg_sq').double().norm().item(), 5)
ds.utils.safe_get_full_fp32_param(p).shape | ds.utils.safe_get_full_fp32_param(p).dtype
ds.comm.is_initialized() | ds.comm.get_rank() | ds.comm.get_world_size() | ds.comm.get_local_rank()
ds.get_accelerator().device_name() | ds.get_accelerator().communication_backend_name()
ds.get_accelerator().is_available() | ds.get_accelerator().device_count()
ds.get_accelerator().is_synchronized_device() | ds.runtime.lr_schedules.VALID_LR_SCHEDULES
ds.checkpointing.is_configured() | ds.zero.Init.__name__
ds.utils.groups._get_data_parallel_world_size()
ds.utils.groups._get_data_parallel_rank() | ds.utils.logger.name | e.dump_state.__name__
hasattr(e, '_hf_hook') | e.module is model | e.device.type | e.zero_cpu_offload()
"""


def expressions() -> list[str]:
    return [one.strip() for line in CALLS.strip().splitlines() for one in line.split(" | ")]
