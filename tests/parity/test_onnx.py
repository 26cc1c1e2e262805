"""ONNX: a trained model exports from gathered() and gives the same logits and greedy text in ONNX
Runtime; a module whose forward and backward run in ONNX Runtime trains as in plain torch."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from parity import hugging_face as hf
from torch import nn

pytestmark = pytest.mark.timeout(480)
SMALL = {"vocab_size": 67, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
NEW = 32

# ---- export


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


def export(model: nn.Module, ids: torch.Tensor, path: str) -> None:
    sizes = {"ids": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}
    torch.onnx.export(
        Logits(model), (ids,), path, dynamo=True, input_names=["ids"], dynamic_shapes=sizes,
        verbose=False,
    )  # fmt: skip


def exports(path: str) -> tuple[int, float] | None:
    """Trains a step and exports. Returns, on rank 0, how many tokens of ONNX Runtime's greedy text
    differ from plain torch's, and how far the logits are."""
    import onnxruntime  # noqa: PLC0415

    import penstock  # noqa: PLC0415

    model = hf.build("llama", **SMALL)
    engine = penstock.initialize(model, {"strategy": "zero3", "units": {"layer_bytes": 1}})
    ids = torch.arange(1, 11).view(2, 5)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    plain = model.eval()
    with engine.gathered():
        if dist.get_rank() == 0:
            export(plain, ids, f"{path}/model.onnx")
    engine.close()
    if dist.get_rank() != 0:
        return None
    session = onnxruntime.InferenceSession(f"{path}/model.onnx", providers=["CPUExecutionProvider"])

    def logits_of(tokens: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run(None, {"ids": tokens.numpy()})[0])

    with torch.no_grad():
        far = (logits_of(ids) - plain(input_ids=ids).logits).abs().max().item()
        expected = plain.generate(
            ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
    made = ids
    for _ in range(NEW):
        made = torch.cat([made, logits_of(made)[:, -1:].argmax(-1)], 1)
    return int((made != expected).sum()), far


def test_exports(pools, tmp_path):
    different, far = pools(2).run(exports, str(tmp_path))[0]
    assert different == 0 and far < 1e-4


# ---- ONNX Runtime as a part of a model


def session_of(nodes: list[tuple[str, list[str], str, dict[str, int]]], inputs: list[str],
               outputs: list[str]) -> Any:  # fmt: skip
    import onnxruntime  # noqa: PLC0415
    from onnx import TensorProto, helper  # noqa: PLC0415

    made = [helper.make_node(op, names, [output], **more) for op, names, output, more in nodes]
    values = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
        for names in (inputs, outputs)
    ]
    graph = helper.make_graph(made, "part", *values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )


class Run(torch.autograd.Function):
    """As in ORTModule: the parameters are inputs, and torch sees one opaque operator."""

    @staticmethod
    def forward(ctx: Any, part: Any, x: Any, weight: Any, bias: Any) -> Any:
        (y,) = part.forwards.run(None, _numpy(x=x, weight=weight, bias=bias))
        ctx.part, result = part, torch.from_numpy(y)
        ctx.save_for_backward(x, weight, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight, y = ctx.saved_tensors
        given = _numpy(x=x, weight=weight, y=y, gradient=gradient)
        of_x, of_weight, inner = map(torch.from_numpy, ctx.part.backwards.run(None, given))
        return None, of_x, of_weight, inner.sum(0)


def _numpy(**tensors: torch.Tensor) -> dict[str, numpy.ndarray[Any, Any]]:
    return {name: one.detach().contiguous().numpy() for name, one in tensors.items()}


class InRuntime(nn.Module):
    """tanh(x @ weight + bias), computed in ONNX Runtime."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.bias = nn.Parameter(torch.zeros(width))
        self.forwards = session_of(
            [
                ("MatMul", ["x", "weight"], "product", {}),
                ("Add", ["product", "bias"], "sum", {}),
                ("Tanh", ["sum"], "y", {}),
            ],
            ["x", "weight", "bias"],
            ["y"],
        )
        self.backwards = session_of(
            [
                ("Mul", ["y", "y"], "square", {}),
                ("Mul", ["gradient", "square"], "less", {}),
                ("Sub", ["gradient", "less"], "inner", {}),
                ("Transpose", ["weight"], "turned", {}),
                ("MatMul", ["inner", "turned"], "of_x", {}),
                ("Transpose", ["x"], "x_turned", {}),
                ("MatMul", ["x_turned", "inner"], "of_weight", {}),
            ],
            ["x", "weight", "y", "gradient"],
            ["of_x", "of_weight", "inner"],
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Run.apply(self, x, self.weight, self.bias)  # type: ignore[no-any-return]


class Mixed(nn.Module):
    def __init__(self, inner: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.parts = nn.ModuleList(inner(16) for _ in range(2))
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for part in self.parts:
            x = x + part(x)
        return self.last(x)  # type: ignore[no-any-return]


class InTorch(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight + self.bias)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7 * step + rank)
    return torch.randn(3, 12, generator=generator), torch.randn(3, 4, generator=generator)


def trains(config: dict[str, Any], inner: type[nn.Module]) -> tuple[list[float], list[Any]]:
    import penstock  # noqa: PLC0415

    torch.manual_seed(5)
    model = Mixed(inner)
    units = {"modules": [inner.__name__]} if "activations" in config else {"layer_bytes": 1}
    settings = {"optimizer": {"type": "AdamW", "lr": 1e-2}, "units": units}
    engine = penstock.initialize(model, settings | config)
    losses = []
    for step in range(4):
        x, y = batch(step, dist.get_rank())
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    return losses, [one.detach().tolist() for one in model.parameters()]


def trains_in_runtime(config: dict[str, Any]) -> tuple[list[float], list[Any]]:
    return trains(config, InRuntime)


def trains_in_torch(config: dict[str, Any]) -> tuple[list[float], list[Any]]:
    return trains(config, InTorch)


CONFIGS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "host": {"strategy": "zero3", "offload": {"optimizer": "host", "params": "host"}},
    "recomputed": {"strategy": "zero2", "activations": {"checkpoint": "unit"}},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_trains_in_onnx_runtime(name, pools):
    ours = pools(2).run(trains_in_runtime, CONFIGS[name])
    theirs = pools(2).run(trains_in_torch, CONFIGS[name])
    for one, other in zip(ours, theirs, strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-5)
        for mine, plain in zip(one[1], other[1], strict=True):
            assert numpy.allclose(mine, plain, rtol=1e-4, atol=1e-5)
