"""Which back end of torch.distributed exchanges device memory, and how it is made: on any version
of torch, and for back ends of other packages. No device is needed."""

import datetime
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from penstock.front import device_backends

CUDA = torch.device("cuda")
TIMEOUT = datetime.timedelta(seconds=5)
Plugin = dist.Backend._BackendPlugin


class WithOptions:
    """Like ProcessGroupNCCL."""

    class Options:
        _timeout = None

    def __init__(self, store, rank, size, options):
        self.made = (store, rank, size, options._timeout)
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1", "its watchdog ends the process"


class WithTimeout:
    """Like ProcessGroupUCC."""

    def __init__(self, store, rank, size, timeout):
        self.made = (store, rank, size, timeout)


def plain(store, rank, size, timeout):
    return SimpleNamespace(made=(store, rank, size, timeout))


def extended(described, options):
    assert options is None and described.global_ranks_in_group == [4, 6]
    return SimpleNamespace(
        made=("store", described.group_rank, described.group_size, described.timeout)
    )


@pytest.fixture
def torch_has(monkeypatch):
    def register(kind, plugin, available=True):
        monkeypatch.setattr(dist, "is_backend_available", lambda _: available)
        monkeypatch.setitem(dist.Backend.default_device_backend_map, "cuda", "nccl")
        if kind is None:
            monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
        else:
            monkeypatch.setattr(dist, "ProcessGroupNCCL", kind, raising=False)
        plugins = {} if plugin is None else {"NCCL": plugin}
        monkeypatch.setattr(dist.Backend, "_plugins", plugins)

    return register


@pytest.mark.parametrize(
    ("kind", "plugin"),
    [
        (WithOptions, None),
        (WithOptions, Plugin(extended, True)),  # torch 2.14, after its first NCCL group
        (WithOptions, Plugin(plain, False)),
        (WithTimeout, None),
        (WithTimeout, Plugin(extended, True)),
        (None, Plugin(plain, False)),
        (None, Plugin(extended, True)),
    ],
)
def test_the_back_end_is_found_and_made(kind, plugin, torch_has, monkeypatch):
    torch_has(kind, plugin)
    assert device_backends.name_for(CUDA, "auto") == "nccl"
    if plugin is not None and kind is None and plugin.extended_api:
        monkeypatch.setattr(device_backends, "_DistributedBackendOptions", SimpleNamespace)
    made = device_backends._make("nccl", "store", 1, [4, 6], TIMEOUT)
    assert made.made == ("store", 1, 2, TIMEOUT)


def test_the_environment_is_as_before(torch_has, monkeypatch):
    torch_has(WithOptions, None)
    for before in (None, "0"):
        if before is None:
            monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
        else:
            monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
        device_backends._make("nccl", "store", 1, [4, 6], TIMEOUT)
        assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before


@pytest.mark.parametrize(
    ("device", "wanted", "available", "kind"),
    [
        (CUDA, "gloo", True, WithOptions),
        (CUDA, "auto", False, WithOptions),
        (CUDA, "auto", True, None),
        (torch.device("cpu"), "auto", True, WithOptions),
        (torch.device("meta"), "auto", True, WithOptions),
    ],
)
def test_exchanges_go_through_host_memory(device, wanted, available, kind, torch_has):
    torch_has(kind, None, available)
    assert device_backends.name_for(device, wanted) is None
