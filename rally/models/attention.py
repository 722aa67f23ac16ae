"""The attention function of the trainer's module, for ordinary, packed and paged forwards.

`rally_attention` is registered with transformers as "rally". Without a context it is the ordinary sdpa attention with
the ordinary mask. A packed or paged forward needs a context object, passed as the keyword `rally`, so a training
forward is never paged by accident. A keyword also survives gradient checkpointing, where a context variable would be
lost in the autograd thread.

Latent attention (DeepSeek, Kimi-Linear, GLM-Flash) can be cached compressed: the latent of a token and its rotated key
are then one key of one head, and its values are the first part of that key. The projections from the latent move to
the query and to the output.

Shapes: T packed tokens, H query heads, K key/value heads, G = H / K, D head size, B sequences, L key length, R size of
a latent, N and V the sizes of a key and a value that are projected from it.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rally.models import routing, state_layers
from rally.models.vision import SeenImages, own_positions, packed_seen_hidden
from rally.platforms import on_accelerator

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
    """How the packed tokens of one forward attend to each other and to cached keys and values. `compressed`: latent
    attention passes the latents, as keys and values of one head."""

    compressed: bool

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scores: Scores) -> Tensor:
        """Attention output [T, H, D], D of the values."""
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
    latent = module.__dict__.pop(LATENT, None)
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
    layer = getattr(module, "layer_idx", 0)
    if latent is not None and rally.compressed:
        return _latent_attention(module, layer, q_THD, k_TKD, latent, scores, rally).unsqueeze(0), None
    return rally.attend(layer, q_THD, k_TKD, v_TKD, scores).unsqueeze(0), None


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
    for module in model.modules():
        projection = getattr(module, "kv_b_proj", None)
        if projection is not None and hasattr(module, "qk_nope_head_dim") and LATENT_HOOK not in vars(module):
            vars(module)[LATENT_HOOK] = projection.register_forward_pre_hook(partial(_keep_latent, module))


LATENT = "rally_latent"  # the attribute that holds the latents between their projection and the attention function
LATENT_HOOK = "rally_latent_hook"


def _keep_latent(attention: nn.Module, projection: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    if not torch.is_grad_enabled():  # training keeps no reference to its activations
        vars(attention)[LATENT] = inputs[0]


def _latent_attention(
    module: Any, layer: int, q_THD: Tensor, k_THD: Tensor, latent: Tensor, scores: Scores, context: AttentionContext
) -> Tensor:
    """Attention [T, H, V] over latents: key = [latent, rotated part], value = latent."""
    heads, key_size, size = q_THD.shape[1], module.qk_nope_head_dim, latent.shape[-1]
    weight_HXR = _projection_weight(module.kv_b_proj, latent).view(heads, -1, size)
    q_THR = torch.einsum("thn,hnr->thr", q_THD[..., :key_size], weight_HXR[:, :key_size])
    q = torch.cat((q_THR, q_THD[..., key_size:]), dim=-1)
    key_T1D = torch.cat((latent.reshape(-1, 1, size), k_THD[:, :1, key_size:]), dim=-1)
    out_THR = context.attend(layer, q, key_T1D, key_T1D[..., :size], scores)
    return torch.einsum("thr,hvr->thv", out_THR, weight_HXR[:, key_size:])


def _projection_weight(projection: Any, latent: Tensor) -> Tensor:
    if type(projection) is nn.Linear:
        return projection.weight
    hooks, projection._forward_pre_hooks = projection._forward_pre_hooks, OrderedDict()
    try:  # an adapted or quantised layer: its product with the unit matrix
        return projection(torch.eye(latent.shape[-1], dtype=latent.dtype, device=latent.device)).t()  # type: ignore[no-any-return]
    finally:
        projection._forward_pre_hooks = hooks


def body_of(model: PreTrainedModel) -> Any:
    """The model without its output layer."""
    model = causal_of(model)
    body = model.base_model
    return model.model if body is model and isinstance(getattr(model, "model", None), nn.Module) else body


def causal_of(model: PreTrainedModel) -> PreTrainedModel:
    """The module with the output layer: the model, or the causal language model inside of it (Llama 4)."""
    if model.base_model is not model or isinstance(getattr(model, "model", None), nn.Module):
        return model
    inner = model.get_decoder()
    whole = isinstance(inner, PreTrainedModel) and inner is not model and inner.get_output_embeddings() is not None
    return inner if whole else model


def packed_hidden(
    model: PreTrainedModel,
    ids_T: Tensor,
    positions: Tensor,
    context: AttentionContext,
    seen: SeenImages | None = None,
    *,
    language_only: bool = False,
) -> Tensor:
    """Last hidden states [T, hidden] of packed tokens. For a vision-language model positions are [3, T], and `seen` are
    the image tokens. `language_only`: call its language model as if some token were of an image. The 4-D mask keeps
    transformers from building its own."""
    no_mask = torch.empty((1, 1, 1, 1), device=ids_T.device)
    positions = own_positions(model, positions)
    if seen is not None or language_only:
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
    if mask is not None and torch.is_grad_enabled() and on_accelerator(mask.device):
        mask = _aligned(mask)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scores.scale)
    return out.view(b, kv, g, t, -1).permute(0, 3, 1, 2, 4).reshape(b, t, h, -1)


def _aligned(mask: Tensor) -> Tensor:
    """The mask with rows that begin at multiples of 8 elements, which the gradients of torch's kernels require."""
    length = mask.shape[-1]
    return mask if length % 8 == 0 else F.pad(mask, (0, -length % 8))[..., :length]


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
