"""The value model: the body of a language model with a scalar head.

An untrained head gives exactly 0, so the first advantages are plain returns. On disk the model is a Hugging Face folder
of the body, with the head in a separate file.

Shapes: M sampled tokens, U different ones among them, T packed tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from rally.models import attention
from rally.models.load import load_model
from rally.models.lora import plain_twin
from rally.models.sequence_parallel import pair_share
from rally.models.sharding import model_state, ranks_of
from rally.train.checkpoint.snapshot import copied
from rally.train.forward.fused_layers import hidden_states
from rally.train.packing import PackedRows

HEAD = "value_head"
HEAD_FILE = f"{HEAD}.safetensors"


def load_value_model(path: str, **options: Any) -> PreTrainedModel:
    """Load from a folder that `value_model_part` wrote, or from any language model without its output head. `options`
    are those of `load_model`."""
    head_file = Path(path).expanduser() / HEAD_FILE
    if head_file.is_file():
        return with_value_head(load_model(path, kind=AutoModel, **options), load_file(head_file))
    return with_value_head(load_model(path, **options).base_model)


def with_value_head(body: nn.Module, weights: dict[str, Tensor] | None = None) -> PreTrainedModel:
    """The body with a value head as its child, so that one optimizer holds both."""
    assert isinstance(body, PreTrainedModel)
    head = nn.Linear(body.config.get_text_config().hidden_size, 1)
    head.load_state_dict(weights or {name: torch.zeros_like(value) for name, value in head.state_dict().items()})
    body.add_module(HEAD, head.to(body.device))  # always float32: it is a single row
    attention.install(body)
    return body


def value_model_part(model: PreTrainedModel) -> Callable[[Path], None]:
    """A function that writes the current weights into a folder."""
    state: dict[str, Tensor] = copied(model_state(model))
    saver = model if ranks_of(model).world_size == 1 else plain_twin(model)
    head = {name.removeprefix(f"{HEAD}."): state.pop(name) for name in list(state) if name.startswith(f"{HEAD}.")}

    def write(folder: Path) -> None:
        saver.save_pretrained(folder, state_dict=state)
        save_file(head, folder / HEAD_FILE)

    return write


def token_values(model: PreTrainedModel, packed: PackedRows) -> Tensor:
    """The value of the state before each sampled token, read where that token is predicted."""
    return ranks_of(model).summon(model, _token_values, packed)


def _token_values(model: PreTrainedModel, packed: PackedRows) -> Tensor:
    share = pair_share(ranks_of(model).sequence_group, packed.predict_U, len(packed.ids_T))
    hidden_UC = hidden_states(model, packed).index_select(0, share.positions_U)
    values_U: Tensor = model.get_submodule(HEAD)(hidden_UC.float()).squeeze(-1)
    return share.gather(values_U).index_select(0, packed.pair_M)
