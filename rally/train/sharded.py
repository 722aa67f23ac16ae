"""Tensors that lie on several ranks are gathered whole on rank 0, one at a time, and given back in parts.

All ranks must ask for the same ones in the same order. What lies on one alone is left as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel


def whole(value: Tensor) -> Tensor:
    """A tensor that may lie on several ranks, in main memory of rank 0; all of them must ask. Others get nothing."""
    if not isinstance(value, DTensor):
        return value
    full: Tensor = value.full_tensor().detach()
    return full.cpu() if value.device_mesh.get_rank() == 0 else torch.empty(0)


def spread_like(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, where `like` lies on several ranks."""
    if not isinstance(like, DTensor):
        return value
    here = value.to(device=like.device, dtype=like.dtype)
    part = distribute_tensor(here, like.device_mesh, like.placements, src_data_rank=None)
    return part.clone()


def model_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by name, those that lie on several ranks gathered one by one. Weights that are one stay one."""
    first: dict[int, str] = {}
    same = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        known = same.get(name, name)
        found[name] = found[known] if known in found else whole(value)
    return found
