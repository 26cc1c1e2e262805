"""Checkpoints with DeepSpeed's folder layout: DIR/latest, DIR/TAG/, DIR/zero_to_fp32.py.

DIR/TAG holds a Penstock checkpoint (docs/formats.md). It is complete or absent, and loads on any
number of ranks. It also has files with DeepSpeed's names, for programs that expect them; these
describe the run and have no tensors.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from penstock import ConfigError, RuntimeFault

from ..comm.comm import get_rank, get_world_size
from ..git_version_info import version
from ..utils.logging import log_dist, logger

_OURS = "deepspeed"  # the key in client_state with this module's data
_COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_MANIFEST = "checkpoint.json"


def _pickled(value: Any) -> str:
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getvalue()).decode()


def _unpickled(text: str) -> Any:
    # As in DeepSpeed: a client_state may have any object, so load only checkpoints that you trust.
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=False)


def _barrier() -> None:
    if get_world_size() > 1:
        dist.barrier()


def _of_ranks(text: str) -> list[str]:
    """Gathers the texts of all ranks, by rank; returns only one if all are equal."""
    if get_world_size() == 1:
        return [text]
    all_texts: list[Any] = [None] * get_world_size()
    dist.all_gather_object(all_texts, text)
    return all_texts[:1] if all(one == text for one in all_texts) else all_texts


def _together(work: Callable[[], None]) -> None:
    """Runs `work` on each rank. If it raises OSError on one rank, all ranks raise RuntimeFault."""
    problem = ""
    try:
        work()
    except OSError as error:
        problem = f"rank {get_rank()}: {error}"
    problems = [problem]
    if get_world_size() > 1:
        problems = [""] * get_world_size()
        dist.all_gather_object(problems, problem)
    if any(problems):
        raise RuntimeFault(f"[deepspeed::save_checkpoint] {next(filter(None, problems))}")


class EngineCheckpoints:
    """The part of DeepSpeedEngine that saves and loads. All ranks must call these methods."""

    native: Any
    module: torch.nn.Module
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

        Args:
            save_dir: folder of checkpoints, the same on all ranks.
            tag: the checkpoint's name in the folder; default: "global_stepN".
            client_state: any objects that can be pickled; ranks may have different ones.
            save_latest: write the name to the file `latest`.
            exclude_frozen_parameters: accepted, without effect: load_checkpoint() needs all
                parameters.

        Returns:
            True.

        Raises:
            ConfigError, RuntimeFault: see penstock.Engine.save().
        """
        root = pathlib.Path(save_dir)
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        before = self._latest(root)
        kept = {
            "counts": {one: getattr(self, one) for one in _COUNTS},
            "scheduler": None
            if self.lr_scheduler is None
            else _pickled(self.lr_scheduler.state_dict()),
            "client_state": _of_ranks(_pickled(client_state or {})),
        }
        if get_world_size() > 1:  # the engine requires the same client_state on all ranks
            shared = [kept]
            dist.broadcast_object_list(shared, 0)
            kept = shared[0]
        self.native.save(root, name, client_state={_OURS: json.dumps(kept)})
        _together(lambda: self._write_names(root / name))
        if get_rank() == 0:
            if not save_latest:
                self._set_latest(root, before)
            self._copy_scripts(root)
        _barrier()
        log_dist(f"saved {root / name}", ranks=[0])
        return True

    @staticmethod
    def _latest(root: pathlib.Path) -> str | None:
        try:
            return (root / "latest").read_text(encoding="utf-8").strip()
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

    def _write_names(self, folder: pathlib.Path) -> None:
        """Writes the files with DeepSpeed's names, without tensors."""
        stage, bf16 = self._config.zero_optimization_stage, self._config.bfloat16_enabled
        about = {
            "module": None,
            "ds_config": self._config._param_dict,
            "ds_version": version,
            "dp_world_size": self.dp_world_size,
            "mp_world_size": 1,
            "lr_scheduler": None,
            "penstock": "the tensors are in *.safetensors: see checkpoint.json",
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
            tag: the checkpoint's name; default: the name in the file `latest`.
            load_module_strict: accepted, without effect: a missing weight is always an error.
            load_optimizer_states: also load masters, moments and counts.
            load_lr_scheduler_states: also load the scheduler's state.
            load_module_only: load only the weights.
            custom_load_fn: must be None.

        Returns:
            The checkpoint's folder and its `client_state`; (None, None) if there is no `latest`.

        Raises:
            ConfigError: the checkpoint is missing, belongs to another model, or was written by
                DeepSpeed itself.
            RuntimeFault: the checkpoint is damaged.
        """
        if custom_load_fn is not None:
            raise ConfigError("[deepspeed::load_checkpoint] custom_load_fn is not supported")
        root = pathlib.Path(load_dir)
        name = self._chosen(root, tag)
        if name is None:
            logger.warning(f"nothing is loaded: there is no file {root / 'latest'}")
            return None, None
        only = load_module_only or not load_optimizer_states
        found = self.native.load(root, name, weights_only=only)
        log_dist(f"loaded {root / name}", ranks=[0])
        if not isinstance(found, dict) or _OURS not in found:  # penstock.Engine or convert wrote it
            self.global_steps = self.native.steps
            return str(root / name), found or {}
        kept = json.loads(found[_OURS])
        if not load_module_only:
            self._take(kept, load_lr_scheduler_states)
        return str(root / name), self._client_state(kept["client_state"])

    def _chosen(self, root: pathlib.Path, tag: str | None) -> str | None:
        """Returns the checkpoint's name as seen by rank 0; None if there is no `latest`."""
        name = str(tag) if tag is not None else self._latest(root)
        if get_world_size() > 1:
            names = [name]
            dist.broadcast_object_list(names, 0)
            name = names[0]
        if name is None:
            return None
        if not (root / name).is_dir():
            raise ConfigError(f'[deepspeed::load_checkpoint] there is no "{root / name}"')
        if not (root / name / _MANIFEST).is_file():
            raise ConfigError(
                f'[deepspeed::load_checkpoint] "{root / name}" is not a checkpoint of Penstock: '
                f"convert it with `penstock convert {root} OUT --tag {name}`, then call "
                f"load_checkpoint(OUT)"
            )
        return name

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
                "ranks get rank 0's"
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
        _barrier()
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
        for path, module in self.module.named_modules(remove_duplicate=False):
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
        return self.module.named_parameters(remove_duplicate=False)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Returns the model's state_dict(). Its sharded parameters raise when they are read."""
        state: dict[str, Any] = self.module.state_dict(
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
        """Loads whole weights (`checkpoint["module"]`), which must be the same on all ranks."""
        if custom_load_fn is not None:
            raise ConfigError("[deepspeed::load_module_state_dict] custom_load_fn is not supported")
        self.native.load_state_dict(checkpoint["module"], strict=strict)
