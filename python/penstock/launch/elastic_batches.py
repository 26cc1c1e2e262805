"""Computes the batch size of a DeepSpeed config's section "elasticity". A size fits a number of
devices if it is divisible by this number times a micro-batch size of the list. The result is the
size up to `max_train_batch_size` that fits the most numbers of devices."""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from penstock._native import ConfigError

LATEST = 0.2
_RESULTS = ("final_batch_size", "valid_gpus", "micro_batch_size")
_OLDEST = (0, 3, 8)  # the first version of DeepSpeed that had elasticity
# Numbers with more divisors than every smaller number (oeis.org/A002182).
_MOST_DIVISORS = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560),
    *(10080, 15120, 20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760),
    *(277200, 332640, 498960, 554400, 665280, 720720),
)


class ElasticityError(ConfigError):  # type: ignore[misc]
    """The base class of this module's errors."""


class ElasticityConfigError(ElasticityError):
    """The section is missing, incomplete or contradictory."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The batch size does not fit this number of devices."""


class ElasticityConfig:
    """The values of the section, with DeepSpeed's names and defaults.

    Raises ElasticityConfigError for a missing or wrong value.
    """

    def __init__(self, param_dict: dict[str, Any]) -> None:
        given = param_dict
        self.enabled = bool(given.get("enabled", False))
        for key in ("max_train_batch_size", "micro_batch_sizes"):
            if self.enabled and key not in given:
                raise ElasticityConfigError(f'[elasticity] "elasticity.{key}" is missing')
        self.max_acceptable_batch_size = int(given.get("max_train_batch_size", 2000))
        sizes = given.get("micro_batch_sizes", [2, 4, 6])
        whole = isinstance(sizes, list) and all(type(one) is int and one > 0 for one in sizes)
        if not whole or not sizes:
            raise ElasticityConfigError(
                f'[elasticity] "elasticity.micro_batch_sizes" is {sizes!r}; allowed: a list of '
                f"positive whole numbers"
            )
        self.micro_batches: list[int] = sizes
        self.min_gpus, self.max_gpus = given.get("min_gpus", 1), given.get("max_gpus", 10000)
        if not 0 < self.min_gpus <= self.max_gpus:
            raise ElasticityConfigError(
                f'[elasticity] "elasticity.min_gpus" is {self.min_gpus} and "max_gpus" is '
                f"{self.max_gpus}; allowed: positive numbers, with min_gpus not above max_gpus"
            )
        self.model_parallel_size = int(given.get("model_parallel_size", 1))
        self.num_gpus_per_node = int(given.get("num_gpus_per_node", 1))
        if self.model_parallel_size < 1 or self.num_gpus_per_node < 1:
            raise ElasticityConfigError(
                '[elasticity] "model_parallel_size" and "num_gpus_per_node" must be at least 1'
            )
        self.min_time = given.get("min_time", 0)
        self.version = float(given.get("version", LATEST))
        self.prefer_larger_batch_size = bool(given.get("prefer_larger_batch", True))
        self.ignore_non_elastic_batch_info = bool(given.get("ignore_non_elastic_batch_info", False))
        if self.version > LATEST:
            raise ElasticityConfigError(
                f'[elasticity] "elasticity.version" is {self.version}; the newest is {LATEST}'
            )
        if self.model_parallel_size > 1 and self.version != LATEST:
            raise ElasticityConfigError(
                f'[elasticity] "elasticity.model_parallel_size" needs "version" {LATEST}'
            )


def elasticity_enabled(ds_config: dict[str, Any]) -> bool:
    """Whether the config has an enabled section "elasticity"."""
    return bool(ds_config.get("elasticity", {}).get("enabled", False))


def _counts(batch: int, settings: ElasticityConfig, least: int, most: int) -> list[int]:
    """Returns the numbers of devices that divide the batch into whole micro-batches."""
    found = set()
    for micro in settings.micro_batches:
        parts = batch // micro if batch % micro == 0 else 0
        found |= {n for n in range(least, min(parts, most) + 1) if parts % n == 0}
    return sorted(found)


def _best(settings: ElasticityConfig, largest: int, least: int, most: int) -> tuple[int, list[int]]:
    """Returns the batch size that fits the most numbers of devices, and these numbers."""
    micros = settings.micro_batches
    if largest < max(micros):
        raise ElasticityConfigError(
            f"[elasticity] the micro-batch size {max(micros)} is above the largest batch size "
            f"{largest}"
        )
    batches = {
        base * max(one for one in _MOST_DIVISORS if base * one <= largest)
        for base in (*micros, math.lcm(*micros))
        if base <= largest
    }
    sign = 1 if settings.prefer_larger_batch_size else -1
    found = [(batch, _counts(batch, settings, least, most)) for batch in batches]
    return max(found, key=lambda one: (len(one[1]), sign * one[0]))


def _micro_of(batch: int, settings: ElasticityConfig, ranks: int) -> int | None:
    """Returns the preferred micro-batch size that divides a rank's part of the batch."""
    fitting = [one for one in settings.micro_batches if batch // ranks % one == 0]
    return (max if settings.prefer_larger_batch_size else min)(fitting, default=None)


def _by_node(settings: ElasticityConfig, world: int) -> tuple[int, list[int], int | None]:
    """Like _best(), for whole nodes on which groups of devices compute one model (version 0.2)."""
    node, parallel = settings.num_gpus_per_node, settings.model_parallel_size
    if node % parallel:
        raise ElasticityConfigError(
            f'[elasticity] "num_gpus_per_node" is {node}, which is not divisible by '
            f'"model_parallel_size" {parallel}'
        )
    each = node // parallel
    largest = settings.max_acceptable_batch_size
    least, most = max(1, settings.min_gpus // node), max(1, settings.max_gpus // node)
    batch, nodes = _best(settings, largest // each, least, most)
    counts = [one * each for one in nodes]
    if world // parallel in counts:
        return batch * each, counts, _micro_of(batch * each, settings, world)
    ranks = max(1, world // node) * each
    batches = [largest // (micro * ranks) * micro * ranks for micro in settings.micro_batches]
    chosen = (max if settings.prefer_larger_batch_size else min)(batches)
    return chosen, [ranks], _micro_of(chosen, settings, world)


def compute_elastic_config(
    ds_config: dict[str, Any],
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> Any:
    """Returns (batch size, numbers of devices that it fits).

    With a `world_size` or `return_microbatch`, the micro-batch size is the third value.

    Raises:
        ElasticityConfigError: the section is missing, off, incomplete or contradictory.
        ElasticityIncompatibleWorldSize: the batch size does not fit `world_size`.
    """
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError('[elasticity] "elasticity" is missing or not enabled')
    numbers = target_deepspeed_version.partition("+")[0].split(".")[:3]
    if tuple(int(one) for one in numbers) < _OLDEST:
        raise ElasticityConfigError(
            f"[elasticity] DeepSpeed {target_deepspeed_version} has no elasticity; the first "
            f"version is 0.3.8"
        )
    settings = ElasticityConfig(ds_config["elasticity"])
    micro: int | None = None
    if settings.version < 0.2:
        least, most = settings.min_gpus, settings.max_gpus
        batch, counts = _best(settings, settings.max_acceptable_batch_size, least, most)
    else:
        world = world_size or os.environ.get("WORLD_SIZE", "")
        if not str(world).isdecimal():
            raise ElasticityConfigError(
                "[elasticity] version 0.2 needs the number of devices: pass world_size, or set "
                "WORLD_SIZE"
            )
        batch, counts, micro = _by_node(settings, int(world))
    if world_size and world_size // settings.model_parallel_size not in counts:
        raise ElasticityIncompatibleWorldSize(
            f"[elasticity] {world_size} devices do not fit the batch size {batch}; allowed: "
            f"{', '.join(map(str, counts))}"
        )
    if not (world_size or return_microbatch):
        return batch, counts
    if settings.version < 0.2:
        micro = (
            max(
                (one for one in settings.micro_batches if batch // world_size % one == 0),
                default=None,
            )
            if world_size
            else _micro_of(batch, settings, counts[-1])
        )
    return batch, counts, micro


def ensure_immutable_elastic_config(runtime_elastic_config_dict: dict[str, Any]) -> None:
    """Raises ElasticityConfigError if the section differs from DEEPSPEED_ELASTICITY_CONFIG, the
    JSON text that a scheduler used."""
    planned = os.environ.get("DEEPSPEED_ELASTICITY_CONFIG")
    if planned is None:
        return
    for key in ("max_train_batch_size", "micro_batch_sizes", "version"):
        before, now = json.loads(planned).get(key), runtime_elastic_config_dict.get(key)
        if before != now:
            raise ElasticityConfigError(
                f'[elasticity] "{key}" was {before} when the run was scheduled, and is {now} now'
            )


def main(argv: Sequence[str] | None = None) -> int:
    """The command ds_elastic: prints the batch size and the numbers of devices of a config."""
    parser = argparse.ArgumentParser(prog="ds_elastic", description=main.__doc__)
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the JSON config")
    parser.add_argument(
        "-w", "--world-size", type=int, default=0, metavar="N", help="number of devices"
    )
    args = parser.parse_args(argv)
    config = json.loads(pathlib.Path(args.config).read_text(encoding="utf-8"))
    found = compute_elastic_config(config, "0.19.8", args.world_size)
    print(json.dumps(config["elasticity"], indent=4, sort_keys=True))
    for name, value in dict(zip(_RESULTS, found, strict=False)).items():
        print(f"{name:.<20} {value}")
    return 0
