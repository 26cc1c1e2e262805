"""Checkpoints in DeepSpeed's folders: DIR/latest, DIR/TAG/, DIR/zero_to_fp32.py.

What is in DIR/TAG is a checkpoint of Penstock's (docs/formats.md), complete or absent, and loads on
any number of ranks. Beside it are DeepSpeed's files by name, for those who look for them; they hold
what describes the run, and no tensors.
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

_OURS = "deepspeed"  # the key of client_state that has what is ours
_COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_MANIFEST = "checkpoint.json"


def _pickled(value: Any) -> str:
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getvalue()).decode()


def _unpickled(text: str) -> Any:
    # As DeepSpeed does: a client_state may hold any object, so load only what you trust.
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=False)


def _barrier() -> None:
    if get_world_size() > 1:
        dist.barrier()


def _of_ranks(text: str) -> list[str]:
    """Every rank's, or the one that is the same on all."""
    if get_world_size() == 1:
        return [text]
    all_texts: list[Any] = [None] * get_world_size()
    dist.all_gather_object(all_texts, text)
    return all_texts[:1] if all(one == text for one in all_texts) else all_texts


def _together(work: Callable[[], None]) -> None:
    """Does what each rank has to do; an error of one is raised on all."""
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
    """The part of an engine that saves and loads; every rank calls these together."""

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
        """Saves all that training goes on from.

        Args:
            save_dir: folder of checkpoints, the same for every rank.
            tag: the checkpoint's name in it; default: "global_stepN".
            client_state: anything that can be pickled; each rank's own.
            save_latest: the file `latest` names it.
            exclude_frozen_parameters: accepted: load_checkpoint() wants them all, so all are saved.

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
        if get_world_size() > 1:  # the engine wants the same of every rank
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
        """DeepSpeed's files, without tensors."""
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

    def load_checkpoint(  # noqa: PLR0913 - as DeepSpeed's
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Takes over a checkpoint, of any number of ranks and any stage.

        Args:
            load_dir: folder of checkpoints.
            tag: the checkpoint's name; default: what `latest` says.
            load_module_strict: accepted: all weights are in it, or it is an error.
            load_optimizer_states: masters, moments and counts too.
            load_lr_scheduler_states: the scheduler's state too.
            load_module_only: weights alone.
            custom_load_fn: must be None.

        Returns:
            The checkpoint's folder and the `client_state`; (None, None) where there is none.

        Raises:
            ConfigError: another model; a checkpoint of real DeepSpeed.
            RuntimeFault: a damaged one.
        """
        if custom_load_fn is not None:
            raise ConfigError("[deepspeed::load_checkpoint] custom_load_fn is not supported")
        root = pathlib.Path(load_dir)
        name = self._chosen(root, tag)
        if name is None:
            logger.warning(f"there is no file {root / 'latest'}: nothing is loaded")
            return None, None
        only = load_module_only or not load_optimizer_states
        found = self.native.load(root, name, weights_only=only)
        log_dist(f"loaded {root / name}", ranks=[0])
        if not isinstance(found, dict) or _OURS not in found:  # converted, or penstock.Engine's
            self.global_steps = self.native.steps
            return str(root / name), found or {}
        kept = json.loads(found[_OURS])
        if not load_module_only:
            self._take(kept, load_lr_scheduler_states)
        return str(root / name), self._client_state(kept["client_state"])

    def _chosen(self, root: pathlib.Path, tag: str | None) -> str | None:
        """The checkpoint's name, as rank 0 sees it; None where there is no `latest`."""
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
                f'[deepspeed::load_checkpoint] "{root / name}" is not one of Penstock: '
                f"`penstock convert {root} OUT --tag {name}` makes one of it, "
                f"and load_checkpoint(OUT) loads that"
            )
        return name

    def _take(self, kept: dict[str, Any], scheduler: bool) -> None:
        for one, value in kept["counts"].items():
            setattr(self, one, value)
        self.micro_steps = 0  # a window begins, whatever the accumulation was
        if scheduler and self.lr_scheduler is not None and kept["scheduler"] is not None:
            self.lr_scheduler.load_state_dict(_unpickled(kept["scheduler"]))

    @staticmethod
    def _client_state(texts: list[str]) -> dict[str, Any]:
        if len(texts) > 1 and len(texts) != get_world_size():
            logger.warning(
                "each rank saved its own client_state, and there are others now: rank 0's"
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
        """Writes the weights in the dtype that they compute in, as one torch file, on rank 0."""
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
        """Whole weights in the dtype that they compute in, on rank 0; None elsewhere."""
        dtypes = {name: one.dtype for name, one in self._named()}
        frozen = {name for name, one in self._named() if not one.requires_grad}
        state = self.native.state_dict()
        if get_rank() != 0:
            return None
        cast: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # tied weights stay one
        for name in list(state):
            whole = state[name]
            if exclude_frozen_parameters and name in frozen:
                del state[name]
            elif name in dtypes:
                cast.setdefault(id(whole), (whole, whole.to(dtypes[name])))
                state[name] = cast[id(whole)][1]
        return dict(state)

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
        """The model's state_dict(); sharded parameters of it raise where they are read."""
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
        """Loads whole weights (`checkpoint["module"]`) into the model; all ranks pass the same."""
        if custom_load_fn is not None:
            raise ConfigError("[deepspeed::load_module_state_dict] custom_load_fn is not supported")
        with self.native.gathered(write=True):
            self.module.load_state_dict(checkpoint["module"], strict=strict)
