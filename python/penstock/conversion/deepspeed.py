"""DeepSpeed's checkpoints: ZeRO 1, 2 and 3, and universal ones.

A rank's file of optimizer states holds its parts of flat buffers. In ZeRO 1 and 2 the parameters of
a group lie one behind the other in a buffer that is cut in as many parts as there are ranks; in
ZeRO 3 each parameter is cut, and a rank's parts of all of them lie one behind the other, in one or
more buffers (sub-groups). Universal checkpoints have a folder for each parameter.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock._native import ConfigError, RuntimeFault
from penstock.conversion import pickles
from penstock.conversion.foreign import Entry, Foreign

_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OTHERS = re.compile(r"(layer_.*|.*expert.*)_states\.pt|layer_.*")
# Of a file of model states; what else is in it is the user's client_state.
_OURS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params lr_scheduler "
    "frozen_param_fragments data_sampler random_ltd sparse_tensor_module_names skipped_steps "
    "global_steps global_samples dp_world_size mp_world_size ds_config ds_version "
    "checkpoint_parallel_dimensions universal_checkpoint_info autotp_uc_info expert_parallel_info "
    "num_experts has_moe_layers".split()
)
_WEIGHTS = "fp32"


def find(path: pathlib.Path, tag: str) -> pathlib.Path | None:
    """The folder of a checkpoint: `path`, or the one in it that the tag or `latest` names."""
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


def read(folder: pathlib.Path, inert: Sequence[str]) -> Foreign:
    """Everything but generators of random numbers and the position in the data.

    Raises:
        ConfigError: of tensor, pipeline or expert parallel training, which needs merging by rules.
        RuntimeFault: a file is missing or damaged.
    """
    _refuse_others(folder)
    models = _of_ranks(folder, _MODEL, inert)
    if not models:
        raise RuntimeFault(f'[convert::deepspeed] "{folder}" has no file of model states')
    found = Foreign("DeepSpeed, universal" if _is_universal(folder) else "DeepSpeed")
    _take_model(found, models)
    if _is_universal(folder):
        _take_universal(found, folder, models[0], inert)
    else:
        _take_zero(found, folder, models[0], inert)
    return found


def _refuse_others(folder: pathlib.Path) -> None:
    for path in folder.iterdir():
        match = _MODEL.fullmatch(path.name) or _OPTIM.fullmatch(path.name)
        several = match is not None and int(match[2]) > 0 and not _is_universal(folder)
        if several or _OTHERS.fullmatch(path.name):
            raise ConfigError(
                f'[convert::deepspeed] "{path.name}" is of tensor, pipeline or expert parallel '
                f"training: make a universal checkpoint of it with DeepSpeed's ds_to_universal, "
                f"and convert that"
            )


def _of_ranks(folder: pathlib.Path, pattern: re.Pattern[str], inert: Sequence[str]) -> list[Any]:
    """The files' contents, by rank; of the first model-parallel rank."""
    found = {
        int(match[1] or 0): path
        for path in folder.iterdir()
        if (match := pattern.fullmatch(path.name)) and int(match[2]) == 0
    }
    missing = sorted(set(range(len(found))) - set(found))
    if missing:
        raise RuntimeFault(
            f'[convert::deepspeed] "{folder}" has files of ranks {sorted(found)}: those of '
            f"{missing} are missing"
        )
    return [pickles.load(found[rank], inert) for rank in range(len(found))]


def _shapes(model: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of the parameters that train, in the order of their groups."""
    return {n: tuple(s) for group in model.get("param_shapes") or [] for n, s in group.items()}


def _take_model(found: Foreign, models: list[dict[str, Any]]) -> None:
    """Buffers, frozen parameters, and what is no tensor."""
    first = models[0]
    for name in first.get("buffer_names") or []:
        if name in first["module"]:
            found.add("buffer", name, first["module"][name])
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name] for model in models]
        _add_cut(found, "param", name, tuple(shape), [_Part([part], 0) for part in parts])
    if not first.get("param_shapes"):
        found.notes.append("not of ZeRO: the weights alone, as the model computed with them")
    found.tied = dict(first.get("shared_params") or {})
    _take_module(found, first)
    found.steps = int(first.get("global_steps") or 0)
    found.skipped = int(first.get("skipped_steps") or 0)
    found.scheduler = found.take("the scheduler's state", first.get("lr_scheduler"))
    found.client_state = {key: value for key, value in first.items() if key not in _OURS}


def _take_module(found: Foreign, model: dict[str, Any]) -> None:
    """What is whole in it and nowhere else; in ZeRO 3 there is nothing in its parameters."""
    taken = {entry.name for entry in found.entries} | found.tied.keys() | _shapes(model).keys()
    for name, value in model["module"].items():
        if name in taken:
            continue
        if not isinstance(value, torch.Tensor):
            found.notes.append(f'"{name}" is left out: no tensor')
        elif value.numel() > 0:
            found.add("weight", name, value)


@dataclasses.dataclass
class _Part:
    """A rank's elements of a parameter: from `begin` on of its buffers, one behind the other."""

    buffers: list[torch.Tensor]
    begin: int
    numel: int = -1  # to the end

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
                f"[convert::deepspeed] the files have {whole.numel()} of {numel} elements of "
                f'"{name}" ({role})'
            )
        return whole[:numel].reshape(shape)

    found.entries.append(Entry(role, name, shape, parts[0].buffers[0].dtype, put_together))


# ---- ZeRO


@dataclasses.dataclass
class _Shard:
    """What a rank's file of optimizer states holds; by buffer: fp32 weights, and the state."""

    stage: int
    weights: list[torch.Tensor]
    states: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    paddings: list[list[int]]  # by group, of ZeRO 1 and 2: elements behind each parameter
    scaler: Any

    @staticmethod
    def of(content: dict[str, Any]) -> _Shard:
        held = content["optimizer_state_dict"]
        third = "fp32_flat_groups" in held
        inner = held.get("optimizer_state_dict" if third else "base_optimizer_state")
        if not isinstance(inner, dict) or "param_groups" not in inner:
            raise ConfigError(
                '[convert::deepspeed] written with "elastic_checkpoint": not supported. Load it '
                "with DeepSpeed, and save it without"
            )
        states = inner["state"]
        return _Shard(
            stage=3 if third else 2,
            weights=held["fp32_flat_groups" if third else "single_partition_of_fp32_groups"],
            states=[states[index] for index in sorted(states)],
            groups=inner["param_groups"],
            paddings=held.get("param_alignment_paddings") or [],
            scaler=held.get("loss_scaler"),
        )


def _take_zero(
    found: Foreign, folder: pathlib.Path, model: dict[str, Any], inert: Sequence[str]
) -> None:
    contents = _of_ranks(folder, _OPTIM, inert)
    if not contents:
        found.notes.append("there are no optimizer states")
        return
    shards = [_Shard.of(content) for content in contents]
    world = int(model.get("dp_world_size") or len(shards))
    if world != len(shards):
        raise RuntimeFault(
            f'[convert::deepspeed] "{folder}" has optimizer states of {len(shards)} rank(s); the '
            f"run had {world}"
        )
    place = _places_of_3 if shards[0].stage == 3 else _places_of_2
    shapes = _shapes(model)
    example = shards[0].states[0] if shards[0].states else {}
    for name, parts, buffer in place(model, shards):
        weights = [_Part(part.buffers, part.begin, part.numel) for part in parts(_WEIGHTS)]
        _add_cut(found, "param", name, shapes[name], weights)
        for key, value in example.items():
            held = shards[0].states[buffer][key]
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                found.add_moment(name, key, held, shapes[name])
            else:
                _add_moment_cut(found, name, key, shapes[name], parts(key))
    _take_groups(found, shards[0].groups, model["param_shapes"])
    _take_scale(found, shards[0].scaler)


def _add_moment_cut(
    found: Foreign, name: str, key: str, shape: tuple[int, ...], parts: list[_Part]
) -> None:
    inner = Foreign(found.kind)
    _add_cut(inner, key, name, shape, parts)
    found.add_moment(name, key, parts[0].buffers[0], shape, read=inner.entries[0].read)


# For each parameter: its name, its parts by what is asked for, and the first buffer that has it.
_Places = list[tuple[str, Callable[[str], list[_Part]], int]]


def _buffers(shard: _Shard, key: str) -> list[torch.Tensor]:
    return shard.weights if key == _WEIGHTS else [state[key] for state in shard.states]


# "param_slice_mappings" of the files are not where parameters are with "round_robin_gradients".
def _places_of_2(model: dict[str, Any], shards: list[_Shard]) -> _Places:
    places: _Places = []
    for group, shapes in enumerate(model["param_shapes"]):
        at = 0
        paddings = shards[0].paddings[group] if shards[0].paddings else [0] * len(shapes)
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            numel = torch.Size(shape).numel()

            def parts(
                key: str, group: int = group, at: int = at, numel: int = numel
            ) -> list[_Part]:
                return [_Part([_buffers(shard, key)[group] for shard in shards], at, numel)]

            places.append((name, parts, group))
            at += numel + padding
    return places


def _places_of_3(model: dict[str, Any], shards: list[_Shard]) -> _Places:
    places: _Places = []
    at = 0
    ends: list[int] = []
    for buffer in shards[0].weights:
        ends.append((ends[-1] if ends else 0) + buffer.numel())
    for name, shape in _shapes(model).items():
        part = -(-torch.Size(shape).numel() // len(shards))

        def parts(key: str, at: int = at, part: int = part) -> list[_Part]:
            return [_Part(_buffers(shard, key), at, part) for shard in shards]

        places.append((name, parts, next((i for i, end in enumerate(ends) if at < end), 0)))
        at += part
    if ends and at > ends[-1]:
        raise RuntimeFault(
            f"[convert::deepspeed] the optimizer states have {ends[-1]} elements of {at}: those "
            f"that were offloaded to NVMe are in other files. Load it with DeepSpeed, and save it "
            f"without offload"
        )
    return places


def _take_groups(
    found: Foreign, groups: list[dict[str, Any]], shapes: list[dict[str, Any]]
) -> None:
    """`shapes`: by buffer; a group names those that it has."""
    if sorted(n for group in groups for n in group.get("params", [])) != list(range(len(shapes))):
        found.notes.append("options of the optimizer are left out: its groups are of other buffers")
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
    shapes = _shapes(model)
    whole = pickles.load(folder / "zero" / "optimizer_state.pt", inert)
    inner = whole.get("optimizer_state_dict") or whole.get("base_optimizer_state") or whole
    steps = [state.get("step", 0) for state in (inner.get("state") or {}).values()]
    for name in sorted(one.name for one in (folder / "zero").iterdir() if one.is_dir()):
        for file in sorted((folder / "zero" / name).glob("*.pt")):
            held = pickles.load(file, inert)
            value = held["param"] if isinstance(held, dict) and "param" in held else held
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                shape = shapes.get(name, tuple(value.shape))
                if value.numel() != torch.Size(shape).numel():
                    raise RuntimeFault(
                        f'[convert::deepspeed] "{file}" has shape {tuple(value.shape)}, not {shape}'
                    )
                value = value.reshape(shape)
            if file.stem == _WEIGHTS:
                found.add("param", name, value)
            else:
                found.add_moment(name, file.stem, value, shapes.get(name, ()))
        if name not in found.updates and steps:
            found.add_moment(name, "step", steps[0], ())
    groups = inner.get("param_groups") or whole.get("param_groups") or []
    _take_groups(found, groups, model.get("param_shapes") or [])
    _take_scale(found, whole.get("loss_scaler"))
