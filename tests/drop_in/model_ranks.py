"""Tensor ranks, sequence ranks and pipelines with DeepSpeed's names, on the ranks' devices.

Started on each rank; see reporting.py. A case tells how far its training is from plain torch in one
process on the CPU.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "parity"))

import pipe_models
import test_pipe
import test_sequence_ranks
import test_tensor_ranks
from reporting import report

CASES = {
    **{
        f"tensor-{case}-zero{stage}": (test_tensor_ranks.trained, case, stage, 2)
        for case, stage in (("specs", 0), ("found", 2), ("llama", 1), ("shared", 3), ("heads", 3))
    },
    **{
        f"sequence-{kind}-{rows}-zero{stage}": (test_sequence_ranks.trained, kind, rows, stage, 2)
        for kind, rows, stage in (
            ("llama", "whole", 3), ("llama", "padded", 1), ("window", "whole", 2),
            ("gpt2", "packed", 0),
        )  # fmt: skip
    },
    **{
        f"pipe-{kind}-zero{stage}": (
            test_pipe.trained,
            kind,
            {"num_stages": 2},
            {"stage": stage},
        )
        for kind, stage in (
            ("modules", 0), ("specs", 3), ("tied", 1), ("tuples", 2), ("functions", 1), ("loss", 3),
            ("values", 0),
        )  # fmt: skip
    },
}  # fmt: skip


def run(case: str) -> dict[str, Any]:
    trained, *arguments = CASES[case]
    return trained(*arguments)


def main() -> None:
    pipe_models.deepspeed().init_distributed()
    report(sys.argv[1:] or CASES, run)


if __name__ == "__main__":
    main()
