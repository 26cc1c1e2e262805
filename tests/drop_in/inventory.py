"""Names that scripts and frameworks import from deepspeed, and a smallest use of each: an
expression, in which `x` is the name. A line without one is imported alone; with `!` the use raises
Penstock's ConfigError."""

from __future__ import annotations

import re
import sys
from typing import Any

COMPARES = re.compile(r" (==|is) ")

NAMES = """
deepspeed.__version__ x.startswith('0.19')
deepspeed.initialize
deepspeed.init_distributed x()
deepspeed.add_config_arguments x(argparse.ArgumentParser()).parse_args(['--deepspeed'])
deepspeed.add_tuning_arguments x(argparse.ArgumentParser()).parse_args([])
deepspeed.DeepSpeedEngine x is deepspeed.runtime.engine.DeepSpeedEngine
deepspeed.DeepSpeedConfig x({'train_batch_size': 1}).train_batch_size
deepspeed.DeepSpeedOptimizer x()
deepspeed.ZeROOptimizer
deepspeed.PipelineModule x(layers=[model], num_stages=1).num_pipeline_stages() == 1
deepspeed.OnDevice x(dtype=torch.float32, device='meta').__enter__().__exit__(None, None, None)
deepspeed.init_inference x(model, dtype=torch.float32).module is model
deepspeed.tp_model_init ! x(model=model, tp_size=2, dtype=torch.float32)
deepspeed.set_autotp_mode ! x(training=True)
deepspeed.PipelineEngine issubclass(x, deepspeed.DeepSpeedEngine)
deepspeed.DeepSpeedHybridEngine issubclass(x, deepspeed.DeepSpeedEngine)
deepspeed.InferenceEngine issubclass(x, torch.nn.Module)
deepspeed.DeepSpeedTransformerLayer ! x(None)
deepspeed.log_dist x('text', ranks=[1])
deepspeed.logger x.level
deepspeed.get_accelerator x().device_name()
deepspeed.checkpointing.configure x(mpu_=None, partition_activations=False)
deepspeed.checkpointing.is_configured x()
deepspeed.checkpointing.checkpoint x(torch.sin, torch.ones(2, requires_grad=True)).sum().backward()
deepspeed.checkpointing.non_reentrant_checkpoint x(torch.sin, torch.ones(2, requires_grad=True))
deepspeed.checkpointing.get_cuda_rng_tracker x().get_states()
deepspeed.checkpointing.model_parallel_cuda_manual_seed x(3)
deepspeed.checkpointing.reset x()
deepspeed.comm.is_initialized x()
deepspeed.comm.get_rank x()
deepspeed.comm.get_world_size x()
deepspeed.comm.get_local_rank x()
deepspeed.comm.init_distributed x(dist_backend=None, auto_mpi_discovery=False, timeout=None)
deepspeed.comm.all_reduce x(torch.ones(2))
deepspeed.comm.broadcast x(torch.ones(2), 0)
deepspeed.comm.barrier x()
deepspeed.comm.all_gather x([torch.ones(2)], torch.ones(2))
deepspeed.comm.all_gather_into_tensor x(torch.ones(2), torch.ones(2))
deepspeed.comm.reduce_scatter_tensor x(torch.ones(2), torch.ones(2))
deepspeed.comm.inference_all_reduce x(torch.ones(2))
deepspeed.comm.get_world_group x()
deepspeed.comm.new_group x([0])
deepspeed.comm.ReduceOp x.SUM
deepspeed.comm.configure x(None)
deepspeed.comm.log_summary x()
deepspeed.comm.initialize_mesh_device x((1, 1), ('data_parallel', 'sequence_parallel'))
deepspeed.zero.Init x(enabled=False).__enter__()
deepspeed.zero.GatheredParameters x([]).__enter__()
deepspeed.zero.register_external_parameter x(model, model.weight) or model.weight.is_external_param
deepspeed.zero.unregister_external_parameter x(model, model.weight)
deepspeed.zero.TiledLinear x(4, 4, in_splits=2)(torch.ones(4))
deepspeed.zero.TiledLinearReturnBias x(4, 4)
deepspeed.zero.MiCS_Init x(enabled=False)
deepspeed.zero.ZeroParamStatus x.AVAILABLE.value == 1
deepspeed.zero.ZeroParamType x.NORMAL.value == 1
deepspeed.zero.unwrap_model_for_generation x(model).__enter__()
deepspeed.zero.estimate_zero2_model_states_mem_needs_all_live x(model)
deepspeed.zero.estimate_zero2_model_states_mem_needs_all_cold x(1000)
deepspeed.zero.estimate_zero3_model_states_mem_needs_all_live x(model)
deepspeed.zero.estimate_zero3_model_states_mem_needs_all_cold x(1000, 100)
deepspeed.runtime.engine.DeepSpeedEngine
deepspeed.runtime.config.DeepSpeedConfig x({'bf16': {'enabled': True}}).bfloat16_enabled
deepspeed.runtime.config.DeepSpeedConfigError
deepspeed.runtime.config_utils.get_scalar_param x({}, 'a', 1) == 1
deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES len(x) == 5
deepspeed.runtime.lr_schedules.WarmupLR x(sgd).get_last_lr()
deepspeed.runtime.lr_schedules.WarmupDecayLR x(sgd, 10).step()
deepspeed.runtime.lr_schedules.WarmupCosineLR x(sgd, 10).state_dict()
deepspeed.runtime.lr_schedules.OneCycle x(sgd, 0.1, 0.2).get_lr()
deepspeed.runtime.lr_schedules.LRRangeTest x(sgd).step()
deepspeed.runtime.lr_schedules.get_config_from_args x(argparse.Namespace(lr_schedule='WarmupLR'))
deepspeed.runtime.lr_schedules.get_lr_from_config x({'type': 'WarmupLR', 'params': {}})
deepspeed.runtime.base_optimizer.DeepSpeedOptimizer
deepspeed.runtime.bf16_optimizer.BF16_Optimizer
deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer
deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer
deepspeed.runtime.fp16.loss_scaler.LossScaler x(scale=2).loss_scale
deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler x(init_scale=4).cur_scale
deepspeed.runtime.utils.move_to_device x([torch.ones(1)], 'cpu')
deepspeed.runtime.utils.see_memory_usage x('now', force=True)
deepspeed.runtime.utils.clip_grad_norm_ x(model.parameters(), 1.0)
deepspeed.runtime.utils.partition_uniform x(7, 3)
deepspeed.runtime.dataloader.RepeatingLoader next(x([1]))
deepspeed.runtime.dataloader.DeepSpeedDataLoader
deepspeed.runtime.zero.config.ZeroStageEnum x(3).name == 'weights'
deepspeed.runtime.zero.config.DeepSpeedZeroConfig x(stage=2).stage
deepspeed.runtime.zero.offload_config.OffloadDeviceEnum x('cpu')
deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum
deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer
deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3
deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload x(model).forward_hooks
deepspeed.runtime.zero.partition_parameters.ZeroParamStatus
deepspeed.runtime.zero.partition_parameters.GatheredParameters
deepspeed.runtime.zero.partition_parameters.Init
deepspeed.runtime.zero.partition_parameters._orig_torch_arange x(3)
deepspeed.runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor
deepspeed.runtime.zero.partition_parameters.is_zero_param x(model.weight)
deepspeed.runtime.activation_checkpointing.checkpointing.configure
deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF x.register_with_transformers
deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter len(x([1], 0, 0, 2, 0))
deepspeed.runtime.sequence_parallel.ulysses_sp.TiledMLP x.apply
deepspeed.runtime.sequence_parallel.parallel_state_sp.get_sequence_parallel_group ! x()
deepspeed.runtime.sequence_parallel.parallel_state_sp.initialize_sequence_parallel x(1)
deepspeed.runtime.sequence_parallel.ulysses_sp.sequence_tiled_compute
deepspeed.runtime.pipe.engine.PipelineEngine x is deepspeed.PipelineEngine
deepspeed.runtime.pipe.topology.PipeModelDataParallelTopology x(2, 2, 2).get_dim('model')
deepspeed.runtime.pipe.topology.PipeDataParallelTopology x(2, 3).world_size() == 6
deepspeed.runtime.pipe.topology.PipelineParallelGrid x().get_data_parallel_world_size() == 1
deepspeed.runtime.pipe.module.PipelineModule x is deepspeed.PipelineModule
deepspeed.runtime.pipe.LayerSpec x is deepspeed.pipe.LayerSpec
deepspeed.pipe.PipelineModule ! x(layers=[model], num_stages=2)
deepspeed.pipe.LayerSpec x(torch.nn.Linear, 4, 2).build().out_features == 2
deepspeed.pipe.TiedLayerSpec x('a', torch.nn.Linear, 4, 2, tied_weight_attr='bias').key == 'a'
deepspeed.pipe.ProcessTopology x(['a', 'b'], [2, 3]).get_rank(a=1, b=2) == 5
deepspeed.moe.layer.MoE ! x(4, model)
deepspeed.moe.utils.is_moe_param x(model.weight)
deepspeed.moe.utils.has_moe_layers x(model)
deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer x({'params': []})
deepspeed.checkpoint.utils.clone_tensors_for_torch_save x({'a': [torch.ones(2)]})
deepspeed.checkpoint.constants.OPTIMIZER_STATE_DICT x == 'optimizer_state_dict'
deepspeed.checkpoint.DeepSpeedCheckpoint ! x('folder')
deepspeed.ops.__compatible_ops__ x['cpu_adam']
deepspeed.ops.adam.DeepSpeedCPUAdam x(model.parameters(), lr=0.1, adamw_mode=False)
deepspeed.ops.adam.FusedAdam x(model.parameters())
deepspeed.ops.adam.ZenFlowCPUAdam ! x(model.parameters())
deepspeed.ops.adagrad.DeepSpeedCPUAdagrad x(model.parameters())
deepspeed.ops.lion.DeepSpeedCPULion x(model.parameters())
deepspeed.ops.lion.FusedLion x(model.parameters())
deepspeed.ops.lamb.FusedLamb ! x(model.parameters())
deepspeed.ops.aio.AsyncIOBuilder x.NAME in deepspeed.ops.__compatible_ops__
deepspeed.ops.op_builder.CPUAdamBuilder ! x().load()
deepspeed.ops.op_builder.UtilsBuilder x().is_compatible()
deepspeed.utils.logger
deepspeed.utils.log_dist x('text', ranks=[1])
deepspeed.utils.logging.logger
deepspeed.utils.logging.set_log_level_from_string x('warning')
deepspeed.utils.RepeatingLoader next(x([1]))
deepspeed.utils.OnDevice
deepspeed.utils.instrument_w_nvtx x(len)([])
deepspeed.utils.groups._get_data_parallel_group x()
deepspeed.utils.groups._get_data_parallel_world_size x()
deepspeed.utils.groups._get_sequence_parallel_world_size x()
deepspeed.utils.groups._get_sequence_parallel_rank x()
deepspeed.utils.groups._get_sequence_parallel_group ! x()
deepspeed.utils.groups._get_sequence_data_parallel_world_size x() == 1
deepspeed.utils.groups._get_expert_parallel_group ! x('ep')
deepspeed.utils.groups.initialize x(ep_size=1)
deepspeed.utils.set_z3_leaf_modules x(model, [torch.nn.Linear])
deepspeed.utils.unset_z3_leaf_modules x(model, [torch.nn.Linear])
deepspeed.utils.get_z3_leaf_modules x(model)
deepspeed.utils.z3_leaf_module.z3_leaf_module x(model)
deepspeed.utils.safe_get_full_fp32_param ! x(model.weight)
deepspeed.utils.safe_get_full_grad ! x(model.weight)
deepspeed.utils.safe_get_full_optimizer_state ! x(model.weight, 'exp_avg')
deepspeed.utils.safe_set_full_fp32_param ! x(model.weight, torch.ones(4, 4))
deepspeed.utils.safe_set_full_grad ! x(model.weight, torch.ones(4, 4))
deepspeed.utils.safe_set_full_optimizer_state ! x(model.weight, torch.ones(4, 4), 'exp_avg')
deepspeed.utils.safe_get_local_fp32_param ! x(model.weight)
deepspeed.utils.safe_get_local_grad ! x(model.weight)
deepspeed.utils.safe_get_local_optimizer_state ! x(model.weight, 'exp_avg')
deepspeed.utils.safe_set_local_fp32_param ! x(model.weight, torch.ones(4))
deepspeed.utils.safe_set_local_grad ! x(model.weight, torch.ones(4))
deepspeed.utils.safe_set_local_optimizer_state ! x(model.weight, torch.ones(4), 'exp_avg')
deepspeed.utils.safe_update_full_grad_vectorized x([], None)
deepspeed.utils.tensor_fragment.fragment_address x(numel=1, start=0)
deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint ! x('.')
deepspeed.utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict
deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint ! x(model, '.')
deepspeed.utils.zero_to_fp32.get_model_state_file
deepspeed.utils.zero_to_fp32.get_optim_files
deepspeed.utils.timer.SynchronizedWallClockTimer x()('a').start()
deepspeed.accelerator.get_accelerator x().communication_backend_name() == 'gloo'
deepspeed.accelerator.is_current_accelerator_supported x()
deepspeed.launcher.runner.DEEPSPEED_ENVIRONMENT_NAME x == '.deepspeed_env'
deepspeed.launcher.runner.main
deepspeed.monitor.monitor.Monitor
deepspeed.monitor.monitor.MonitorMaster x({}).write_events([('Train/a', 1.0, 1)])
deepspeed.monitor.config.get_monitor_config x({'wandb': {'team': 'a'}}).enabled == False
deepspeed.monitor.config.DeepSpeedMonitorConfig x(csv_monitor={'enabled': True}).enabled
deepspeed.monitor.config.TensorBoardConfig x().job_name == 'DeepSpeedJobName'
deepspeed.monitor.config.WandbConfig x().project == 'deepspeed'
deepspeed.monitor.config.CSVConfig x().output_path == ''
deepspeed.monitor.config.CometConfig x().samples_log_interval == 100
deepspeed.monitor.tensorboard.TensorBoardMonitor
deepspeed.monitor.wandb.WandbMonitor
deepspeed.monitor.csv_monitor.csvMonitor
deepspeed.monitor.comet.CometMonitor
deepspeed.profiling.flops_profiler.FlopsProfiler x(model).get_total_params()
deepspeed.profiling.flops_profiler.get_model_profile x(model, input_shape=(2, 4))
deepspeed.git_version_info.torch_info x['version']
deepspeed.sequence.layer.DistributedAttention x(model, None, 2, 1).scatter_idx == 2
deepspeed.linear.LoRAConfig ! x()
deepspeed.ops.transformer.DeepSpeedTransformerLayer ! x(None)
deepspeed.inference.config.DeepSpeedInferenceConfig ! x()
deepspeed.inference.engine.InferenceEngine issubclass(x, torch.nn.Module)
deepspeed.runtime.hybrid_engine.DeepSpeedHybridEngine x is deepspeed.DeepSpeedHybridEngine
deepspeed.runtime.compiler.is_compile_supported x()
deepspeed.runtime.zero.utils.is_zero_param x(model.weight) is False
deepspeed.runtime.utils.get_global_norm ! x([])
deepspeed.runtime.utils.CheckOverflow ! x()
deepspeed.runtime.utils.DummyOptim x([]).param_groups
deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator
deepspeed.utils.timer.ThroughputTimer x(batch_size=2).start()
deepspeed.env_report.cli_main x() == 0
deepspeed.module_inject.layers.GatherReplacedLayerParams x([model.weight], model).__enter__()
deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine.TorchCheckpointEngine x().commit(None)
deepspeed.runtime.checkpoint_engine.TorchCheckpointEngine x().load
deepspeed.runtime.checkpoint_engine.nebula_checkpoint_engine.NebulaCheckpointEngine ! x()
deepspeed.elasticity.compute_elastic_config callable(x)
deepspeed.elasticity.config.ElasticityError issubclass(x, Exception)
deepspeed.elasticity.elasticity.compute_elastic_config callable(x)
deepspeed.compression.helper.recursive_getattr x(model, 'weight.shape') == (4, 4)
deepspeed.compression.helper.recursive_setattr x(model, 'bias', None)
deepspeed.compression.helper.convert_conv1d_to_linear x(model, torch.nn.Conv1d) is model
deepspeed.compression.compress.init_compression ! x(model, {})
deepspeed.compression.compress.redundancy_clean ! x(model, {})
deepspeed.launcher.runner.EXPORT_ENVS 'PYTHON' in x
deepspeed.launcher.runner.fetch_hostfile x('/nowhere') is None
deepspeed.launcher.runner.parse_inclusion_exclusion x({'a': 2}, 'a:1', '') == {'a': [1]}
deepspeed.launcher.runner.parse_resource_filter x({'a': [0, 1], 'b': [0]}, '', 'a') == {'b': [0]}
deepspeed.launcher.runner.encode_world_info x({'a': [0]}) == 'eyJhIjogWzBdfQ=='
deepspeed.launcher.runner.parse_args x(['t.py']).user_script == 't.py'
deepspeed.launcher.runner.DLTS_HOSTFILE x == '/job/hostfile'
deepspeed.launcher.multinode_runner.PDSHRunner callable(x)
deepspeed.launcher.constants.PDSH_LAUNCHER x == 'pdsh'
deepspeed.comm.mpi_discovery ! x()
deepspeed.comm.TorchBackend ! x()
deepspeed.comm.ProcessGroup x is torch.distributed.ProcessGroup
deepspeed.checkpointing._CUDA_RNG_STATE_TRACKER x is deepspeed.checkpointing.get_cuda_rng_tracker()
deepspeed.checkpointing._set_cuda_rng_state x(torch.get_rng_state())
deepspeed.ops.sparse_attention.sparsity_config.LocalSlidingWindowSparsityConfig ! x(4)
deepspeed.checkpointing._MODEL_PARALLEL_RNG_TRACKER_NAME x == 'model-parallel-rng'
deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset.MMapIndexedDataset ! x('path')
deepspeed.runtime.data_pipeline.constants.CURRICULUM_LEARNING_MIN_DIFFICULTY x == 'min_difficulty'
deepspeed.runtime.data_pipeline.data_routing.helper.convert_to_random_ltd ! x(model, None)
deepspeed.ops.sparse_attention.FixedSparsityConfig ! x(4)
deepspeed.ops.sparse_attention.BigBirdSparsityConfig ! x(4)
deepspeed.runtime.pipe.schedule.PipeSchedule x.steps and x.num_pipe_buffers
deepspeed.runtime.pipe.schedule.ForwardPass x(1) == x(buffer_id=1)
deepspeed.runtime.pipe.schedule.InferenceSchedule len(list(x(2, 2, 0))) == 3
deepspeed.PipelineEngine._INSTRUCTION_MAP ! x[int]
deepspeed.PipelineEngine._INSTRUCTION_MAP ! x.__setitem__(int, int)
deepspeed.checkpoint.ORIGINAL_VOCAB_SIZE x == 'original_vocab_size'
deepspeed.checkpoint.constants.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 x.endswith('cat_dim_0')
deepspeed.checkpoint.UNIVERSAL_CHECKPOINT_INFO x == 'universal_checkpoint_info'
deepspeed.checkpoint.UNIVERSAL_CHECKPOINT_VERSION_VALUE x == 0.4
deepspeed.checkpoint.VOCABULARY_PARAMETER_PATTERNS x == 'vocabulary_parameter_patterns'
deepspeed.checkpoint.ZeROCheckpoint ! x('folder')
deepspeed.checkpoint.get_model_3d_descriptor ! x('folder')
deepspeed.checkpoint.ds_to_universal.main callable(x)
deepspeed.runtime.utils.PartitionedTensor x(torch.ones(3), None).full().tolist() == [1, 1, 1]
deepspeed.runtime.utils.partition_balanced x([1, 1, 4], 2) == [0, 2, 3]
deepspeed.runtime.utils.prefix_sum_inc x([3, 4, 5]) == [3, 7, 12]
deepspeed.runtime.utils.count_used_parameters_in_backward ! x([model.weight])
deepspeed.runtime.state_dict_factory.SDLoaderFactory ! x()
deepspeed.utils.timer.BACKWARD_MICRO_TIMER x == 'bwd_microstep'
deepspeed.utils.timer.BACKWARD_GLOBAL_TIMER x == 'bwd'
deepspeed.utils.timer.trim_mean x([9, 1, 2, 3, -5], 0.2) == 2.0
deepspeed.utils.timer.NoopTimer ! x()
deepspeed.ops.op_builder.builder.OpBuilder x is deepspeed.ops.op_builder.OpBuilder
deepspeed.sequence.fpdt_layer.FPDT_Attention ! x(None)
deepspeed.sequence.cross_entropy.vocab_sequence_parallel_cross_entropy ! x()
deepspeed.constants.TORCH_DISTRIBUTED_DEFAULT_PORT x == 29500
deepspeed.constants.CROSS_RANK x == 'CROSS_RANK'
deepspeed.io.FastFileWriterConfig x(None, None).num_parallel_writers == 1
deepspeed.io.FastFileWriter ! x('file', deepspeed.io.FastFileWriterConfig(num_parallel_writers=2))
deepspeed.io.MockFileWriter x('file').write(b'abc') == 3
deepspeed.runtime.config.LAMB_OPTIMIZER x == 'lamb'
deepspeed.runtime.config.ADAM_OPTIMIZER x == 'adam'
deepspeed.runtime.config.ONEBIT_LAMB_OPTIMIZER x == 'onebitlamb'
deepspeed.runtime.config.get_gradient_clipping x({}) == 1.0
deepspeed.runtime.config.get_log_level x({'log_level': 'info'}) == 'info'
deepspeed.compile.passes.prefetch.schedule_prefetch ! x()
deepspeed.runtime.domino.transformer.DominoTransformer ! x()
deepspeed.inference.v2.engine_v2.InferenceEngineV2 ! x()
deepspeed.module_inject.replace_transformer_layer ! x(None, model, None, None, None)
deepspeed.utils.torch.required_torch_version x(min_version=2.1) and not x(max_version='1.13')
deepspeed.utils.torch.register_grad_hook x(model.weight, print)
deepspeed.utils.numa.get_numactl_cmd ! x(None, 1, 0)
deepspeed.utils.comms_logging.CommsLogger x()
deepspeed.utils.set_log_level_from_string x('warning')
deepspeed.runtime.precision_config.get_bfloat16_config x({'bf16': {'enabled': True}}).enabled
deepspeed.runtime.precision_config.get_float16_config x({}).loss_scale_window == 1000
deepspeed.runtime.precision_config.DeepSpeedFP16Config x(loss_scale='4').loss_scale == 4.0
deepspeed.runtime.constants.TRAIN_BATCH_SIZE x == 'train_batch_size'
deepspeed.runtime.constants.GRADIENT_CLIPPING_DEFAULT x == 1.0
deepspeed.runtime.constants.ValidationMode x.WARN == 'WARN'
deepspeed.runtime.config_utils.DeepSpeedConfigModel x().model_dump() == {}
deepspeed.runtime.zero.config.DeepSpeedZeroConfig x(stage3_max_live_parameters='7').stage == 0
deepspeed.runtime.zero.config.DeepSpeedZeroOffloadParamConfig x(device='cpu').device.name == 'cpu'
deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig x().buffer_count == 4
deepspeed.runtime.zero.leaf_module_config.DEFAULT_LEAF_MODULE_NAMES x == []
deepspeed.runtime.zero.linear.LinearModuleForZeroStage3 x(4, 2).out_features == 2
deepspeed.runtime.zero.utils.ZeRORuntimeException issubclass(x, Exception)
deepspeed.runtime.zero.offload_states.get_state_devices x(torch.ones(1), 'lp_params')
deepspeed.runtime.swap_tensor.constants.AIO_BLOCK_SIZE_DEFAULT x == 1048576
deepspeed.runtime.swap_tensor.utils.MIN_SWAPPABLE_BYTES x == 1048576
deepspeed.runtime.lr_schedules.LR_RANGE_TEST_MIN_LR x == 'lr_range_test_min_lr'
deepspeed.runtime.lr_schedules.COS_MIN_RATIO x == 'cos_min_ratio'
deepspeed.runtime.pipe.topology._prime_factors x(12) == [2, 2, 3]
deepspeed.linear.optimized_linear.LoRAOptimizedLinear ! x(4, 4)
deepspeed.linear.init_lora ! x(model)
deepspeed.linear.Init ! x()
deepspeed.ops.op_builder.PinMemoryBuilder x().load().pin_memory_handle().is_pinned(model.weight)
deepspeed.ops.op_builder.AsyncIOBuilder x().load().aio_handle(2, 8).get_queue_depth() == 8
deepspeed.runtime.progressive_layer_drop.ProgressiveLayerDrop ! x()
deepspeed.runtime.fp16.onebit.adam.OnebitAdam ! x([])
deepspeed.pipe.PipelineModule
deepspeed.utils.groups._get_expert_parallel_ranks x(4, 1, 2) == ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
deepspeed.zero.partition_parameters x is deepspeed.runtime.zero.partition_parameters
"""


def lines() -> list[str]:
    return [one for one in NAMES.strip().splitlines() if one]


def look_up(path: str) -> Any:
    """Imports as much of it as is a module, as `from a.b import c` does."""
    import importlib  # noqa: PLC0415 - with what follows it is all that this script imports

    parts = path.split(".")
    found: Any = None
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


def use(line: str) -> str:
    """ "" where the name is as the line says, else what is wrong."""
    import argparse  # noqa: PLC0415 - as in look_up()

    import deepspeed  # noqa: PLC0415
    import torch  # noqa: PLC0415

    from penstock import ConfigError  # noqa: PLC0415

    path, _, expression = line.partition(" ")
    try:
        x = look_up(path)
    except Exception as error:  # noqa: BLE001 - that is what is asked
        return f"{type(error).__name__}: {error}"
    refuses = expression.startswith("! ")
    model = torch.nn.Linear(4, 4)
    names = {"x": x, "model": model, "torch": torch, "argparse": argparse, "deepspeed": deepspeed}
    names["sgd"] = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        made = eval(expression.removeprefix("! ") or "True", names)  # noqa: S307 - of the list
    except ConfigError as error:
        return "" if refuses else f"refuses: {error}"
    except Exception as error:  # noqa: BLE001 - as above
        return f"{type(error).__name__}: {error}"
    return (
        "does not refuse"
        if refuses
        else "is False"
        if made is False and COMPARES.search(line)
        else ""
    )


if __name__ == "__main__":
    import json

    print("\nCASE " + json.dumps({one: use(one) for one in lines()}), flush=True)
    sys.stdout.flush()
