"""Version and build information, with DeepSpeed's names."""

import torch

version = "0.19.8+penstock"
git_hash = "penstock"
git_branch = "penstock"
installed_ops: dict[str, bool] = {}
accelerator_name = ""
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": torch.version.hip or "0.0",
}
