"""The setting of a measurement: ranks, device and options."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from dataclasses import dataclass

import torch

from penstock.bench.rank_group import RankGroup

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setting:
    """The setting of one rank."""

    ranks: RankGroup
    device: torch.device
    precision: str
    width: int
    tokens: int
    disk: str

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.precision]

    @property
    def on_host(self) -> bool:
        return self.device.type == "cpu"

    def wait(self) -> None:
        """Blocks until the device has finished all queued work."""
        if not self.on_host:
            torch.accelerator.synchronize(self.device)


def of(options: Namespace, ranks: RankGroup) -> Setting:
    """Returns the setting for the options. It uses the machine's accelerator if there is one."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        number = ranks.local_rank % torch.accelerator.device_count()
        torch.accelerator.set_device_index(number)
        device = torch.device(device.type, number)
    disk = options.disk or tempfile.gettempdir()
    precision = options.precision
    if precision == "auto":
        known: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
        fast = known.get("amx_bf16") or known.get("avx512_bf16") or device.type != "cpu"
        precision = "bf16" if fast else "fp32"
    return Setting(ranks, device, precision, options.width, options.tokens, disk)
