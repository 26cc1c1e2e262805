"""penstock plan: what it prints, for every way to name a model, and what it says of wrong words."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

# 1024 and 2048 parameters in bf16 on four ranks of two nodes, nothing early and nothing fused: the
# bytes are those worked out in src/plan/simulator_test.cpp.
LEAN = '{"precision": "bf16", "prefetch_bytes": 0, "comm": {"bucket_bytes": 0}}'
BLOCKS = ["--model", "1024,2048", "--world", "4", "--node", "2", "--config", LEAN]
# Seconds are then thousands of bytes of the longest link; 28 x 768 bytes of an optimizer are one.
SLOW = ["--tokens", "1", "--flops", "1e12", "--local-link", "1e3", "--node-link", "1e3"]
SLOW += ["--device-host-link", "1e3", "--host-disk-link", "1e3"]
SLOW += ["--device-memory", "21504", "--host-memory", "2150.4"]


def plan(capsys, *args):
    from penstock import cli  # noqa: PLC0415

    code = cli.main(["plan", *args])
    out, err = capsys.readouterr()
    return code, out, err


def alternatives(capsys, *args):
    code, out, err = plan(capsys, *args, "--json")
    assert code == 0, err
    report = json.loads(out)
    rows = {
        (one["strategy"], one["optimizer"], one["params"]): one for one in report["alternatives"]
    }
    assert len(rows) == len(report["alternatives"])
    return rows, report


# (strategy, optimizer, params): device, host, disk, seconds.
GOLDEN = {
    # Backward all-reduces 2 x 3/4 of 6144 bytes, 2/3 of it across; 3072 parameters are updated.
    ("ddp", "none", "none"): (52224, 0, 0, 6.144 + 4),
    # Reduce-scatter, and all-gather in the update, 3072 bytes across each, above the update.
    ("zero1", "none", "none"): (None, 0, 0, 3.072 + 3.072),
    # Parameters once more, in forward.
    ("zero3", "none", "none"): (23040, 0, 0, 3.072 + 6.144 + 1),
    # Half of the traffic is inside the node, and gradients across once.
    ("mics", "none", "none"): (37888, 0, 0, 3.072 + 6.144 + 2),
    ("hpz", "none", "none"): (24064, 0, 0, 3.072 + 4.608 + 1),
    # 1536 of gradients leave under the collectives; 768 parameters on the CPU take 10 s, 1.536 to
    # bring them back are hidden.
    ("zero3", "host", "none"): (12800, None, 0, 3.072 + 6.144 + 10),
    # 18432 bytes are read and written in the update; both units' state, 9216, is there with 1536 of
    # gradients.
    ("zero3", "disk", "none"): (12800, 10752, 9216, 3.072 + 6.144 + 18.432),
    ("zero3", "none", "host"): (21504, 1536, 0, 3.072 + 6.144 + 1.536),
}


def test_golden_numbers(capsys):
    rows, report = alternatives(capsys, *BLOCKS, *SLOW)
    assert report["same"] == {}
    for key, (device, host, disk, seconds) in GOLDEN.items():
        one = rows[key]
        assert device is None or one["device"] == device, key
        assert host is None or one["host"] == host, key
        assert one["disk"] == disk, key
        assert one["seconds"] == pytest.approx(seconds, rel=1e-3), key
    # Whatever rests whole stays on the device, and hpz_host on the host: three optimizer tiers;
    # else nine.
    assert len(rows) == 4 * 3 + 3 * 9


def test_best_first_and_why(capsys):
    blocks = [*BLOCKS[:4], *BLOCKS[6:]]  # on one node
    budget = ["--budget", "device=21504,host=10751B"]
    _, out, _ = plan(capsys, *blocks, *SLOW, *budget)
    lines = out.splitlines()
    assert lines[0].startswith("3072 parameters in 3 units, 4 ranks, 1 tokens per rank and step;")
    assert "device 21.00 KiB, host 10.50 KiB" in lines[0]
    assert lines[1].split()[:8] == [
        "strategy", "optimizer", "params", "device", "host", "disk", "s/step", "fits"
    ]  # fmt: skip
    assert lines[2].split()[:3] == ["zero3", "none", "host"]
    why = "fastest that fits; less than a tenth to spare; longest: backward, local link"
    assert lines[2].endswith(f"tight  {why}")
    order = ["yes", "tight", "no"]
    verdicts = [
        next(word for word in line.split() if word in order)
        for line in lines[2:]
        if " is " not in line
    ]
    assert verdicts == sorted(verdicts, key=order.index) and "no" in verdicts
    rows, _ = alternatives(capsys, *blocks, *SLOW, *budget)
    assert rows["zero3", "none", "none"]["over"] == "device 1.50 KiB over"
    assert rows["zero3", "disk", "none"]["over"] == "host 1 B over"
    assert [one["fits"] for one in rows.values()] == sorted(
        (one["fits"] for one in rows.values()), reverse=True
    )


def test_budgets_add_up(capsys):
    one = plan(capsys, *BLOCKS, "--budget", "device=21504,host=10751B")
    two = plan(capsys, *BLOCKS, "--budget", "device=21504", "--budget", "host=10751B")
    assert two == one and "device 21.00 KiB, host 10.50 KiB" in one[1]


def test_parameters_alone_are_a_plausible_transformer(capsys):
    # GPT-3 of 175e9 has 96 layers, LLaMA of 7e9 32. And the root.
    for numel, layers in {"1e6": 2, "7e9": 33, "7e10": 71, "1.75e11": 96, "1e12": 172}.items():
        _, out, _ = plan(capsys, "--params", numel, "--world", "64")
        assert f" in {layers + 1} units" in out.splitlines()[0], out
        assert plan(capsys, "--params", numel, "--world", "64", "--units", str(layers))[1] == out


def test_tiles_are_units(capsys):
    gpt = ["--model", "gpt:layers=1,hidden=64,vocab=100,seq=16", "--world", "2", "--config"]
    _, whole, _ = plan(capsys, *gpt, "{}")
    _, tiled, _ = plan(capsys, *gpt, '{"tiling": {"max_bytes": 4096}}')
    units = [int(re.search(r"in (\d+) units", out).group(1)) for out in (whole, tiled)]
    assert units[1] > units[0]


UNTIED = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
class Gpt(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.tokens = nn.Embedding(8192, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 8192, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
def tied():
    return Gpt(tied=True)
"""


def test_large_layers_are_units(capsys, tmp_path):
    (tmp_path / "gpts.py").write_text(UNTIED)
    settings = {"precision": "bf16", "prefetch_bytes": 0}
    bytes_of, units = {}, {}
    for name, kind, limit in [
        ("own", "Gpt", 1 << 20), ("root", "Gpt", 1 << 30), ("tied", "tied", 1 << 20)
    ]:  # fmt: skip
        config = json.dumps(settings | {"units": {"layer_bytes": limit}})
        args = ["--model", f"{tmp_path}/gpts.py:{kind}", "--world", "4", "--config", config]
        bytes_of[name] = alternatives(capsys, *args)[0]["zero3", "none", "none"]["device"]
        units[name] = re.search(r"in (\d+) units", plan(capsys, *args)[1]).group(1)
    assert units == {"own": "6", "root": "4", "tied": "4"}
    # One of two layers of 1 MiB and its gradient are not there at a time.
    assert bytes_of["root"] - bytes_of["own"] >= 2 << 20


def test_what_is_equal_on_a_mesh_is_shown_once(capsys):
    rows, report = alternatives(capsys, "--params", "1e6", "--units", "4", "--world", "2")
    assert report["same"] == {"hpz": "zero3", "mics": "zero3"}
    assert {key[0] for key in rows} == {"ddp", "zero1", "zero2", "zero3", "hpz_host"}
    rows, report = alternatives(capsys, "--params", "1e6", "--world", "1")
    assert report["same"]["zero1"] == "ddp" and "zero3" not in report["same"]


# ---- ways to name a model

FILE = """
import torch
def build():
    return torch.nn.Sequential(torch.nn.Linear(10, 100), torch.nn.Linear(100, 1))
number = 3
def seven():
    return 7
"""


def test_models(capsys, tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    cases = {
        f"{tmp_path}/nets.py:build": 1201,
        "nets:build": 1201,
        # 12 h^2 + 13 h a block; tokens, places, the last norm.
        "gpt:layers=2,hidden=8,vocab=16,seq=4": 2 * (12 * 64 + 13 * 8) + 16 * 8 + 4 * 8 + 2 * 8,
        "gpt": 124439808,  # GPT-2
        "10,20,30": 60,
        "1e3": 1000,
    }
    for spec, numel in cases.items():
        code, out, err = plan(capsys, "--model", spec, "--world", "2")
        assert code == 0, err
        assert out.startswith(f"{numel} parameters in "), spec


def test_a_hugging_face_config(capsys, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=1, vocab_size=16, n_positions=4)
    config.save_pretrained(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "small gpt.json")
    code, out, err = plan(capsys, "--model", str(tmp_path / "small gpt.json"), "--world", "2")
    assert code == 0, err
    assert out.startswith(f"{2 * (12 * 64 + 13 * 8) + 16 * 8 + 4 * 8 + 2 * 8} parameters")


WRONG = {
    "gpt key": (["--model", "gpt:layer=3"], 'a gpt has no "layer": did you mean "layers"?'),
    "gpt value": (["--model", "gpt:layers=x"], 'layers of the gpt is "x", not a whole number'),
    "kind": (["--model", "gtp:layers=3"], 'did you mean "gpt:layers=3"?'),
    "no such file": (["--model", "no/such.py:f"], 'there is no file "no/such.py"'),
    "no config": (
        ["--model", "plain.json"],
        'plain.json has no "model_type", so it is not the config',
    ),
    "no JSON": (["--model", "broken.json"], "cannot read broken.json as JSON: "),
    "no such callable": (["--model", "nets.py:bild"], 'has no "bild": did you mean "build"?'),
    "no module": (["--model", "nets.py:seven"], "nets.py:seven returned a int, not an nn.Module"),
    "nothing known": (["--model", "bert"], '--model is "bert"; allowed: module:callable'),
    "tier": (["--params", "1e6", "--budget", "devise=1GiB"], 'did you mean "device"?'),
    "bytes": (["--params", "1e6", "--budget", "device=1gig"], '"memory.device_bytes" is "1gig"'),
    "no value": (["--params", "1e6", "--budget", "device"], "must have the form device=value"),
    "tier twice": (
        ["--params", "1e6", "--budget", "device=1GiB", "--budget", "host=2GiB,device=3GiB"],
        '--budget has "device" twice: 1GiB and 3GiB',
    ),
    "params": (["--params", "many"], '--params is "many", not a whole number >= 1'),
    "nodes": (["--params", "1e6", "--node", "3"], '"mesh.node" is 3'),
    "config": (["--params", "1e6", "--config", '{"stratgy": 1}'], 'did you mean "strategy"?'),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_words_are_one_sentence(name, capsys, tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(FILE)
    (tmp_path / "plain.json").write_text('{"layers": 3}')
    (tmp_path / "broken.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    args, says = WRONG[name]
    code, out, err = plan(capsys, *args, "--world", "4")
    assert (code, out) == (2, "")
    assert err.startswith("penstock: ") and err.count("\n") == 1, err
    assert says in err, err


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        plan(capsys, "--help")
    text = capsys.readouterr().out
    for word in ("--model", "--budget", "--flops", "--node-link", "gpt:layers=12", "4e+14"):
        assert word in text


# ---- meshes

CLUSTER = ["--nodes", "2", "--gpus", "4", "--batch", "64", "--micro", "1,2"]
TINY = ["--model", "gpt:layers=8,hidden=512,vocab=1024,seq=128"]


def test_meshes_and_the_config_to_use(capsys):
    from penstock._native import _penstock  # noqa: PLC0415

    code, out, err = plan(capsys, *TINY, *CLUSTER, "--intra", "400GB/s", "--inter", "50GB/s")
    assert code == 0, err
    assert "heads 4" in out and "activations are an estimate" in out
    assert "tensor 2: its sums cost" in out and "pipeline 2: bubble" in out
    best = json.loads(out.splitlines()[-1].removeprefix("best: "))
    code, out, _ = plan(capsys, *TINY, *CLUSTER, "--intra", "4e11", "--inter", "50GB", "--json")
    report = json.loads(out)
    assert report["batch"] == 64 and report["alternatives"][0]["config"] == best
    for one in report["alternatives"]:
        _penstock.Config(one["config"])
        parts = ("compute", "sums", "messages", "bubble", "data_waits")
        assert one["seconds"] == pytest.approx(sum(one[part] for part in parts))
    assert [one["seconds"] for one in report["alternatives"]] == sorted(
        one["seconds"] for one in report["alternatives"]
    )


def test_one_stage_is_as_reported_for_one_mesh(capsys):
    args = ["--params", "1e8", "--units", "8"]
    _, out, _ = plan(capsys, *args, *CLUSTER, "--json")
    window = '{"precision": "bf16", "batch": {"accumulate": 8}}'
    one_mesh = ["--world", "8", "--node", "2", "--config", window, "--tokens", str(8 * 2048)]
    rows, _ = alternatives(capsys, *args, *one_mesh)
    compared = 0
    for one in json.loads(out)["alternatives"]:
        if one["data"] < 8 or one["micro"] > 1 or one["recompute"]:
            continue
        same = rows[one["strategy"], "none", "none"]
        assert one["device"] == same["device"]
        assert one["seconds"] == pytest.approx(same["seconds"])
        compared += 1
    assert compared == 4


LLAMA = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
# Trains a step with each of the configs and prints the loss of the weights that all begin with.
TRAIN = """
import json, os, pathlib, sys
import penstock, torch, transformers
for config in json.loads(pathlib.Path(sys.argv[1]).read_text()):
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(sys.argv[2]))
    rows = torch.randint(256, (8, 16))
    engine = penstock.initialize(model, config)
    own = rows.chunk(engine.data_size)[engine.data_rank]
    loss = float(engine.train_batch({"input_ids": own, "labels": own}))
    if os.environ["RANK"] == "0":
        print("loss", loss, flush=True)
    engine.close()
"""


def test_shapes_come_from_a_config(capsys, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    _, out, err = plan(capsys, "--model", str(tmp_path / "config.json"), *CLUSTER, "--json")
    report = json.loads(out)
    assert err == "" and report["shape"]["heads"] == 4 and report["shape"]["hidden"] == 64
    assert report["shape"]["key_value_heads"] == 2
    assert max(one["tensor"] for one in report["alternatives"]) == 2
    _, out, _ = plan(capsys, "--model", str(tmp_path / "config.json"), *CLUSTER)
    assert "heads 4, " in out and "key value heads 2" in out


# Tensor, pipeline, stages a rank.
MESHES = {(1, 1, 1), (1, 2, 1), (1, 2, 2), (1, 4, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2)}


def test_proposed_configs_train(capsys, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    cluster = ["--nodes", "2", "--gpus", "2", "--batch", "8", "--micro", "1,2"]
    model = ["--model", str(tmp_path / "config.json"), "--precision", "fp32"]
    _, out, _ = plan(capsys, *model, *cluster, "--json")
    best = {}  # of each mesh and schedule; tensor ranks with recomputation
    for one in json.loads(out)["alternatives"]:
        key = tuple(one[name] for name in ("tensor", "pipeline", "virtual_stages"))
        if one["recompute"] == (one["tensor"] > 1):
            best.setdefault(key, one["config"])
    assert set(best) == MESHES
    (tmp_path / "configs.json").write_text(json.dumps(list(best.values())))
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    command = [sys.executable, "-m", "penstock", "run", "--nproc", "4", str(script)]
    command += [str(tmp_path / "configs.json"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"^.*loss (\S+)$", done.stdout, re.M)]
    assert losses == pytest.approx([losses[0]] * len(best), rel=1e-5)


def test_nothing_fits_says_the_nearest(capsys):
    _, out, _ = plan(capsys, *TINY, *CLUSTER, "--budget", "device=1MiB")
    assert "nothing fits; the nearest: {" in out and "does not fit: device" in out


WRONG_MESHES = {
    "nodes": (["--gpus", "4"], "pass both --nodes and --gpus"),
    "world": (["--nodes", "2", "--gpus", "4", "--world", "4"], "Leave --world out"),
    "tokens": ([*CLUSTER, "--tokens", "7"], "--tokens is for one mesh"),
    "batch": (["--nodes", "2", "--gpus", "4", "--batch", "0"], '--batch is "0"'),
    "odd": (["--nodes", "1", "--gpus", "8", "--batch", "7", "--micro", "2"], "no mesh of 8 ranks"),
    "no world": ([], "pass --world for one mesh, or --nodes and --gpus"),
}


@pytest.mark.parametrize("name", WRONG_MESHES)
def test_wrong_clusters_are_one_sentence(name, capsys):
    args, says = WRONG_MESHES[name]
    code, out, err = plan(capsys, *TINY, *args)
    assert (code, out) == (2, "")
    assert err.startswith("penstock: ") and err.count("\n") == 1 and says in err, err


@pytest.mark.parametrize("text", ["fast", "400GBit", "0", "-1", "1..2"])
def test_wrong_rates(text, capsys):
    with pytest.raises(SystemExit):
        plan(capsys, *TINY, *CLUSTER, f"--intra={text}")
    assert "is not a rate such as 400GB/s" in capsys.readouterr().err


def test_inference_has_no_gradients_and_quantized_parameters_are_small(capsys):
    model = ["--model", "gpt:layers=4,hidden=256,vocab=512,seq=64", "--world", "1"]

    def host(**config: object) -> tuple[int, int]:
        given = {"strategy": "zero3", "offload": {"params": "host"}, "inference": True}
        given |= {"precision": "bf16"} | config
        _, out, _ = plan(capsys, *model, "--config", json.dumps(given), "--json")
        found = [one for one in json.loads(out)["alternatives"] if one["params"] == "host"]
        return min(one["host"] for one in found), min(one["device"] for one in found)

    rest, device = host()
    matrices = 4 * 12 * 256 * 256  # of the blocks
    others = 512 * 256 + 64 * 256  # embeddings, with the head, and few vectors
    assert rest == pytest.approx(2 * (matrices + others), rel=0.02)
    assert device <= rest  # parameters in use, and nothing for a backward
    # A block's values are decoded when they are compared.
    quantized = matrices * 0.5625 + 2 * others
    assert quantized < host(quantize={"dtype": "int4"})[0] < quantized + matrices
