"""The documents' Python blocks run as they stand, on one rank."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch
from torch import nn

ROOT = pathlib.Path(__file__).parents[2]

PAGES = ("training", "index", "from_fsdp2", "from_torch")  # with Python blocks that run


def blocks():
    for path in ("README.md", *(f"docs/{page}.md" for page in PAGES)):
        text = (ROOT / path).read_text(encoding="utf-8")
        for index, block in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)):
            yield pytest.param(block, id=f"{path}-{index}")


class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return super().forward(x.to(self[0].weight.dtype)).square().mean()


@pytest.mark.parametrize("block", list(blocks()))
def test_block_runs(block):
    import penstock  # noqa: PLC0415

    torch.manual_seed(0)
    data = [torch.randn(4, 8) for _ in range(4)]
    names = {
        "penstock": penstock,
        "torch": torch,
        "model": Model(),
        "Model": Model,
        "build": Model,
        "data": data,
        "batch": data[0],
    }
    exec(compile(block, "block", "exec"), names)
    names["engine"].close()


def test_engine_page_has_every_public_name():
    import penstock  # noqa: PLC0415

    page = (ROOT / "docs/engine.md").read_text(encoding="utf-8")
    rows = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| "))
    told = set(re.findall(r"`(?:engine\.)?(\w+)", rows))
    made = penstock.initialize(Model(), {"strategy": "ddp"})
    public = {name for name in [*dir(penstock.Engine), *vars(made)] if not name.startswith("_")}
    made.close()
    missing = (public | set(penstock.__all__)) - told
    assert not missing
