"""Checkpoints with DeepSpeed's folder layout: DIR/latest, DIR/TAG/, DIR/zero_to_fp32.py.

DIR/TAG holds a Penstock checkpoint (docs/formats.md). It is complete or absent, and loads on any
number of ranks. Other files, for programs that expect them, have DeepSpeed's names. They describe
the run and, if ranks hold whole weights, contain the weights in their compute dtype.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pathlib
import shutil
from collections.abc import Callable
from logging import INFO, WARNING
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from penstock import ConfigError, RuntimeFault
from penstock._native import _penstock
from penstock.conversion import universal
from penstock.conversion.convert import state_dict
from penstock.front.json_values import decode

from ..checkpoint.utils import clone_tensors_for_torch_save
from ..comm.comm import _of_ranks, get_rank, get_world_size
from ..git_version_info import version
from ..utils.logging import log_dist, logger

_T = TypeVar("_T")
_OURS = "deepspeed"  # the key in client_state for this module's data
_COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class TagMismatch(ConfigError, AssertionError):  # type: ignore[misc]
    """Ranks pass different tags, and "checkpoint.tag_validation" is "Fail"."""


def _pickled(value: Any) -> str:
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getvalue()).decode()


def _unpickled(text: str) -> Any:
    # As in DeepSpeed, a client_state may hold any object, so load only checkpoints you trust.
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=False)


def _of_first_rank(value: _T) -> _T:
    shared = [value]
    if get_world_size() > 1:
        dist.broadcast_object_list(shared, 0)
    return shared[0]


def _different(text: str) -> list[str]:
    """Returns the texts of all ranks, by rank, or only one text if all are equal."""
    texts = _of_ranks(text)
    return texts[:1] if len(set(texts)) == 1 else texts


def _together(work: Callable[[], None]) -> None:
    """Runs `work` on each rank. If it fails on one rank, all ranks raise RuntimeFault."""
    problem = ""
    try:
        work()
    except (OSError, ConfigError, RuntimeFault) as error:
        problem = f"rank {get_rank()}: {error}"
    problems = list(filter(None, _of_ranks(problem)))
    if problems:
        raise RuntimeFault(f"[deepspeed::checkpoint] {problems[0]}")


class EngineCheckpoints:
    """The part of DeepSpeedEngine that saves and loads. All ranks must call these methods."""

    native: Any
    _model: Any
    lr_scheduler: Any
    dp_world_size: int
    _config: Any

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves the complete state of the training.

        Inside an accumulation window, the checkpoint does not have the gradients of the window,
        as in DeepSpeed.

        Args:
            save_dir: folder of checkpoints, the same on all ranks.
            tag: the checkpoint's name in the folder; default: "global_stepN". If ranks pass
                different ones, "checkpoint.tag_validation" decides: "Fail" raises TagMismatch;
                "Warn" and "Ignore" use rank 0's.
            client_state: any objects that can be pickled; ranks may have different ones.
            save_latest: write the name to the file `latest`.
            exclude_frozen_parameters: leave out parameters that do not train. Load the checkpoint
                with load_module_strict=False; these parameters then keep their values.

        Returns:
            True.

        Raises:
            ConfigError, RuntimeFault: see penstock.Engine.save().
        """
        if not save_dir:
            raise ConfigError(
                f"[deepspeed::save_checkpoint] save_dir is {save_dir!r}, not a folder"
            )
        root = pathlib.Path(save_dir)
        name = self._one_tag(f"global_step{self.global_steps}" if tag is None else str(tag))
        before = self._latest(root)
        kept = {
            "counts": {one: getattr(self, one) for one in _COUNTS},
            "scheduler": None
            if self.lr_scheduler is None
            else _pickled(self.lr_scheduler.state_dict()),
            "client_state": _different(_pickled(client_state or {})),
        }
        kept = _of_first_rank(kept)  # the engine requires the same client_state on all ranks
        client = {_OURS: json.dumps(kept)}
        self.native.save(
            root,
            name,
            client_state=client,
            frozen=not exclude_frozen_parameters,
            in_window=True,
        )
        _together(lambda: self._write_names(root / name, exclude_frozen_parameters))
        if get_rank() == 0:
            self._set_latest(root, name if save_latest else before)  # the file has no newline
            self._copy_scripts(root)
        _of_ranks(None)  # waits for rank 0
        log_dist(f"saved {root / name}", ranks=[0])
        return True

    def _setting(self, key: str, default: Any) -> Any:
        return self._config._values.get("checkpoint", {}).get(key, default)

    def _one_tag(self, name: str) -> str:
        """Returns rank 0's tag, after the check that "checkpoint.tag_validation" selects."""
        names = _different(name)
        if len(names) == 1:
            return name
        mode = str(self._setting("tag_validation", "warn")).lower()
        text = f"[deepspeed::save_checkpoint] the tag differs between ranks: {', '.join(names)}"
        if mode == "fail":
            raise TagMismatch(f"{text}. Pass the same tag on every rank")
        level = WARNING if mode == "warn" else INFO
        log_dist(f"{text}. All ranks use the tag of rank 0", ranks=[0], level=level)
        return str(names[0])

    @staticmethod
    def _latest(root: pathlib.Path, file: str = "latest") -> str | None:
        try:
            return (root / file).read_text(encoding="utf-8").strip()
        except OSError:
            return None

    @staticmethod
    def _set_latest(root: pathlib.Path, name: str | None) -> None:
        if name is None:
            (root / "latest").unlink(missing_ok=True)
            return
        draft = root / ".latest.part"
        draft.write_text(name, encoding="utf-8")
        os.replace(draft, root / "latest")

    @staticmethod
    def _copy_scripts(root: pathlib.Path) -> None:
        for name in ("zero_to_fp32.py", "zero_to_torch.py"):
            shutil.copyfile(pathlib.Path(__file__).parents[1] / "utils" / name, root / name)
            (root / name).chmod(0o755)

    def _write_names(self, folder: pathlib.Path, trained_only: bool) -> None:
        """Writes the files with DeepSpeed's names. Below stage 3, rank 0's file has the weights."""
        stage, bf16 = self._config.zero_optimization_stage, self._config.bfloat16_enabled
        module = None
        mesh = self.native.config.mesh
        if stage < 3 and get_rank() == 0 and mesh.tensor == mesh.pipeline == 1:
            state = self.module_state_dict(exclude_frozen_parameters=trained_only)
            module = clone_tensors_for_torch_save(dict(state))
        about = {
            "module": module,
            "ds_config": self._config._param_dict,
            "ds_version": version,
            "dp_world_size": self.dp_world_size,
            "mp_world_size": 1,
            "lr_scheduler": None,
            "penstock": "all state is in *.safetensors: see checkpoint.json",
            **{one: getattr(self, one) for one in _COUNTS},
        }
        name = "mp_rank_00_model_states.pt"
        if stage == 3:
            torch.save(about, folder / f"zero_pp_rank_{get_rank()}_{name}")
        elif get_rank() == 0:
            torch.save(about, folder / name)
        if stage > 0:
            optim = {
                "optimizer_state_dict": {"zero_stage": stage, "partition_count": get_world_size()},
                "ds_config": self._config._param_dict,
                "ds_version": version,
            }
            prefix = "bf16_" if bf16 else ""
            file = f"{prefix}zero_pp_rank_{get_rank()}_mp_rank_00_optim_states.pt"
            torch.save(optim, folder / file)

    def load_checkpoint(  # noqa: PLR0913 - DeepSpeed's signature
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads a checkpoint. It may come from another number of ranks and another stage.

        Args:
            load_dir: folder of checkpoints.
            tag: the checkpoint's name; default: the name in the file `latest`, or in
                `latest_universal` if "checkpoint.load_universal" is true. A checkpoint that
                DeepSpeed wrote is converted first, to TAG.penstock beside it.
            load_module_strict: if False, parameters that do not train keep their values if the
                checkpoint lacks them. If only weights are loaded, all other parameters keep
                theirs, too, and weights that the model lacks are ignored.
            load_optimizer_states: also load masters, moments and counts.
            load_lr_scheduler_states: also load the scheduler's state.
            load_module_only: load only the weights.
            custom_load_fn: custom_load_fn(src, dst) takes the checkpoint's weights by name and
                writes to the module, whose weights are whole on every rank. It is called last.

        Returns:
            The checkpoint's folder and its `client_state`; (None, None) if there is no `latest`.

        Raises:
            ConfigError: the checkpoint is missing, belongs to another model, or cannot be
                converted.
            RuntimeFault: the checkpoint is damaged.
        """
        root = pathlib.Path(load_dir)
        name = self._chosen(root, tag)
        if name is None:
            logger.warning(f"nothing is loaded: there is no file {root / 'latest'}")
            return None, None
        only = load_module_only or not load_optimizer_states
        found = self._load(root, name, only, load_module_strict, custom_load_fn)
        log_dist(f"loaded {root / name}", ranks=[0])
        if not isinstance(found, dict) or _OURS not in found:  # penstock.Engine or convert wrote it
            if not load_module_only:
                self._take_converted(root / name, load_lr_scheduler_states)
            return str(root / name), found or {}
        kept = json.loads(found[_OURS])
        if not load_module_only:
            self._take(kept, load_lr_scheduler_states)
        return str(root / name), self._client_state(kept["client_state"])

    def _load(self, root: pathlib.Path, name: str, only: bool, strict: bool, custom: Any) -> Any:
        """Loads the state, or only the weights. Returns client_state."""
        if custom is None or not only:
            try:
                found = self.native.load(root, name, weights_only=only, frozen=strict)
                if custom is None:
                    return found
            except ConfigError:
                if strict or not only:
                    raise
        state = state_dict(root / name)
        if custom is not None:
            self.load_module_state_dict({"module": state}, custom_load_fn=custom)
        else:
            missing, unexpected = self.native.load_state_dict(state, strict=False)
            text = f"{root / name} lacks {missing}, and the model lacks {unexpected}"
            log_dist(text, ranks=[0], level=WARNING)
        return decode(json.loads(_penstock.CheckpointReader(str(root), name).front)["client_state"])

    def _take_converted(self, path: pathlib.Path, scheduler: bool) -> None:
        """Restores the counts and the scheduler's state from another program's checkpoint."""
        found = _penstock.CheckpointReader(str(path), "")
        kept, state = json.loads(found.front).get("scheduler"), json.loads(found.state)
        self.skipped_steps = state["skipped"]
        self.global_steps = state["steps"] + self.skipped_steps
        self.global_samples = self.global_steps * self._config.train_batch_size
        if scheduler and self.lr_scheduler is not None and kept is not None:
            self.lr_scheduler.load_state_dict(decode(kept["state"]))

    def _chosen(self, root: pathlib.Path, tag: str | None) -> str | None:
        """Returns the checkpoint's name as rank 0 sees it; None if there is no `latest`."""
        universal_only = tag is None and bool(self._setting("load_universal", False))
        latest = "latest_universal" if universal_only else "latest"
        name = _of_first_rank(str(tag) if tag is not None else self._latest(root, latest))
        if name is None and universal_only:
            raise ConfigError(
                f'[deepspeed::load_checkpoint] "checkpoint.load_universal" is true, but there is '
                f'no file "{root / latest}": make the checkpoint with ds_to_universal'
            )
        if name is None:
            return None
        if not (root / name).is_dir():
            raise ConfigError(f'[deepspeed::load_checkpoint] there is no folder "{root / name}"')
        if universal.is_ours(root / name):
            return name
        made = root / f"{name}.penstock"
        needed = get_rank() == 0 and not universal.is_newer(made, root / name)
        if needed:
            logger.warning(f"{root / name} is converted to {made}")
        _together(lambda: universal.make(root / name, made) if needed else None)
        return made.name

    def _take(self, kept: dict[str, Any], scheduler: bool) -> None:
        for one, value in kept["counts"].items():
            setattr(self, one, value)
        self.micro_steps = 0  # a new accumulation window begins
        if scheduler and self.lr_scheduler is not None and kept["scheduler"] is not None:
            self.lr_scheduler.load_state_dict(_unpickled(kept["scheduler"]))

    @staticmethod
    def _client_state(texts: list[str]) -> dict[str, Any]:
        if len(texts) > 1 and len(texts) != get_world_size():
            logger.warning(
                "the number of ranks has changed since each rank saved its own client_state: all "
                "ranks get the client_state of rank 0"
            )
            texts = texts[:1]
        state: dict[str, Any] = _unpickled(texts[get_rank() if len(texts) > 1 else 0])
        return state

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the weights in their compute dtype to one torch file, on rank 0.

        All ranks must call it. Returns True.
        """
        state = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        if get_rank() == 0:
            os.makedirs(save_dir, exist_ok=True)
            torch.save(state, os.path.join(save_dir, save_filename))
        _of_ranks(None)  # waits for rank 0
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """Returns whole weights in their compute dtype on rank 0; None on other ranks.

        As in DeepSpeed, the keys are the names in the tree of modules, even if a class overrides
        state_dict().
        """
        native = self.native
        whole = dict(native._core.values.weights(torch.float32, torch.device("cpu"), False))
        native._pipeline.bring_buffers()
        if get_rank() != 0:
            return None
        cast: dict[str, torch.Tensor] = {}  # tied weights share one tensor
        state: dict[str, Any] = {}
        for path, module in self._model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for name, param in module._parameters.items():
                if param is not None and (param.requires_grad or not exclude_frozen_parameters):
                    own = native._structure.own[param]
                    if own not in cast:
                        cast[own] = whole[own].to(param.dtype)
                    state[prefix + name] = cast[own]
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    state[prefix + name] = buffer.detach().cpu().clone()
        return state

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def _named(self) -> Any:
        return self._model.named_parameters(remove_duplicate=False)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Returns the model's state_dict(), with empty tensors for sharded parameters."""
        state: dict[str, Any] = self._model.state_dict(
            destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        if exclude_frozen_parameters:
            for name, one in self._named():
                if not one.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: dict[str, Any],
        strict: bool = True,
        custom_load_fn: Any = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Loads whole weights (`checkpoint["module"]`), which must be the same on all ranks.

        If `custom_load_fn` is given, custom_load_fn(src=weights, dst=module) writes the weights,
        and rank 0's result counts.
        """
        if custom_load_fn is None:
            self.native.load_state_dict(checkpoint["module"], strict=strict)
            return

        def load() -> None:
            try:
                custom_load_fn(src=checkpoint["module"], dst=self._model)
            except Exception as error:
                text = f"custom_load_fn raised {type(error).__name__}: {error}"
                raise RuntimeFault(text) from error

        with self.native.gathered(write=True):
            _together(load)
