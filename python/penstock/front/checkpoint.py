"""The state that the Python front adds to a checkpoint of the core.

The front saves the optimizer's groups, the scheduler, buffers, random generators, the state of an
optimizer that computes in Python, and registered objects. docs/formats.md describes the format.
"""

import json
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from penstock._native import ConfigError, _penstock
from penstock.front import (
    export,
    generators,
    module_tree,
    process_group,
    save_signals,
    whole_state,
)
from penstock.front.json_values import decode, decode_scalar, encode, encode_scalar
from penstock.front.model_state import extra_states
from penstock.front.optimizer import ShardStep
from penstock.launch import RESUME

_Tensor = _penstock.CheckpointTensor
_OWN = "optim."  # prefix of the roles of the state that a Python optimizer keeps


class Checkpointing:
    """The engine's methods that save and load. All ranks call them together."""

    config: Any
    module: torch.nn.Module
    _core: Any
    _pipeline: Any

    def _open(self) -> bool:
        raise NotImplementedError

    def __init__(self) -> None:
        self._registered: list[Any] = []
        self._saving = False  # True after the first save()
        self.client_state: Any = None  # the client_state of a save that a signal starts

    def save(
        self,
        path: str | os.PathLike[str] | None = None,
        tag: str | None = None,
        client_state: Any = None,
        wait: bool = True,
        frozen: bool = True,
        in_window: bool = False,
    ) -> str:
        """Saves all state that training needs to continue. Call it between a step() and the next
        backward.

        Each rank writes its own shards, and nothing is gathered. The checkpoint gets its final name
        when it is complete and durable. Then `path/latest` names it.

        Args:
            path: folder of the run's checkpoints, the same on every rank; default: the key
                `checkpoint.path`.
            tag: name of the checkpoint; default: "step-N". Replaces a checkpoint of that name.
            client_state: numbers, strings, and lists, tuples and dicts of them. `load()` returns
                them.
            wait: if False, returns once the state is copied, and a thread writes it while training
                continues. A later call reports a failed write as a RuntimeWarning. `close()` and
                the next `save()` wait for the write.
            frozen: if False, parameters that do not train are left out (see `load()`).
            in_window: if True, the call may stand between two backwards of an accumulation window.
                The checkpoint then has weights and optimizer state as of the last step, without
                the gradients of the window, and training continues with them. Random generators,
                buffers and registered objects are saved as they are at the call.

        Returns:
            The folder of the checkpoint.

        Raises:
            ConfigError: inside a backward or `gathered(write=True)`; in an accumulation window,
                unless `in_window` is set; if a value cannot be saved (the error names it); if
                ranks give different arguments.
            RuntimeFault: if a rank could not save (the error names rank, path and bytes). The
                incomplete checkpoint is removed.
        """
        self._say_failure()
        where = self._checkpoints_in(path, "save")
        self._saving = True
        self._pipeline.bring_buffers()
        return _save(self, where, (tag or "", wait, frozen, in_window), client_state)

    def load(
        self,
        path: str | os.PathLike[str] | None = None,
        tag: str | None = None,
        *,
        weights_only: bool = False,
        frozen: bool = True,
    ) -> Any:
        """Loads a checkpoint. Ranks, strategy, offload and tiling may differ from the saving run.

        Restores weights, buffers, the optimizer's state and the options of its groups, the
        scheduler, random generators and registered objects.

        Args:
            path: a folder of checkpoints, or the folder of one checkpoint. "auto" (or None): the
                key `checkpoint.path`, or the value of `penstock run --resume`.
            tag: name of the checkpoint; default: the newest undamaged one (a line on stderr names
                each damaged one).
            weights_only: loads only parameters and buffers, as always if the engine is for
                inference.
            frozen: if False, parameters that do not train keep their values if the checkpoint
                lacks them.

        Returns:
            The `client_state` of the save. With "auto", None if there is no checkpoint yet.

        Raises:
            ConfigError: if the model or the optimizer does not match. The error names all missing,
                extra and different entries, and nothing changes.
            RuntimeFault: if there is no undamaged checkpoint. If values were already replaced, the
                engine can only load another checkpoint or close.
        """
        self._say_failure()
        auto = path is None or path == "auto"
        first = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0
        resume = os.environ.get(RESUME, "auto") if auto and tag is None and first else "auto"
        if resume == "never":
            return None
        if resume != "auto":
            auto, path = False, resume
        where = self._checkpoints_in(None if auto else path, "load")
        weights_only = weights_only or self.config.inference
        options = (tag or "", not weights_only, auto and tag is None, _tied(self), frozen)
        return _load(self, where, _penstock.LoadOptions(*options))[1]

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Registers objects to save and load by state_dict(), such as a data loader or a counter.

        Each rank saves its own state, of the types that `client_state` allows. Register the same
        objects in the same order before `save()` and `load()`.

        Raises:
            ConfigError: if an object has no state_dict() or load_state_dict().
        """
        for one in objects:
            for name in ("state_dict", "load_state_dict"):
                if not callable(getattr(one, name, None)):
                    raise ConfigError(
                        f"[front::register_for_checkpointing] a {type(one).__name__} has no "
                        f"{name}()"
                    )
        self._registered.extend(objects)

    def export_hf(
        self,
        path: str | os.PathLike[str],
        dtype: torch.dtype | None = None,
        max_shard_bytes: int = 5_000_000_000,
    ) -> None:
        """Writes the weights for `from_pretrained()`. All ranks call it, and rank 0 writes.

        Writes `model.safetensors`, or shards of it and `model.safetensors.index.json`. Tied weights
        are written once. A transformers model's config is written, too. The call gathers one unit
        at a time, so rank 0 holds one unit and at most one additional tensor.

        Args:
            path: a folder, which may exist; replaces the files of an earlier export in it.
            dtype: dtype of the parameters; default: the dtypes that they compute in.
            max_shard_bytes: size limit of a file; a larger tensor gets a file of its own.

        Raises:
            ConfigError: if `dtype` is not a floating dtype.
            RuntimeFault: if a file could not be written, on every rank.
        """
        export.export_hf(self, path, dtype, max_shard_bytes)

    def _persistent_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return _buffers(self.module)

    def _watch_signals(self) -> None:
        for name in self.config.checkpoint.signals:
            save_signals.watch(name, self)

    def _save_if_asked(self) -> None:
        urgency = self._core.checkpoints.asked()
        if urgency == 0:
            return
        # The original values of quantized parameters are gone.
        frozen = self.config.quantize.dtype == "none"
        self.save(client_state=self.client_state, frozen=frozen)
        save_signals.end_if(urgency)

    def _checkpoints_in(self, path: Any, call: str) -> str:
        where = os.fspath(path) if path is not None else self.config.checkpoint.path
        if not where:
            raise ConfigError(
                f'[front::{call}] there is no path. Pass one, or set the key "checkpoint.path"'
            )
        return str(where)

    def _say_failure(self) -> None:
        """Warns if the last save with wait=False failed."""
        failure = self._core.checkpoints.failure() if self._saving else ""
        if failure:
            warnings.warn(f"[front::save] not saved: {failure}", RuntimeWarning, stacklevel=4)


def _save(engine: Any, path: str, how: tuple[str, bool, bool, bool], client_state: Any) -> str:
    """See `Checkpointing.save`."""
    front: dict[str, Any] = {}
    of_rank: dict[str, Any] = {}
    tensors: list[Any] = []
    problem = ""
    try:
        front, of_rank, tensors = _kept(engine, client_state)
    except Exception as error:  # noqa: BLE001 - from the user's objects; raised on every rank
        problem = str(error)
    tag, wait, *which = how
    parts = (json.dumps(front), json.dumps(of_rank), tensors, problem)
    return str(engine._core.checkpoints.save(path, tag, wait, *parts, *which))


def _kept(engine: Any, client_state: Any) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Returns the front's state: values equal on all ranks, values of this rank, and tensors."""
    engine._follow_groups()
    front = {
        "optimizer": _optimizer_state(engine),
        "scheduler": _scheduler_state(engine),
        "extra_state": {
            name: encode(module.get_extra_state(), f'the extra state of "{name}"')
            for name, module in extra_states(engine)
        },
        "client_state": encode(client_state, "client_state"),
        "tied": _tied(engine),
    }
    of_rank: dict[str, Any] = {
        **generators.states(_device_of(engine)),
        "objects": [
            [type(one).__name__, encode(one.state_dict(), f"state_dict() of object {i}")]
            for i, one in enumerate(engine._registered)
        ],
    }
    generator = torch.get_rng_state()
    own = engine._ranks.group.rank
    tensors = [_Tensor("rng", "torch", list(generator.shape), 0, own, generator)]
    tensors += [_buffer(name, value) for name, value in _buffers(engine.module)]
    if engine._external is not None:
        pieces, of_rank["own"] = _own_state(engine.optimizer, engine._external)
        tensors += pieces
    return front, of_rank, tensors


def _load(engine: Any, path: str, options: Any) -> tuple[str, Any]:
    """Returns the checkpoint's path ("": there is none) and client_state. See `load()`."""
    taken: list[_Taken] = []
    engine._follow_groups()

    def wanted(found: Any) -> list[Any]:
        taken[:] = [_Taken(engine, found, not options.optimizer)]
        return taken[0].tensors

    found = engine._core.checkpoints.load(path, options, wanted)
    if not found.path:
        return "", None
    problem = ""
    try:
        taken[0].apply()
    except Exception as error:  # noqa: BLE001 - from the user's objects; raised on every rank
        problem = f"{type(error).__name__}: {error}"
    engine._core.checkpoints.taken(problem)
    return str(found.path), decode(taken[0].front.get("client_state"))


class _Taken:
    """The front's part of a checkpoint that is being loaded. It is checked first, then applied."""

    def __init__(self, engine: Any, found: Any, weights_only: bool) -> None:
        self.front = json.loads(found.front)
        self._engine, self._weights_only = engine, weights_only
        self._of_ranks = [json.loads(one) for one in found.of_ranks]
        self._extra = dict(extra_states(engine))
        # A checkpoint of a C++ program and a converted checkpoint lack some of these entries.
        self._has_options = "optimizer" in self.front
        if "extra_state" in self.front:
            _same_names("get_extra_state()", set(self.front["extra_state"]), set(self._extra))
        self.tensors = [_buffer(name, value) for name, value in _buffers(engine.module)]
        if weights_only:
            return
        if self._has_options:
            _check_optimizer(engine, self.front["optimizer"])
        self._scheduler = self.front.get("scheduler")
        converted = "converted" in self.front
        if self._scheduler is None and converted and engine.lr_scheduler:
            self._say_it_stays("scheduler")
        else:
            _check_scheduler(engine, self._scheduler)
        self._objects: list[Any] = []
        if not converted:
            self._take_objects()
        elif engine._registered:
            self._say_it_stays("registered objects")
        # Tensor ranks draw the same numbers, so they all load the first tensor rank's generator.
        tensor = engine.config.mesh.tensor
        self._place = engine._ranks.group.rank // tensor * tensor
        self._place_in_run = process_group.rank() // tensor * tensor
        self._rank = min(self._place, found.world - 1)
        self._generator: torch.Tensor | None = None
        if any(one.role == "rng" for one in found.tensors):
            self._generator = torch.empty_like(torch.get_rng_state())
            self.tensors.append(
                _Tensor("rng", "torch", list(self._generator.shape), 0, self._rank, self._generator)
            )
        self._own: dict[torch.Tensor, dict[str, Any]] = {}
        if engine._external is not None:
            self._take_own(found, engine._external)

    def _take_objects(self) -> None:
        registered = self._engine._registered
        self._objects = [
            (one, _object_state(self._of_ranks, i, one, self._engine._ranks.group))
            for i, one in enumerate(registered)
        ]
        saved = len(self._of_ranks[0].get("objects", []))
        if saved != len(self._objects):
            raise ConfigError(
                f"[front::load] the checkpoint has {saved} registered objects, but the engine has "
                f"{len(self._objects)}. Register the same objects (register_for_checkpointing)"
            )

    def _say_it_stays(self, what: str) -> None:
        warnings.warn(
            f"[front::load] the checkpoint, which was converted from {self.front['converted']}, "
            f"has no {what}. The engine keeps its own {what}",
            RuntimeWarning,
            stacklevel=2,
        )

    def _take_own(self, found: Any, external: ShardStep) -> None:
        kept: dict[str, list[Any]] = defaultdict(list)
        for one in found.tensors:
            if one.role not in ("param", "buffer", "weight", "rng"):
                kept[one.name].append(one)
        scalars = {k: v for rank in self._of_ranks for k, v in rank.get("own", {}).items()}
        for name, begin, param, master in external.pieces():
            state: dict[str, Any] = {}
            for one in kept[name]:
                key = one.role.removeprefix(_OWN)
                per_element = list(one.shape) == list(param.shape)
                if not external.whole and (whole_state.is_packed(key) or not per_element):
                    raise ConfigError(
                        f"[front::load] the checkpoint's state {key!r} of parameter "
                        f'"{name}" belongs to the whole parameter, but optimizer.layout is "flat". '
                        f'Set it to "whole"'
                    )
                shape = list(one.shape)
                size = math.prod(shape) if external.whole else master.numel()
                value = torch.zeros(size, dtype=one.dtype, device=master.device)
                state[key] = value.view(shape) if external.whole else value
                if size > 0:
                    role = _OWN + key
                    self.tensors.append(_Tensor(role, name, shape, begin, _Tensor.PIECES, value))
            for key, value in scalars.get(name, {}).items():
                state[key] = decode_scalar(value, master.device)
                external.single_keys.add(key)
            if state:
                self._own[master] = state

    def apply(self) -> None:
        for name, state in self.front.get("extra_state", {}).items():
            self._extra[name].set_extra_state(decode(state))
        if self._weights_only:
            return
        engine = self._engine
        if self._has_options:
            self._set_options(engine)
        if engine._external is not None:
            engine.optimizer.state.clear()
            engine.optimizer.state.update(
                {master: whole_state.restored(state) for master, state in self._own.items()}
            )
            engine._external.loaded()
        self._set_rates(engine)
        for one, state in self._objects:
            one.load_state_dict(state)
        self._set_generators()

    def _set_options(self, engine: Any) -> None:
        for group, saved in zip(
            engine.optimizer.param_groups, self.front["optimizer"]["groups"], strict=True
        ):
            for key, value in saved["options"].items():
                if key == "params" or key not in group:
                    continue
                now = group[key]
                if isinstance(now, torch.Tensor):
                    now.fill_(decode(value))
                else:
                    group[key] = decode(value)
        peaks = self.front["optimizer"]["peak_lrs"]
        if peaks is not None:
            engine._peak_lrs = decode(peaks)

    def _set_rates(self, engine: Any) -> None:
        if engine.lr_scheduler is not None:
            if self._scheduler is not None:
                engine.lr_scheduler.load_state_dict(decode(self._scheduler["state"]))
        else:
            engine._schedule_lr()

    def _set_generators(self) -> None:
        if self._generator is None:
            return
        if self._rank != self._place or not self._engine._ranks.on_first_node():
            return generators.derive(self._generator, self._place_in_run)
        torch.set_rng_state(self._generator)
        generators.restore(self._of_ranks[self._rank], _device_of(self._engine))


# ---- the parts


def _device_of(engine: Any) -> torch.device:
    """Returns the device on which this rank's parameters compute."""
    return module_tree.device_of(engine.module)


def _buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the buffers of state_dict() by name. A shared buffer appears once."""
    seen: set[int] = set()
    for prefix, module in module_tree.modules_of(model):
        for name, value in module_tree.saved_buffers(module):
            if id(value) not in seen:
                seen.add(id(value))
                yield f"{prefix}.{name}" if prefix else name, value


def _buffer(name: str, value: torch.Tensor) -> Any:
    return _Tensor("buffer", name, list(value.shape), 0, _Tensor.IF_DIFFERENT, value)


def _same_names(what: str, there: set[str], here: set[str]) -> None:
    if there != here:
        raise ConfigError(
            f"[front::load] {what} belongs to other modules. Only in the checkpoint: "
            f"{sorted(there - here)}. Only in the model: {sorted(here - there)}"
        )


def _tied(engine: Any) -> dict[str, str]:
    """Maps each further name of a tied parameter to the name that the engine uses."""
    own = engine._structure.own
    named = module_tree.params_of(engine.module, repeats=True)
    return {name: own[one] for name, one in named if one in own and own[one] != name}


def _option(value: Any, what: str) -> Any:
    one = isinstance(value, torch.Tensor) and value.numel() == 1
    return encode(value.item() if one else value, what)


def _optimizer_state(engine: Any) -> dict[str, Any]:
    own, external = engine._structure.own, engine._external
    groups = [
        {
            "options": {
                key: _option(value, f"option {key!r} of parameter group {i}")
                for key, value in group.items()
                if key != "params"
            },
            "params": sorted({own[one] for one in group["params"] if one in own})
            if external is None
            else external.group_names[i],
        }
        for i, group in enumerate(engine.optimizer.param_groups)
    ]
    kind = type(engine.optimizer).__name__
    return {"class": kind, "groups": groups, "peak_lrs": encode(engine._peak_lrs, "peak_lrs")}


def _check_optimizer(engine: Any, saved: dict[str, Any]) -> None:
    here = _optimizer_state(engine)
    if saved["class"] is not None and here["class"] != saved["class"]:
        raise ConfigError(
            f"[front::load] the checkpoint has the state of optimizer {saved['class']}, but the "
            f"engine has {here['class']}. load(..., weights_only=True) loads the weights without "
            f"that state"
        )
    if len(here["groups"]) != len(saved["groups"]):
        raise ConfigError(
            f"[front::load] the checkpoint's optimizer has {len(saved['groups'])} parameter "
            f"groups, but the engine's optimizer has {len(here['groups'])}"
        )
    frozen = {n for param, n in engine._structure.own.items() if not param.requires_grad}
    for i, (ours, theirs) in enumerate(zip(here["groups"], saved["groups"], strict=True)):
        other = sorted(set(ours["params"]) ^ set(theirs["params"]))
        if saved["class"] is None:  # converted from another library: no frozen parameters
            other = sorted(set(other) - frozen)
        if other:
            raise ConfigError(
                f"[front::load] parameter group {i} of the optimizer differs from the checkpoint "
                f"in these parameters: {', '.join(other[:10])}"
            )


def _scheduler_state(engine: Any) -> dict[str, Any] | None:
    scheduler = engine.lr_scheduler
    if scheduler is None:
        return None
    kind = type(scheduler).__name__
    return {"class": kind, "state": encode(scheduler.state_dict(), f"state_dict() of {kind}")}


def _check_scheduler(engine: Any, saved: dict[str, Any] | None) -> None:
    here = None if engine.lr_scheduler is None else type(engine.lr_scheduler).__name__
    there = None if saved is None else saved["class"]
    # A checkpoint converted from another library has no class: the keys identify the scheduler.
    if saved is not None and there is None:
        if here is None or saved["state"].keys() == engine.lr_scheduler.state_dict().keys():
            return
        there = f"a scheduler with the keys {', '.join(saved['state'])}"
    if here != there:
        raise ConfigError(
            f"[front::load] lr_scheduler is {there} in the checkpoint and {here} here. Pass the "
            f"same scheduler to initialize(), or call load(..., weights_only=True)"
        )


def _object_state(of_ranks: list[dict[str, Any]], index: int, one: Any, group: Any) -> Any:
    states = [rank.get("objects", [])[index : index + 1] for rank in of_ranks]
    kind = type(one).__name__
    if not states[0] or states[0][0][0] != kind:
        there = states[0][0][0] if states[0] else "missing"
        raise ConfigError(
            f"[front::load] registered object {index} is {there} in the checkpoint and {kind} "
            f"here. Register the same objects in the same order"
        )
    if len(of_ranks) == group.size:
        return _checked(one, decode(states[group.rank][0][1]))
    if any(state != states[0] for state in states):
        raise ConfigError(
            f"[front::load] registered object {index} ({kind}) has different states on the "
            f"{len(of_ranks)} ranks that saved it, but there are {group.size} ranks now. Start "
            f"{len(of_ranks)} ranks, or call load(..., weights_only=True)"
        )
    return _checked(one, decode(states[0][0][1]))


def _checked(one: Any, state: Any) -> Any:
    """Returns the state. Calls the object's check_state_dict() first, if it has one.

    The check runs before the load changes anything.
    """
    check = getattr(one, "check_state_dict", None)
    if callable(check):
        check(state)
    return state


def _own_state(
    optimizer: torch.optim.Optimizer, external: ShardStep
) -> tuple[list[Any], dict[str, dict[str, Any]]]:
    """Returns the user's optimizer state on this rank: tensors by element, and single values.

    Raises ConfigError for state that belongs to no parameter or cannot be sharded.
    """
    external.check_saved()
    tensors: list[Any] = []
    scalars: dict[str, dict[str, Any]] = defaultdict(dict)
    masters = {master for _, _, _, master in external.pieces()}
    for key in optimizer.state:
        if key not in masters:
            raise ConfigError(
                f"[front::save] {type(optimizer).__name__} keeps state under {key!r:.80}, which is "
                f"not a parameter, so the state cannot be saved"
            )
    for name, begin, param, master in external.pieces():
        for own, value in optimizer.state.get(master, {}).items():
            what, role = f'state {own!r} of parameter "{name}"', f"{_OWN}{own}"
            if external.whole and not whole_state.is_simple(value):
                role, value = _OWN + whole_state.packed_key(own), whole_state.packed(value, what)
            if external.is_single(own, value, master):
                scalars[name][own] = encode_scalar(value, what)
            elif external.whole or value.shape == master.shape:
                if value.numel() > 0:
                    shape, flat = value.shape if external.whole else param.shape, value.flatten()
                    tensors.append(_Tensor(role, name, [*shape], begin, _Tensor.PIECES, flat))
            else:
                raise ConfigError(
                    f"[front::save] {what} has shape {tuple(value.shape)}, but a checkpoint can "
                    f"hold only state with one value per element, so that any number of ranks can "
                    f"shard it"
                )
    return tensors, scalars
