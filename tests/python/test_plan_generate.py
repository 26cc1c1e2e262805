"""penstock plan --generate: bytes, seconds and batches by hand, the config that it prints, and what
it says of wrong words."""

from __future__ import annotations

import json
import math
import re

import pytest
from test_plan_command import LLAMA, plan

# A block has 12 h^2 = 49152 parameters in matrices and 13 h = 832 others. The root has the tokens,
# the positions and the last norm.
GPT = ["--model", "gpt:layers=4,hidden=64,vocab=100,seq=16"]
MATRICES, BLOCK, ROOT = 49152, 49984, 7552
NUMEL = 4 * BLOCK + ROOT
WEIGHTS = 2 * NUMEL  # in bf16, as all bytes below
CACHE = 2 * 4 * 64 * 2  # keys and values, layers, hidden, bytes
# All units but one block compute from the window: nothing but one unit is read ahead.
LEAN = ["--config", '{"precision": "bf16", "prefetch_bytes": 0}']
WINDOW = 2 * (ROOT + 2 * BLOCK)
SPEEDS = ["--flops", "1e9", "--device-host-link", "1e6", "--host-disk-link", "1e5"]
SPEEDS += ["--device-memory", "3e8", "--local-link", "2e5", "--node-link", "1e5"]
SMALL = "batch=2,new=4,prompt=8"


def generate(capsys, text, *args, model=GPT, config=LEAN):
    """The report of `plan --generate`, its modes by tier and dtype, and the exit code."""
    command = [*model, *config, *SPEEDS, "--generate", text, *args, "--json"]
    code, out, err = plan(capsys, *command)
    assert err == ""
    report = json.loads(out)
    modes = {(one["mode"]["tier"], one["mode"]["dtype"]): one for one in report["modes"]}
    assert len(modes) == len(report["modes"]) == 7
    return report, modes, code


def text_of(capsys, text, *args, model=GPT):
    code, out, err = plan(capsys, *model, *LEAN, *SPEEDS, "--generate", text, *args)
    assert err == ""
    return code, out.splitlines()


def test_resident_by_hand(capsys):
    report, modes, code = generate(capsys, SMALL)
    assert code == 0 and report["params"] == NUMEL
    assert report["cache_bytes"] == CACHE and report["cache_bytes_of_batch"] == 2 * 12 * CACHE
    one = modes["device", "bf16"]
    assert one["memory"] == {"device": WEIGHTS + 2 * 12 * CACHE, "host": 0, "disk": 0}
    assert one["reads"] == {} and one["keep_bytes"] == 0
    step, prefill = WEIGHTS / 3e8, 2 * NUMEL * 2 * 8 / 1e9  # memory, compute
    assert one["step_s"] == pytest.approx(step) and one["longest"] == "weights"
    assert one["prefill_s"] == pytest.approx(prefill)
    # The prefill gives the first of four tokens.
    assert one["tokens_per_s"] == pytest.approx(2 * 4 / (prefill + 3 * step))
    assert one["balanced_batch"] == 4  # 2 N B / 1e9 = 2 N / 3e8: B = 3.3


def test_a_long_cache_takes_longest(capsys):
    _, modes, _ = generate(capsys, "batch=2,new=1000,prompt=1000")
    one = modes["device", "bf16"]
    assert one["longest"] == "KV cache"
    assert one["step_s"] == pytest.approx(2 * 2000 * CACHE / 3e8)
    _, lines = text_of(capsys, "batch=2,new=1000,prompt=1000")
    assert lines[-2].startswith("a larger batch gains little, with batch=4 (B*): ")


def test_streamed_by_hand(capsys):
    _, modes, _ = generate(capsys, SMALL)
    host, disk = modes["host", "bf16"], modes["disk", "bf16"]
    device = WINDOW + 2 * 12 * CACHE
    assert host["memory"] == {"device": device, "host": WEIGHTS, "disk": 0}
    assert disk["memory"] == {"device": device, "host": WINDOW, "disk": WEIGHTS}
    assert host["reads"] == {"device_host": WEIGHTS}
    assert disk["reads"] == {"host_disk": WEIGHTS, "device_host": WEIGHTS}
    # Reading hides computing, and the first block is waited for.
    assert host["step_s"] == pytest.approx((WEIGHTS + 2 * BLOCK) / 1e6)
    assert disk["step_s"] == disk["prefill_s"] == pytest.approx((WEIGHTS + 2 * BLOCK) / 1e5)
    assert (host["longest"], disk["longest"]) == ("device-host link", "host-disk link")
    assert host["balanced_batch"] == 1000 and disk["balanced_batch"] == 10000


@pytest.mark.parametrize("dtype, code", [("int8", 1.03125), ("int4", 0.5625)])
def test_only_matrices_of_blocks_are_quantized(dtype, code, capsys):
    _, modes, _ = generate(capsys, SMALL)
    rest = int(4 * MATRICES * code) + 2 * (NUMEL - 4 * MATRICES)
    block = int(MATRICES * code) + 2 * (BLOCK - MATRICES)
    host, disk = modes["host", dtype], modes["disk", dtype]
    assert host["reads"] == {"device_host": rest}
    assert host["memory"]["host"] == rest + 2 * MATRICES  # a block is decoded to be compared
    assert disk["reads"]["host_disk"] == rest and disk["memory"]["disk"] == rest
    assert host["memory"]["device"] == modes["host", "bf16"]["memory"]["device"]
    assert host["step_s"] == pytest.approx((rest + block) / 1e6)
    assert ("device", dtype) not in modes


@pytest.mark.parametrize("dtype, share", [("none", 1), ("int8", 1.03125 / 2)])
def test_a_cache_that_moves_by_hand(dtype, share, capsys):
    whole = 2 * 12 * CACHE
    for tier in ("host", "disk"):
        offload = {"cache": tier} | ({"path": "/swap"} if tier == "disk" else {})
        config = {"precision": "bf16", "prefetch_bytes": 0, "offload": offload}
        config |= {"quantize": {"cache": dtype}} if dtype != "none" else {}
        given = ["--config", json.dumps(config)]
        report, modes, _ = generate(capsys, SMALL, config=given)
        one, disk = modes["device", "bf16"], modes["disk", "bf16"]
        rest = math.ceil(whole * share)
        # Two and a half of four blocks have their tokens on the device.
        tokens = math.ceil(2.5 * whole / 4)
        assert one["memory"]["device"] == WEIGHTS + tokens
        assert one["memory"][tier] == rest and disk["memory"]["device"] == WINDOW + tokens
        assert one["memory"]["host"] == (rest if tier == "host" else math.ceil(rest / 2))
        links = {"device_host": rest} | ({"host_disk": rest} if tier == "disk" else {})
        assert one["reads"] == links
        assert disk["reads"]["device_host"] == WEIGHTS + rest
        slowest = 1e6 if tier == "host" else 1e5
        weights = WEIGHTS / 3e8
        step = max(weights, rest / slowest, 3 * whole / 3e8)
        assert one["step_s"] == pytest.approx(step + rest / slowest / 4)
        assert disk["step_s"] == pytest.approx(
            (disk["reads"]["host_disk"] + 2 * BLOCK) / 1e5 + rest / slowest / 4
        )
        room = f"{tier}={rest}" if tier == "host" else f"device={WEIGHTS + tokens}"
        _, modes, _ = generate(capsys, SMALL, "--budget", room, config=given)
        assert modes["device", "bf16"]["most_batch"] == 2
        best = report["best"]
        assert best["offload"] == offload
        assert best.get("quantize") == config.get("quantize")


def test_measured_products_count(capsys, tmp_path):
    speeds = {"flops": 1e9, "device_memory": 3e8, "one_row": 1e8, "rows_16": 4e8, "attention": 1e7}
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(speeds))

    def step(batch):
        command = [*GPT, *LEAN, "--machine", str(path), "--json"]
        _, out, _ = plan(capsys, *command, "--generate", f"batch={batch},new=4,prompt=8")
        [one] = [m for m in json.loads(out)["modes"] if m["mode"]["tier"] == "device"]
        return one["step_s"] - batch * 12 * CACHE / 1e7, one

    one, sixteen = WEIGHTS / 1e8, 2 * NUMEL * 16 / 4e8
    assert step(1)[0] == pytest.approx(one) and step(16)[0] == pytest.approx(sixteen)
    assert step(4)[0] == pytest.approx((one * sixteen) ** 0.5)
    assert step(1024)[0] == pytest.approx(2 * NUMEL * 1024 / 1e9)
    assert step(1)[1]["longest"] == "compute" and step(1024)[1]["longest"] == "KV cache"
    assert step(1)[1]["prefill_s"] == pytest.approx(
        one * (sixteen / one) ** 0.75,
        rel=1e-6,  # 8 rows
    )


def test_copies_slow_down_what_computes_and_the_disk_does_not(capsys, tmp_path):
    path = tmp_path / "machine.json"
    speeds = {"overlap": 0.0, "one_row": 1e8, "rows_16": 1e9, "device_host": 1e8}
    path.write_text(json.dumps(speeds | {"host_disk": 1e8, "about": {"device": "cpu"}}))
    command = [*GPT, *LEAN, "--machine", str(path), "--json"]
    _, out, _ = plan(capsys, *command, "--generate", "batch=1,new=4,prompt=8,keep=0")
    steps = {tuple(one["mode"].values()): one["step_s"] for one in json.loads(out)["modes"]}
    copied = read = computed = WEIGHTS / 1e8
    first = 2 * BLOCK / 1e8
    assert steps["host", "bf16"] == pytest.approx(computed + copied, rel=1e-3)
    assert steps["disk", "bf16"] == pytest.approx(max(computed, read) + first, rel=1e-3)


def test_cpus_read_values_straight_into_their_place(capsys, tmp_path):
    path = tmp_path / "machine.json"

    def reads(device, *args):
        path.write_text(json.dumps({"host_disk": 1e8, "about": {"device": device}}))
        command = [*GPT, *LEAN, "--machine", str(path), "--json", *args]
        _, out, _ = plan(capsys, *command, "--generate", "batch=1,new=4,prompt=8")
        return {tuple(one["mode"].values()): one["reads"] for one in json.loads(out)["modes"]}

    cpu, cuda = reads("cpu"), reads("cuda")
    assert set(cuda["disk", "bf16"]) == {"host_disk", "device_host"}
    assert set(cpu["disk", "bf16"]) == {"host_disk"}
    for same in (("disk", "int8"), ("host", "bf16")):
        assert cpu[same] == cuda[same]
    assert "device_host" in reads("cpu", "--world", "2")["disk", "bf16"]


def test_ranks_read_shards_and_gather_them(capsys):
    _, modes, _ = generate(capsys, SMALL, "--world", "2")
    host = modes["host", "int4"]
    rest = int(4 * MATRICES * 0.5625) + 2 * (NUMEL - 4 * MATRICES)
    # Values are decoded before they are gathered.
    assert host["reads"] == {"device_host": rest // 2, "local": WEIGHTS // 2}
    assert host["memory"]["host"] == rest // 2 + MATRICES
    assert host["longest"] == "local link"
    assert host["step_s"] == pytest.approx((WEIGHTS + 2 * BLOCK) / 2 / 2e5)
    both = 2 * 2 * 4 / (host["prefill_s"] + 3 * host["step_s"])  # tokens of both ranks
    assert host["tokens_per_s"] == pytest.approx(both)
    assert modes["device", "bf16"]["memory"]["device"] == WEIGHTS + 2 * 12 * CACHE
    _, modes, _ = generate(capsys, SMALL, "--world", "4", "--nodes", "2")
    reads = {"device_host": WEIGHTS // 4, "local": WEIGHTS // 4, "node": WEIGHTS // 2}
    assert modes["host", "bf16"]["reads"] == reads


def test_a_budget_decides_what_is_kept(capsys):
    # The root and one block stay, beside the window of two others; less than a block is left.
    room = 2 * 12 * CACHE + WINDOW + 3 * BLOCK
    report, modes, code = generate(capsys, SMALL, "--budget", f"device={room}")
    one = modes["host", "bf16"]
    kept = 2 * (ROOT + BLOCK)
    assert kept < one["keep_bytes"] < kept + 2 * BLOCK
    assert one["reads"] == {"device_host": WEIGHTS - kept}
    assert one["memory"]["device"] == 2 * 12 * CACHE + WINDOW + 2 * BLOCK and not one["over"]
    assert one["memory"]["host"] == WEIGHTS  # what is kept also rests
    assert code == 0 and modes["device", "bf16"]["over"]["device"] > 0
    assert report["best"]["offload"]["keep_bytes"] == one["keep_bytes"]


def test_keep_is_taken_as_given(capsys):
    for keep, kept in {
        "0": 0,
        "64KiB": ROOT,
        f"{2 * (ROOT + 2 * BLOCK)}": ROOT + 2 * BLOCK,
    }.items():
        _, modes, _ = generate(capsys, f"{SMALL},keep={keep}", "--budget", "device=1GiB")
        one = modes["disk", "bf16"]
        assert one["reads"]["host_disk"] == WEIGHTS - 2 * kept
        assert one["over"] == {}
    assert modes["disk", "bf16"]["keep_bytes"] == 2 * (ROOT + 2 * BLOCK)


GQA = """
import types
import torch
from torch import nn
def build():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.config = types.SimpleNamespace(
        num_hidden_layers=3, hidden_size=64, num_attention_heads=8, num_key_value_heads=2
    )
    return model
def wide():
    model = build()
    model.config.head_dim = 32
    return model
def pair():
    model = build()
    model.config.is_encoder_decoder = True
    return model
"""


def test_the_cache_of_grouped_heads(capsys, tmp_path):
    (tmp_path / "nets.py").write_text(GQA)
    sizes = {"build": 2 * 3 * 2 * 8 * 2, "wide": 2 * 3 * 2 * 32 * 2, "pair": None}
    for name, size in sizes.items():
        model = ["--model", f"{tmp_path}/nets.py:{name}"]
        report, _, _ = generate(capsys, SMALL, model=model)
        assert report["cache_bytes"] == size, name
    config = ["--config", '{"precision": "fp32"}']
    report, _, _ = generate(
        capsys, SMALL, model=["--model", f"{tmp_path}/nets.py:build"], config=config
    )
    assert report["cache_bytes"] == 2 * sizes["build"]


def test_a_hugging_face_config(capsys, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    model = ["--model", str(tmp_path / "config.json")]
    report, modes, _ = generate(capsys, SMALL, model=model)
    assert report["cache_bytes"] == 2 * 4 * 2 * 16 * 2  # layers, key heads, values, bytes
    # Queries, outputs; keys, values; three of the MLP. Norms and embeddings stay in bf16.
    matrices = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    rest = int(matrices * 0.5625) + 2 * (report["params"] - matrices)
    assert modes["host", "int4"]["memory"]["host"] == rest + 2 * matrices // 4


def test_an_unknown_cache_is_not_counted(capsys):
    blocks = ["--params", "1e6", "--units", "4"]
    report, modes, _ = generate(capsys, SMALL, model=blocks)
    assert report["cache_bytes"] is None and report["cache_bytes_of_batch"] is None
    assert modes["device", "bf16"]["memory"]["device"] == 2_000_000
    _, lines = text_of(capsys, SMALL, model=blocks)
    assert lines[1].startswith("KV cache: not counted") and "kv=BYTES" in lines[1]
    report, modes, _ = generate(capsys, f"{SMALL},kv=2KiB", model=blocks)
    assert report["cache_bytes"] == 2048
    assert modes["device", "bf16"]["memory"]["device"] == 2_000_000 + 2 * 12 * 2048


def test_nothing_fits(capsys):
    room = WINDOW + 5 * 12 * CACHE
    limit = ["--budget", f"device={room}"]
    report, modes, code = generate(capsys, "batch=8,new=4,prompt=8", *limit)
    assert code == 1 and report["best"] is None and report["balanced"] is None
    assert modes["host", "bf16"]["over"] == {"device": 3 * 12 * CACHE}
    code, lines = text_of(capsys, "batch=8,new=4,prompt=8", *limit)
    assert code == 1
    says = f"needs {3 * 12 * CACHE} bytes more device memory, or batch=5"
    assert lines[-1].startswith("nothing fits; the smallest, ") and lines[-1].endswith(says)
    assert "no: needs 36 KiB more device memory" in lines[3]
    _, modes, code = generate(capsys, SMALL, "--budget", f"device={room},host={WINDOW}")
    assert code == 0 and modes["host", "bf16"]["over"] == {"host": WEIGHTS - WINDOW}


def test_the_batch_that_balances(capsys):
    # 12 bytes of KV cache for a sequence. All weights do not fit, and nothing is kept.
    small, room = "new=4,prompt=8,kv=1,keep=0", ["--budget", "device=300KiB"]
    report, modes, _ = generate(capsys, f"batch=2,{small}", *room)
    one, wide = modes["host", "int4"], report["balanced"]
    assert report["best"]["quantize"]["dtype"] == "int4"
    assert one["most_batch"] == (300 * 1024 - WINDOW) // 12
    assert wide["batch"] == one["balanced_batch"] == 319
    computing, reading = 2 * NUMEL * 319 / 1e9, one["reads"]["device_host"] / 1e6
    assert reading <= computing < reading * 1.01
    assert wide["tokens_per_s"] > 3 * one["tokens_per_s"]
    _, lines = text_of(capsys, f"batch=2,{small}", *room)
    assert lines[-2].startswith("with batch=319 (B*): ")
    _, lines = text_of(capsys, f"batch=400,{small}", *room)
    assert lines[-2].startswith("batch=400 is not below B*")
    _, lines = text_of(capsys, f"batch=2,{small}".replace("kv=1", "kv=100"), *room)
    most = (300 * 1024 - WINDOW) // 1200
    assert lines[-2].startswith(f"with batch={most} (the most that the KV cache allows): ")
    _, lines = text_of(capsys, f"batch={most},{small}".replace("kv=1", "kv=100"), *room)
    assert lines[-2].endswith("the KV cache of a larger batch does not fit")


def test_a_larger_batch_keeps_less(capsys):
    small, room = "new=4,prompt=8,kv=100", ["--budget", "device=400KiB"]
    report, modes, _ = generate(capsys, f"batch=2,{small}", *room)
    wide = report["balanced"]
    tier, dtype = wide["mode"]["tier"], wide["mode"]["dtype"]
    assert wide["batch"] > 100 and wide["keep_bytes"] < modes[tier, dtype]["keep_bytes"]
    assert not wide["over"] and wide["batch"] == min(wide["balanced_batch"], wide["most_batch"])
    _, modes, _ = generate(capsys, f"batch={wide['batch']},{small}", *room)
    assert modes[tier, dtype] == wide


def test_rounds_only_for_a_gain(capsys):
    # Computing takes longest in every mode, so int4 would gain only the time of one unit.
    args = ["--budget", f"device={WINDOW + 5 * 12 * CACHE}", "--flops", "1e6"]
    args += ["--device-host-link", "1e9"]
    report, modes, _ = generate(capsys, SMALL, *args)
    assert "quantize" not in report["best"] and report["best"]["offload"]["params"] == "host"
    report, modes, _ = generate(capsys, SMALL, *args[:2])
    assert report["best"]["quantize"] == {"dtype": "int4"}
    speeds = [one["tokens_per_s"] for one in report["modes"] if not one["over"]]
    assert speeds == sorted(speeds, reverse=True)


def test_the_config_runs(capsys):
    from penstock._native import _penstock  # noqa: PLC0415

    given = {"seed": 3, "prefetch_bytes": 0, "offload": {"path": "/swap", "params": "disk"}}
    given = ["--config", json.dumps(given)]
    model = ["--model", "gpt:layers=16,hidden=64,vocab=100,seq=16"]
    disk = {"path": "/swap", "params": "disk"}
    for host, offload in {"1MiB": {"params": "host"}, "300KiB": disk}.items():
        budget = ["--budget", f"host={host},device={WINDOW + 4 * BLOCK}"]
        command = [*model, *given, *SPEEDS, "--generate", f"{SMALL},kv=64", *budget]
        code, out, _ = plan(capsys, *command)
        best = json.loads(out.splitlines()[-1].removeprefix("best: "))
        _penstock.Config(best)
        keep = best["offload"].pop("keep_bytes")
        assert code == 0 and keep > 2 * ROOT
        assert best == {
            "seed": 3,
            "prefetch_bytes": 0,
            "inference": True,
            "precision": "bf16",
            "strategy": "zero3",
            "offload": offload,
            "quantize": {"dtype": "int4"},
        }
    best, _, _ = generate(capsys, SMALL, "--precision", "fp16")
    assert best["best"] == {
        "precision": "fp16", "prefetch_bytes": 0, "inference": True, "strategy": "ddp"
    }  # fmt: skip
    _penstock.Config(best["best"])
    best, _, _ = generate(capsys, SMALL, model=["--model", "1e3,1e3"])
    assert "units" not in best["best"]


NETS = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)
class Stack(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(depth)), nn.LayerNorm(256)
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(8192, 256)
        self.encoder, self.decoder = Stack(3), Stack(2)
        self.head = nn.Linear(256, 8192, bias=False)
def frozen(model):
    return model.requires_grad_(False)
def stack():
    return frozen(Stack(4))
def pair():
    return frozen(Pair())
def tied():
    model = Pair()
    model.head.weight = model.tokens.weight
    return frozen(model)
def plain():
    return frozen(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)))
"""


# The engine refuses to quantize a model without blocks ("plain").
CASES = [(name, dtype) for name in ("stack", "pair", "tied") for dtype in ("none", "int8")]


@pytest.mark.parametrize("name, dtype", [*CASES, ("plain", "none")])
def test_bytes_are_those_of_the_engine(name, dtype, capsys, tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    model = ["--model", f"{tmp_path}/nets.py:{name}", "--world", "2"]
    settings = {"precision": "bf16", "inference": True, "prefetch_bytes": 8 << 20}
    config = ["--config", json.dumps(settings)]
    _, out, _ = plan(capsys, *model, *config, "--generate", f"{SMALL},kv=0,keep=3MiB")
    ours, _, _ = generate(capsys, f"{SMALL},kv=0,keep=3MiB", model=model, config=config)
    settings |= {"quantize": {"dtype": dtype}, "offload": {"keep_bytes": "3MiB"}}
    code, text, err = plan(capsys, *model, "--config", json.dumps(settings))
    assert code == 0, err
    units = re.search(r"in (\d+) units", text)[1]
    assert f"in {units} units" in out
    code, text, _ = plan(capsys, *model, "--config", json.dumps(settings), "--json")
    engine = {(one["strategy"], one["params"]): one for one in json.loads(text)["alternatives"]}
    for one in ours["modes"]:
        tier = one["mode"]["tier"]
        if tier == "device" or one["mode"]["dtype"] != {"none": "bf16"}.get(dtype, dtype):
            continue
        peak = engine["zero3", tier]
        assert one["memory"]["disk"] == pytest.approx(peak["disk"], rel=0.01)
        most = 1.5 if dtype == "none" else 2.1
        for memory in ("device", "host"):  # never less, but for padding
            assert 0.98 * peak[memory] <= one["memory"][memory] <= most * peak[memory], memory


WRONG = {
    "key": ("bacth=3", 'has no "bacth": did you mean "batch"?'),
    "other key": ("xyz=3", "allowed: batch, new, prompt, kv, keep"),
    "no value": ("batch", "must have the form batch=value"),
    "count": ("new=half", 'new of --generate is "half", not a whole number >= 1'),
    "zero": ("prompt=0", 'prompt of --generate is "0", not a whole number >= 1'),
    "bytes": ("kv=lots", 'kv of --generate is "lots"; allowed: a whole number of bytes >= 0'),
    "keep": ("keep=10", "keep of --generate is 10 bytes, but the smallest unit has 15104"),
    "twice": ("new=1,new=2", '"new" twice: 1 and 2'),
}
WRONG_OPTIONS = {
    "gpus": (["--nodes", "1", "--gpus", "2"], "--gpus has no effect with --generate"),
    "tokens": (["--tokens", "7"], "--tokens has no effect with --generate"),
    "batch": (["--batch", "7"], "--batch has no effect with --generate"),
    "world": (["--world", "3", "--nodes", "2"], '"mesh.node" is 2'),
    "table": (["--config", '{"tiling": {"max_bytes": 4096}}'], 'the effect of "tiling"'),
    "mesh": (["--world", "2", "--config", '{"mesh": {"tensor": 2}}'], "is for data ranks only"),
    "units": (["--config", '{"units": {"modules": ["Blok"]}}'], 'has the class "Blok"'),
    "optimizer": (["--config", '{"optimizer": {"type": "AdamW"}}'], '"optimizer" in --config'),
    "training": (["--config", '{"activations": {"checkpoint": "unit"}}'], '"activations'),
}


def refused(capsys, *args):
    code, out, err = plan(capsys, *GPT, *args)
    assert (code, out) == (2, "")
    assert err.startswith("penstock: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("name", WRONG)
def test_wrong_words_are_one_sentence(name, capsys):
    text, says = WRONG[name]
    assert says in refused(capsys, "--generate", text)


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_wrong_options_are_one_sentence(name, capsys):
    args, says = WRONG_OPTIONS[name]
    assert says in refused(capsys, "--generate", SMALL, *args)
