"""An engine for inference that would not fit is refused before it starts, and told what fits."""

from __future__ import annotations

import re
from typing import Any

import hugging_face as hf
import pytest
import torch

import penstock

PREFETCH = 1 << 20  # about a block


def asked(folder: str) -> dict[str, Any]:
    def start(**config: Any) -> Any:
        torch.manual_seed(0)
        model = hf.build("llama", hidden_size=128, intermediate_size=512, num_hidden_layers=6)
        return penstock.initialize(
            model, {"inference": True, "strategy": "zero3", "prefetch_bytes": PREFETCH} | config
        )

    engine = start()
    entry = engine.ledger()["predicted"]["zero3"]
    engine.close(gather=False)
    limit = {"host_bytes": int(entry["memory"] * 0.8)}
    told: dict[str, Any] = {}
    try:
        start(memory=limit).close(gather=False)
    except penstock.ConfigError as error:
        told["error"] = str(error)
    fits = re.search(r'this fits: strategy "(\w+)".*offload.params "(\w+)"', told.get("error", ""))
    if fits is None:
        return told
    strategy, tier = fits.groups()
    offload = {"params": tier} | ({"path": folder} if tier == "disk" else {})
    engine = start(memory=limit, offload=offload, strategy=strategy)
    with torch.no_grad():
        engine(input_ids=torch.arange(3, 9)[None])
    measured = engine.ledger()["measured"]
    engine.close(gather=False)
    return told | {"tier": tier, "peak": measured["memory"], "limit": limit["host_bytes"]}


@pytest.mark.parametrize("world", [1, 2])
def test_the_error_names_what_fits(world, pools, tmp_path):
    for told in pools(world).run(asked, str(tmp_path)):
        assert told.get("tier") == "disk" and told["peak"] <= told["limit"], told
