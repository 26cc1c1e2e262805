"""DeepSpeed's names that come from the table: constants have values, the others raise when used;
`penstock doctor --deepspeed` lists the missing names in scripts."""

import json
import subprocess
import sys

import pytest
from record import cases_found

# A snippet, and what it evaluates to: its value, or the type of its error and a part of the text.
SNIPPETS = {
    # every module of DeepSpeed, and every public name of it
    "[m for m in names.table() if not importlib.import_module(m)]": [],
    "[f'{m}.{n}' for m in names.table() for n in everything(m) if not has(m, n)]": [],
    # names that DeepSpeed does not have either
    "from deepspeed.runtime.utils import partition_balance": ("ImportError", "partition_balanced?"),
    "from deepspeed.utils import PartitionedTensor": (
        "ImportError", "it is in deepspeed.runtime.utils"),
    "from deepspeed import is_deepspeed_zero3_enabled": (
        "ImportError", "neither DeepSpeed 0.19.8 nor Penstock's package has this name"),
    "from deepspeed.runtime.zero.stage3 import _x": ("ImportError", "private names"),
    "deepspeed.ops.nope": ("AttributeError", "deepspeed.ops.nope: neither"),
    "hasattr(deepspeed.runtime.utils, 'nope')": False,
    "hasattr(deepspeed.inference.v2, 'nope')": False,
    "import deepspeed.nope": ("ModuleNotFoundError", "No module named 'deepspeed.nope'"),
    "importlib.util.find_spec('deepspeed.nope') is None": True,
    # classes that are not supported
    "from deepspeed.linear.optimized_linear import LoRAOptimizedLinear as x; x(4, 4)": (
        "ConfigError", "LoRAOptimizedLinear is not supported by Penstock: use peft"),
    "from deepspeed.moe.sharded_moe import MOELayer as x; isinstance(torch.nn.Linear(1, 1), x)":
        False,
    "from deepspeed.moe.sharded_moe import MOELayer as x; type('Mine', (x,), {}).__name__": "Mine",
    "from deepspeed.moe.sharded_moe import MOELayer as x; type('Mine', (x, abc.ABC), {})()": (
        "ConfigError", "deepspeed.moe.sharded_moe.MOELayer is not supported"),
    "from deepspeed.moe.sharded_moe import MOELayer as x; type('Y', (x, torch.nn.Module), {})()": (
        "ConfigError", "deepspeed.moe.sharded_moe.MOELayer is not supported"),
    "from deepspeed.moe.sharded_moe import MOELayer as x; x.forward = print": (
        "ConfigError", "an assignment to deepspeed.moe.sharded_moe.MOELayer.forward"),
    "from deepspeed.moe.sharded_moe import MOELayer as x; x.forward": (
        "AttributeError", "deepspeed.moe.sharded_moe.MOELayer.forward is not supported"),
    "from deepspeed.moe.sharded_moe import MOELayer as x; x is deepspeed.moe.sharded_moe.MOELayer":
        True,
    # other objects
    "from deepspeed.profiling.flops_profiler.profiler import old_functions as x; repr(x)":
        "<deepspeed.profiling.flops_profiler.profiler.old_functions: not supported by Penstock>",
    "from deepspeed.profiling.flops_profiler.profiler import old_functions as x; bool(x)": (
        "ConfigError", "old_functions is not supported"),
    "from deepspeed.profiling.flops_profiler.profiler import old_functions as x; x.keys()": (
        "ConfigError", "old_functions is not supported"),
    "deepspeed.PipelineEngine._INSTRUCTION_MAP.update({})": ("ConfigError", "_INSTRUCTION_MAP"),
    # values, enumerations and exceptions
    "deepspeed.checkpoint.constants.ZERO_FILE_PREFIX": "zero_pp_rank_",
    "deepspeed.runtime.constants.STEPS_PER_PRINT_DEFAULT": None,
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum('nvme') == 'nvme'": True,
    "deepspeed.utils.types.NormType.LayerNorm == 1": True,
    "isinstance(deepspeed.runtime.pipe.module.PipelineError(), Exception)": True,
    "isinstance(deepspeed.utils.exceptions.DeprecatedException('x'), Exception)": True,
    # sections of the config
    "zero(stage='2', reduce_bucket_size=1e6).reduce_bucket_size": 1000000,
    "zero(offload_param={'device': 'cpu'}).offload_param.device.value": "cpu",
    "zero(stage3_max_live_parameters='auto').max_live_parameters": 1000000000,
    "zero().leaf_module.names": [],
    "zero(overlap_comm=1).overlap_comm": True,
    "zero(stag=3)": ("ConfigError", "no key 'stag': did you mean 'stage'?"),
    "zero(stage=4)": ("ConfigError", 'stage" is 4; allowed: a whole number from 0 to 3'),
    "zero(reduce_bucket_size=0.5)": ("ConfigError", "is 0.5; allowed: a whole number of"),
    "zero(offload_param='cpu')": ("ConfigError", 'offload_param" is "cpu"; allowed: a section'),
    "zero(offload_param={'devise': 1})": ("ConfigError", '"zero_optimization.offload_param.dev'),
    "zero(stage=None)": ("ConfigError", 'stage" is null; allowed: a whole number from 0 to 3'),
    "zero(reduce_bucket_size='5e8')": ("ConfigError", 'is "5e8"; allowed: a whole number'),
    "zero(reduce_bucket_size=float('inf'))": ("ConfigError", 'is "inf"; allowed: a whole number'),
    "zero(overlap_comm='off', sub_group_size='7.0').sub_group_size": 7,
    "zero(overlap_comm=2)": ("ConfigError", 'overlap_comm" is 2; allowed: true or false'),
    "class Mine(deepspeed.runtime.config_utils.DeepSpeedConfigModel):\n    size: int = 3\n"
    "Mine(size='4').size": 4,
    # things that work
    "schedules('TrainSchedule')": "5a712a0d92f03821",  # DeepSpeed's, hashed
    "schedules('InferenceSchedule')": "0588fb4c7a5cbd9e",
    "schedules('DataParallelSchedule')": "40f2e7a1cf68f906",
    "[difficulty('fixed_linear', total_curriculum_step=20, difficulty_step=8)(i) for i in "
    "(0, 3, 4, 40)]": [8, 16, 24, 100],
    "[difficulty('fixed_root', total_curriculum_step=20, difficulty_step=16, root_degree=2)(i) "
    "for i in (0, 3, 4, 40)]": [16, 32, 48, 100],
    "[difficulty('fixed_discrete', difficulty=[8, 50, 100], max_step=[3, 9])(i) for i in "
    "(0, 3, 4, 40)]": [8, 8, 50, 100],
    "difficulty('fixed_root', total_curriculum_step=20)": (
        "ConfigError", "schedule_config.difficulty_step, schedule_config.root_degree"),
    "saved('PyFileWriter', 'a')": [1.0, 1.0],
    "saved('FastFileWriter', 'b', deepspeed.io.FastFileWriterConfig())": [1.0, 1.0],
    "handle.async_pwrite(torch.arange(4), 'c'), handle.async_pwrite(torch.ones(2), 'd'), "
    "handle.wait()": [0, 0, 2],
    "x = torch.empty(2, dtype=torch.int64)\nhandle.sync_pwrite(torch.arange(4), 'c')\n"
    "handle.pread(x, 'c', False, True, 16), handle.wait(), x.tolist()": [0, 1, [2, 3]],
    "handle.async_pread(torch.empty(2), '/nowhere'); handle.wait()": (
        "FileNotFoundError", "/nowhere"),
    "open('e', 'wb').write(b'abc'); handle.sync_pread(torch.empty(2), 'e')": (
        "RuntimeFault", "e ends at byte 3, but 8 bytes from byte 0 were requested"),
    "handle.sync_pwrite(torch.ones(4, 4).t(), 'f')": ("ConfigError", "pass a contiguous tensor"),
    "made = handle.new_cpu_locked_tensor(3, torch.ones(1))\n"
    "[made.numel(), handle.is_pinned(made), handle.free_cpu_locked_tensor(made)]": [3, True, True],
    "patched()": ["TorchCheckpointEngine.load was replaced"],
    "converted().tolist()": [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]],
}  # fmt: skip
PREPARED = """
import abc, ast, hashlib, importlib, importlib.util, json, logging, sys
import torch
import deepspeed, deepspeed.io, deepspeed.runtime.pipe.schedule as schedule
from deepspeed.compression.helper import convert_conv1d_to_linear
from deepspeed.runtime.checkpoint_engine import torch_checkpoint_engine as engines
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from penstock import deepspeed_names as names

zero = deepspeed.runtime.zero.config.DeepSpeedZeroConfig
handle = deepspeed.ops.op_builder.AsyncIOBuilder().load().aio_handle(intra_op_parallelism=2)

def everything(module):
    given = names.table()[module].get("from", {}).values()
    return names.defined(module) | {x.split("=")[0] for one in given for x in one if x != "*"}

def has(module, name):
    return hasattr(importlib.import_module(module), name)

def schedules(name):
    made = [
        (stages, count, stage, x.num_pipe_buffers(), [list(map(repr, step)) for step in x])
        for stages in range(1, 5) for count in range(1, 9) for stage in range(stages)
        for x in [getattr(schedule, name)(count, stages, stage)]
    ]
    return hashlib.sha256(repr(made).encode()).hexdigest()[:16]

def difficulty(kind, **options):
    config = {"min_difficulty": 8, "max_difficulty": 100, "schedule_type": kind}
    return CurriculumScheduler({**config, "schedule_config": options}).get_difficulty

def saved(kind, path, *more):
    writer = getattr(deepspeed.io, kind)(path, *more)
    torch.save(torch.ones(2), writer)
    writer.close()
    return torch.load(path).tolist()

def patched():
    said = []
    watch = logging.Handler()
    watch.emit = lambda record: said.append(record.getMessage()[12:51])
    deepspeed.utils.logger.addHandler(watch)
    engines.TorchCheckpointEngine.load = lambda self, path, map_location=None: path
    assert engines.TorchCheckpointEngine().load("x") == "x"
    return said

def converted():
    layer = torch.nn.Module()
    layer.__class__ = type("Conv1D", (torch.nn.Module,), {})
    layer.weight = torch.nn.Parameter(torch.arange(6.0).view(3, 2))
    model = torch.nn.Sequential(layer)
    return convert_conv1d_to_linear(model, type(layer))[0].weight

def run(code):
    *before, last = ast.parse(code).body
    names = dict(globals())
    exec(compile(ast.Module(before, []), "<case>", "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "<case>", "eval"), names)
    exec(compile(ast.Module([last], []), "<case>", "exec"), names)

found = {}
for case in json.load(open("cases.json")):
    try:
        found[case] = run(case)
    except Exception as error:
        found[case] = [type(error).__name__, str(error)]
print("CASE " + json.dumps(found, default=repr))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("names")
    (folder / "cases.json").write_text(json.dumps([*SNIPPETS]))
    return cases_found(["-c", PREPARED], folder)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet(snippet, found):
    wanted = SNIPPETS[snippet]
    if isinstance(wanted, tuple):
        kind, text = found[snippet]
        assert kind == wanted[0] and wanted[1] in text
    else:
        assert found[snippet] == wanted


# A line of a script, and the end of what doctor prints about it; "" if the name works.
SCRIPTS = {
    "import deepspeed.runtime.zero.stage3 as z; z.DeepSpeedZeroOptimizer_Stage3": "",
    "from deepspeed.checkpoint import UNIVERSAL_CHECKPOINT_INFO": "",
    "from deepspeed.utils import logger, log_dist": "",
    "import deepspeed.comm as dist; dist.all_reduce; dist.ProcessGroup": "",
    "from deepspeed.ops.op_builder import CPUAdamBuilder": "",
    "from deepspeed.runtime.pipe.schedule import *": "",
    "deepspeed.runtime.engine.DeepSpeedEngine.train_batch.nope": "",
    "args.deepspeed.nope": "",
    "from deepspeed.nope import x":
        "deepspeed.nope.x missing: deepspeed.nope: neither DeepSpeed 0.19.8 nor Penstock's package "
        "has this name; see docs/deepspeed.md",
    "from deepspeed.utils import PartitionedTensor":
        "missing: deepspeed.utils.PartitionedTensor: neither DeepSpeed 0.19.8 nor Penstock's "
        "package has this name; it is in deepspeed.runtime.utils",
    "import deepspeed as ds; ds.is_deepspeed_zero3_enabled()":
        "deepspeed.is_deepspeed_zero3_enabled missing: deepspeed.is_deepspeed_zero3_enabled: "
        "neither DeepSpeed 0.19.8 nor Penstock's package has this name; see docs/deepspeed.md",
    "import deepspeed; deepspeed.init_inference(model)": "",
    "import deepspeed; deepspeed.default_inference_config()":
        "deepspeed.default_inference_config raises when used: use "
        "deepspeed.init_inference(), or call the model under torch.inference_mode()",
    "from deepspeed.linear import OptimizedLinear":
        "raises when used: use peft, whose adapters train under every strategy",
    "from deepspeed.compile.passes import prefetch; prefetch.schedule_prefetch":
        "deepspeed.compile.passes.prefetch.schedule_prefetch raises when used: compile the model's "
        "blocks with torch.compile() before initialize()",
}  # fmt: skip


def doctor(folder):
    code = "import sys\nfrom penstock.cli import main\ncode = main(sys.argv[1:])\n" + (
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "doctor", "--deepspeed", folder],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def examined(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    lines = ["import deepspeed", *SCRIPTS]
    (folder / "inner").mkdir()
    (folder / "inner" / "script.py").write_text("\n".join(lines) + "\n")
    (folder / "broken.py").write_text("import deepspeed; print 3\n")
    return folder, doctor(folder)


@pytest.mark.parametrize("number, line", list(enumerate(SCRIPTS, 2)), ids=[*SCRIPTS])
def test_doctor_on_a_line(number, line, examined):
    folder, done = examined
    place = f"{folder / 'inner' / 'script.py'}:{number}: "
    said = [one for one in done.stdout.splitlines() if one.startswith(place)]
    assert all(one.endswith(SCRIPTS[line]) for one in said)
    assert len(said) == bool(SCRIPTS[line])


def test_doctor_counts(examined):
    _, done = examined
    assert done.returncode == 1
    assert "broken.py is left out, because it is not Python" in done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.endswith("3 raise when used, 3 are missing")


def test_doctor_without_a_missing_name(tmp_path):
    (tmp_path / "a.py").write_text("import deepspeed; deepspeed.initialize; deepspeed.dist\n")
    done = doctor(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "1 files, names of deepspeed: 3 work, 0 raise when used, 0 are missing\n"


def test_doctor_without_a_script(tmp_path):
    done = doctor(tmp_path / "nowhere")
    assert done.returncode == 2 and "has no Python file: give a folder of scripts" in done.stderr


def test_the_names_of_the_table_and_doctor_agree(found):
    """Each name that doctor calls missing is missing in the package, and vice versa."""
    code = (
        "from penstock import deepspeed_names as n\nfrom penstock.cli import doctor_names as d\n"
        "print([f'{m}.{x}' for m in n.table() for x in n.defined(m) "
        "if d.verdict(m, x).state == d.MISSING])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout == "[]\n", done.stderr
