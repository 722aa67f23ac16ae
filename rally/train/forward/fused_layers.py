"""The training forward of packed rows: attention over the prefix tree, and fused layers for supported families.

Linear layers are the module's own; one with a plain LoRA adapter is three products (`rally.models.lora.linear`). Norms,
rotary embeddings and gated activations are fused kernels that save only their inputs for the backward pass. Other
families, and machines without a GPU, use the module's own forward, which is the specification of the fused one.

Shapes: T packed tokens, C hidden size, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import bisect
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rally.models.attention import Scores, body_of, grouped_attention, packed_hidden, visible
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
from rally.models.lora import linear
from rally.models.residence import device_of
from rally.models.routing import over_tokens, routed
from rally.models.sequence_parallel import UlyssesAttention
from rally.models.sharding import ranks_of
from rally.models.state_layers import BranchContext, holds_state
from rally.models.vision import SeenImages, image_features
from rally.platforms import CUDA, from_host, has_kernels
from rally.train.packing import PackedImages, PackedRows

# since torch 2.12 the kernel needs this flag for fewer key/value heads than query heads
GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
FORWARD_ATTRIBUTE = "rally_forward"
MASKED_TOKENS = 4096  # of a group with a mask; attention weights grow with the square


class PackedAttention(BranchContext):
    """Attention over a packed batch without padding. The queries of a branch are the last of its keys.

    In half precision on a GPU all branches are one kernel call; elsewhere there is one call per branch shape.
    """

    compressed = False

    def __init__(self, packed: PackedRows) -> None:
        super().__init__(packed.queries, packed.parents, packed.ids_T.device)
        shapes = itertools.groupby(zip(packed.queries, packed.keys, strict=True))
        self.runs = [(len(list(group)), t, length) for (t, length), group in shapes]  # branches, queries, keys
        self.source_S = packed.source_S
        self.most_queries, self.most_keys = max(packed.queries), max(packed.keys)
        self.query_ends, self.key_ends = (_ends(x, packed.ids_T.device) for x in (packed.queries, packed.keys))
        self._masks: dict[tuple[int, int, int | None, int | None], Tensor] = {}

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scores: Scores) -> Tensor:
        in_one = scores.plain and scores.chunk is None and fits_one_call(q_THD)
        attend = self._in_one_call if in_one else self._by_shape
        return attend(q_THD, self._history(k_TKD), self._history(v_TKD), scores)

    def _in_one_call(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, scores: Scores) -> Tensor:
        size = v_SKD.shape[-1]
        output = varlen_attn(
            q_THD,
            k_SKD,
            F.pad(v_SKD, (0, q_THD.shape[-1] - size)),
            self.query_ends,
            self.key_ends,
            self.most_queries,
            self.most_keys,
            scale=scores.scale,
            window_size=(-1 if scores.window is None else scores.window - 1, 0),  # keys left and right of a query's own
            **GROUPED_HEADS,
        )
        assert isinstance(output, Tensor)
        return output[..., :size]

    def _by_shape(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, scores: Scores) -> Tensor:
        # split, not slices: the gradient of a split is one concatenation, that of each slice a full-sized zero tensor
        queries = q_THD.split([branches * t for branches, t, _ in self.runs])
        keys, values = (x.split([branches * length for branches, _, length in self.runs]) for x in (k_SKD, v_SKD))
        outputs = []
        for (branches, t, length), *parts in zip(self.runs, queries, keys, values, strict=True):
            q, k, v = (x.unflatten(0, (branches, -1)) for x in parts)
            mask = self._mask(t, length, scores, q)
            outputs.append(grouped_attention(q, k, v, scores, mask, causal=mask is None).flatten(0, 1))
        return torch.cat(outputs)

    def _history(self, x_TKD: Tensor) -> Tensor:
        return x_TKD if self.source_S is None else _History.apply(x_TKD, self.source_S)  # type: ignore[no-any-return]

    def _mask(self, t: int, length: int, scores: Scores, like: Tensor) -> Tensor | None:
        """The mask to add to the scores, the same in all layers; None: plainly causal."""
        narrow, chunk = (size if size is not None and size < length else None for size in (scores.window, scores.chunk))
        if t == length and narrow is None and chunk is None:
            return None
        shape = (t, length, narrow, chunk)
        if shape not in self._masks:
            seen = visible(torch.tensor([length - t], device=like.device), t, length, narrow, chunk)
            self._masks[shape] = torch.zeros_like(seen, dtype=like.dtype).masked_fill(~seen, -torch.inf)
        return self._masks[shape]


def fits_one_call(q_THD: Tensor) -> bool:
    """Whether torch's variable-length flash attention supports these tensors."""
    return (
        has_kernels(q_THD.device)
        and q_THD.dtype in (torch.bfloat16, torch.float16)
        and q_THD.shape[-1] % 8 == 0
        and q_THD.shape[-1] <= 256
        and CUDA.module.get_device_capability(q_THD.device) >= (8, 0)
    )


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    return from_host(torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), device)


class _History(torch.autograd.Function):
    """Gathers the keys or values of every branch's whole history. The gradient of a token that many branches attend to
    is summed in float32, because bf16 would round small terms away."""

    @staticmethod
    def forward(ctx: Any, x_TKD: Tensor, source_S: Tensor) -> Tensor:
        ctx.save_for_backward(source_S)
        ctx.like = x_TKD.shape
        history: Tensor = x_TKD.flatten(1).index_select(0, source_S).unflatten(1, x_TKD.shape[1:])
        return history

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (source_S,) = ctx.saved_tensors
        (gradient,) = gradients
        exact = gradient.flatten(1).to(torch.promote_types(gradient.dtype, torch.float32))
        total = exact.new_zeros((ctx.like[0], exact.shape[1])).index_add_(0, source_S, exact)
        return total.to(gradient.dtype).view(ctx.like), None


class Ops(NamedTuple):
    """The operations of a layer; signatures are those of `rally.models.kernels.autograd`."""

    rms_norm: Callable[..., Tensor]
    add_and_norm: Callable[..., tuple[Tensor, Tensor]]
    gated: Callable[..., Tensor]
    rotate: Callable[..., Tensor]


def hidden_states(model: PreTrainedModel, packed: PackedRows) -> Tensor:
    """Last hidden states [T, C] of the packed tokens; in a sequence-parallel group only those of this rank."""
    forward = training_forward(model)
    if (group := ranks_of(model).sequence_group) is not None:
        assert forward == "packed" and packed.images is None, "other forwards do not divide sequences"
        attention = UlyssesAttention(PackedAttention(packed), group, len(packed.ids_T))
        own = group.tokens(len(packed.ids_T))[group.rank]
        tokens = torch.arange(own.start, own.stop, device=packed.ids_T.device)
        with over_tokens(tokens) if own else routed(None):  # the experts of padding do not count
            return packed_hidden(model, group.own(packed.ids_T), group.own(packed.positions_T), attention)
    if forward == "unpacked":
        return _unpacked_hidden(model, packed)
    if forward == "masked":
        return _masked_hidden(model, packed)
    whole = PackedAttention(packed)
    if _can_fuse(model):
        return fused_hidden(model, packed.ids_T, packed.positions_T, whole, compiled_ops())
    positions = packed.positions_T if packed.positions_3T is None else packed.positions_3T
    return packed_hidden(model, packed.ids_T, positions, whole, _image_inputs(model, packed.images))


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


def _image_inputs(model: PreTrainedModel, images: PackedImages | None) -> SeenImages | None:
    """The features of all distinct images from one run of the vision tower, placed at their tokens."""
    if images is None:
        return None
    return SeenImages(images.at_V, image_features(model, images.images).rows(images.feature_V))


def compiled_ops() -> Ops:
    from rally.models.kernels import autograd

    return Ops(autograd.rms_norm, autograd.add_and_norm, autograd.gated, autograd.rotate)


def _can_fuse(model: PreTrainedModel) -> bool:
    unsharded = ranks_of(model).world_size == 1  # FSDP gathers a layer's weights only while the layer itself is called
    if not (unsharded and has_triton() and known(model)):
        return False
    return fits_one_call(torch.empty((0, 1, kv_shape(model).size), dtype=model.dtype, device=device_of(model)))


def fused_hidden(
    model: PreTrainedModel, ids_T: Tensor, positions_T: Tensor, attention: PackedAttention, ops: Ops
) -> Tensor:
    base = cast(Any, model.base_model)
    layers = [_FusedLayer(parts_of(module, model), model, ops) for module in base.layers]
    stream_TC = base.embed_tokens(ids_T)
    rotary = rotary_of(base, stream_TC, positions_T, {layer.parts.kind for layer in layers})
    for number, layer in enumerate(layers):
        arguments = (number, stream_TC, *rotary[layer.parts.kind], attention)
        again = base.is_gradient_checkpointing and base.training
        stream_TC = (
            checkpoint(layer, *arguments, use_reentrant=False, context_fn=checkpoint_contexts)
            if again
            else layer(*arguments)
        )
    return ops.rms_norm(stream_TC, base.norm.weight, layers[0].eps, offset=layers[0].offset)


class _FusedLayer:
    """One decoder layer as a function of the residual stream."""

    def __init__(self, parts: LayerParts, model: PreTrainedModel, ops: Ops) -> None:
        self.parts, self.ops = parts, ops
        self.eps: float = model.config.get_text_config().rms_norm_eps
        self.offset = offset_norms(model)
        self.activation = ACTIVATIONS[activation_name(model)]
        self.size = kv_shape(model).size

    def __call__(
        self, number: int, stream_TC: Tensor, cos_TD: Tensor, sin_TD: Tensor, attention: PackedAttention
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
        product = self.ops.gated(linear(mlp.gate_proj, x_TC), linear(mlp.up_proj, x_TC), self.activation)
        return stream_TC + self._norm(linear(mlp.down_proj, product), parts.mlp_norm)

    def _attend(self, number: int, x_TC: Tensor, cos_TD: Tensor, sin_TD: Tensor, attention: PackedAttention) -> Tensor:
        own, parts = self.parts.attention, self.parts
        q_THD, k_TKD, v_TKD = (
            linear(layer, x_TC).unflatten(1, (-1, self.size)) for layer in (own.q_proj, own.k_proj, own.v_proj)
        )
        q_THD = self.ops.rotate(self._head_norm(q_THD, parts.q_norm), cos_TD, sin_TD)
        k_TKD = self.ops.rotate(self._head_norm(k_TKD, parts.k_norm), cos_TD, sin_TD)
        mixed_THD = attention.attend(number, q_THD, k_TKD, v_TKD, Scores(parts.scale, parts.window))
        return linear(own.o_proj, mixed_THD.flatten(1))

    def _norm(self, x_TC: Tensor, norm: Norm | None) -> Tensor:
        return x_TC if norm is None else self.ops.rms_norm(x_TC, norm.weight, self.eps, offset=self.offset)

    def _head_norm(self, x_THD: Tensor, norm: Norm | None) -> Tensor:
        return x_THD if norm is None else self._norm(x_THD.flatten(0, 1), norm).view_as(x_THD)
