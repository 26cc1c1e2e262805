"""Where the inputs of recomputed units wait for their backward changes no bit."""

from __future__ import annotations

import on_device
import pytest
from training import Case

CASES = [
    Case("zero3", "fp32", world=1),
    Case("zero2", "bf16", accumulate=2, world=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_activations_on_their_tier(case, tier, device_pools, tmp_path):
    run = device_pools(case.world).run
    kept = run(on_device.train_recomputed, case, 0, str(tmp_path), "none")
    for seed in range(3):
        moved = run(on_device.train_recomputed, case, seed, str(tmp_path), tier)
        for (one, one_digest), (other, other_digest) in zip(kept, moved, strict=True):
            assert one.losses == other.losses
            assert one.norms == other.norms
            assert one_digest == other_digest
