"""Masters, moments and gradients of single parameters: read, replaced, and trained on."""

import sys

import pytest
from record import run

_CASES = [
    f"{where}-{dtype}"
    for where in ("stage0", "stage1", "stage2", "stage3", "host", "disk")
    for dtype in ("fp32", "bf16")
]


@pytest.fixture(scope="module")
def found():
    return run(sys.executable, "fragments.py", 2, {"PENSTOCK_AS_DEEPSPEED": "1"})


@pytest.mark.parametrize("case", _CASES)
def test_as_a_torch_optimizer_with_the_same_edits(case, found):
    ours = found[case]
    assert "error" not in ours, ours
    assert max(ours["gaps"]) < 1e-6 and len(ours["gaps"]) == 5
    assert ours["pieces"] < 1e-6 and ours["edits"] < (1e-4 if case.endswith("bf16") else 1e-9)


@pytest.mark.parametrize("stage", range(4))
def test_refusals(stage, found):
    ours = found[f"refusals-{stage}"]
    assert ours["frozen"] == [None] * 6 and ours["doubled"] and ours["kept"]
    differs = "ConfigError: [engine::set_grads] rank 0 and rank 1 were given different gradients"
    assert ours.get("mixed", True) and (stage == 0 or ours["said"][0] == "")
    texts = (
        differs if stage == 0 else "",
        "ConfigError: [deepspeed::safe_set_local_grad] rank 0 passes",
        "ConfigError: [deepspeed::safe_set_local_grad] rank 0 passes 0 elements",
        "ConfigError: [deepspeed::safe_*] the tensor is not a parameter",
    )
    for text, said in zip(texts, ours["said"], strict=False):
        assert text in said
    assert len(set(ours["alone"])) == 1
