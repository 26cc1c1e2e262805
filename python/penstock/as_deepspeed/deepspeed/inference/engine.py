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
from ..runtime.zero.config import DeepSpeedZeroConfig
from ..utils.logging import log_dist_once

_DTYPES = {"fp16": "fp16", "float16": "fp16", "half": "fp16", "fp32": "fp32", "float32": "fp32",
           "float": "fp32", "bf16": "bf16", "bfloat16": "bf16", "bfloat": "bf16",
           "int8": "fp16"}  # fmt: skip
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
    "mpu": ((None,), 'set "tensor_parallel": {"tp_size": ...} instead'),
}
_USED = ("dtype", "tensor_parallel", "mp_size", "zero", "quant")
_QUANT = ("enabled", "weight", "activation", "qkv")  # only weights are quantized
_QUANT_WEIGHT = ("enabled", "num_bits", "q_type", "q_groups")  # groups are blocks


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
    given, more = _by_key(given), _by_key(kwargs)
    for key in given.keys() & more.keys():
        if given[key] != more[key]:
            raise DeepSpeedRefusal(
                f"[deepspeed::init_inference] {key!r} is {given[key]!r} in the config and "
                f"{more[key]!r} as an argument: keep one"
            )
    if not torch.distributed.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        init_distributed()
    return InferenceEngine(model, given | more)


def _by_key(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values by DeepSpeed's first name of each key."""
    known = {*_USED, *_NO_EFFECT, *_REFUSED}
    config: dict[str, Any] = {}
    for name, value in given.items():
        key = _ALIASES.get(name, name)
        if key not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = (
                f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(sorted(known))}"
            )
            raise ConfigError(f"[deepspeed::init_inference] no key {name!r}: {advice}")
        if key in config and config[key] != value:
            raise DeepSpeedRefusal(
                f"[deepspeed::init_inference] {name!r} is {value!r}, but its other name has "
                f"{config[key]!r}: keep one"
            )
        config[key] = value
    return config


def _translated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the native config. Logs the keys without effect once, on rank 0."""
    for key, (allowed, instead) in _REFUSED.items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise ConfigError(
                f"[deepspeed::init_inference] {key!r} is {config[key]!r}, which is not supported: "
                f"{instead}"
            )
    ranks = _tensor_ranks(config)
    native: dict[str, Any] = {"inference": True, "strategy": "ddp", "mesh": {"tensor": ranks}}
    native["precision"] = _precision(config.get("dtype", torch.float16))
    native |= _of_zero(config.get("zero")) | _quantized(config)
    idle = [f"{key}: {_NO_EFFECT[key]}" for key in config
            if key in _NO_EFFECT and config[key] not in (None, False)]  # fmt: skip
    if "quantize" in native:
        idle.append("quant.activation, quant.qkv, quant.weight.q_groups: only matrices of blocks "
                    "are rounded, with a scale for 128 or 64 values")  # fmt: skip
    if idle:
        log_dist_once("keys of init_inference without effect: " + "; ".join(idle), ranks=[0])
    return native


def _quantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the native section for the keys "dtype" (int8) and "quant"."""
    section = config.get("quant") or {"enabled": False}
    section = section.model_dump() if hasattr(section, "model_dump") else section
    weight = section.get("weight") or {} if isinstance(section, Mapping) else None
    if not isinstance(weight, Mapping):
        raise ConfigError(
            f"[deepspeed::init_inference] 'quant' is {section!r}; expected a dict such as "
            f'{{"weight": {{"num_bits": 8}}}}'
        )
    unknown = (section.keys() - _QUANT) | (weight.keys() - _QUANT_WEIGHT)
    if unknown or weight.get("q_type", "symmetric") != "symmetric":
        raise ConfigError(
            f"[deepspeed::init_inference] 'quant' is {section!r}; its keys are "
            f"{', '.join(_QUANT)}, and 'quant.weight' may have {', '.join(_QUANT_WEIGHT)}, "
            f'with q_type "symmetric"'
        )
    bits = 8 if _name_of(config.get("dtype")) == "int8" else None
    if section.get("enabled", True) and weight.get("enabled", True):
        bits = weight.get("num_bits", 8)
    if bits not in (None, 4, 8):
        raise ConfigError(
            f"[deepspeed::init_inference] 'quant.weight.num_bits' is {bits!r}; allowed: 4, 8"
        )
    return {"quantize": {"dtype": f"int{bits}"}} if bits else {}


def _tensor_ranks(config: Mapping[str, Any]) -> int:
    section = config.get("tensor_parallel") or {}
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"[deepspeed::init_inference] 'tensor_parallel' is {section!r}; expected a dict such "
            f'as {{"tp_size": 2}}'
        )
    for key in section.keys() - {"enabled", "tp_size", "tp_grain_size"}:
        if key not in ("mpu", "tp_group") or section[key] is not None:
            raise ConfigError(
                f"[deepspeed::init_inference] 'tensor_parallel.{key}' is not supported: set tp_size"
            )
    given = {one for one in (section.get("tp_size"), config.get("mp_size")) if one is not None}
    if len(given) > 1:
        raise DeepSpeedRefusal(
            f"[deepspeed::init_inference] 'mp_size' is {config['mp_size']!r} and tp_size is "
            f"{section['tp_size']!r}: keep one"
        )
    ranks = next(iter(given), 1) if section.get("enabled", True) else 1
    world = get_world_size() if torch.distributed.is_initialized() else 1
    if not isinstance(ranks, int) or ranks < 1 or world % ranks != 0:
        raise ConfigError(
            f"[deepspeed::init_inference] tp_size is {ranks!r}, which does not divide the {world} "
            f"ranks evenly"
        )
    return ranks


def _name_of(dtype: Any) -> str:
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def _precision(dtype: Any) -> str:
    name = _name_of(dtype)
    if name not in _DTYPES:
        raise ConfigError(
            f"[deepspeed::init_inference] dtype is {dtype!r}, which is not supported; allowed: "
            f"float16, bfloat16, float32, int8"
        )
    return _DTYPES[name]


def _of_zero(given: Any) -> dict[str, Any]:
    if not given:
        return {}
    section = given.model_dump() if hasattr(given, "model_dump") else given
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"[deepspeed::init_inference] 'zero' is {given!r}; expected a dict such as "
            f'{{"stage": 3}}'
        )
    section = DeepSpeedZeroConfig(**section)  # refuses unknown keys and values
    offload = section.offload_param
    device = "none" if offload is None else str(getattr(offload.device, "value", offload.device))
    if int(section.stage) != 3:
        if device != "none":
            raise ConfigError(
                "[deepspeed::init_inference] 'zero.offload_param' needs 'zero.stage' 3"
            )
        return {}  # these stages do not shard parameters
    native: dict[str, Any] = {"params": {"none": "none", "cpu": "host", "nvme": "disk"}[device]}
    if device == "nvme":
        native["path"] = str(offload.nvme_path or "")
    return {"strategy": "zero3", "offload": native}


__getattr__ = _table.attributes(__name__)
