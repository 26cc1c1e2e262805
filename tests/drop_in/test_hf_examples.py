"""examples/hf, as their docstrings start them."""

import os
import re
import subprocess
import sys

import pytest
from record import HERE

EXAMPLES = HERE.parents[1] / "examples" / "hf"


def _run(arguments, cwd):
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "run", "--nproc", "2", *map(str, arguments)],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _losses(text):
    return [float(one) for one in re.findall(r"step \d+: loss ([\d.]+)", text)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Of a model: under zero.Init transformers draws them in another order."""
    folder = tmp_path_factory.mktemp("weights")
    made = f"import models; models.build('llama').save_pretrained({str(folder)!r})"
    subprocess.run([sys.executable, "-c", made], cwd=EXAMPLES, check=True, capture_output=True)
    return folder


def test_accelerate(weights, tmp_path):
    script = EXAMPLES / "train_accelerate.py"
    plain = _losses(_run([script, "--model", weights, "--stage", "-1"], tmp_path))
    ours = _run(["--as-deepspeed", script, "--model", weights, "--stage", 3], tmp_path)
    assert len(plain) == 8 and _losses(ours) == pytest.approx(plain, abs=1e-5)


def test_lightning(weights, tmp_path):
    script = EXAMPLES / "train_lightning.py"
    plain = _losses(_run([script, "--model", weights, "--stage", "-1"], tmp_path))
    ours = _losses(_run([script, "--model", weights, "--stage", 3, "--offload"], tmp_path))
    assert len(plain) == 8 and ours == pytest.approx(plain, abs=1e-5)


def test_trainer(weights, tmp_path):
    script = EXAMPLES / "train_trainer.py"
    config = EXAMPLES / "configs" / "zero3_offload.json"
    arguments = ["--model", weights, "--output_dir", tmp_path]
    text = _run(["--as-deepspeed", script, *arguments, "--deepspeed", config], tmp_path)
    ours = re.findall(r"'loss': '([\d.]+)'", text)
    plain = re.findall(r"'loss': '([\d.]+)'", _run([script, *arguments], tmp_path))
    assert len(plain) == 8 and ours == plain
    assert (tmp_path / "model.safetensors").is_file()
