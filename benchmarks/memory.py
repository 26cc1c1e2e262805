"""Memory of a 152M-parameter model on four ranks: predicted, counted by the engine, and resident.

    python benchmarks/memory.py [--json FILE]

For every strategy, with bf16 and with one and two backwards per step, in fresh processes:

- predicted: the ledger's total before the first step;
- counted: the most the engine's arenas held at once;
- resident: the peak of the process's memory in RAM during steps 2 to 4, over what it held before
  the model was built. The operating system counts this, so it contains what the engine does not
  count: activations, workspaces of kernels, unused heap. "remainder" is resident less counted.
- outside: what a plain torch model that only runs forward and backward holds beside its bf16
  weights and gradients, measured in the same way. It is the part of the remainder that is not the
  engine's.

Fails unless counted, and resident less outside, are within 10% of predicted; ddp > zero1 >= zero2
> zero3; and zero1 > zero2 with two backwards per step.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys

import torch
import torch.distributed as dist
from measure import launch, machine, peak_bytes, reset_peak, resident_bytes, run_rank, write_json
from peers import PENSTOCK, Settings, make_trainer

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from gpt import GPT, Block, GPTConfig  # noqa: E402

SIZES = GPTConfig(layers=12, width=1024, heads=16, context=16)
STEPS = 3  # measured; one more goes before
TOLERANCE = 0.10


def formula(strategy: str, ranks: int) -> float:
    """Bytes per parameter: bf16 weight and gradient, fp32 master and two moments (Rajbhandari et
    al. 2020, "ZeRO: Memory Optimizations ...", section 3)."""
    return {
        "ddp": 16.0,
        "zero1": 4 + 12 / ranks,
        "zero2": 2 + 14 / ranks,
        "zero3": 16 / ranks,
    }[strategy]


# ---- in the ranks


def warm_up() -> None:
    """Loads what torch loads on first use, so that it is not counted as the model's."""
    small = GPT(GPTConfig(layers=1, width=64, heads=1, context=SIZES.context)).bfloat16()
    tokens = torch.zeros(1, SIZES.context, dtype=torch.long)
    small(tokens, tokens).backward()
    dist.all_reduce(small.head.weight.grad)


def worker(options: argparse.Namespace) -> dict:
    """Figures of one strategy in bytes, each the largest of all ranks."""
    warm_up()
    before = resident_bytes()
    torch.manual_seed(0)
    model = GPT(SIZES)
    num_params = sum(param.numel() for param in model.parameters())
    settings = Settings(accumulate=options.accumulate, block_class=Block)
    trainer = make_trainer(options.strategy, model, settings)
    tokens = torch.randint(SIZES.vocab, (1, SIZES.context))
    predicted = 0
    if options.strategy in PENSTOCK:
        predicted = trainer.engine.ledger()["predicted"][options.strategy]["total"]
    for _ in range(options.accumulate):
        trainer.step(tokens, tokens)
    rest = resident_bytes() - before
    reset_peak()
    for _ in range(STEPS * options.accumulate):
        trainer.step(tokens, tokens)
    peak = peak_bytes() - before
    counted = 0
    if options.strategy in PENSTOCK:
        counted = trainer.engine.ledger()["measured"]["total"]
    trainer.close()
    largest = torch.tensor([predicted, counted, peak, rest])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    names = ("predicted", "counted", "resident", "resident_between_steps")
    return {"num_params": num_params, **dict(zip(names, largest.tolist(), strict=True))}


# ---- in the one that starts them


def check(all_figures: dict[int, dict[str, dict]], outside: int) -> list[str]:
    """What does not hold."""
    wrong = []
    for accumulate, by_strategy in all_figures.items():
        where = f"accumulate {accumulate}"
        for strategy, figures in by_strategy.items():
            for name in ("counted", "resident"):
                others = outside if name == "resident" else 0
                off = (figures[name] - others) / figures["predicted"] - 1
                if abs(off) > TOLERANCE:
                    wrong.append(f"{where}, {strategy}: {name} is {off:+.1%} off the prediction")
        for name in ("predicted", "counted", "resident"):
            ddp, zero1, zero2, zero3 = (by_strategy[strategy][name] for strategy in PENSTOCK)
            slack = 0.01 * zero1 if name == "resident" else 0  # noise of the heap
            if not ddp > zero1 >= zero2 - slack or not zero2 > zero3:
                wrong.append(f"{where}: {name} does not fall from ddp to zero3")
            if accumulate > 1 and not zero1 > zero2:
                wrong.append(f"{where}: {name} of zero1 is not above zero2")
    return wrong


def report(all_figures: dict[int, dict[str, dict]], outside: int, ranks: int) -> None:
    titles = ("predicted", "counted", "resident", "remainder")
    mib = 2**20
    print(f"outside: {outside / mib:.0f} MiB")
    for accumulate, by_strategy in all_figures.items():
        print(f"\nMiB per rank, {accumulate} backward(s) per step")
        print(
            f"{'':<8}"
            + "".join(f"{title:>11}" for title in titles)
            + f"{'(resident - outside) / predicted':>34}{'B/param':>9}{'formula':>9}"
        )
        for strategy, figures in by_strategy.items():
            left = figures["resident"] - figures["counted"]
            cells = [*(figures[title] for title in titles[:3]), left]
            print(
                f"{strategy:<8}"
                + "".join(f"{cell / mib:>11.1f}" for cell in cells)
                + f"{(figures['resident'] - outside) / figures['predicted']:>34.3f}"
                f"{figures['counted'] / figures['num_params']:>9.2f}"
                f"{formula(strategy, ranks):>9.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--strategy", help=argparse.SUPPRESS)
    parser.add_argument("--accumulate", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.strategy:
        run_rank(worker, options)
        return
    start = functools.partial(launch, __file__, nproc=options.ranks)
    compute = start(["--strategy", "compute"])
    outside = compute["resident"] - 4 * compute["num_params"]  # bf16 weights and gradients
    all_figures = {
        accumulate: {
            strategy: start(["--strategy", strategy, "--accumulate", str(accumulate)])
            for strategy in PENSTOCK
        }
        for accumulate in (1, 2)
    }
    report(all_figures, outside, options.ranks)
    write_json(
        options.json, {"machine": machine(), "outside": outside, "by_accumulate": all_figures}
    )
    wrong = check(all_figures, outside)
    if wrong:
        raise SystemExit("FAILED\n" + "\n".join(wrong))
    print("\nall within 10% of the prediction, and in order")


if __name__ == "__main__":
    main()
