"""penstock plan --generate: compares where a model can rest while it generates text."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from penstock._native import ConfigError, _penstock
from penstock.bench import machine_file
from penstock.cli import generate_plan, model_spec
from penstock.cli.generate_plan import Forecast, Question, Request
from penstock.cli.model_spec import PlannedModel
from penstock.monitor.report import size

_KEYS = ("batch", "new", "prompt", "kv", "keep")
_LINKS = {
    "host_disk": "from disk",
    "device_host": "to device",
    "local": "from node",
    "node": "across nodes",
}
# Sections of a config that change bytes in a way that is not counted here.
_UNCOUNTED = ("dtypes", "parallel", "quantize.dtype", "quantize.params", "table", "tiling")
_OF_THE_DISK = ("path", "checksums", "timeout_s")  # keys of offload that need state on disk
HELP = (
    "plan for generation, not for training: sequences on each rank (batch, default 1), tokens to "
    "generate (new, 128) after a prompt of so many tokens (prompt, 512), bytes of the KV cache "
    "for each token (kv, default: from the model) and bytes of parameters that stay whole between "
    "forwards (keep, default: as many as fit the budget)"
)


def _bytes(text: str, what: str) -> int:
    """Parses bytes as a config does. Raises ValueError for text that is not bytes."""
    if text == "0":
        return 0
    try:
        read: int = _penstock.Config({"memory": {"device_bytes": text}}).memory.device_bytes
    except ConfigError:
        raise ValueError(
            f'[plan] {what} is "{text}"; allowed: a whole number of bytes >= 0, such as 65536 or '
            "64KiB"
        ) from None
    return read


def _request(text: str, model: PlannedModel, precision: str, config: dict[str, Any]) -> Request:
    """Parses --generate. The config says where the KV cache rests.

    Raises ValueError for an unknown key or a wrong value.
    """
    given = model_spec.pairs(text, _KEYS, "--generate")
    counts = {"batch": 1, "new": 128, "prompt": 512}
    for key in counts:
        if key in given:
            counts[key] = model_spec.whole(given[key], f"{key} of --generate")
    sizes = {key: _bytes(given[key], f"{key} of --generate") for key in _KEYS[3:] if key in given}
    values = model.cached_values()
    cache = None if values is None else values * generate_plan.VALUE_BYTES[precision]
    tier = _given(config, "offload.cache") or "device"
    code = generate_plan.CODE_BYTES.get(_given(config, "quantize.cache"))
    return Request(
        **counts,
        cache_bytes=sizes.get("kv", cache),
        keep_bytes=sizes.get("keep"),
        cache_tier=tier,
        cache_share=1.0 if code is None else code / generate_plan.VALUE_BYTES[precision],
    )


def _given(config: dict[str, Any], key: str) -> Any:
    """Returns the value of a key such as "comm.codec", or None if it has no effect."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return None if value == "none" else value


def _check(args: argparse.Namespace, config: dict[str, Any]) -> None:
    for option in ("gpus", "batch", "tokens"):
        if getattr(args, option) is not None:
            raise ValueError(
                f"[plan] --{option} has no effect with --generate: give batch and prompt in "
                "--generate, and the ranks as --world"
            )
    if _given(config, "optimizer"):
        raise ValueError('[plan] "optimizer" in --config is for training, not --generate')
    uncounted = [key for key in (*_UNCOUNTED, "comm.codec") if _given(config, key)]
    if uncounted:
        raise ValueError(
            f'[plan] --generate does not count the effect of "{uncounted[0]}" in --config. Leave '
            "it out"
        )


def _question(
    args: argparse.Namespace, model: PlannedModel, config: dict[str, Any], machine: Any
) -> Question:
    world = 1 if args.world is None else args.world
    parsed = _penstock.Config(config).resolved(world)
    mesh = parsed.mesh
    if mesh.data != world:
        raise ValueError(
            f"[plan] --generate is for data ranks only, but the mesh of --config has {mesh.data} "
            f"data ranks of {world}. Remove tensor, pipeline and sequence from it"
        )
    limits = {"device": parsed.memory.device_bytes, "host": parsed.memory.host_bytes}
    return Question(
        units=model.units(parsed.units),
        precision=parsed.precision,
        request=_request(args.generate, model, parsed.precision, config),
        prefetch_bytes=parsed.prefetch_bytes,
        limits={tier: limit for tier, limit in limits.items() if limit >= 0},
        machine=machine,
        world=world,
        nodes=mesh.node,
        on_cpu=args.machine is not None and machine_file.is_of_cpu(args.machine),
    )


def _check_kept(question: Question) -> None:
    """Raises ValueError if so few bytes are to be kept that no unit is."""
    keep = question.request.keep_bytes
    smallest = min(filter(None, (question.whole([unit]) for unit in question.units)), default=0)
    if keep and keep < smallest:
        raise ValueError(
            f"[plan] keep of --generate is {keep} bytes, but the smallest unit has {smallest}"
        )


def _config_for(found: Forecast, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config that runs this mode: `config` with the keys that the mode needs."""
    mode, given = found.mode, config.get("offload")
    made = {key: value for key, value in config.items() if key != "offload"}
    made["strategy"] = "ddp" if mode.tier == "device" else "zero3"
    offload: dict[str, Any] = {}
    if mode.tier != "device":
        offload["params"] = mode.tier
        if found.keep_bytes:
            offload["keep_bytes"] = found.keep_bytes
    if isinstance(given, dict):
        keys = ("cache", *(_OF_THE_DISK if "disk" in (mode.tier, given.get("cache")) else ()))
        offload |= {key: given[key] for key in keys if key in given}
    if offload:
        made["offload"] = offload
    if mode.dtype in generate_plan.CODE_BYTES:
        made["quantize"] = {**config.get("quantize", {}), "dtype": mode.dtype}
    return made


def _shown(num_bytes: int) -> str:
    return size(num_bytes) if num_bytes else "-"


def _over(found: Forecast) -> str:
    return ", ".join(f"{size(more)} more {tier} memory" for tier, more in found.over.items())


def _table(found: list[Forecast]) -> list[str]:
    links = [link for link in _LINKS if any(link in one.reads for one in found)]
    rows = [
        ["params", "dtype", *generate_plan.TIERS, "kept", *(_LINKS[link] for link in links)]
        + ["prefill s", "s/step", "tokens/s", "B*", "longest", "fits"]
    ]
    for one in found:
        rows.append(
            [
                "resident" if one.mode.tier == "device" else one.mode.tier,
                one.mode.dtype,
                *(_shown(one.memory[tier]) for tier in generate_plan.TIERS),
                _shown(one.keep_bytes),
                *(_shown(one.reads.get(link, 0)) for link in links),
                *(f"{seconds:.3g}" for seconds in (one.prefill_s, one.step_s)),
                _speed(one),
                str(one.balanced_batch),
                one.longest,
                f"no: needs {_over(one)}" if one.over else "yes",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _heading(question: Question) -> list[str]:
    request = question.request
    room = ", ".join(f"{tier} {size(limit)}" for tier, limit in question.limits.items())
    where = {"device": "", "host": ", in host memory", "disk": ", on disk"}[request.cache_tier]
    cache = (
        f"{size(request.cache_bytes)} per token, {size(request.bytes_of_cache(request.length))} "
        f"for the batch at {request.length} tokens{where}"
        if request.cache_bytes
        else "not counted, because the model does not tell its size; give kv=BYTES per token"
    )
    return [
        f"{question.num_params} parameters in {len(question.units)} units, {question.world} ranks, "
        f"each generates {request.new} tokens for {request.batch} prompts of {request.prompt} "
        "tokens; bytes per rank at the peak, without activations, and per step; each rank has "
        f"{room or 'no limits'}",
        f"KV cache: {cache}",
    ]


def _advice(chosen: Forecast, wide: Forecast) -> str:
    """Returns a line about the batch. `wide` has the batch that balances reading and computing."""
    most = chosen.most_batch
    cache = "" if most is None else f"; the KV cache fits up to batch={most}"
    if chosen.batch >= chosen.balanced_batch:
        return f"batch={chosen.batch} is not below B*: a larger batch takes longer{cache}"
    if most is not None and most <= chosen.batch:
        return f"batch={chosen.batch} is below B*, but the KV cache of a larger batch does not fit"
    why = "B*" if wide.batch == wide.balanced_batch else "the most that the KV cache allows"
    shown = f"with batch={wide.batch} ({why}): {_speed(wide)} tokens/s"
    faster = generate_plan.is_faster(wide, chosen)
    return shown if faster else f"a larger batch gains little, {shown}"


def _speed(found: Forecast) -> str:
    speed = found.tokens_per_s
    return f"{speed:.0f}" if speed >= 100 else f"{speed:.3g}"


def _missing(nearest: Forecast) -> str:
    bytes_more = ", ".join(
        f"{more} bytes more {tier} memory" for tier, more in nearest.over.items()
    )
    hint = ""
    if nearest.most_batch and list(nearest.over) == ["device"]:
        hint = f", or batch={nearest.most_batch}"
    where = f"{nearest.mode.tier} {nearest.mode.dtype}"
    return f"nothing fits; the smallest, {where}, needs {bytes_more}{hint}"


def report(
    args: argparse.Namespace, model: PlannedModel, config: dict[str, Any], machine: Any
) -> int:
    """Prints the modes, and the config for the best one. Returns 0, or 1 if no mode fits.

    Raises ValueError for wrong options, and ConfigError for a wrong config.
    """
    _check(args, config)
    config = {**config, "inference": True, "precision": config.get("precision") or "bf16"}
    question = _question(args, model, config, machine)
    _check_kept(question)
    if isinstance(model, model_spec.Blocks):
        del config["units"]  # names the stand-ins for blocks
    if args.budget is not None:
        del config["memory"]  # it has no room for the KV cache
    found = generate_plan.forecasts(question)
    chosen = generate_plan.best(found)
    wide = None if chosen is None else generate_plan.balanced(question, chosen.mode)
    best = None if chosen is None else _config_for(chosen, config)
    if args.json:
        print(json.dumps(_json(question, found, wide, best), indent=2))
        return 0 if chosen else 1
    print("\n".join([*_heading(question), *_table(found)]))
    if chosen is None or wide is None:
        print(_missing(found[0]))
        return 1
    print(_advice(chosen, wide))
    print(f"best: {json.dumps(best)}")
    return 0


def _json(
    question: Question, found: list[Forecast], wide: Forecast | None, best: dict[str, Any] | None
) -> dict[str, Any]:
    request = question.request
    cache = request.bytes_of_cache(request.length) if request.cache_bytes else None
    return {
        "params": question.num_params,
        "world": question.world,
        **dataclasses.asdict(request),
        "cache_bytes_of_batch": cache,
        "modes": [dataclasses.asdict(one) for one in found],
        "best": best,
        "balanced": wide and dataclasses.asdict(wide),
    }
