"""penstock plan --gpus: meshes of a cluster, with bytes, seconds and why."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from torch import nn

from penstock import model_spec, tree
from penstock._native import _penstock

_MICRO = "1,2,4,8"
_HEAD = 128  # hidden values of a head, where nothing says
_ASSUMED = {"sequence": 2048, "vocabulary": 0}  # of parameters alone
# What transformers' configs call it.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "sequence": ("max_position_embeddings", "n_positions", "seq_length"),
    "vocabulary": ("vocab_size",),
}


def rate(text: str) -> float:
    """Bytes/s of "400GB/s", "50 GiB/s" or a plain number."""
    read = re.fullmatch(
        r"([0-9.]+(?:e[+]?[0-9]+)?)\s*(?:([KMGT]?)(i?)B(?:/s)?)?", text.strip(), re.I
    )
    try:
        number = float(read.group(1)) if read else 0.0
    except ValueError:
        number = 0.0
    if read is None or not number > 0:
        raise argparse.ArgumentTypeError(f'"{text}" is no rate such as 400GB/s, 50GiB/s or 5e10')
    base = 1024 if read.group(3) else 1000
    return number * float(base ** " KMGT".index((read.group(2) or " ").upper()))


def _heads(hidden: int) -> int:
    return max(1, round(hidden / _HEAD))


def _of_config(config: Any) -> tuple[dict[str, int], str]:
    shape: dict[str, int] = {}
    for key, names in _NAMES.items():
        values = [getattr(config, name, None) for name in names]
        found = [value for value in values if isinstance(value, int)]
        if not found:
            raise ValueError(
                f"[plan] the model's config has none of {', '.join(names)}, which meshes need"
            )
        shape[key] = found[0]
    keys = getattr(config, "num_key_value_heads", None) or shape["heads"]
    return {**shape, "heads": min(shape["heads"], keys)}, "of the model's config"


def shape_of(model: nn.Module) -> tuple[dict[str, int], str]:
    """The transformer that the model is, or is taken for, and how that is known."""
    if isinstance(model, model_spec.PlainGpt):
        vocabulary, hidden = model.tokens.weight.shape
        shape = {"layers": len(model.blocks), "hidden": hidden, "heads": _heads(hidden)}
        shape |= {"sequence": model.seq, "vocabulary": vocabulary}
        return shape, f"heads are assumed, of {_HEAD} values each"
    config = getattr(model, "config", None)
    if config is not None:
        return _of_config(config.get_text_config())
    if not isinstance(model, model_spec.Blocks):
        raise ValueError(
            "[plan] the width and heads of this model are not known: meshes are proposed for a "
            "gpt:..., a Hugging Face config.json, parameters per block and --params"
        )
    layers = len(model.blocks)
    numel = sum(param.numel() for param in model.parameters())
    hidden = max(1, round((numel / layers / 12) ** 0.5))
    shape = {"layers": layers, "hidden": hidden, "heads": _heads(hidden), **_ASSUMED}
    return shape, "all of it assumed: a transformer of 12 x hidden^2 parameters a layer"


def _check(args: argparse.Namespace) -> None:
    if args.node is None or args.gpus is None:
        raise ValueError("[plan] meshes need both --nodes and --gpus")
    if args.node < 1 or args.gpus < 1:
        raise ValueError("[plan] --nodes and --gpus are whole numbers >= 1")
    if args.tokens is not None:
        raise ValueError("[plan] --tokens is for one mesh; with --gpus give --batch, --micro")
    if args.world is not None and args.world != args.node * args.gpus:
        raise ValueError(
            f"[plan] --world is {args.world} and --nodes times --gpus is {args.node * args.gpus}: "
            "leave --world out"
        )


def report(
    args: argparse.Namespace, model: nn.Module, config: dict[str, Any], machine: Any
) -> None:
    """Prints the meshes. Raises ValueError for options that do not go together."""
    _check(args)
    shape, known = shape_of(model)
    config.pop("mesh", None)  # what --nodes made of it
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
    native = _penstock.TransformerShape()
    for key, value in shape.items():
        setattr(native, key, value)
    question.shape = native
    found = _penstock.mesh_report(tree.model_tree(model, {}), question)
    if args.json:
        for one in found["alternatives"]:
            one["config"] = json.loads(one["config"])
        shown = {"shape": shape, "shape_is": known, "batch": batch}
        print(json.dumps({**shown, "alternatives": found["alternatives"]}, indent=2))
        return
    print(f"{', '.join(f'{key} {value}' for key, value in shape.items())} ({known})")
    print(found["text"].rstrip())


def add_options(plan: argparse.ArgumentParser) -> None:
    """Those of a cluster."""
    cluster = plan.add_argument_group("meshes: with --gpus, those of --nodes x --gpus are proposed")
    cluster.add_argument("--gpus", type=int, metavar="N", help="ranks of a node")
    cluster.add_argument(
        "--batch", metavar="B", help="samples of a step over all ranks (default 8 a rank)"
    )
    cluster.add_argument(
        "--micro",
        metavar="M,...",
        default=_MICRO,
        help="samples of a micro-batch to be tried (default %(default)s)",
    )
