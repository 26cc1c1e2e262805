"""The modules of DeepSpeed 0.19.8 and their public names, read from as_deepspeed/names.jsonl.

If the drop-in package does not define a name itself, it takes the name from this table. `penstock
doctor --deepspeed` compares scripts with the table. tests/drop_in/record_names.py writes the table.
"""

from __future__ import annotations

import difflib
import functools
import json
import pathlib
from typing import Any

FOLDER = pathlib.Path(__file__).parent / "as_deepspeed"
TENSOR = 'set "tensor_parallel": {"autotp_size": N} in the config (mesh.tensor)'
_TRAINS = "use deepspeed.init_inference(), or call the model under torch.inference_mode()"
_LINEAR = "use peft, whose adapters train under every strategy"
_LAYER = "use torch's own layer"
_COMPILE = "compile the model's blocks with torch.compile() before initialize()"
_WHOLE = "the engine moves this state itself; config sections say where the state is kept"
_DATA = "make batches in the script; pass the length of sequences to the data loader"
_OFFLOAD = 'set "offload_optimizer" in the config (offload.late_update overlaps the update)'
_REMOVED = "DeepSpeed 0.19.8 removed it"
_NORMS = "the engine shards gradients; engine.get_global_grad_norm() returns their norm"

# Keys of a line whose names work. A name under any other key raises an error when it is used.
MADE = ("values", "enums", "errors", "settings", "getters")

# Module or name -> what to do instead. The longest entry that contains a name applies.
_INSTEAD = {
    "deepspeed": "it is internal to DeepSpeed, and the engine has its own",
    "deepspeed.accelerator": "use torch.accelerator; deepspeed.get_accelerator() wraps it",
    "deepspeed.autotuning": "`penstock plan` predicts memory and step time of every strategy",
    "deepspeed.checkpoint": "`penstock convert` reads all of DeepSpeed's kinds of checkpoints",
    "deepspeed.comm": "use torch.distributed, or deepspeed.comm.all_reduce() and its neighbours",
    "deepspeed.compile": _COMPILE,
    "deepspeed.compression": "Penstock only trains; quantize or prune the exported model",
    "deepspeed.default_inference_config": _TRAINS,
    "deepspeed.set_autotp_mode": TENSOR,
    "deepspeed.tp_model_init": TENSOR,
    "deepspeed.datastates": "engine.save_checkpoint() writes complete checkpoints in parallel",
    "deepspeed.elasticity": f"{_REMOVED}; `penstock run --nnodes MIN:MAX` starts elastic runs",
    "deepspeed.inference": _TRAINS,
    "deepspeed.io": "use open(); engine.save_checkpoint() writes checkpoints in parallel",
    "deepspeed.launcher": "`penstock run --dry-run` prints the command of every node",
    "deepspeed.linear": _LINEAR,
    "deepspeed.model_implementations": _TRAINS,
    "deepspeed.module_inject": "layers train unchanged; drop the call",
    "deepspeed.module_inject.auto_tp": TENSOR,
    "deepspeed.module_inject.autotp_config": TENSOR,
    "deepspeed.module_inject.layers": TENSOR,
    "deepspeed.moe": "expert parallelism is not built yet; a model's own experts train unchanged",
    "deepspeed.nvme": "`penstock bench` measures the disk",
    "deepspeed.ops": "the engine's kernels cannot be called separately",
    "deepspeed.ops.deepspeed4science": _LAYER,
    "deepspeed.ops.adam": _OFFLOAD,
    "deepspeed.ops.lamb": "its trust ratio needs whole parameters; use AdamW or Lion",
    "deepspeed.ops.sparse_attention": f"{_REMOVED}; use torch.nn.attention.flex_attention",
    "deepspeed.ops.transformer": _LAYER,
    "deepspeed.profiling": "use torch.profiler or penstock.trace()",
    "deepspeed.runtime.activation_checkpointing": "use checkpointing.checkpoint()",
    "deepspeed.runtime.checkpoint_engine": "engine.save_checkpoint() writes in parallel",
    "deepspeed.runtime.comm": "the engine compresses no gradients; drop the call",
    "deepspeed.runtime.config": "read the keys of the config's dict",
    "deepspeed.runtime.data_pipeline": _DATA,
    "deepspeed.runtime.eigenvalue": _REMOVED,
    "deepspeed.runtime.fp16.onebit": f"{_REMOVED}; set the optimizer's type in the config",
    "deepspeed.runtime.progressive_layer_drop": _REMOVED,
    "deepspeed.runtime.quantize": _REMOVED,
    "deepspeed.runtime.domino": "mesh.tensor cuts layers over ranks (docs/parallel.md)",
    "deepspeed.runtime.model_checkpointing": "engine.save_checkpoint() writes in parallel",
    "deepspeed.runtime.pipe": "PipelineModule and engine.train_batch() run the stages",
    "deepspeed.runtime.rollout": "engine.module.generate() works under every strategy",
    "deepspeed.runtime.state_dict_factory": "`penstock convert --to torch` joins model ranks",
    "deepspeed.runtime.superoffload": _OFFLOAD,
    "deepspeed.runtime.swap_tensor": _WHOLE,
    "deepspeed.runtime.tensor_parallel": TENSOR,
    "deepspeed.runtime.utils.CheckOverflow": _NORMS,
    "deepspeed.runtime.utils.get_global_norm": _NORMS,
    "deepspeed.runtime.utils.get_global_norm_of_tensors": _NORMS,
    "deepspeed.runtime.utils.get_grad_norm": _NORMS,
    "deepspeed.runtime.utils.get_weight_norm": "use torch.linalg",
    "deepspeed.runtime.weight_quantizer": _TRAINS,
    "deepspeed.runtime.zenflow": _OFFLOAD,
    "deepspeed.runtime.zero": _WHOLE,
    "deepspeed.sequence": "long sequences: mesh.sequence and tiling.loss_tokens (docs/parallel.md)",
}
# (Module, module that has these names here, names). NAME=OTHER: NAME is called OTHER there.
_ELSEWHERE = (
    ("accelerator.cuda_accelerator", "deepspeed.accelerator.device_accelerator",
     "CUDA_Accelerator"),
    ("elasticity.config", "penstock.launch.elastic_batches", "ElasticityConfig ElasticityError "
     "ElasticityConfigError ElasticityIncompatibleWorldSize"),
    ("elasticity.elasticity", "penstock.launch.elastic_batches", "compute_elastic_config "
     "elasticity_enabled ensure_immutable_elastic_config"),
    ("io", "deepspeed.io.file_writers", "FastFileWriter FastFileWriterConfig MockFileWriter "
     "PyFileWriter"),
    ("monitor.comet", "penstock.monitor.deepspeed", "CometMonitor"),
    ("monitor.config", "penstock.monitor.deepspeed_config", "CometConfig CSVConfig WandbConfig "
     "TensorBoardConfig DeepSpeedMonitorConfig get_monitor_config"),
    ("monitor.csv_monitor", "penstock.monitor.deepspeed", "csvMonitor=CsvMonitor"),
    ("monitor.monitor", "penstock.monitor.deepspeed", "Monitor MonitorMaster"),
    ("monitor.tensorboard", "penstock.monitor.deepspeed", "TensorBoardMonitor"),
    ("monitor.wandb", "penstock.monitor.deepspeed", "WandbMonitor"),
    ("ops.lion.fused_lion", "deepspeed.ops.lion.cpu_lion", "FusedLion"),
    ("ops.op_builder.builder", "deepspeed.ops.op_builder", "OpBuilder"),
    ("pipe", "deepspeed.runtime.pipe.topology", "ProcessTopology"),
    ("runtime", "deepspeed.runtime.base_optimizer", "DeepSpeedOptimizer ZeROOptimizer"),
    ("runtime.bf16_optimizer", "deepspeed.runtime.base_optimizer", "BF16_Optimizer"),
    ("runtime.compiler", "torch.compiler", "disable is_compiling"),
    ("runtime.dataloader", "deepspeed.utils.loaders", "DeepSpeedDataLoader RepeatingLoader"),
    ("runtime.fp16.fused_optimizer", "deepspeed.runtime.base_optimizer", "FP16_Optimizer"),
    ("runtime.fp16.unfused_optimizer", "deepspeed.runtime.base_optimizer", "FP16_UnfusedOptimizer"),
    ("runtime.lr_schedules", "penstock.front.schedules", "LRRangeTest OneCycle WarmupCosineLR "
     "WarmupDecayLR WarmupLR"),
    ("runtime.zero", "deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("runtime.zero", "deepspeed.runtime.zero.partition_parameters", "MiCS_Init "
     "unregister_external_parameter"),
    ("runtime.zero", "deepspeed.runtime.zero.estimates",
     "estimate_zero3_model_states_mem_needs_all_cold "
     "estimate_zero3_model_states_mem_needs_all_live"),
    ("runtime.zero", "deepspeed.runtime.zero.estimates",
     "estimate_zero2_model_states_mem_needs_all_cold "
     "estimate_zero2_model_states_mem_needs_all_live"),
    ("runtime.zero", "deepspeed.runtime.zero.utils", "unwrap_model_for_generation"),
    ("runtime.zero.stage3", "deepspeed.runtime.zero.estimates",
     "estimate_zero3_model_states_mem_needs_all_cold "
     "estimate_zero3_model_states_mem_needs_all_live"),
    ("runtime.zero.stage_1_and_2", "deepspeed.runtime.base_optimizer", "DeepSpeedZeroOptimizer"),
    ("runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.estimates",
     "estimate_zero2_model_states_mem_needs_all_cold "
     "estimate_zero2_model_states_mem_needs_all_live"),
    ("runtime.zero.linear", "torch.nn", "LinearModuleForZeroStage3=Linear"),
    ("runtime.zero.linear", "torch.nn.functional", "zero3_linear_wrap=linear"),
    ("runtime.zero.mics", "deepspeed.runtime.zero.partition_parameters", "MiCS_Init"),
    ("utils.comms_logging", "penstock.monitor.deepspeed_comms", "CommsLogger calc_bw_log "
     "convert_size"),
)  # fmt: skip
# Modules of older versions that scripts still import, in the form of the table.
_OLDER: list[dict[str, Any]] = [
    {
        "module": "deepspeed.elasticity",
        "package": True,
        "from": {
            "deepspeed.elasticity.elasticity": [
                "compute_elastic_config",
                "elasticity_enabled",
                "ensure_immutable_elastic_config",
            ]
        },
    },
    {"module": "deepspeed.elasticity.config"},
    {"module": "deepspeed.elasticity.elasticity"},
    {"module": "deepspeed.elasticity.elastic_agent", "classes": ["DSElasticAgent"]},
    {"module": "deepspeed.elasticity.utils", "defs": ["is_torch_elastic_compatible"]},
    {
        "module": "deepspeed.runtime.config",
        "values": {
            "ONEBIT_ADAM_OPTIMIZER": "onebitadam",
            "ONEBIT_LAMB_OPTIMIZER": "onebitlamb",
            "ZERO_ONE_ADAM_OPTIMIZER": "zerooneadam",
        },
    },
    {
        "module": "deepspeed.runtime.checkpoint_engine.nebula_checkpoint_engine",
        "classes": ["NebulaCheckpointEngine"],
    },
    {"module": "deepspeed.runtime.fp16.onebit", "package": True},
    {"module": "deepspeed.runtime.fp16.onebit.adam", "classes": ["OnebitAdam"]},
    {"module": "deepspeed.runtime.fp16.onebit.lamb", "classes": ["OnebitLamb"]},
    {"module": "deepspeed.runtime.fp16.onebit.zoadam", "classes": ["ZeroOneAdam"]},
    {"module": "deepspeed.runtime.eigenvalue", "classes": ["Eigenvalue"]},
    {"module": "deepspeed.runtime.progressive_layer_drop", "classes": ["ProgressiveLayerDrop"]},
    {"module": "deepspeed.runtime.quantize", "classes": ["Quantizer"]},
    {"module": "deepspeed.runtime.utils", "defs": ["get_grad_norm"]},
    {"module": "deepspeed.runtime.zero.mics"},
    {
        "module": "deepspeed.compression.compress",
        "defs": ["init_compression", "redundancy_clean", "student_initialization"],
    },
    {
        "module": "deepspeed.ops.sparse_attention",
        "package": True,
        "classes": ["BertSparseSelfAttention", "SparseAttentionUtils", "SparseSelfAttention"],
        "from": {"deepspeed.ops.sparse_attention.sparsity_config": ["*"]},
    },
    {
        "module": "deepspeed.ops.sparse_attention.sparsity_config",
        "classes": [
            "BigBirdSparsityConfig",
            "BSLongformerSparsityConfig",
            "DenseSparsityConfig",
            "FixedSparsityConfig",
            "LocalSlidingWindowSparsityConfig",
            "SparsityConfig",
            "VariableSparsityConfig",
        ],
    },
]


@functools.cache
def table() -> dict[str, dict[str, Any]]:
    """Returns the line of each module. tests/drop_in/record_names.py describes its keys."""
    text = (FOLDER / "names.jsonl").read_text(encoding="utf-8")
    lines = {line["module"]: line for line in map(json.loads, text.splitlines())}
    for old in _OLDER:
        line = lines.setdefault(old["module"], old)
        if line is not old:
            line["values"] = {**line.get("values", {}), **old.get("values", {})}
            line["defs"] = [*line.get("defs", ()), *old.get("defs", ())]
    return lines


def defined(module: str) -> set[str]:
    """Returns the names that a module defines."""
    line = table().get(module, {})
    return {one for kind in (*MADE, "defs", "classes", "others") for one in line.get(kind, ())}


@functools.cache
def _moved() -> dict[tuple[str, str], tuple[str, str]]:
    found = {}
    for module, origin, names in _ELSEWHERE:
        for made, _, other in (one.partition("=") for one in names.split()):
            found[f"deepspeed.{module}", made] = origin, other or made
    return found


def elsewhere(module: str, name: str) -> tuple[str, str] | None:
    """Returns the module and name that a name of a module without a file stands for here."""
    return _moved().get((module, name))


def source(module: str, name: str) -> tuple[str, str] | None:
    """Returns the module and name from which `module` imports `name`; None if it does not."""
    if (module, name) in _moved():
        return elsewhere(module, name)
    for origin, names in table().get(module, {}).get("from", {}).items():
        for one in names:
            made, _, other = one.partition("=")
            if made == name:
                return origin, other or name
            if one == "*" and (name in defined(origin) or source(origin, name)):
                return origin, name
    return None


def knows(module: str, name: str) -> bool:
    """Whether the module of DeepSpeed has the name."""
    inner = f"{module}.{name}"
    return inner in table() or name in defined(module) or source(module, name) is not None


def instead(path: str) -> str:
    """Returns what to do instead of using a name that Penstock does not support."""
    parts = path.split(".")
    ends = range(len(parts), 0, -1)
    return next(_INSTEAD[one] for end in ends if (one := ".".join(parts[:end])) in _INSTEAD)


def no_such_name(module: str, name: str, here: set[str]) -> str:
    """Returns the text of the error for a name that neither package has.

    Args:
        here: the public names that the module has in Penstock's package.
    """
    if name.startswith("_"):
        return f"{module}.{name}: Penstock's package does not have DeepSpeed's private names"
    homes = [one for one in table() if name in defined(one)]
    near = difflib.get_close_matches(name, sorted(here | defined(module)), n=1, cutoff=0.6)
    advice = "see docs/deepspeed.md"
    if homes:
        advice = f"it is in {min(homes, key=lambda one: _distance(one, module))}"
    elif near:
        advice = f"did you mean {near[0]}?"
    return (
        f"{module}.{name}: neither DeepSpeed 0.19.8 nor Penstock's package has this name; {advice}"
    )


def _distance(one: str, other: str) -> tuple[int, str]:
    """Returns a sort key: the number of folders between two modules, then the name of the first."""
    left, right = one.split("."), other.split(".")
    same = sum(1 for a, b in zip(left, right, strict=False) if a == b)
    return len(left) + len(right) - 2 * same, one
