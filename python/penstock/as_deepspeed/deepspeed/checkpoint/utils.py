"""Functions for state dicts that are about to be saved."""

from __future__ import annotations

from typing import Any

import torch


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Copies all tensors, so that torch.save() does not write the whole storage of a view."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(one, device) for one in item)
    if isinstance(item, dict):
        return type(item)(
            {key: clone_tensors_for_torch_save(one, device) for key, one in item.items()}
        )
    return item


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    return f"{base_folder}/mp_rank_{mp_rank_str}_model_states.pt"
