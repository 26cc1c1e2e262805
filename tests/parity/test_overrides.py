"""Models that override methods of `torch.nn.Module`, and classes that change: each row of
idioms/overrides.py, idioms/overridden_calls.py and idioms/late_changes.py on two ranks, with three
strategies."""

from __future__ import annotations

import pytest
import torch
from idioms import late_changes, nets, overridden_calls, overrides
from idioms.table import Cell
from test_idioms import TIMEOUT, check, on_plain, on_rank, slug

GROUPS = (overrides, overridden_calls, late_changes)
IDIOMS = {row.name: row for group in GROUPS for row in group.rows.idioms}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("name", IDIOMS, ids=slug)
def test_override(name, strategy, pools, tmp_path):
    cell = Cell(strategy)
    if strategy not in IDIOMS[name].only.get("strategy", (strategy,)):
        return
    plain = on_plain(IDIOMS[name], cell)
    ours = pools(2).attempt(on_rank, name, cell, str(tmp_path), timeout=TIMEOUT)
    check(IDIOMS[name], cell, ours, plain)


def test_an_export_refuses_keys_that_are_no_names(tmp_path):
    import penstock  # noqa: PLC0415

    engine = penstock.initialize(nets.build(overrides.ValueHead), {"strategy": "zero3"})
    with pytest.raises(penstock.ConfigError, match=r'ValueHead has the key "enter.weight"'):
        engine.export_hf(tmp_path)
    engine.close()


class Moded(nets.Net):
    """Computes by a mode of its own, which only `train()` sets."""

    factor = 1.0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(features) * self.factor

    def train(self, mode: bool = True) -> Moded:
        self.factor = 1.0 if mode else 2.0
        return super().train(mode)


@pytest.mark.parametrize("mode", [True, False])
def test_eval_batch_leaves_the_model_in_its_mode(mode):
    import penstock  # noqa: PLC0415

    engine = penstock.initialize(nets.build(Moded), {"strategy": "ddp"})
    engine.module.train(mode)
    before = engine.module.factor
    engine.eval_batch(nets.batch(0, 4)[0], loss_of=lambda output, _part: output.mean())
    assert (engine.module.factor, engine.module.training) == (before, mode)
    engine.close()
