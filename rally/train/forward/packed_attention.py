"""Attention over packed rows: one call for all branches of the prefix tree.

Shapes: T packed tokens, S keys of all branches, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from rally.models.attention import Scores, grouped_attention, visible
from rally.models.kernels.dispatch import has_triton
from rally.models.segment_tree import BranchContext
from rally.platforms import CUDA, from_host, has_kernels
from rally.train.packing import PackedRows

# since torch 2.12 the kernel needs this flag for fewer key/value heads than query heads
GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


class PackedAttention(BranchContext):
    """Attention over a packed batch without padding. The queries of a branch are the last of its keys.

    In half precision on a GPU all branches are one kernel call; elsewhere there is one call per branch shape.
    """

    compressed = False

    def __init__(self, packed: PackedRows) -> None:
        super().__init__(packed.queries, packed.parents, packed.ids_T.device)
        shapes = itertools.groupby(zip(packed.queries, packed.keys, strict=True))
        self.runs = [(len(list(group)), t, length) for (t, length), group in shapes]  # branches, queries, keys
        self.source_S, self.sources = packed.source_S, _sources(packed.source_S, len(packed.ids_T))
        self.most_queries, self.most_keys = max(packed.queries), max(packed.keys)
        self.query_ends, self.key_ends = (_ends(x, packed.ids_T.device) for x in (packed.queries, packed.keys))
        self._masks: dict[tuple[int, int, int | None, int | None], Tensor] = {}

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scores: Scores) -> Tensor:
        in_one = scores.plain and scores.chunk is None and fits_one_call(q_THD)
        attend = self._in_one_call if in_one else self._by_shape
        return attend(q_THD, self._history(k_TKD), self._history(v_TKD), scores)

    def _in_one_call(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, scores: Scores) -> Tensor:
        size, missing = v_SKD.shape[-1], q_THD.shape[-1] - v_SKD.shape[-1]
        output = varlen_attn(
            q_THD,
            k_SKD,
            F.pad(v_SKD, (0, missing)) if missing else v_SKD,
            self.query_ends,
            self.key_ends,
            self.most_queries,
            self.most_keys,
            scale=scores.scale,
            window_size=(-1 if scores.window is None else scores.window - 1, 0),  # keys left and right of a query's own
            **GROUPED_HEADS,
        )
        assert isinstance(output, Tensor)
        return output[..., :size] if missing else output

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
        if self.source_S is None:
            return x_TKD
        return _History.apply(x_TKD, self.source_S, self.sources)  # type: ignore[no-any-return]

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
    def forward(ctx: Any, x_TKD: Tensor, source_S: Tensor, sources: Any) -> Tensor:
        ctx.save_for_backward(source_S)
        ctx.like, ctx.sources = x_TKD.shape, sources
        history: Tensor = x_TKD.flatten(1).index_select(0, source_S).unflatten(1, x_TKD.shape[1:])
        return history

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (source_S,) = ctx.saved_tensors
        (gradient,) = gradients
        if ctx.sources is not None:
            from rally.models.kernels.branch_sum import branch_sum

            return branch_sum(gradient.flatten(1), ctx.sources).view(ctx.like), None, None
        exact = gradient.flatten(1).to(torch.promote_types(gradient.dtype, torch.float32))
        total = exact.new_zeros((ctx.like[0], exact.shape[1])).index_add_(0, source_S, exact)
        return total.to(gradient.dtype).view(ctx.like), None, None


def _sources(source_S: Tensor | None, tokens: int) -> Any:
    """What the kernel of `_History` needs; None where torch's own operations compute it."""
    if source_S is None or not (has_kernels(source_S.device) and has_triton()):
        return None
    from rally.models.kernels.branch_sum import sources_of

    return sources_of(source_S, tokens)
