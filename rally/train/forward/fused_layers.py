"""The training forward of packed rows: attention over the prefix tree, and fused layers for supported families.

Linear layers are those of `linear_layers`. Norms, rotary embeddings and gated activations are fused kernels that save
only their inputs for the backward pass. Other families, and machines without a GPU, use the module's own forward, which
is the specification of the fused one. The layers of a sharded model are computed within calls of their modules, around
which FSDP gathers their weights.

Shapes: T packed tokens, C hidden size, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rally.images.loading import blank_image
from rally.models.attention import AttentionContext, Scores, body_of, packed_hidden, visible
from rally.models.decoder_families import (
    ACTIVATIONS,
    LayerParts,
    Norm,
    activation_name,
    dense,
    known,
    kv_shape,
    offset_norms,
    parts_of,
    rotary_of,
    through_module,
)
from rally.models.forward_variables import checkpoint_contexts
from rally.models.kernels.dispatch import has_triton
from rally.models.residence import device_of
from rally.models.routing import over_tokens, routed
from rally.models.segment_tree import BranchContext
from rally.models.sequence_parallel import UlyssesAttention
from rally.models.sharding import ranks_of
from rally.models.state_layers import holds_state
from rally.models.vision import SeenImages, image_features, image_parts_of, patches_of
from rally.train.forward.linear_layers import linear_layers
from rally.train.forward.packed_attention import PackedAttention, fits_one_call
from rally.train.packing import PackedImages, PackedRows

FORWARD_ATTRIBUTE = "rally_forward"
MASKED_TOKENS = 4096  # of a group with a mask; attention weights grow with the square


class Ops(NamedTuple):
    """The operations of a layer; signatures are those of `rally.models.kernels.autograd`."""

    rms_norm: Callable[..., Tensor]
    add_and_norm: Callable[..., tuple[Tensor, Tensor]]
    gated: Callable[..., Tensor]
    rotate: Callable[..., Tensor]


def hidden_states(model: PreTrainedModel, packed: PackedRows) -> Tensor:
    """Last hidden states [T, C] of the packed tokens; in a sequence-parallel group only those of this rank."""
    hidden_TC = _hidden_states(model, packed)
    if not _images_elsewhere(model, packed):
        return hidden_TC
    blank = image_features(model, [blank_image()])
    total = torch.stack([one.float().sum() for one in (blank.first_VC, *blank.deep_VC)]).sum()
    return hidden_TC + 0 * total.to(hidden_TC.dtype)


def _images_elsewhere(model: PreTrainedModel, packed: PackedRows) -> bool:
    """Whether the tower is trained on images that other ranks show at the same time, and this one shows none. Gradients
    are reduced together, so it must have one for the same weights."""
    ranks = ranks_of(model)
    if ranks.world_size == 1 or patches_of(model) is None or not torch.is_grad_enabled():
        return False
    if not any(p.requires_grad for part in image_parts_of(model).values() for p in part.parameters()):
        return False
    shown = torch.tensor([float(packed.images is not None)])
    return any(map(bool, ranks.all_gather(shown))) and packed.images is None


def _hidden_states(model: PreTrainedModel, packed: PackedRows) -> Tensor:
    forward, ranks = training_forward(model), ranks_of(model)
    positions = packed.positions_T if packed.positions_3T is None else packed.positions_3T
    in_parts = ranks.world_size > 1 and patches_of(model) is not None
    if (group := ranks.sequence_group) is not None:
        assert forward == "packed", "other forwards do not divide sequences"
        attention = UlyssesAttention(PackedAttention(packed), group, len(packed.ids_T))
        own = group.tokens(len(packed.ids_T))[group.rank]
        tokens = torch.arange(own.start, own.stop, device=packed.ids_T.device)
        seen = _image_inputs(model, packed.images, own)
        with over_tokens(tokens) if own else routed(None):  # the experts of padding do not count
            ids, places = group.own(packed.ids_T), group.own(positions)
            if _can_fuse(model):
                return fused_hidden(model, ids, places, attention, compiled_ops())
            return packed_hidden(model, ids, places, attention, seen, language_only=in_parts)
    if forward == "unpacked":
        return _unpacked_hidden(model, packed)
    if forward == "masked":
        return _masked_hidden(model, packed)
    whole = PackedAttention(packed)
    if _can_fuse(model):
        return fused_hidden(model, packed.ids_T, packed.positions_T, whole, compiled_ops())
    seen = _image_inputs(model, packed.images)
    return packed_hidden(model, packed.ids_T, positions, whole, seen, language_only=in_parts)


TrainingForward = Literal["packed", "masked", "unpacked"]


def training_forward(model: PreTrainedModel) -> TrainingForward:
    chosen: TrainingForward = getattr(model, FORWARD_ATTRIBUTE, "packed")
    return chosen


def choose_training_forward(model: PreTrainedModel, forward: TrainingForward) -> None:
    """How rows are computed from now on. "masked" is for models with their own attention function: it gets a mask over
    one group of rows with a common prefix at a time. "unpacked" is for models that do not keep rows apart at all: the
    module's own forward computes one row at a time, and shared prefixes once per row."""
    setattr(model, FORWARD_ATTRIBUTE, forward)


def copy_training_forward(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Compute rows with `target` as with `source`, a model of the same class for which the start-up check decided."""
    target.set_attn_implementation(source.config._attn_implementation)
    choose_training_forward(target, training_forward(source))


def _unpacked_hidden(model: PreTrainedModel, packed: PackedRows) -> Tensor:
    assert packed.images is None, "rows with images are packed"
    histories = _histories(packed)
    return torch.cat([_row_hidden(model, packed, i, histories[i]) for i in range(len(histories))])


def _row_hidden(model: PreTrainedModel, packed: PackedRows, branch: int, history: Tensor) -> Tensor:
    with over_tokens(history):
        output = body_of(model)(input_ids=packed.ids_T[history].unsqueeze(0), use_cache=False)
    return output.last_hidden_state[0, -packed.queries[branch] :]  # type: ignore[no-any-return]


def _masked_hidden(model: PreTrainedModel, packed: PackedRows) -> Tensor:
    assert packed.images is None, "rows with images are packed"
    histories = _histories(packed)
    parts: list[Tensor] = []
    order: list[Tensor] = []
    for branches in _groups(packed):
        own = [histories[i][-packed.queries[i] :] for i in branches]
        order.extend(own)
        if sum(packed.queries[i] for i in branches) > MASKED_TOKENS:
            parts.extend(_row_hidden(model, packed, i, histories[i]) for i in branches)
        else:
            parts.append(_group_hidden(model, packed, branches, torch.cat(own), [histories[i] for i in branches]))
    return torch.cat(parts).index_select(0, torch.cat(order).argsort())


def _group_hidden(
    model: PreTrainedModel, packed: PackedRows, branches: list[int], tokens: Tensor, histories: list[Tensor]
) -> Tensor:
    """Hidden states of `tokens`, the branches of one group, from the module's own attention and a mask."""
    place = torch.full((len(packed.ids_T),), -1, device=tokens.device)
    place[tokens] = torch.arange(len(tokens), device=tokens.device)
    seen = torch.zeros((len(tokens), len(tokens)), dtype=torch.bool, device=tokens.device)
    begin, parents = 0, []
    for branch, history in zip(branches, histories, strict=True):
        t, length = packed.queries[branch], packed.keys[branch]
        causal = visible(torch.tensor([length - t], device=tokens.device), t, length, None)[0, 0]
        seen[begin : begin + t, place[history]] = causal
        begin += t
        parents.append(packed.parents[branch])
    mask = torch.zeros(seen.shape, dtype=model.dtype, device=tokens.device)
    states = {}
    if holds_state(model):
        before = [int(place[parent]) if parent >= 0 else -1 for parent in parents]
        states["rally"] = BranchContext([packed.queries[i] for i in branches], before, tokens.device)
    with over_tokens(tokens):
        output = body_of(model)(
            input_ids=packed.ids_T[tokens][None],
            position_ids=packed.positions_T[tokens][None],
            attention_mask=mask.masked_fill(~seen, torch.finfo(model.dtype).min)[None, None],
            use_cache=False,
            **states,
        )
    return output.last_hidden_state[0]  # type: ignore[no-any-return]


def _histories(packed: PackedRows) -> tuple[Tensor, ...]:
    """The packed tokens that each branch attends to."""
    tokens = torch.arange(len(packed.ids_T), device=packed.ids_T.device)
    source_S = tokens if packed.source_S is None else packed.source_S
    return tuple(source_S.split(packed.keys))


def _groups(packed: PackedRows) -> list[list[int]]:
    """Branches that share a prefix, each after the one that it leaves."""
    ends = list(itertools.accumulate(packed.queries))
    parent = [-1 if token < 0 else bisect.bisect_right(ends, token) for token in packed.parents]
    children: dict[int, list[int]] = {}
    for branch, before in enumerate(parent):
        children.setdefault(before, []).append(branch)
    groups = []
    for first in children[-1]:
        group = [first]
        for branch in group:  # grows
            group.extend(children.get(branch, ()))
        groups.append(group)
    return groups


def _image_inputs(model: PreTrainedModel, images: PackedImages | None, own: range | None = None) -> SeenImages | None:
    """The features of all distinct images from one run of the vision tower, placed at their tokens: those within `own`,
    counted from its first, if it is given."""
    if images is None:
        return None
    at_V, feature_V = images.at_V, images.feature_V
    if own is not None:
        inside = (at_V >= own.start) & (at_V < own.stop)
        at_V, feature_V = at_V[inside] - own.start, feature_V[inside]
    return SeenImages(at_V, image_features(model, images.images).rows(feature_V))


def compiled_ops() -> Ops:
    from rally.models.kernels import autograd

    return Ops(autograd.rms_norm, autograd.add_and_norm, autograd.gated, autograd.rotate)


def _can_fuse(model: PreTrainedModel) -> bool:
    if not (has_triton() and known(model) and _units_are_layers(model)):
        return False
    return fits_one_call(torch.empty((0, 1, kv_shape(model).size), dtype=model.dtype, device=device_of(model)))


def _units_are_layers(model: PreTrainedModel) -> bool:
    """Whether FSDP gathers no part of a layer, and no norm or embedding, by itself."""
    base = cast(Any, model.base_model)
    outer = {model, *base.layers}
    inner = (module for part in (base.layers, base.embed_tokens, base.norm) for module in part.modules())
    return not any(isinstance(module, FSDPModule) for module in inner if module not in outer)


def fused_hidden(
    model: PreTrainedModel, ids_T: Tensor, positions_T: Tensor, attention: AttentionContext, ops: Ops
) -> Tensor:
    compute = partial(_fused_hidden, model, ops=ops)
    if isinstance(model, FSDPModule) and model.base_model is model:  # the body of a critic
        compute = partial(_called, model, compute)
    return compute(ids_T, positions_T, attention)


def _fused_hidden(
    model: PreTrainedModel, ids_T: Tensor, positions_T: Tensor, attention: AttentionContext, *, ops: Ops
) -> Tensor:
    base = cast(Any, model.base_model)
    layers = [_FusedLayer(parts_of(module, model), model, ops) for module in base.layers]
    stream_TC = base.embed_tokens(ids_T)
    rotary = rotary_of(base, stream_TC, positions_T, {layer.parts.kind for layer in layers})
    for number, (module, layer) in enumerate(zip(base.layers, layers, strict=True)):
        compute = partial(_called, module, layer) if isinstance(module, FSDPModule) else layer
        arguments = (number, stream_TC, *rotary[layer.parts.kind], attention)
        again = base.training and module.gradient_checkpointing
        stream_TC = (
            checkpoint(compute, *arguments, use_reentrant=False, context_fn=checkpoint_contexts)
            if again
            else compute(*arguments)
        )
    return ops.rms_norm(stream_TC, base.norm.weight, layers[0].eps, offset=layers[0].offset)


def _called(module: Any, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """`function(*arguments)` in place of the module's own forward, within the hooks of its call."""
    assert "forward" not in vars(module), "nothing else replaces the forward of a sharded layer"
    module.forward = function
    try:
        result: Tensor = nn.Module.__call__(module, *arguments)  # not that of a class that checkpoints by itself
    finally:
        del module.forward
    return result


class _FusedLayer:
    """One decoder layer as a function of the residual stream."""

    def __init__(self, parts: LayerParts, model: PreTrainedModel, ops: Ops) -> None:
        self.parts, self.ops = parts, ops
        self.eps: float = model.config.get_text_config().rms_norm_eps
        self.offset = offset_norms(model)
        self.activation = ACTIVATIONS[activation_name(model)]
        self.size = kv_shape(model).size

    def __call__(
        self, number: int, stream_TC: Tensor, cos_TD: Tensor, sin_TD: Tensor, attention: AttentionContext
    ) -> Tensor:
        parts = self.parts
        x_TC = self._norm(stream_TC, parts.input_norm)
        mixed_TC = self._norm(self._attend(number, x_TC, cos_TD, sin_TD, attention), parts.attention_norm)
        stream_TC, x_TC = self.ops.add_and_norm(
            mixed_TC, stream_TC, parts.middle_norm.weight, self.eps, offset=self.offset
        )
        mlp = parts.mlp
        if not dense(mlp):
            return stream_TC + self._norm(through_module(mlp, x_TC), parts.mlp_norm)
        product = self.ops.gated(*linear_layers([mlp.gate_proj, mlp.up_proj], x_TC), self.activation)
        return stream_TC + self._norm(linear_layers([mlp.down_proj], product)[0], parts.mlp_norm)

    def _attend(self, number: int, x_TC: Tensor, cos_TD: Tensor, sin_TD: Tensor, attention: AttentionContext) -> Tensor:
        own, parts = self.parts.attention, self.parts
        projected = linear_layers([own.q_proj, own.k_proj, own.v_proj], x_TC)
        q_THD, k_TKD, v_TKD = (x.unflatten(1, (-1, self.size)) for x in projected)
        q_THD = self.ops.rotate(self._head_norm(q_THD, parts.q_norm), cos_TD, sin_TD)
        k_TKD = self.ops.rotate(self._head_norm(k_TKD, parts.k_norm), cos_TD, sin_TD)
        mixed_THD = attention.attend(number, q_THD, k_TKD, v_TKD, Scores(parts.scale, parts.window))
        return linear_layers([own.o_proj], mixed_THD.flatten(1))[0]

    def _norm(self, x_TC: Tensor, norm: Norm | None) -> Tensor:
        return x_TC if norm is None else self.ops.rms_norm(x_TC, norm.weight, self.eps, offset=self.offset)

    def _head_norm(self, x_THD: Tensor, norm: Norm | None) -> Tensor:
        return x_THD if norm is None else self._norm(x_THD.flatten(0, 1), norm).view_as(x_THD)
