"""The attention function of the trainer's module, for ordinary, packed and paged forwards.

`rally_attention` is registered with transformers as "rally". Without a context it is the ordinary sdpa attention with
the ordinary mask. A packed or paged forward needs a context object, passed as the keyword `rally`, so a training
forward is never paged by accident. A keyword also survives gradient checkpointing, where a context variable would be
lost in the autograd thread.

Shapes: T packed tokens, H query heads, K key/value heads, G = H / K, D head size, B sequences, L key length.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rally.models import routing, state_layers
from rally.models.vision import SeenImages, packed_seen_hidden

NAME = "rally"


class Scores(NamedTuple):
    """How a layer computes attention weights from scores. `softcap` bounds scores by a tanh (Gemma 2); `sinks_H` take
    part in the softmax of each head without a value (gpt-oss). With `chunk`, a token attends to the tokens of its own
    chunk of so many positions (Llama 4)."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    chunk: int | None = None

    @property
    def plain(self) -> bool:
        """Whether torch's own attention functions support it."""
        return self.softcap is None and self.sinks_H is None


class AttentionContext(Protocol):
    """How the packed tokens of one forward attend to each other and to cached keys and values."""

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scores: Scores) -> Tensor:
        """Attention output [T, H, D]."""
        ...


def rally_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    rally: AttentionContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    scores = Scores(scale, sliding_window, kwargs.get("softcap"), kwargs.get("s_aux"), _chunk_of(module))
    if rally is None and scores.plain:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if rally is None:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        mask = attention_mask[..., : k.shape[1]] if attention_mask is not None else None
        return grouped_attention(q, k, v, scores, mask, causal=mask is None), None
    assert query.shape[0] == 1, "packed forwards have one row"
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    out_THD = rally.attend(getattr(module, "layer_idx", 0), q_THD, k_TKD, v_TKD, scores)
    return out_THD.unsqueeze(0), None


def _chunk_of(module: Any) -> int | None:
    config = getattr(module, "config", None)
    size: int | None = getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None) if size else None
    return size if kinds and kinds[module.layer_idx] == "chunked_attention" else None


def install(model: PreTrainedModel) -> None:
    """Make `model` use `rally_attention`; the results of ordinary forwards do not change."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, rally_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    state_layers.install(model, body_of(model))
    routing.install(model)


def body_of(model: PreTrainedModel) -> Any:
    """The model without its output layer."""
    body = model.base_model
    return model.model if body is model and isinstance(getattr(model, "model", None), nn.Module) else body


def packed_hidden(
    model: PreTrainedModel, ids_T: Tensor, positions: Tensor, context: AttentionContext, seen: SeenImages | None = None
) -> Tensor:
    """Last hidden states [T, hidden] of packed tokens. For a vision-language model positions are [3, T], and `seen` are
    the image tokens. The 4-D mask keeps transformers from building its own."""
    no_mask = torch.empty((1, 1, 1, 1), device=ids_T.device)
    if seen is not None:
        return packed_seen_hidden(model, ids_T, positions, context, seen, no_mask)
    output = body_of(model)(
        input_ids=ids_T.unsqueeze(0),
        position_ids=positions.unsqueeze(-2),
        attention_mask=no_mask,
        use_cache=False,
        rally=context,
    )
    return output.last_hidden_state[0]  # type: ignore[no-any-return]


def grouped_attention(
    q_BtHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, scores: Scores, mask: Tensor | None, causal: bool
) -> Tensor:
    """Attention where G query heads share a key/value head: [B, t, H, D], D of the values. A window must be part of the
    mask.

    With a mask, or for one query, the heads of a group become further queries, and keys and values are read once. The
    causal kernel needs queries in order, so there keys and values are repeated.
    """
    b, t, h, d = q_BtHD.shape
    kv = k_BLKD.shape[2]
    k, v = k_BLKD.transpose(1, 2), v_BLKD.transpose(1, 2)
    if causal or not scores.plain:
        k, v = (x.unsqueeze(2).expand(-1, -1, h // kv, -1, -1).flatten(1, 2) for x in (k, v))
        q = q_BtHD.transpose(1, 2)
        if scores.plain:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scores.scale).transpose(1, 2)
        return _explicit_attention(q, k, v, scores, mask, causal).transpose(1, 2)
    g = h // kv
    q = q_BtHD.view(b, t, kv, g, d).permute(0, 2, 3, 1, 4).reshape(b, kv, g * t, d)
    if mask is not None and t > 1:
        mask = mask.repeat(1, 1, g, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scores.scale)
    return out.view(b, kv, g, t, -1).permute(0, 3, 1, 2, 4).reshape(b, t, h, -1)


def _explicit_attention(
    q_BHtD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, scores: Scores, mask: Tensor | None, causal: bool
) -> Tensor:
    """Attention variants that torch's functions do not support, in plain operations."""
    weights = q_BHtD.float() @ k_BHLD.float().transpose(2, 3) * scores.scale
    if scores.softcap is not None:
        weights = torch.tanh(weights / scores.softcap) * scores.softcap
    t, length = weights.shape[2:]
    if causal:
        mask = visible(torch.tensor([length - t], device=q_BHtD.device), t, length, None)
    if mask is not None:
        weights = weights.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else weights + mask
    if scores.sinks_H is not None:
        sinks = scores.sinks_H.float().view(1, -1, 1, 1).expand(*weights.shape[:3], 1)
        weights = torch.cat([weights, sinks], dim=-1)
    return (weights.softmax(-1)[..., :length] @ v_BHLD.float()).to(q_BHtD.dtype)


def visible(starts: Tensor, t: int, length: int, window: int | None, chunk: int | None = None) -> Tensor:
    """Causal mask [B, 1, t, length]: query i of a row has position starts + i. With a sliding `window` or only within
    its `chunk`, if given."""
    queries = starts[:, None, None] + torch.arange(t, device=starts.device)[None, :, None]
    keys = torch.arange(length, device=starts.device)[None, None, :]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    if chunk is not None:
        mask &= keys // chunk == queries // chunk
    return mask.unsqueeze(1)
