"""Trains a model that fits neither a device nor host memory, from a file of weights.

    .venv/bin/python tests/weekly/construction_memory.py [--layers 96] [--width 2048]
        [--device-mib 512] [--host-mib 2560] [--offload disk] [--how meta]

Writes a file in bf16 and trains two steps in plain torch, then on two ranks with simulated devices
under zero3 from `penstock.init(weights=...)`. The defaults are a model of 403 M parameters, which
need 6 GiB with fp32 masters and AdamW's moments. The command prints the peaks of each rank, and
exits with 1 if a peak exceeds a budget or a loss differs.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile

TESTS = pathlib.Path(__file__).resolve().parents[1]
for folder in ("device", "parity"):
    sys.path.insert(0, str(TESTS / folder))

import test_device_construction as construction  # noqa: E402
from ranks import Pools  # noqa: E402

MIB = 1 << 20


def asked():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--device-mib", type=int, default=512)
    parser.add_argument("--host-mib", type=int, default=2560)
    parser.add_argument("--offload", choices=("host", "disk"), default="disk")
    parser.add_argument("--how", choices=("built", "meta"), default="meta")
    return parser.parse_args()


def main() -> int:
    given = asked()
    numel = given.layers * given.width**2
    print(f"{numel / 1e6:.0f} M parameters, {14 * numel / (1 << 30):.2f} GiB with AdamW's state")
    with tempfile.TemporaryDirectory() as folder:
        values = construction.write_deep(folder, given.layers, given.width)
        expected = construction.deep_losses(values, given.layers, given.width)
        del values
        budget = (given.device_mib * MIB, given.host_mib * MIB)
        pools = Pools()
        try:
            found = pools(2).run(
                construction.peaks,
                (given.how, given.offload),
                folder,
                given.layers,
                given.width,
                budget,
                timeout=1500,
            )
        finally:
            pools.close()
    wrong = False
    for rank, (built, host, device, _ledger, losses) in enumerate(found):
        print(
            f"rank {rank}: after init() {built / 1024:.0f} MiB, peak {host / 1024:.0f} MiB of "
            f"host memory and {device / 1024:.0f} MiB of the device, losses {losses}"
        )
        wrong |= device > given.device_mib * 1024 or host > given.host_mib * 1024
        wrong |= any(abs(a - b) > 2e-3 * abs(b) for a, b in zip(losses, expected, strict=True))
    print(f"plain torch: losses {expected}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
