"""deepspeed.init_inference() and its engine."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from typing import Any

import torch

import penstock
from penstock import ConfigError

from .. import _table
from .._refusal import DeepSpeedRefusal
from ..accelerator.real_accelerator import get_accelerator
from ..comm.comm import get_world_size, init_distributed
from ..utils.logging import log_dist_once

_DTYPES = {"fp16": "fp16", "float16": "fp16", "half": "fp16", "fp32": "fp32", "float32": "fp32",
           "float": "fp32", "bf16": "bf16", "bfloat16": "bf16", "bfloat": "bf16"}  # fmt: skip
# Other name -> key.
_ALIASES = {"kernel_inject": "replace_with_kernel_inject", "tp": "tensor_parallel",
            "injection_dict": "injection_policy", "max_tokens": "max_out_tokens",
            "min_tokens": "min_out_tokens", "tm": "triangular_masking", "args": "config",
            "ckpt_config": "checkpoint_config", "expert_group": "ep_group",
            "expert_mp_group": "ep_mp_group"}  # fmt: skip
# Keys that change how DeepSpeed computes, but not what.
_NO_EFFECT = {
    "replace_with_kernel_inject": "the model's own layers compute",
    "injection_policy": "layers are cut as the model's plan says (parallel.rules)",
    "injection_policy_tuple": "layers are cut as the model's plan says (parallel.rules)",
    "enable_cuda_graph": "no graphs are captured; use torch.compile",
    "use_triton": "the model's own layers compute",
    "triton_autotune": "the model's own layers compute",
    "triangular_masking": "the model's own masks count",
    "return_tuple": "layers return what they return without an engine",
    "max_out_tokens": "the length is not limited",
    "min_out_tokens": "the length is not limited",
    "transposed_mode": "the model's own layers compute",
    "replace_method": "the model's own layers compute",
    "set_empty_params": "a model built on the device meta needs penstock.init(weights=...)",
    "base_dir": "there is no checkpoint to load",
    "config": "the model's own config counts",
    "training_mp_size": "there is no checkpoint to load",
    "keep_module_on_host": 'parameters rest where "zero" puts them',
    "moe": "experts run whole on each rank",
    "ep_size": "experts run whole on each rank",
    "ep_group": "experts run whole on each rank",
    "ep_mp_group": "experts run whole on each rank",
}
# Keys that may only have these values.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "checkpoint": (
        (None,),
        "load the weights into the model first, for example by from_pretrained",
    ),
    "save_mp_checkpoint_path": ((None,), "save the model by save_pretrained"),
    "checkpoint_config": ((None, {}), "load the weights into the model first"),
    "quant": ((None, {}), "quantized weights are not supported yet"),
    "mpu": ((None,), 'set "tensor_parallel": {"tp_size": ...} instead'),
}
_USED = ("dtype", "tensor_parallel", "mp_size", "zero")


class InferenceEngine(torch.nn.Module):
    """Runs a model's forwards and `generate()`. Made by `deepspeed.init_inference()`.

    Attributes:
        module: the model.
        config: the model's own config.
    """

    inference_mp_group = None
    inference_ep_group = None
    expert_mp_group = None

    def __init__(self, model: torch.nn.Module, config: Mapping[str, Any]) -> None:
        super().__init__()
        native = _translated(config)
        place = get_accelerator().current_device_name()
        device = None if place == "cpu" else torch.device(place)
        object.__setattr__(self, "_engine", penstock.initialize(model, native, device=device))
        self.module = model
        self.config = getattr(model, "config", None)
        self._config = dict(config)
        self.eval()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the model's forward without gradients."""
        with torch.no_grad():
            return self._engine(*inputs, **kwargs)

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the model's `generate()`.

        Raises:
            AttributeError: if the model has no such method.
        """
        return self.module.generate(*inputs, **kwargs)  # type: ignore[operator]

    def destroy(self) -> None:
        """Gives the model back with whole parameters. All ranks call it."""
        self._engine.close()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model's forward in place, like `torch.nn.Module.compile()`."""
        self.module.compile(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def init_inference(
    model: torch.nn.Module, config: str | Mapping[str, Any] | None = None, **kwargs: Any
) -> InferenceEngine:
    """Creates an engine that only runs forwards. All ranks must call it.

    Without tensor ranks, each rank has the whole model, and ranks run alone. "zero" with stage 3
    shards the parameters, on the host or on disk with "offload_param".

    Args:
        model: an nn.Module with its weights.
        config: a dict or the path of a JSON file, with DeepSpeed's keys for inference.
        kwargs: more such keys.

    Raises:
        ConfigError: a key or value is unknown or not supported.
    """
    if not isinstance(model, torch.nn.Module):
        raise DeepSpeedRefusal(
            f"[deepspeed::init_inference] model is a {type(model).__name__}, not an nn.Module"
        )
    if isinstance(config, str):
        with open(config, encoding="utf-8") as file:
            given = dict(json.load(file))
    else:
        given = dict(config or {})
    for key in given.keys() & kwargs.keys():
        if given[key] != kwargs[key]:
            raise DeepSpeedRefusal(
                f"[deepspeed::init_inference] {key!r} is {given[key]!r} in the config and "
                f"{kwargs[key]!r} as an argument: keep one"
            )
    if not torch.distributed.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        init_distributed()
    return InferenceEngine(model, given | kwargs)


def _translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the native config. Logs the keys without effect once, on rank 0."""
    known = {*_USED, *_NO_EFFECT, *_REFUSED}
    config = {}
    for name, value in given.items():
        key = _ALIASES.get(name, name)
        if key not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = (
                f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(sorted(known))}"
            )
            raise ConfigError(f"[deepspeed::init_inference] no key {name!r}: {advice}")
        config[key] = value
    for key, (allowed, instead) in _REFUSED.items():
        if config.get(key, allowed[0]) not in allowed:
            raise ConfigError(
                f"[deepspeed::init_inference] {key!r} is {config[key]!r}, which is not supported: "
                f"{instead}"
            )
    ranks = _tensor_ranks(config)
    native: dict[str, Any] = {"inference": True, "strategy": "ddp", "mesh": {"tensor": ranks}}
    native["precision"] = _precision(config.get("dtype", torch.float16))
    native |= _of_zero(config.get("zero") or {})
    idle = [f"{key}: {_NO_EFFECT[key]}" for key in config
            if key in _NO_EFFECT and config[key] not in (None, False)]  # fmt: skip
    if idle:
        log_dist_once("keys of init_inference without effect: " + "; ".join(idle), ranks=[0])
    return native


def _tensor_ranks(config: Mapping[str, Any]) -> int:
    section = config.get("tensor_parallel") or {}
    section = section if isinstance(section, Mapping) else vars(section)
    for key in section.keys() - {"enabled", "tp_size", "tp_grain_size"}:
        if key not in ("mpu", "tp_group") or section[key] is not None:
            raise ConfigError(
                f"[deepspeed::init_inference] 'tensor_parallel.{key}' is not supported: set tp_size"
            )
    ranks = int(section.get("tp_size", config.get("mp_size", 1)))
    ranks = ranks if section.get("enabled", True) else 1
    world = get_world_size() if torch.distributed.is_initialized() else 1
    if ranks < 1 or world % ranks != 0:
        raise ConfigError(
            f"[deepspeed::init_inference] tp_size is {ranks}, which does not divide the {world} "
            f"ranks evenly"
        )
    return ranks


def _precision(dtype: Any) -> str:
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(
            f"[deepspeed::init_inference] dtype is {dtype!r}, which is not supported; allowed: "
            f"float16, bfloat16, float32"
        )
    return _DTYPES[name]


def _of_zero(section: Any) -> dict[str, Any]:
    section = section if isinstance(section, Mapping) else section.model_dump()
    stage = int(section.get("stage", 0))
    if stage not in (0, 1, 2, 3):
        raise ConfigError(
            f"[deepspeed::init_inference] 'zero.stage' is {stage}; allowed: 0, 1, 2, 3"
        )
    if stage != 3:
        return {}  # these stages do not shard parameters
    offload = section.get("offload_param") or {}
    device = str(offload.get("device", "none"))
    tiers = {"none": "none", "cpu": "host", "nvme": "disk"}
    if device not in tiers:
        raise ConfigError(
            f"[deepspeed::init_inference] 'zero.offload_param.device' is {device!r}; allowed: "
            f"none, cpu, nvme"
        )
    native: dict[str, Any] = {"params": tiers[device]}
    if device == "nvme":
        native["path"] = str(offload.get("nvme_path") or "")
    return {"strategy": "zero3", "offload": native}


__getattr__ = _table.attributes(__name__)
