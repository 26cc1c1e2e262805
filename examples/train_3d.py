"""Trains a GPT or a Llama over data, tensor and pipeline ranks at once, and shows what they do.

    python -m penstock run --nproc 8 examples/train_3d.py --demo
    python -m penstock run --nproc 4 examples/train_3d.py --model llama --pipeline 2 --tensor 2
    python examples/train_3d.py

The loop is the same on every mesh: engine.train_batch() takes a data rank's samples of a whole
step. The results do not depend on the mesh either: after training, one process trains the same
model with plain torch for a few steps, and the losses are compared. The text is that of
examples/train_gpt.py: the source of the Python standard library, as bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time

import pipeline_report as report
import torch
from gpt import GPT, GPTConfig
from torch import nn
from train_gpt import Ranks, Windows, read_text

import penstock

DEMO = (
    {"model": "gpt", "strategy": "zero2", "offload": "none"},
    {"model": "llama", "strategy": "zero3", "offload": "disk"},
)
ALONE = DEMO[0]  # the defaults
DEMO_STEPS = 30
GPT_RULES = {
    "token": "vocab",
    "head": "vocab",
    "*.qkv": "column:3",  # [Q|K|V]
    "*.proj": "row",
    "*.heads": "divide",
    "*.up": "column",
    "*.down": "row",
}
HEAD_WIDTH = 32
HELD_OUT_BATCHES = 4
MESH = {
    "data": "samples of their own",
    "tensor": "a part of each layer",
    "pipeline": "some of the layers",
}
TOLERANCE = 1e-4  # nats per byte, between ranks and one process
SIMULATED = pathlib.Path(__file__).parents[1] / "tests" / "device"  # has sim.py


# ---- options


def add_mesh(parser: argparse.ArgumentParser) -> None:
    mesh = parser.add_argument_group("the mesh (the product is the number of ranks)")
    for axis, what in MESH.items():
        mesh.add_argument(f"--{axis}", type=int, metavar="N", help=f"ranks that have {what}")
    add = parser.add_argument_group("the pipeline").add_argument
    add("--micro-batches", type=int, default=8, metavar="N", help="per step (default %(default)s)")
    add(
        "--schedule",
        choices=("1f1b", "gpipe", "interleaved"),
        default="1f1b",
        help="order of forwards and backwards (default %(default)s)",
    )
    add(
        "--virtual-stages",
        type=int,
        metavar="N",
        help="stages of each pipeline rank (default: 2 if interleaved, else 1)",
    )


def add_sizes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sizes").add_argument
    add(
        "--batch",
        type=int,
        default=2,
        metavar="N",
        help="windows of text in a data rank's micro-batch (default %(default)s)",
    )
    add("--steps", type=int, default=100, metavar="N", help="default %(default)s")
    add("--seq", type=int, default=64, metavar="N", help="bytes per window (default %(default)s)")
    add("--layers", type=int, default=4, metavar="N", help="default %(default)s")
    add(
        "--width",
        type=int,
        default=128,
        metavar="N",
        help=f"a multiple of {HEAD_WIDTH}, the width of a head (default %(default)s)",
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Without --data, --tensor and --pipeline, ranks are halved into 2 stages, then into "
        "2 tensor ranks, if possible; the rest are data ranks (8: 2 x 2 x 2).",
    )
    add = parser.add_argument
    add(
        "--demo",
        action="store_true",
        help=f"{DEMO_STEPS} steps each of a GPT with zero2 and a Llama with zero3 and disk",
    )
    add(
        "--model",
        choices=("gpt", "llama"),
        help="gpt (default): examples/gpt.py; llama: transformers' own class",
    )
    add("--strategy", help="over the data ranks: ddp, zero1, zero2 (default), ...")
    add(
        "--offload",
        choices=("none", "host", "disk"),
        help="where the optimizer's state rests (default %(default)s)",
    )
    add("--lr", type=float, default=3e-3, help="peak learning rate (default %(default)s)")
    add("--precision", default="fp32", help="fp32 (default), bf16 or fp16")
    add(
        "--device",
        default="cpu",
        help="cpu (default), cuda, ...: each rank trains on its own; sim: the accelerator that "
        "tests/device simulates (build its target _sim first)",
    )
    add("--text", type=pathlib.Path, metavar="PATH", help="a file or a folder")
    add(
        "--config",
        metavar="JSON",
        help="Penstock config, text or path; its keys replace the options",
    )
    add(
        "--check-steps",
        type=int,
        default=3,
        metavar="N",
        help="number of first steps to compare with one process (default %(default)s; 0: none)",
    )
    add("--seed", type=int, default=0, help="seed of weights and windows (default %(default)s)")
    add("--log-every", type=int, default=10, metavar="STEPS", help="default %(default)s")
    add_mesh(parser)
    add_sizes(parser)
    parser.set_defaults(**ALONE)
    known, _ = parser.parse_known_args()
    if known.demo:
        parser.set_defaults(steps=DEMO_STEPS)
    return parser.parse_args()


def mesh_of(options: argparse.Namespace, world: int) -> dict[str, int]:
    """Returns the mesh. Axes that are not given get 2 ranks if the others leave an even number."""
    left = world
    for size in (options.data, options.tensor, options.pipeline):
        left = left // size if size else left
    pipeline = options.pipeline or (2 if left % 2 == 0 else 1)
    left = left if options.pipeline else left // pipeline
    tensor = options.tensor or (2 if left % 2 == 0 else 1)
    left = left if options.tensor else left // tensor
    mesh = {"data": options.data or left, "tensor": tensor, "pipeline": pipeline}
    if mesh["data"] * tensor * pipeline != world:
        raise SystemExit(
            f"--data {mesh['data']} x --tensor {tensor} x --pipeline {pipeline} are not the "
            f"{world} ranks of this run: start it with `python -m penstock run --nproc N`"
        )
    return mesh


def make_config(options: argparse.Namespace, world: int) -> dict:
    mesh = mesh_of(options, world)
    parallel: dict = {}
    if mesh["pipeline"] > 1:
        virtual = options.virtual_stages or (2 if options.schedule == "interleaved" else 1)
        parallel = {"schedule": options.schedule, "virtual_stages": virtual}
    elif options.schedule != "1f1b" or options.virtual_stages:
        raise SystemExit("--schedule and --virtual-stages need a pipeline, but --pipeline is 1")
    if mesh["tensor"] > 1 and options.model == "gpt":
        parallel["rules"] = GPT_RULES  # a Llama's are transformers'
    config = {
        "strategy": options.strategy,
        "precision": options.precision,
        "mesh": mesh,
        "parallel": parallel,
        "batch": {"accumulate": options.micro_batches},
        "units": {"layer_bytes": 16 << 10},  # embedding and head of so small a model are units, too
        "optimizer": {
            "type": "AdamW",
            "lr": options.lr,
            "betas": [0.9, 0.95],
            "weight_decay": 0.1,
        },
        "schedule": {
            "type": "cosine",
            "warmup_steps": min(10, options.steps // 5),
            "total_steps": options.steps,
            "min_ratio": 0.1,
        },
        "clip": 1.0,
        "offload": {"optimizer": options.offload},
        "seed": options.seed,
    }
    if options.config is None:
        return config
    text = options.config
    if not text.lstrip().startswith("{"):
        text = pathlib.Path(text).read_text(encoding="utf-8")
    return config | json.loads(text)


# ---- models


def build(options: argparse.Namespace) -> nn.Module:
    """Returns a model whose weights depend only on the seed, not on the mesh."""
    torch.manual_seed(options.seed)
    heads = max(1, options.width // HEAD_WIDTH)
    if options.model == "gpt":
        return GPT(GPTConfig(options.layers, options.width, heads, context=options.seq))
    import transformers  # noqa: PLC0415 - takes seconds, and a GPT does not need it

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=options.width,
            intermediate_size=3 * options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2),
            max_position_embeddings=options.seq + 1,
            use_cache=False,
        )
    )


class Batches:
    """A data rank's samples, step by step, in the form that the model takes."""

    def __init__(self, text: torch.Tensor, options: argparse.Namespace, ranks: Ranks):
        rows = options.batch * options.micro_batches
        sizes = argparse.Namespace(batch=rows, seq=options.seq)
        self._windows = Windows(text, sizes, ranks, options.seed)
        self._gpt = options.model == "gpt"
        self._device = options.device
        self.tokens = rows * options.seq * ranks.size  # predicted per step

    def next(self) -> dict[str, torch.Tensor]:
        inputs, targets = (part.to(self._device) for part in self._windows.next())
        if self._gpt:
            return {"tokens": inputs, "targets": targets}
        whole = torch.cat([inputs, targets[:, -1:]], dim=1)  # the model shifts labels itself
        return {"input_ids": whole, "labels": whole}


# ---- training


@dataclasses.dataclass
class Step:
    loss: float
    lr: float


def train(
    engine: penstock.Engine, batches: Batches, options: argparse.Namespace, ranks: Ranks
) -> list[Step]:
    ranks.say(f"{'step':>6}{'loss':>9}{'grad norm':>11}{'lr':>10}{'tokens/s':>10}")
    steps: list[Step] = []
    last, since = time.perf_counter(), 0
    for step in range(1, options.steps + 1):
        lr = engine.lr
        steps.append(Step(float(engine.train_batch(batches.next())), lr))
        since += 1
        if step % options.log_every and step not in (1, options.steps):
            continue
        now = time.perf_counter()
        speed = since * batches.tokens / (now - last)
        ranks.say(
            f"{step:>6}{steps[-1].loss:>9.4f}{engine.grad_norm:>11.3f}{lr:>10.2e}{speed:>10.0f}"
        )
        last, since = now, 0
    return steps


def held_out_loss(
    engine: penstock.Engine, text: torch.Tensor, options: argparse.Namespace, of_data: Ranks
) -> float:
    """Returns the loss in nats per byte, over the same windows in each call."""
    batches = Batches(text, options, of_data)
    losses = [float(engine.eval_batch(batches.next())) for _ in range(HELD_OUT_BATCHES)]
    return sum(losses) / len(losses)


def plain_losses(
    text: torch.Tensor, options: argparse.Namespace, config: dict, steps: list[Step]
) -> list[float]:
    """Returns the losses of the same steps in this process alone, with plain torch: the samples of
    all data ranks in one batch, at the engine's learning rates."""
    model, count = build(options), options.micro_batches
    given = dict(config["optimizer"])
    given.pop("type")
    optimizer = torch.optim.AdamW(model.parameters(), **given)
    alone = {"batch": options.batch * config["mesh"]["data"], "device": "cpu"}
    whole = argparse.Namespace(**vars(options) | alone)
    batches, losses = Batches(text, whole, Ranks(0, 1)), []
    for step in steps:
        optimizer.param_groups[0]["lr"] = step.lr
        parts = {name: one.chunk(count) for name, one in batches.next().items()}
        of_parts = []
        for index in range(count):
            made = model(**{name: part[index] for name, part in parts.items()})
            loss = made if torch.is_tensor(made) else made.loss
            (loss / count).backward()
            of_parts.append(float(loss.detach()))
        if config["clip"] > 0:
            nn.utils.clip_grad_norm_(model.parameters(), config["clip"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(of_parts) / count)
    return losses


def check(text: torch.Tensor, options: argparse.Namespace, config: dict, steps: list[Step]) -> None:
    """Prints the first losses beside those of one process. Raises SystemExit if they differ."""
    steps = steps[: options.check_steps]
    if not steps:
        return
    if options.config is not None or config["precision"] != "fp32":
        print("not compared with one process: this needs fp32, and no --config\n", flush=True)
        return
    world = Ranks().size
    print(f"\nthe first steps, on {world} ranks and in one process of plain torch:")
    plain = plain_losses(text, options, config, steps)
    for number, (step, loss) in enumerate(zip(steps, plain, strict=True), 1):
        print(f"step {number}: loss {step.loss:.6f} and {loss:.6f}, lr {step.lr:.2e}")
    worst = max(abs(step.loss - loss) for step, loss in zip(steps, plain, strict=True))
    if not worst <= TOLERANCE:
        raise SystemExit(f"they differ by {worst:.1e}, more than {TOLERANCE:g}")
    print(f"equal within {TOLERANCE:g} (the largest difference is {worst:.1e})\n", flush=True)


def run(options: argparse.Namespace, texts: tuple[torch.Tensor, torch.Tensor]) -> None:
    ranks = Ranks()
    config = make_config(options, ranks.size)
    model = build(options)
    whole = report.sizes_of(model)
    engine = penstock.initialize(model, config, device=options.device)
    options.micro_batches = engine.config.batch.accumulate
    mesh, of_data = engine.config.mesh, Ranks(engine.data_rank, engine.data_size)
    ranks.say(
        f"{sum(whole.values()):,} parameters; {config['strategy']}, {config['precision']}; ranks: "
        f"data {mesh.data} x tensor {mesh.tensor} x pipeline {mesh.pipeline}, of "
        f"{torch.get_num_threads()} thread(s) each"
        f"\n\n{report.stage_table(engine, whole)}\n"
    )
    clock, predicted = report.Clock(engine), report.predicted_memory(engine)
    before = held_out_loss(engine, texts[1], options, of_data)
    batches = Batches(texts[0], options, of_data)
    began = time.perf_counter()
    steps = train(engine, batches, options, ranks)
    seconds = time.perf_counter() - began
    after = held_out_loss(engine, texts[1], options, of_data)
    ranks.say("\n" + report.bubble_report(engine, clock))
    ranks.say("\n" + report.memory_table(engine, predicted))
    engine.close()
    ranks.say(
        f"\nheld-out loss {before:.4f} before training, {after:.4f} nats/byte after "
        f"{len(steps)} steps of {batches.tokens} tokens in {seconds:.1f} s"
    )
    if ranks.rank == 0:
        check(texts[0], options, config, steps)


def main() -> None:
    began = time.perf_counter()
    options = parse_options()
    if options.device == "sim":
        sys.path.append(str(SIMULATED))
        import sim  # noqa: PLC0415 - only where it was built

        sim.start()
    texts = read_text(options.text)
    own = {name: getattr(options, name) for name in ALONE}
    if options.demo and own != ALONE:
        raise SystemExit("--demo chooses --model, --strategy and --offload itself")
    for chosen in DEMO if options.demo else (own,):
        Ranks().say("==== " + ", ".join(f"{name} {value}" for name, value in chosen.items()))
        run(argparse.Namespace(**vars(options) | chosen), texts)
    Ranks().say(f"all took {time.perf_counter() - began:.1f} s on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
