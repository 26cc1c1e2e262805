"""Whether the engine finds NCCL in a CUDA build of another torch. That needs no GPU.

    python tests/weekly/nccl_lookup.py

The interpreter is one of another torch, such as that of build/torch-2.14.1/venv (tools/test_torch);
Penstock itself need not be installed. From 2.14 on, torch registers its own back ends as plugins
when the first group is made, which must not hide the class. Exits with 1 if something is wrong.
"""

from __future__ import annotations

import datetime
import importlib.util
import pathlib
import sys
from typing import Any

import torch
import torch.distributed as dist

ROOT = pathlib.Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda")


def lookup() -> Any:
    """The module alone: `import penstock` would need a build for this torch."""
    file = ROOT / "python/penstock/front/device_backends.py"
    spec = importlib.util.spec_from_file_location("device_backends", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def register() -> str:
    """What torch does when its first NCCL group is made; how its plugin for NCCL then looks."""
    if not hasattr(dist.Backend, "_ensure_backend_registered"):
        return "no plugins of its own"
    dist.Backend._ensure_backend_registered("nccl")
    plugin = dist.Backend._plugins["NCCL"]
    return f"plugin {plugin.creator_fn.__name__}, extended_api={plugin.extended_api}"


def made(module: Any) -> str:
    """The error of NCCL's constructor without a GPU: it got what it expects."""
    store = dist.HashStore()
    try:
        group = module._make("nccl", store, 0, [0], datetime.timedelta(seconds=5))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return f"a {type(group).__name__}"


def main() -> int:
    if torch.version.cuda is None:
        sys.exit(f"torch {torch.__version__} is no CUDA build")
    module, wrong = lookup(), []
    before = module.name_for(CUDA, "auto")
    registered = register()
    after = module.name_for(CUDA, "auto")
    result = made(module)
    print(f"torch {torch.__version__}: {before}; {registered}; {after}; _make(): {result}")
    if (before, after) != ("nccl", "nccl"):
        wrong.append("NCCL is not found")
    if not ("no GPUs found" in result or result.endswith("ProcessGroupNCCL")):
        wrong.append("ProcessGroupNCCL was not made as it expects")
    print("\n".join(wrong) or "as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
