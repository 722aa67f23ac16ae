"""Rotary embeddings whose frequencies would follow the longest position of a forward, decided once per run.

transformers chooses between the short and the long frequencies of LongRoPE by the largest position of the batch. A
short row would then change beside a long one, and cached keys would be wrong as soon as a history passes the first
length. The choice is made once, by the longest history that the run allows, as vLLM makes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rally.types import RallyError

DECIDED = "decided"  # as a rope type: a name that transformers leaves alone


class RopeError(RallyError):
    """A rotary embedding that is not the same function for all histories of this run."""


def decide_rope(model: PreTrainedModel, max_length: int) -> None:
    """Fix the frequencies of every LongRoPE for histories of up to `max_length` tokens. RopeError for embeddings that
    change with every length."""
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _decided(module, kinds, None, max_length)
        elif isinstance(kinds, dict):
            module.rope_type = {layer: _decided(module, kind, layer, max_length) for layer, kind in kinds.items()}


def _decided(module: nn.Module, kind: str, layer: str | None, max_length: int) -> str:
    """The new rope type of one kind of layer; its frequencies are set."""
    if kind != "longrope" and "dynamic" not in kind:
        return kind
    config: Any = module.config
    parameters = config.rope_parameters if layer is None else config.rope_parameters[layer]
    first = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    if kind != "longrope":
        if max_length > first:
            raise RopeError(
                f"the frequencies of the model's {kind} rotary embedding change with the length of the history beyond "
                f"{first} tokens, and this run allows {max_length}; lower the lengths to {first}"
            )
        return kind
    prefix = "" if layer is None else f"{layer}_"
    short = getattr(module, f"{prefix}original_inv_freq")
    if max_length > first:
        options = {} if layer is None else {"layer_type": layer}
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, short.device, seq_len=first + 1, **options)
    else:
        frequencies = short
    here: torch.Tensor = getattr(module, f"{prefix}inv_freq")
    module.register_buffer(f"{prefix}inv_freq", frequencies.to(here.device), persistent=False)
    return DECIDED
