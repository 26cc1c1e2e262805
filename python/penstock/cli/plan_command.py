"""penstock plan: lists every strategy and offload choice for a model, with bytes and seconds."""

from __future__ import annotations

import argparse
import importlib
import json
from typing import Any

from penstock._native import _penstock
from penstock.bench import machine_file
from penstock.cli import generate_command, mesh_command, model_spec
from penstock.cli.model_spec import PlannedModel
from penstock.front.config_file import config_dict

_TOKENS = 4096
# Field of the machine -> its options.
_MACHINE = {
    "flops": "--flops",
    "local": "--local-link --intra",
    "node": "--node-link --inter",
    "device_host": "--device-host-link",
    "host_disk": "--host-disk-link",
    "host_memory": "--host-memory",
    "device_memory": "--device-memory",
}


def _model_of(args: argparse.Namespace) -> PlannedModel:
    if args.model is not None:
        blocks = model_spec.blocks_of(args.model)
        if blocks is not None:
            return blocks
        # This import loads torch, which a model given by the sizes of its blocks does not need.
        built: PlannedModel = importlib.import_module("penstock.cli.model_build").build(args.model)
        return built
    total = model_spec.whole(str(args.params), "--params")
    count = model_spec.num_blocks(total)
    if args.units is not None:
        count = model_spec.whole(args.units, "--units")
    share, rest = divmod(total, count)
    sizes = [share + (1 if unit < rest else 0) for unit in range(count)]
    return model_spec.Blocks(sizes)


def _config_of(args: argparse.Namespace, model: PlannedModel) -> dict[str, Any]:
    config = config_dict(args.config)
    if args.precision is not None or args.config is None:
        config["precision"] = args.precision or "bf16"
    if args.node is not None and args.gpus is None:
        config["mesh"] = {**config.get("mesh", {}), "node": args.node}
    if args.budget is not None:
        budgets = model_spec.pairs(",".join(args.budget), ("device", "host"), "--budget")
        limits = {f"{tier}_bytes": size for tier, size in budgets.items()}
        config["memory"] = {**config.get("memory", {}), **limits}
    if isinstance(model, model_spec.Blocks):
        config["units"] = {"modules": ["Block"]}
    return config


def _machine_of(args: argparse.Namespace) -> Any:
    machine = machine_file.load(args.machine) if args.machine else _penstock.Machine()
    for field in _MACHINE:
        told = getattr(args, f"machine_{field}")
        if told is not None:
            setattr(machine, field, told)
    return machine


def _plan(args: argparse.Namespace) -> int:
    if args.generate is not None:
        model = _model_of(args)
        return generate_command.report(args, model, _config_of(args, model), _machine_of(args))
    if args.gpus is None and (args.world is None or args.batch is not None):
        raise ValueError(
            "[plan] pass --world for one mesh, or --nodes and --gpus (and optionally --batch) to "
            "compare meshes"
        )
    model = _model_of(args)
    machine = _machine_of(args)
    if args.gpus is not None:
        mesh_command.report(args, model, _config_of(args, model), machine)
        return 0
    config = _penstock.Config(_config_of(args, model))
    tokens = args.tokens or model.sequence or _TOKENS
    report = _penstock.plan_report(model.tree(), config, args.world, tokens, machine)
    if args.json:
        keys = ("alternatives", "same", "codecs")
        print(json.dumps({key: report[key] for key in keys}, indent=2))
    else:
        print(report["text"].rstrip())
    return 0


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is not greater than 0")
    return number


def _add_machine(plan: argparse.ArgumentParser) -> None:
    defaults = _penstock.Machine()
    machine = plan.add_argument_group("speeds of the machine, for each rank")
    machine.add_argument(
        "--machine",
        metavar="FILE",
        help="speeds measured by `penstock bench`; the options below override them",
    )
    for field, options in _MACHINE.items():
        default = f"default: from --machine, or {getattr(defaults, field):g}"
        machine.add_argument(
            *options.split(),
            dest=f"machine_{field}",
            type=_positive if field == "flops" else mesh_command.rate,
            metavar="F",
            help=f"{machine_file.FIELDS[field]} ({default})",
        )


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser], summary: str) -> None:
    """Adds the command to the command line."""
    plan = commands.add_parser(
        "plan",
        help=summary,
        description=f"Predicts {summary}. Bytes are peaks on one rank as the engine counts "
        "them, without activations. Seconds are for one step, in which links and compute overlap "
        "in each phase.",
        epilog="example: penstock plan --model gpt:layers=48,hidden=1600 --world 8 "
        "--budget device=80GiB,host=200GiB",
    )
    which = plan.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", metavar="SPEC", help=model_spec.SPECS)
    which.add_argument(
        "--params", metavar="P", help="number of parameters, such as 7e9, in equal blocks"
    )
    plan.add_argument(
        "--units",
        metavar="N",
        help="number of blocks for --params (default: the number in a transformer that is 128 "
        "times as wide as deep)",
    )
    plan.add_argument("--world", type=int, metavar="N", help="number of ranks")
    plan.add_argument(
        "--node", "--nodes", type=int, metavar="M", help="number of nodes that the ranks run on"
    )
    plan.add_argument(
        "--budget",
        action="append",
        metavar="TIER=BYTES,...",
        help="memory limits of a rank, such as device=80GiB,host=64GiB; may be repeated "
        "(default: no limits)",
    )
    plan.add_argument(
        "--config", metavar="JSON", help="config as JSON text or a path: precision, optimizer, ..."
    )
    plan.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        help="default: the precision of --config, or bf16 without --config",
    )
    plan.add_argument(
        "--tokens",
        type=_positive,
        metavar="T",
        help=f"tokens per rank and step (default: one sequence of a gpt, else {_TOKENS})",
    )
    plan.add_argument("--generate", metavar="KEY=N,...", help=generate_command.HELP)
    mesh_command.add_options(plan)
    plan.add_argument("--json", action="store_true", help="print JSON for other programs")
    _add_machine(plan)
    plan.set_defaults(command=_plan)
