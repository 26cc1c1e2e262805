"""What backs the claims of the pages: the table that tools/check_claims.py reads.

A backing is `path`, `path::text that the file has`, or `make target`; several are joined by ", ".
"""

from __future__ import annotations

PUBLISHED = "src/plan/cost/published_test.cpp"
SEQUENCES = "tests/drop_in/test_sequence_ranks.py"
LOOPS = "tests/drop_in/test_drop_in_loops.py"
SNIPPETS = "tests/python/test_docs.py::def test_block_runs"
README, DEEPSPEED, PARALLEL = "README.md", "docs/deepspeed.md", "docs/parallel.md"
TRAINING, MONITORING, ERRORS = "docs/training.md", "docs/monitoring.md", "docs/errors.md"

# Page, a part of the claim's text, its backing. The first row that matches counts.
CLAIMS = [
    (README, "Predicted and counted bytes agree within 10 %", "tests/ranks/engine_test.cpp"),
    (README, "time of a step, `zero3`", "benchmarks/train_gpt.py"),
    (README, "its peak memory | 0.54", "benchmarks/train_gpt.py"),
    (README, "time, tensor 2 x data 2", "benchmarks/parallel.py"),
    (README, "its peak memory | 0.68", "benchmarks/parallel.py"),
    (README, "time, pipeline 2 x data 2", "benchmarks/pipeline.py"),
    (README, "largest GPT in 4 GiB", "benchmarks/max_model.py"),
    (README, "time to save 2 GiB", "benchmarks/checkpoint.py"),
    (README, "all-gather, reduce-scatter of 32 MiB", "benchmarks/collectives.py"),
    (README, "`zero3` takes 0.77 of FSDP2's time", "benchmarks/train_gpt.py"),
    (README, "#include <penstock/engine.h>", "tests/ranks/engine_test.cpp"),
    (README, "pip install dist/penstock", "make wheel"),
    (DEEPSPEED, "In fp32 they agree to 2e-6", f"{LOOPS}::2e-6"),
    (DEEPSPEED, "compares losses, gradient norms", f"{LOOPS}, tests/drop_in/record.py"),
    (DEEPSPEED, "Gradients agree to 1e-6, weights to 1e-5", f"{SEQUENCES}::1e-6"),
    (DEEPSPEED, "losses and weights agree to 1e-5", "tests/drop_in/test_pipe.py"),
    (DEEPSPEED, "UlyssesSPAttentionHF.register_with_transformers(", SEQUENCES),
    (DEEPSPEED, "from deepspeed.pipe import", "tests/drop_in/test_pipe.py"),
    (DEEPSPEED, "config = penstock.hf.config(", "tests/drop_in/test_trainers.py"),
    (DEEPSPEED, "penstock run --as-deepspeed", "tests/drop_in/test_switch.py"),
    (DEEPSPEED, "penstock deepspeed on", "tests/drop_in/test_launch_flags.py::def test_switch"),
    (
        DEEPSPEED,
        "zero_optimization.overlap_comm: exchanges",
        "tests/drop_in/test_config_effects.py",
    ),
    (ERRORS, "30 seconds", "src/plan/config/config_test.cpp"),
    (ERRORS, "penstock: rank 1, step 7: waiting", "tests/python/test_status.py::a_long_wait"),
    (ERRORS, "rank pid step for what", "tests/python/test_status.py"),
    (ERRORS, '[plan::Config::parse] unknown key "stratgy"', "tests/python/test_errors.py"),
    ("docs/design.md", "agree with a plain single-process run to 1e-6", "tests/parity/compare.py"),
    ("docs/design.md", "include/penstock/ ", "tools/check_layers.py"),
    ("docs/design.md", "penstock.initialize(model, config=None", "tests/python/test_api.py"),
    ("docs/design.md", "peaks agree within 10%", "tests/ranks/engine_test.cpp"),
    ("docs/gpu_check.md", "tools/gpu_bundle #", "tests/python/test_gpu_check.py"),
    ("docs/gpu_check.md", "tools/gpu_check --demo #", "tests/python/test_gpu_check.py"),
    ("docs/gpu_check.md", "units of 64 MiB and 400 MB", "benchmarks/gpu_link.py"),
    ("docs/gpu_check.md", "less than 2 GiB of free memory", "benchmarks/watched.py"),
    ("docs/gpu_check.md", "refuses to exceed 40 MiB", "tools/gpu/bundle.py::limit_mib"),
    ("docs/devices.md", 'device="cuda")', "tests/device/test_device_construction.py"),
    ("docs/how_a_step_works.md", "move u1 param all_gather(data) # 1", "tests/plans/zero3.plan"),
    ("docs/tables.md", '"strategy": "mics"', "tests/parity/tables/tables_test.cpp"),
    (MONITORING, "within 1 % of torch's", "tests/python/test_monitor.py::rel=0.01"),
    (MONITORING, "| ddp | 0.", "benchmarks/predicted.py"),
    (MONITORING, "| zero", "benchmarks/predicted.py"),
    (MONITORING, "| `local` | bytes/s", "tests/python/test_bench.py"),
    (MONITORING, "| `device_host` | bytes/s", "tests/python/test_bench.py"),
    (MONITORING, "a zero3, 2 ranks, shm, elapsed", "tests/python/test_top.py"),
    (MONITORING, '"monitor": {"path": "runs/a"', "tests/python/test_monitor.py"),
    (MONITORING, "--trace trace.json train.py", "tests/python/test_timelines.py"),
    (PARALLEL, "fails if a difference exceeds 15 %", PUBLISHED),
    (PARALLEL, "| GPT ", PUBLISHED),
    (PARALLEL, "matrix multiplies reach 67.8 %", PUBLISHED),
    (PARALLEL, "must agree within 1e-4", "tests/parity/test_rule_check.py::1e-4"),
    (PARALLEL, "17 % and 11 % faster", "src/plan/cost/mesh_choice_test.cpp::PublishedRuns"),
    (PARALLEL, "auto h = penstock::unit(*embed", "tests/ranks/pipeline_test.cpp"),
    (PARALLEL, "penstock plan --model gpt:", "tests/python/test_plan_command.py"),
    (PARALLEL, '"zero2", "mesh": {"pipeline": 2}', "tests/parity/test_pipeline.py"),
    (PARALLEL, '"strategy": "zero3", "mesh": {"tensor": 2}', "tests/parity/test_tensor.py"),
    (PARALLEL, '{"mesh": {"tensor": 2}, "parallel"', "tests/parity/test_tensor.py"),
    (PARALLEL, '"param": {"hold": "RR@device:bf16"}', "tests/parity/test_held_parameters.py"),
    (PARALLEL, '"mesh": {"sequence": 4}', "tests/parity/test_sequence.py"),
    (TRAINING, "`beta2` of 0.99 or less", "tests/python/test_bf16_moments.py"),
    (TRAINING, "both agree to 1e-6", "tests/parity/test_tiling.py"),
    (TRAINING, "400 TFLOP/s in bf16", "src/plan/cost/machine_test.cpp"),
    (TRAINING, "Tensors below 4 KiB", "src/activations/activations_test.cpp::4096"),
    (TRAINING, '{"tiling": {"max_bytes"', "tests/parity/test_tiling.py"),
    (TRAINING, 'dist.init_process_group("penstock")', "tests/python/test_shm.py"),
    (
        "docs/troubleshooting.md",
        "less than 48 MiB",
        "tests/python/test_resident_memory.py::LARGEST_MIB = 48",
    ),
    ("docs/troubleshooting.md", "penstock status #", "tests/python/test_status.py"),
    ("docs/troubleshooting.md", "`comm.timeout_s` (600 s)", "src/plan/config/config_test.cpp"),
    ("docs/checkpoints.md", "penstock convert ds_run/", "tests/python/test_convert.py"),
    ("docs/checkpoints.md", '{"*.qkv": "column:3"', "tests/python/test_convert_ranks.py"),
    ("docs/checkpoints.md", "penstock inspect", "tests/python/test_checkpoint.py"),
    ("docs/checkpoints.md", "--max-restarts 3", "tests/python/test_restarts.py"),
    ("docs/checkpoints.md", "penstock.ResumableLoader(", "tests/python/test_resumable_loader.py"),
    ("docs/checkpoints.md", '{"checkpoint": {"path"', "tests/python/test_checkpoint.py"),
    ("docs/from_fsdp2.md", "penstock convert dcp_folder/", "tests/python/test_convert_others.py"),
    (
        "docs/from_accelerate_lightning.md",
        "from accelerate import",
        "tests/drop_in/test_accelerated.py",
    ),
    (
        "docs/from_accelerate_lightning.md",
        "from transformers import",
        "tests/drop_in/test_trainers.py",
    ),
    (
        "docs/from_accelerate_lightning.md",
        "import lightning.pytorch",
        "tests/drop_in/test_lightning.py",
    ),
]
# Page ("*": any), a pattern in a block of code or commands, its backing.
BLOCKS = [
    (README, r"^import penstock", SNIPPETS),
    (README, r"^make demo", "make demo, make test, make wheel"),
    (README, r"^penstock run", "tests/python/test_launch.py"),
    (TRAINING, r"penstock\.|dist\.", SNIPPETS),
    ("docs/launching.md", r".", "tests/python/test_launch_vectors.py::the_commands_of_the_page"),
    ("docs/formats.md", r"^move|^recv", "tests/plans/golden_test.cpp"),
    ("docs/formats.md", r"@(device|host)", "src/place/placement_test.cpp"),
    ("docs/formats.md", r"^0F0", "src/plan/pipeline_schedule_test.cpp"),
    ("docs/formats.md", r"penstock_checkpoint|safetensors", "tests/parity/checkpoints.py"),
    ("docs/index.md", r"^engine = ", SNIPPETS),
    ("docs/from_torch.md", r"penstock\.", SNIPPETS),
    ("docs/from_fsdp2.md", r"penstock\.", SNIPPETS),
    ("*", r"^penstock run", "tests/python/test_launch.py"),
]
# Page -> the one test that checks all of its figures.
PAGES_OF_FIGURES = {
    "docs/config.md": "src/plan/config/config_test.cpp",
    "docs/compatibility.md": "tools/compatibility.py",
    "docs/deepspeed_differences.md": "tools/deepspeed_page.py",
    "docs/idioms.md": "tests/python/test_idioms_page.py",
}
