"""Predicts the bytes and seconds of generation for each tier and dtype in which a model rests.

A forward takes as long as the longest of these, plus the time to read its first unit (measured
computing adds up, and so does the share of the links' time that slows it down, except the disk's):

- the bytes that it reads from host memory, from disk or from other ranks, over the slowest link;
- 2 FLOPs per parameter and token, at the speed of products with so many rows, if `penstock bench`
  measured it (then this includes the next item);
- one read of all weights from device memory;
- one read of the KV cache from device memory, or, if it rests on another tier, its way to the
  device and two passes more over device memory: it is written there in one piece.

So `prefetch_bytes` must let reads overlap computing. Every parameter counts as used by each token.
Pure functions; the arguments that are named `mode` are one of modes().
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.cli.model_spec import UnitSize

VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Integers with one fp32 scale for 128 or 64 values (docs/tables.md, quantized parameters).
CODE_BYTES = {"int8": 1 + 4 / 128, "int4": 0.5 + 4 / 64}
TIERS = ("device", "host", "disk")
# A gain below a twentieth is within the error of the prediction.
_SURE_GAIN = 0.95
# From so many rows on, products are about as fast as `flops` says.
_MANY_ROWS = 512
# The engine pads a unit by at most so many bytes: parameters to 64 bytes, and each of two flats
# (quantized, other) to 512 bytes per rank.
_PADDING, _RANK_PADDING = 4096, 2 * 512


class Machine(Protocol):
    """Speeds of one rank (`_penstock.Machine`): FLOP/s and bytes/s."""

    flops: float
    local: float
    node: float
    device_host: float
    host_disk: float
    device_memory: float
    one_row: float  # 0, like the next two, if it was not measured
    rows_16: float
    attention: float
    overlap: float  # share of the time of links that does not slow down computing


@dataclasses.dataclass(frozen=True)
class Request:
    """What each rank generates."""

    batch: int  # sequences
    new: int  # tokens generated for each sequence
    prompt: int  # tokens given for each sequence
    cache_bytes: int | None = None  # keys and values of one token; None: unknown, not counted
    keep_bytes: int | None = None  # None: as many as the budget leaves
    cache_tier: str = "device"  # where the KV cache rests
    cache_share: float = 1.0  # its bytes at rest for each byte on the device

    @property
    def length(self) -> int:
        return self.prompt + self.new

    def bytes_of_cache(self, tokens: int) -> int:
        """Returns the bytes of the KV cache if each sequence has so many tokens."""
        return self.batch * tokens * (self.cache_bytes or 0)

    def cache_at_rest(self, tokens: int) -> int:
        """Returns the bytes of the same cache in its tier."""
        return math.ceil(self.bytes_of_cache(tokens) * self.cache_share)


@dataclasses.dataclass(frozen=True)
class Question:
    """A model, a request and the ranks that serve it."""

    units: Sequence[UnitSize]  # the root first
    precision: str  # "fp32" "bf16" "fp16"
    request: Request
    prefetch_bytes: int
    limits: Mapping[str, int]  # tier -> budget of a rank in bytes; absent: no limit
    machine: Machine
    world: int = 1
    nodes: int = 1
    on_cpu: bool = False  # the device's memory is host memory

    @property
    def num_params(self) -> int:
        return sum(unit.numel for unit in self.units)

    def whole(self, units: Sequence[UnitSize]) -> int:
        """Returns the bytes of units on the device."""
        return sum(unit.numel for unit in units) * VALUE_BYTES[self.precision]

    def at_rest(self, units: Sequence[UnitSize], dtype: str) -> int:
        """Returns the bytes of units whose block matrices rest in `dtype`, over all ranks."""
        code = CODE_BYTES.get(dtype, VALUE_BYTES[self.precision])
        matrices = sum(unit.matrices for unit in units)
        others = sum(unit.numel for unit in units) - matrices
        return math.ceil(matrices * code) + others * VALUE_BYTES[self.precision]

    def with_batch(self, batch: int) -> Question:
        request = dataclasses.replace(self.request, batch=batch)
        return dataclasses.replace(self, request=request)


@dataclasses.dataclass(frozen=True)
class Mode:
    """Where the parameters rest, and the dtype of their block matrices there."""

    tier: str
    dtype: str


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What a mode takes on one rank. Bytes in memory are peaks without activations."""

    mode: Mode
    batch: int  # sequences of each rank
    memory: Mapping[str, int]  # tier -> bytes, with the KV cache
    over: Mapping[str, int]  # tier -> bytes above its budget; empty if the mode fits
    keep_bytes: int  # offload.keep_bytes
    reads: Mapping[str, int]  # link (field of the machine) -> bytes that a step reads over it
    step_s: float  # one token for each sequence, with a full KV cache
    prefill_s: float
    longest: str  # the longest part of a step: "compute", "weights", "KV cache" or a link
    tokens_per_s: float  # new tokens of all ranks over the seconds of prefill and steps
    balanced_batch: int  # from this batch on, a step computes for longer than it reads
    most_batch: int | None  # the largest batch whose KV cache fits; None: no limit


def modes(precision: str) -> list[Mode]:
    """Returns the modes to compare. Those that round no values come first, faster tiers first."""
    exact = [Mode(tier, precision) for tier in TIERS]
    return exact + [Mode(tier, dtype) for dtype in CODE_BYTES for tier in TIERS[1:]]


def _streamed(question: Question, keep_bytes: int) -> list[UnitSize]:
    """Returns the units that are not kept (set_kept() of src/plan/strategy.h)."""
    left, streamed = keep_bytes, []
    for unit in question.units:
        whole = question.whole([unit])
        if whole <= left:
            left -= whole
        else:
            streamed.append(unit)
    return streamed


@dataclasses.dataclass(frozen=True)
class _Window:
    """The parameters that are whole at one time during a forward, in bytes, apart from kept units.

    The root is whole during the whole forward. Besides the root, the largest unit is whole while it
    computes, and so are the units that are read ahead: at least one, as on an accelerator.
    """

    root: int
    others: int
    share: float  # of the bytes of all streamed units but the root


def _window(question: Question, streamed: Sequence[UnitSize]) -> _Window:
    others = _without_root(question, streamed)
    whole = question.whole(others)
    largest = max((question.whole([unit]) for unit in others), default=0)
    ahead = min(max(question.prefetch_bytes, largest), whole - largest)
    root = question.whole(streamed) - whole
    return _Window(root, largest + ahead, (largest + ahead) / max(1, whole))


def _without_root(question: Question, units: Sequence[UnitSize]) -> list[UnitSize]:
    return [unit for unit in units if unit is not question.units[0]]


def _memory(question: Question, mode: Mode, streamed: Sequence[UnitSize]) -> dict[str, int]:
    """Returns the bytes of parameters in each tier."""
    if mode.tier == "device":
        return {"device": question.whole(question.units), "host": 0, "disk": 0}
    window = _window(question, streamed)
    kept = question.whole(question.units) - question.whole(streamed)
    device = kept + window.root + window.others
    rest = math.ceil(question.at_rest(question.units, mode.dtype) / question.world)
    if mode.tier == "host":
        return {"device": device, "host": rest + _decoded(question, mode), "disk": 0}
    return {"device": device, "host": _staging(question, mode, streamed), "disk": rest}


def _decoded(question: Question, mode: Mode) -> int:
    """Returns the bytes of a quantized unit that is decoded to be compared with its use."""
    if mode.dtype not in CODE_BYTES:
        return 0
    largest = max(unit.matrices for unit in question.units)
    return math.ceil(largest * VALUE_BYTES[question.precision] / question.world)


def _staging(question: Question, mode: Mode, streamed: Sequence[UnitSize]) -> int:
    """Returns the bytes of host memory through which units on disk pass.

    After a unit's forward, its values are compared with those on disk. Quantized values are decoded
    for this.
    """

    def read(units: Sequence[UnitSize]) -> int:
        window = _window(question, units)
        rest = (
            question.at_rest(_without_root(question, units), mode.dtype) * window.share
            + window.root
        )
        return math.ceil(rest / question.world)

    staged = max(read(streamed), read(question.units))  # the first forward reads kept units, too
    decoded = _decoded(question, mode)

    def compared(units: Sequence[UnitSize]) -> int:
        rest = max((question.at_rest([unit], mode.dtype) for unit in units), default=0)
        return math.ceil(rest / question.world) + decoded

    others = _without_root(question, streamed)
    return max(staged + (compared(others) if decoded else 0), compared(question.units))


def _reads(question: Question, mode: Mode, streamed: Sequence[UnitSize]) -> dict[str, int]:
    """Returns the bytes that a rank moves over each link to make these units whole."""
    rest = 0
    if mode.tier != "device":
        rest = math.ceil(question.at_rest(streamed, mode.dtype) / question.world)
    local_ranks = question.world // question.nodes
    shard = question.whole(streamed) / question.world  # gathered after it is decoded
    # On a CPU, values from disk need no copy, unless they are decoded or gathered.
    straight = question.on_cpu and question.world == 1 and mode.dtype not in CODE_BYTES
    copies = 0 if straight and mode.tier == "disk" else rest
    reads = {
        "host_disk": rest if mode.tier == "disk" else 0,
        "device_host": copies,
        "local": math.ceil(shard * (local_ranks - 1)),
        "node": math.ceil(shard * (question.world - local_ranks)),
    }
    return {link: size for link, size in reads.items() if size > 0}


def _with_cache(request: Request, reads: Mapping[str, int], cached: int) -> dict[str, int]:
    """Adds the bytes of a KV cache of `cached` tokens that moves."""
    added = dict(reads)
    links = {"device": (), "host": ("device_host",), "disk": ("host_disk", "device_host")}
    for link in links[request.cache_tier]:
        added[link] = added.get(link, 0) + request.cache_at_rest(cached)
    return added


def _cache_memory(question: Question) -> dict[str, int]:
    """Returns the bytes of the KV cache in each tier. If it moves, the tokens of two and a half
    blocks are on the device: in one piece (keys, then values), as they came, and those of the next
    block."""
    request = question.request
    whole = request.bytes_of_cache(request.length)
    if request.cache_tier == "device":
        return {"device": whole}
    blocks = max(1, len(question.units) - 1)
    memory = {"device": math.ceil(2.5 * whole / blocks)}
    rest = request.cache_at_rest(request.length)
    memory[request.cache_tier] = rest
    if request.cache_tier == "disk":
        memory["host"] = math.ceil(2 * rest / blocks)
    return memory


def _seconds_of(reads: Mapping[str, int], machine: Machine) -> float:
    return max(_link_seconds(reads, machine).values(), default=0.0)


def _link_seconds(reads: Mapping[str, int], machine: Machine) -> dict[str, float]:
    return {link: size / getattr(machine, link) for link, size in reads.items()}


def _fill(reads: Mapping[str, int], machine: Machine) -> float:
    """Returns the seconds of reads before computing begins, except those that _longest() adds."""
    times = _link_seconds(reads, machine).items()
    return max(
        (time * (1.0 if link == "host_disk" else machine.overlap) for link, time in times),
        default=0.0,
    )


def _most_kept(question: Question, mode: Mode) -> int:
    """Returns the largest offload.keep_bytes that fits beside the window and the KV cache.

    Counts only the first units, all of them: the engine keeps exactly these. Without a budget of
    the device, returns 0.
    """
    limit = question.limits.get("device")
    if limit is None:
        return 0
    limit -= _cache_memory(question)["device"]
    units = question.units
    for count in range(len(units), 0, -1):
        padding = count * (_PADDING + question.world * _RANK_PADDING)
        kept = question.whole(units[:count])
        if kept > 0 and padding + _memory(question, mode, units[count:])["device"] <= limit:
            return kept + padding
    return 0


def _most_batch(question: Question, mode: Mode) -> int | None:
    """Returns the largest batch whose KV cache fits if nothing is kept by choice."""
    if not question.request.cache_bytes:
        return None
    streamed = _streamed(question, question.request.keep_bytes or 0)
    memory, one = _memory(question, mode, streamed), _cache_memory(question.with_batch(1))
    fits = [
        max(0, limit - memory[tier]) // one[tier]
        for tier, limit in question.limits.items()
        if one.get(tier)
    ]
    return min(fits, default=None)


def products_s(question: Question, rows: int) -> float:
    """Returns the seconds of the products of all weights with so many rows.

    Seconds between the measured numbers of rows (1, 16, and `_MANY_ROWS` at the speed `flops`)
    follow a power law.
    """
    machine, flops = question.machine, 2.0 * question.num_params
    points = [(float(_MANY_ROWS), flops * _MANY_ROWS / machine.flops)]
    if machine.rows_16:
        points.insert(0, (16.0, flops * 16 / machine.rows_16))
    if machine.one_row:
        points.insert(0, (1.0, question.whole(question.units) / machine.one_row))
    if len(points) < 2 or rows >= _MANY_ROWS:
        return flops * rows / machine.flops
    at = next(i for i in range(1, len(points)) if rows <= points[i][0])
    (left, fast), (right, slow) = points[at - 1 : at + 1]
    power = math.log(slow / fast) / math.log(right / left)
    return float(fast * (rows / left) ** power)


def _balanced_batch(question: Question, reading_s: float) -> int:
    """Returns the smallest batch whose products take at least so many seconds."""
    low, high = 0, 1
    while products_s(question, high) < reading_s:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if products_s(question, middle) < reading_s:
            low = middle
        else:
            high = middle
    return high


def _longest(
    question: Question, reads: Mapping[str, int], tokens: int, cached: int
) -> tuple[float, str]:
    """Returns the seconds of the longest part of a forward, and its name.

    The forward computes `tokens` tokens of each sequence, with a KV cache of `cached` tokens.
    """
    request, machine = question.request, question.machine
    cache = request.bytes_of_cache(cached)
    moved = 0 if request.cache_tier == "device" else 2 * cache / machine.device_memory
    parts = {
        "weights": question.whole(question.units) / machine.device_memory,
        "compute": products_s(question, request.batch * tokens),
        "KV cache": cache / (machine.attention or machine.device_memory) + moved,
    }
    if machine.one_row:  # measured: what computes adds up
        parts = {"compute": parts["compute"], "KV cache": parts["KV cache"] * (tokens == 1)}
    links = _link_seconds(_with_cache(request, reads, cached), machine)
    # On processors that also copy, copies slow down what computes. The disk reads by itself.
    together = sum(parts.values()) if machine.one_row else max(parts.values())
    copies = sum(seconds for link, seconds in links.items() if link != "host_disk")
    together += (1.0 - machine.overlap) * copies
    parts |= {f"{link.replace('_', '-')} link": seconds for link, seconds in links.items()}
    longest = max(parts, key=lambda part: parts[part])
    return max(parts[longest], together), longest


def forecast(question: Question, mode: Mode) -> Forecast:
    """Returns the bytes and seconds of a mode."""
    request, machine = question.request, question.machine
    keep, streamed = 0, list[UnitSize]()
    if mode.tier != "device":
        chosen = request.keep_bytes
        keep = _most_kept(question, mode) if chosen is None else chosen
        streamed = _streamed(question, keep)
    memory = _memory(question, mode, streamed)
    for tier, added in _cache_memory(question).items():
        memory[tier] += added
    over = {
        tier: memory[tier] - limit
        for tier, limit in question.limits.items()
        if memory[tier] > limit
    }
    reads = _reads(question, mode, streamed)
    units = _without_root(question, streamed) or streamed
    first = _fill(_with_cache(request, {}, request.length), machine)
    fill = max((_fill(_reads(question, mode, [unit]), machine) for unit in units), default=0.0)
    fill += first / max(1, len(question.units) - 1)
    prefill, _ = _longest(question, reads, request.prompt, request.prompt)
    step, longest = _longest(question, reads, 1, request.length)
    prefill, step = prefill + fill, step + fill
    whole = prefill + (request.new - 1) * step  # the prefill gives the first token
    weights = question.whole(question.units) / machine.device_memory
    reading = max(_seconds_of(reads, machine), weights)
    return Forecast(
        mode=mode,
        batch=request.batch,
        memory=memory,
        over=over,
        keep_bytes=keep,
        reads=_with_cache(request, reads, request.length),
        step_s=step,
        prefill_s=prefill,
        longest=longest,
        tokens_per_s=question.world * request.batch * request.new / whole,
        balanced_batch=_balanced_batch(question, reading),
        most_batch=_most_batch(question, mode),
    )


def forecasts(question: Question) -> list[Forecast]:
    """Returns the forecasts of all modes: the fastest that fit, then those that miss the fewest
    bytes."""
    found = [forecast(question, mode) for mode in modes(question.precision)]
    return sorted(found, key=lambda one: (sum(one.over.values()), -one.tokens_per_s))


def is_faster(one: Forecast, other: Forecast) -> bool:
    """Whether one is faster than the other beyond the error of the prediction."""
    return other.tokens_per_s < _SURE_GAIN * one.tokens_per_s


def best(found: Sequence[Forecast]) -> Forecast | None:
    """Returns the fastest forecast that fits, or None.

    If several are as fast within the error of the prediction, returns the first of them in the
    order of modes(). So values are rounded only for a gain.
    """
    order = [*VALUE_BYTES, *CODE_BYTES]
    fit = [one for one in found if not one.over]
    return min(
        (one for one in fit if not any(is_faster(other, one) for other in fit)),
        key=lambda one: (order.index(one.mode.dtype), TIERS.index(one.mode.tier)),
        default=None,
    )


def balanced(question: Question, mode: Mode) -> Forecast:
    """Returns the forecast with the batch at which computing takes as long as reading, or with the
    largest batch whose KV cache fits. `mode` must fit.

    A larger batch leaves less memory to keep units, so more is read; this is repeated until the
    batch stays.
    """
    found = forecast(question, mode)
    for _ in range(len(question.units) + 2):
        wanted = found.balanced_batch
        if found.most_batch is not None:
            wanted = min(wanted, found.most_batch)
        if wanted == found.batch:
            break
        found = forecast(question.with_batch(wanted), mode)
    return found
