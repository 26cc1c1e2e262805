"""Reads DeepSpeed's checkpoints: ZeRO 1, 2 and 3, and universal ones, also with model parallelism.

A rank's file of optimizer states holds the rank's parts of flat buffers. In ZeRO 1 and 2, a buffer
has the parameters of a group, one after another, and is cut into one part per rank. In ZeRO 3, each
parameter is cut, and one or more buffers (sub-groups) have the rank's parts of all parameters, one
after another. Universal checkpoints have a folder for each parameter.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault
from penstock.conversion import pickles, rank_merge
from penstock.conversion.cuts import Rules
from penstock.conversion.foreign import Entry, Foreign

_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_OTHERS = re.compile(r"layer_.*|.*expert.*_states\.pt|expp_rank_.*")
# DeepSpeed's keys in a file of model states. All other keys are the user's client_state.
_OURS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params lr_scheduler "
    "frozen_param_fragments data_sampler random_ltd sparse_tensor_module_names skipped_steps "
    "global_steps global_samples dp_world_size mp_world_size ds_config ds_version "
    "checkpoint_parallel_dimensions universal_checkpoint_info autotp_uc_info expert_parallel_info "
    "num_experts has_moe_layers".split()
)
_WEIGHTS = "fp32"


def find(path: pathlib.Path, tag: str) -> pathlib.Path | None:
    """Returns the checkpoint's folder: `path`, or the subfolder that the tag or `latest` names.

    Returns None if that is not a DeepSpeed checkpoint.
    """
    if tag:
        return path / tag if _is_one(path / tag) else None
    if _is_one(path):
        return path
    for latest in ("latest", "latest_universal"):
        if (path / latest).is_file():
            named = path / (path / latest).read_text(encoding="utf-8").strip()
            if _is_one(named):
                return named
    return None


def _is_one(folder: pathlib.Path) -> bool:
    if not folder.is_dir():
        return False
    return _is_universal(folder) or any(_MODEL.fullmatch(one.name) for one in folder.iterdir())


def _is_universal(folder: pathlib.Path) -> bool:
    return (folder / "zero").is_dir()


def read(folder: pathlib.Path, inert: Sequence[str], rules: Rules | None = None) -> Foreign:
    """Reads a checkpoint, except the states of random generators and the position in the data.

    Args:
        folder: the result of find().
        inert: full names of more classes that the pickles may have (see pickles.load).
        rules: how model-parallel ranks cut the weights, by name pattern.

    Raises:
        ConfigError: the checkpoint is from expert-parallel training; a weight's cut is unknown.
        RuntimeFault: a file is missing or damaged.
    """
    files = _Files.of(folder, inert)
    tensor = len(files.layers) or len(files.models)
    if tensor == 1 and rules:
        raise ConfigError(
            "[convert] rules have no effect, because the weights are not cut: remove the rules"
        )
    by_stage = [
        [_read_rank(files, stage * tensor + rank) for stage in range(len(files.models) // tensor)]
        for rank in range(tensor)
    ]
    ranks = [rank_merge.of_stages(stages) for stages in by_stage]
    for rank, layers in files.layers.items():
        of_rank = [held[0] for held in files.models[rank::tensor]]
        buffers = {name for held in of_rank for name in held.get("buffer_names") or []}
        rank_merge.add_layers(ranks[rank], layers, buffers)
    if tensor == 1:
        return ranks[0]
    info = files.models[0][0].get("universal_checkpoint_info") or {}
    return rank_merge.of_parts(ranks, rules or {}, info)


@dataclasses.dataclass
class _Files:
    """The files of a folder. A model rank is stage * (tensor ranks) + tensor rank."""

    folder: pathlib.Path
    inert: Sequence[str]
    models: list[list[dict[str, Any]]]  # model states by model rank, then by data rank
    layers: dict[int, dict[int, Any]]  # pipeline layers by tensor rank, then by layer index

    @staticmethod
    def of(folder: pathlib.Path, inert: Sequence[str]) -> _Files:
        ranks: set[int] = set()
        layers: dict[int, dict[int, Any]] = {}
        for path in sorted(folder.iterdir()):
            match = _MODEL.fullmatch(path.name) or _OPTIM.fullmatch(path.name)
            layer = _LAYER.fullmatch(path.name)
            if match is not None:
                ranks.add(int(match[2]))
            elif layer is not None:
                held = layers.setdefault(int(layer[2] or 0), {})
                held[int(layer[1])] = pickles.load(path, inert)
            elif _OTHERS.fullmatch(path.name):
                raise ConfigError(
                    f'[convert::deepspeed] "{path.name}" comes from expert-parallel training or '
                    f"has axes other than pipe, data and model, which is not supported"
                )
        models = [_of_ranks(folder, _MODEL, rank, inert) for rank in range(max(ranks) + 1)]
        if len(models) > 1 and _is_universal(folder):
            raise ConfigError(
                f'[convert::deepspeed] "{folder}" is a universal checkpoint of {len(models)} model '
                f"ranks, which is not supported: convert the checkpoint that it was made from"
            )
        found = _Files(folder, inert, models, layers)
        found.check()
        return found

    def check(self) -> None:
        """Raises RuntimeFault if a rank's file is missing or the number of ranks differs."""
        for rank, held in enumerate(self.models):
            if not held:
                raise RuntimeFault(
                    f'[convert::deepspeed] "{self.folder}" has no file of model states for '
                    f"mp_rank_{rank:02d}"
                )
            ranks = int(held[0].get("mp_world_size") or 1)
            if ranks != len(self.models):
                raise RuntimeFault(
                    f'[convert::deepspeed] "{self.folder}" has files of {len(self.models)} model '
                    f"rank(s), from mp_rank_00 on, but mp_rank_{rank:02d} records a run with "
                    f"{ranks} model rank(s)"
                )
            if (held[0].get("module") is None) != bool(self.layers):
                raise RuntimeFault(
                    f'[convert::deepspeed] "{self.folder}" has {len(self.layers) or "no"} sets of '
                    f"layer files, but mp_rank_{rank:02d} has "
                    f"{'weights' if self.layers else 'no weights'}: files are missing or belong to "
                    f"another checkpoint"
                )
        self._check_layers()

    def _check_layers(self) -> None:
        tensor = len(self.layers)
        if tensor and (sorted(self.layers) != list(range(tensor)) or len(self.models) % tensor):
            raise RuntimeFault(
                f'[convert::deepspeed] "{self.folder}" has layer files for the tensor ranks '
                f"{sorted(self.layers)}, which do not fit its {len(self.models)} model ranks: "
                f"files are missing or belong to another checkpoint"
            )
        places = {frozenset(held) for held in self.layers.values()}
        if len(places) > 1:
            raise RuntimeFault(
                f'[convert::deepspeed] "{self.folder}" lacks the files of layers '
                f"{sorted(frozenset.union(*places) - frozenset.intersection(*places))} for some "
                f"tensor ranks"
            )
        if tensor and not _shapes(self.models[0][0]):
            raise ConfigError(
                f'[convert::deepspeed] "{self.folder}" comes from a pipeline without ZeRO, which '
                f"is not supported: its files do not record which weights are tied"
            )


def _read_rank(files: _Files, rank: int) -> Foreign:
    """Reads the files of one model rank, as if the run had no other model rank."""
    folder, models = files.folder, files.models[rank]
    if files.layers:
        models = [model | {"module": {}} for model in models]
    elif not isinstance(models[0]["module"], dict):
        raise ConfigError(
            f'[convert::deepspeed] "{folder}" has no weights by name: its "module" is not a dict'
        )
    found = Foreign("DeepSpeed, universal" if _is_universal(folder) else "DeepSpeed")
    found.tied = dict(files.models[0][0].get("shared_params") or {})  # only rank 0 writes them
    _take_model(found, models)
    if _is_universal(folder):
        _take_universal(found, folder, models[0], files.inert)
    else:
        _take_zero(found, folder, rank, models[0], files.inert)
    missing = _shapes(models[0]).keys() - {one.name for one in found.entries}
    if missing:
        raise RuntimeFault(
            f'[convert::deepspeed] "{folder}" has no values for the parameters {sorted(missing)}'
        )
    return found


def _of_ranks(
    folder: pathlib.Path, pattern: re.Pattern[str], rank: int, inert: Sequence[str]
) -> list[Any]:
    """Returns the contents of one model rank's files, by data rank."""
    found: dict[int, pathlib.Path] = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None or int(match[2]) != rank:
            continue
        other = found.setdefault(int(match[1] or 0), path)
        if other != path:
            raise RuntimeFault(
                f'[convert::deepspeed] "{path.name}" and "{other.name}" are for the same rank: the '
                f"folder has two checkpoints; remove the files of one"
            )
    missing = sorted(set(range(len(found))) - set(found))
    if missing:
        raise RuntimeFault(
            f'[convert::deepspeed] "{folder}" has files of the data ranks {sorted(found)} for '
            f"mp_rank_{rank:02d}: the files of {missing} are missing"
        )
    return [pickles.load(found[data], inert) for data in range(len(found))]


def _shapes(model: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the trainable parameters, in the order of their groups."""
    return {n: tuple(s) for group in model.get("param_shapes") or [] for n, s in group.items()}


def _take_model(found: Foreign, models: list[dict[str, Any]]) -> None:
    """Takes buffers, frozen parameters, counts, the scheduler and client_state."""
    first = models[0]
    for name in first.get("buffer_names") or []:
        if name in first["module"]:
            found.add("buffer", name, first["module"][name])
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name] for model in models]
        _add_cut(found, "param", name, tuple(shape), [_Part([part], 0) for part in parts])
    if not first.get("param_shapes"):
        found.notes.append(
            "the checkpoint is not from ZeRO: only the weights are read, in the model's dtype"
        )
    _take_module(found, first)
    found.skipped = int(first.get("skipped_steps") or 0)
    found.steps = int(first.get("global_steps") or 0) - found.skipped
    found.scheduler = found.take("the scheduler's state", first.get("lr_scheduler"))
    found.client_state = {key: value for key, value in first.items() if key not in _OURS}


def _take_module(found: Foreign, model: dict[str, Any]) -> None:
    """Takes tensors of the module that other files do not have.

    In ZeRO 3 the module's parameters are empty.
    """
    taken = {entry.name for entry in found.entries} | found.tied.keys() | _shapes(model).keys()
    for name, value in model["module"].items():
        if name in taken:
            continue
        if not isinstance(value, torch.Tensor):
            found.notes.append(f'"{name}" is left out: it is not a tensor')
        elif value.numel() > 0:
            found.add("weight", name, value)


@dataclasses.dataclass
class _Part:
    """A rank's elements of a parameter: a range in the concatenation of the rank's buffers."""

    buffers: list[torch.Tensor]
    begin: int
    numel: int = -1  # -1: to the end

    def read(self) -> torch.Tensor:
        pieces, at = [], self.begin
        left = self.numel if self.numel >= 0 else sum(one.numel() for one in self.buffers)
        for one in self.buffers:
            if at < one.numel() and left > 0:
                pieces.append(one.flatten()[at : at + left])
                left -= pieces[-1].numel()
            at = max(0, at - one.numel())
        return torch.cat(pieces) if pieces else self.buffers[0].new_zeros(0)


def _add_cut(
    found: Foreign, role: str, name: str, shape: tuple[int, ...], parts: list[_Part]
) -> None:
    numel = torch.Size(shape).numel()

    def put_together() -> torch.Tensor:
        whole = torch.cat([part.read() for part in parts])
        if whole.numel() < numel:
            raise RuntimeFault(
                f"[convert::deepspeed] the files have only {whole.numel()} of {numel} elements of "
                f'"{name}" ({role})'
            )
        return whole[:numel].reshape(shape)

    found.entries.append(Entry(role, name, shape, parts[0].buffers[0].dtype, put_together))


# ---- ZeRO


@dataclasses.dataclass
class _Shard:
    """The contents of a rank's file of optimizer states."""

    third: bool  # whether this is ZeRO 3
    weights: list[torch.Tensor]  # fp32 weights, by buffer
    states: dict[int, dict[str, Any]]  # optimizer state, by buffer
    groups: list[dict[str, Any]]
    paddings: list[list[int]]  # ZeRO 1 and 2: padding elements after each parameter
    scaler: Any

    @staticmethod
    def of(content: dict[str, Any], world: int) -> _Shard:
        held = content["optimizer_state_dict"]
        third = "fp32_flat_groups" in held
        inner = held.get("optimizer_state_dict" if third else "base_optimizer_state")
        if not isinstance(inner, dict) or "param_groups" not in inner:
            raise ConfigError(
                '[convert::deepspeed] the checkpoint was written with "elastic_checkpoint", which '
                "is not supported: load it with DeepSpeed and save it without this key"
            )
        counts = held.get("partition_count", world)
        if any(count != world for count in (counts if isinstance(counts, list) else [counts])):
            raise ConfigError(
                f"[convert::deepspeed] state is cut into {counts} parts, but there are {world} "
                f"ranks: MiCS and other partitions within groups of ranks are not supported"
            )
        return _Shard(
            third=third,
            weights=held["fp32_flat_groups" if third else "single_partition_of_fp32_groups"],
            states=inner["state"],
            groups=inner["param_groups"],
            paddings=held.get("param_alignment_paddings") or [],
            scaler=held.get("loss_scaler"),
        )

    def buffer(self, key: str, index: int) -> torch.Tensor:
        found = self.weights[index] if key == _WEIGHTS else self.states[index][key]
        if not isinstance(found, torch.Tensor) or found.numel() < self.weights[index].numel():
            raise RuntimeFault(f'[convert::deepspeed] "{key}" does not have one value per element')
        return found


def _take_zero(
    found: Foreign, folder: pathlib.Path, rank: int, model: dict[str, Any], inert: Sequence[str]
) -> None:
    contents = _of_ranks(folder, _OPTIM, rank, inert)
    if not contents:
        _take_weights(found, folder, model)
        return
    world = int(model.get("dp_world_size") or len(contents))
    if world != len(contents):
        raise RuntimeFault(
            f'[convert::deepspeed] "{folder}" has optimizer states of {len(contents)} rank(s), but '
            f"the run had {world} (mp_rank_{rank:02d})"
        )
    shards = [_Shard.of(content, world) for content in contents]
    first, shapes = shards[0], model["param_shapes"]
    if any(len(shard.weights) != len(shapes) for shard in shards):
        raise RuntimeFault(
            f"[convert::deepspeed] the files have {len(first.weights)} buffers of weights, but "
            f"shapes for {len(shapes)} buffers"
        )
    for index in range(len(shapes)):
        _take_buffer(found, shards, index, shapes[index])
    _take_groups(found, first.groups, shapes)
    _take_scale(found, first.scaler)


def _take_weights(found: Foreign, folder: pathlib.Path, model: dict[str, Any]) -> None:
    """Takes the weights in the model's dtype if there are no optimizer states (ZeRO 1 and 2)."""
    for name, shape in _shapes(model).items():
        value = model["module"].get(name)
        if value is None or tuple(value.shape) != shape:
            raise RuntimeFault(
                f'[convert::deepspeed] "{folder}" has no optimizer states: the files that hold the '
                f"weights are missing"
            )
        found.add("weight", name, value)
    if _shapes(model):
        found.notes.append(
            "there are no optimizer states: the weights are read in the model's dtype"
        )


# The files' "param_slice_mappings" are wrong with "round_robin_gradients", so they are not used.
def _take_buffer(found: Foreign, shards: list[_Shard], index: int, shapes: dict[str, Any]) -> None:
    """Takes the parameters of one buffer; they follow one another in the order of the shapes."""
    first, world = shards[0], len(shards)
    paddings = first.paddings[index] if first.paddings else [0] * len(shapes)
    at = 0
    for (name, given), padding in zip(shapes.items(), paddings, strict=True):
        shape = tuple(given)
        numel = torch.Size(shape).numel()
        part = -(-numel // world) if first.third else numel

        def parts(key: str, at: int = at, part: int = part) -> list[_Part]:
            buffers = [shard.buffer(key, index) for shard in shards]
            if first.third:
                return [_Part([buffer], at, part) for buffer in buffers]
            return [_Part(buffers, at, part)]

        _add_cut(found, "param", name, shape, parts(_WEIGHTS))
        for key, value in first.states.get(index, {}).items():
            if not isinstance(value, torch.Tensor) or value.numel() <= 1 < numel:
                found.add_moment(name, key, value, shape)
            elif value.numel() < first.weights[index].numel():
                found.notes.append(
                    f'state "{key}" of "{name}" is left out: it does not have one value per element'
                )
            else:
                _add_moment_cut(found, name, key, shape, parts(key))
        _count_by_group(found, name, first, index)
        at += part + padding
    held = [shard.weights[index].numel() for shard in shards]
    align = 2 * world  # ZeRO 1 and 2 pad to a multiple of this
    fits = held[0] == at if first.third else -(-sum(held) // align) == -(-at // align)
    if not fits or (first.third and len(set(held)) > 1):
        raise RuntimeFault(
            f"[convert::deepspeed] the parameters {', '.join(shapes)} have {at} elements"
            f"{' on each rank' if first.third else ''}, but the files have {held}. (State that was "
            f"offloaded to NVMe is in other files.)"
        )


def _count_by_group(found: Foreign, name: str, shard: _Shard, index: int) -> None:
    """Takes the count of steps of optimizers that keep it for each group."""
    for group in shard.groups:
        if name not in found.updates and index in group.get("params", ()) and "step" in group:
            found.add_moment(name, "step", group["step"], ())


def _add_moment_cut(
    found: Foreign, name: str, key: str, shape: tuple[int, ...], parts: list[_Part]
) -> None:
    inner = Foreign(found.kind)
    _add_cut(inner, key, name, shape, parts)
    found.add_moment(name, key, parts[0].buffers[0], shape, read=inner.entries[0].read)


def _take_groups(
    found: Foreign, groups: list[dict[str, Any]], shapes: list[dict[str, Any]]
) -> None:
    """Takes the groups' options. A group lists its buffers; `shapes` is by buffer."""
    if sorted(n for group in groups for n in group.get("params", [])) != list(range(len(shapes))):
        found.notes.append(
            "options of the optimizer are left out: its groups do not match the buffers"
        )
        return
    for group in groups:
        found.add_options(group, [name for n in group["params"] for name in shapes[n]])


def _take_scale(found: Foreign, scaler: Any) -> None:
    if getattr(scaler, "dynamic", False):
        good = max(0, int(scaler.cur_iter) - int(scaler.last_overflow_iter) - 1)
        found.loss_scale = {
            "active": True,
            "value": float(scaler.cur_scale),
            "good_steps": good % max(1, int(scaler.scale_window)),
        }


# ---- universal


def _take_universal(
    found: Foreign, folder: pathlib.Path, model: dict[str, Any], inert: Sequence[str]
) -> None:
    whole = pickles.load(folder / "zero" / "optimizer_state.pt", inert)
    inner = whole.get("optimizer_state_dict") or whole.get("base_optimizer_state") or whole
    steps = [state["step"] for state in (inner.get("state") or {}).values() if "step" in state]
    shapes = _shapes(model)
    kinds: dict[str, set[str]] = {}
    for name, shape in shapes.items():
        files = sorted((folder / "zero" / name).glob("*.pt"))
        kinds[name] = {file.stem for file in files}
        for file in files:
            _take_file(found, name, shape, file, inert)
        if name not in found.updates and steps:
            found.add_moment(name, "step", steps[0], ())
    for name, kind in kinds.items():
        everywhere = next(iter(kinds.values()))
        if _WEIGHTS not in kind or kind != everywhere:
            raise RuntimeFault(
                f'[convert::deepspeed] "{folder / "zero" / name}" has {sorted(kind)}, but other '
                f"parameters have {sorted(everywhere | {_WEIGHTS})}"
            )
    groups = inner.get("param_groups") or whole.get("param_groups") or []
    _take_groups(found, groups, model.get("param_shapes") or [])
    _take_scale(found, whole.get("loss_scaler"))


def _take_file(
    found: Foreign, name: str, shape: tuple[int, ...], file: pathlib.Path, inert: Sequence[str]
) -> None:
    held = pickles.load(file, inert)
    value = held["param"] if isinstance(held, dict) and "param" in held else held
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        if value.numel() != torch.Size(shape).numel():
            raise RuntimeFault(
                f'[convert::deepspeed] "{file}" has shape {tuple(value.shape)}, not {shape}'
            )
        value = value.reshape(shape)
    if file.stem == _WEIGHTS:
        found.add("param", name, value)
    else:
        found.add_moment(name, file.stem, value, shape)
