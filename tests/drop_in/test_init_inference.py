"""`deepspeed.init_inference`: greedy text is that of the plain model."""

from __future__ import annotations

import json
import tempfile
from typing import Any

import pytest
import torch
from pipe_models import deepspeed

pytestmark = pytest.mark.timeout(480)
FP32 = {"dtype": torch.float32}
HOST = {"stage": 3, "offload_param": {"device": "cpu"}}

# Name: number of ranks, arguments, tolerance of logits.
CASES: dict[str, tuple[int, dict[str, Any], float]] = {
    "alone": (1, FP32, 1e-6),
    "text": (1, {"dtype": "fp32"}, 1e-6),
    "half": (1, {}, 1e-2),
    "bf16": (2, {"dtype": torch.bfloat16}, 3e-2),
    "data": (2, FP32, 1e-6),
    "kernels": (
        1,
        FP32 | {"replace_with_kernel_inject": True, "enable_cuda_graph": True, "max_tokens": 64},
        1e-6,
    ),
    "T2": (2, FP32 | {"tensor_parallel": {"tp_size": 2}}, 1e-6),
    "T2 tp": (2, FP32 | {"tp": {"tp_size": 2, "enabled": True}, "kernel_inject": True}, 1e-6),
    "T2 old": (2, FP32 | {"mp_size": 2}, 1e-6),
    "T2 off": (2, FP32 | {"tp": {"tp_size": 2, "enabled": False}}, 1e-6),
    "T2D2": (4, FP32 | {"tensor_parallel": {"tp_size": 2}}, 1e-6),
    "off": (1, FP32 | {"quant": {"enabled": False}, "tp": {"tp_size": None}}, 1e-6),
    "zero2": (2, FP32 | {"zero": {"stage": 2}, "ep_size": 2}, 1e-6),
    "zero3": (2, FP32 | {"zero": {"stage": 3}}, 1e-6),
    "zero3 host": (2, FP32 | {"zero": HOST}, 1e-6),
    "int8": (1, {"dtype": torch.int8}, 2e-2),
    "int8 of zero3": (2, {"dtype": torch.int8, "zero": HOST}, 2e-2),
    "quant": (1, FP32 | {"quant": {"enabled": True}}, 2e-2),
    "quant 4": (2, FP32 | {"quant": {"weight": {"num_bits": 4}}}, 0.3),
    "T2 zero3 host": (4, FP32 | {"mp_size": 2, "zero": HOST}, 1e-6),
}


def build(family: str = "llama") -> Any:
    """Imports transformers, which must find a deepspeed."""
    deepspeed()
    import hugging_face as hf  # noqa: PLC0415

    return hf.build(family)


def runs(family: str, given: dict[str, Any]) -> dict[str, Any]:
    model, plain = build(family), build(family).eval()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        config: Any = {key: one for key, one in given.items() if key == "tensor_parallel"}
        json.dump(config, file)
        file.flush()
        others = {key: one for key, one in given.items() if key not in config}
        engine = deepspeed().init_inference(model, config=file.name, **others)
    tensor = engine._engine.config.mesh.tensor
    generator = torch.Generator().manual_seed(3 + torch.distributed.get_rank() // tensor)
    ids = torch.randint(1, 40, (2, 5), generator=generator)
    logits, theirs = engine(ids).logits, plain(ids).logits
    more = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    told = {
        "logits": float((logits.float() - theirs).norm() / theirs.norm()),
        "same": torch.equal(engine.generate(ids, **more), plain.generate(ids, **more)),
        "graph": logits.requires_grad,
        "modes": (model.training, engine.training),
        "config": engine.config is model.config,
    }
    engine.destroy()
    whole = dict(plain.to(next(model.parameters()).dtype).named_parameters())
    told["restored"] = all(torch.equal(one, whole[name]) for name, one in model.named_parameters())
    return told


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("name", CASES)
def test_runs(name, family, drop_in_pools):
    world, given, limit = CASES[name]
    for told in drop_in_pools(world).run(runs, family, given):
        assert told["logits"] < limit
        assert told["same"] or limit > 1e-6
        assert told["restored"] != ("int8" in name or "quant" in name)
        assert told["config"] and not told["graph"]
        assert told["modes"] == (False, False)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"dtpye": "fp32"}, "no key 'dtpye': did you mean 'dtype'?"),
    "int16": ({"dtype": torch.int16}, "allowed: float16, bfloat16, float32, int8"),
    "checkpoint": ({"checkpoint": "a.json"}, "load the weights into the model first"),
    "bits": ({"quant": {"weight": {"num_bits": 6}}}, "num_bits' is 6; allowed: 4, 8"),
    "quant": ({"quant": 8}, "'quant' is 8; expected a dict"),
    "zero point": ({"quant": {"weight": {"q_type": "asymmetric"}}}, 'with q_type "symmetric"'),
    "quant typo": ({"quant": {"weight": {"bits": 4}}}, "'quant.weight' may have enabled, num_bits"),
    "odd": ({"tensor_parallel": {"tp_size": 3}}, "tp_size is 3, which does not divide the 2 ranks"),
    "group": ({"tp": {"tp_group": object}}, "'tensor_parallel.tp_group' is not supported"),
    "stage": ({"zero": {"stage": 4}}, "a whole number from 0 to 3"),
    "device": ({"zero": {"stage": 3, "offload_param": {"device": "ssd"}}}, "ssd"),
    "typo": ({"zero": {"stge": 3}}, "stge"),
    "no stage": (
        {"zero": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "needs 'zero.stage' 3",
    ),
    "text": ({"tensor_parallel": {"tp_size": "two"}}, "tp_size is 'two'"),
    "number": ({"tensor_parallel": 2}, "'tensor_parallel' is 2; expected a dict"),
    "yes": ({"zero": True}, "'zero' is True; expected a dict"),
    "two sizes": ({"mp_size": 2, "tp": {"tp_size": 1}}, "'mp_size' is 2 and tp_size is 1"),
    "two names": ({"tp": {"tp_size": 2}, "tensor_parallel": {}}, "its other name has"),
}


def refused(given: dict[str, Any]) -> str:
    try:
        deepspeed().init_inference(build(), given)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name, drop_in_pools):
    given, expected = REFUSED[name]
    for said in drop_in_pools(2).run(refused, given):
        assert expected in said, said


def conflicts() -> str:
    try:
        deepspeed().init_inference(build(), {"mp_size": 1}, mp_size=2)
    except ValueError as error:
        return str(error)
    return ""


def test_refuses_two_values(drop_in_pools):
    for said in drop_in_pools(1).run(conflicts):
        assert "'mp_size' is 1 in the config and 2 as an argument: keep one" in said
