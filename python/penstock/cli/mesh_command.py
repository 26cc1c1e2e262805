"""penstock plan --gpus: proposes meshes for a cluster, with bytes, seconds and the reason."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from penstock._native import _penstock
from penstock.cli import model_spec
from penstock.cli.model_spec import PlannedModel

_MICRO = "1,2,4,8"
# Keys of "parallel" that raise an error if an axis has size 1, as in some proposed meshes.
_OF_AN_AXIS = ("cut_logits", "norms", "sequence")


def rate(text: str) -> float:
    """Returns bytes/s from "400GB/s", "50 GiB/s" or a plain number.

    Raises argparse.ArgumentTypeError for any other text.
    """
    read = re.fullmatch(
        r"([0-9.]+(?:e[+]?[0-9]+)?)\s*(?:([KMGT]?)(i?)B(?:/s)?)?", text.strip(), re.I
    )
    try:
        number = float(read.group(1)) if read else 0.0
    except ValueError:
        number = 0.0
    if read is None or not number > 0:
        raise argparse.ArgumentTypeError(f'"{text}" is not a rate such as 400GB/s, 50GiB/s or 5e10')
    base = 1024 if read.group(3) else 1000
    return number * float(base ** " KMGT".index((read.group(2) or " ").upper()))


def _check(args: argparse.Namespace) -> None:
    if args.node is None or args.gpus is None:
        raise ValueError("[plan] to compare meshes, pass both --nodes and --gpus")
    if args.node < 1 or args.gpus < 1:
        raise ValueError("[plan] --nodes and --gpus must be whole numbers >= 1")
    if args.tokens is not None:
        raise ValueError("[plan] --tokens is for one mesh. With --gpus, use --batch and --micro")
    if args.world is not None and args.world != args.node * args.gpus:
        raise ValueError(
            f"[plan] --world is {args.world}, but --nodes times --gpus is {args.node * args.gpus}. "
            "Leave --world out"
        )


def _native_shape(shape: dict[str, int]) -> Any:
    """Returns the shape for the C++ planner. Tensor ranks must divide the smaller number of heads,
    so `heads` is the number of key and value heads if these are fewer."""
    heads = min(shape["heads"], shape.get("key_value_heads", shape["heads"]))
    native = _penstock.TransformerShape()
    for key, value in {**shape, "heads": heads}.items():
        if key != "key_value_heads":
            setattr(native, key, value)
    return native


def report(
    args: argparse.Namespace, model: PlannedModel, config: dict[str, Any], machine: Any
) -> None:
    """Prints the proposed meshes. Raises ValueError for options that exclude each other."""
    _check(args)
    shape, known = model.shape()
    config.pop("mesh", None)  # --nodes replaces it
    parallel = config.get("parallel")
    if isinstance(parallel, dict):
        config["parallel"] = {k: v for k, v in parallel.items() if k not in _OF_AN_AXIS}
    offload = config.setdefault("offload", {})
    if isinstance(offload, dict):
        offload.setdefault("optimizer", "none")
        offload.setdefault("params", "none")
    question = _penstock.MeshQuestion(_penstock.Config(config), machine)
    question.nodes, question.per_node = args.node, args.gpus
    world = args.node * args.gpus
    batch = model_spec.whole(args.batch, "--batch") if args.batch else 8 * world
    question.batch = batch
    question.micro = [model_spec.whole(size, "--micro") for size in args.micro.split(",")]
    question.shape = _native_shape(shape)
    found = _penstock.mesh_report(model.tree(), question)
    if args.json:
        for one in found["alternatives"]:
            one["config"] = json.loads(one["config"])
        shown = {"shape": shape, "shape_is": known, "batch": batch}
        print(json.dumps({**shown, "alternatives": found["alternatives"]}, indent=2))
        return
    words = (f"{key.replace('_', ' ')} {value}" for key, value in shape.items())
    print(f"{', '.join(words)} ({known})")
    print(found["text"].rstrip())


def add_options(plan: argparse.ArgumentParser) -> None:
    """Adds the options that describe a cluster."""
    cluster = plan.add_argument_group("meshes: --gpus proposes meshes of --nodes x --gpus ranks")
    cluster.add_argument("--gpus", type=int, metavar="N", help="number of ranks per node")
    cluster.add_argument(
        "--batch", metavar="B", help="samples per step over all ranks (default: 8 per rank)"
    )
    cluster.add_argument(
        "--micro",
        metavar="M,...",
        default=_MICRO,
        help="sizes of micro-batches to try, in samples (default %(default)s)",
    )
