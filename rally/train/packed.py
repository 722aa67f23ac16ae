"""Attention of a training forward: each branch of a packed tree sees its own history, causally, and nothing else.

Shapes: T packed tokens, S keys of all branches, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from rally.engines.embedded.attention import Scores, grouped_attention, visible
from rally.train.packing import PackedRows, placed

# the kernel always took fewer key/value heads than query heads; since torch 2.12 it wants to be told
GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


class PackedAttention:
    """The queries of a branch are the last of its keys; nothing is padded.

    In half precision on a GPU all branches are one call, elsewhere those of one shape are.
    """

    def __init__(self, packed: PackedRows) -> None:
        shapes = itertools.groupby(zip(packed.queries, packed.keys, strict=True))
        self.runs = [(len(list(group)), t, length) for (t, length), group in shapes]  # branches, queries, keys
        self.source_S = packed.source_S
        self.most_queries, self.most_keys = max(packed.queries), max(packed.keys)
        self.query_ends, self.key_ends = (_ends(x, packed.ids_T.device) for x in (packed.queries, packed.keys))
        self._masks: dict[tuple[int, int, int | None], Tensor | None] = {}

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scores: Scores) -> Tensor:
        attend = self._in_one_call if scores.plain and fits_one_call(q_THD) else self._by_shape
        return attend(q_THD, self._history(k_TKD), self._history(v_TKD), scores)

    def _in_one_call(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, scores: Scores) -> Tensor:
        output = varlen_attn(
            q_THD,
            k_SKD,
            v_SKD,
            self.query_ends,
            self.key_ends,
            self.most_queries,
            self.most_keys,
            scale=scores.scale,
            window_size=(-1 if scores.window is None else scores.window - 1, 0),  # keys left and right of a query's own
            **GROUPED_HEADS,
        )
        assert isinstance(output, Tensor)
        return output

    def _by_shape(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, scores: Scores) -> Tensor:
        # split, not slices: the gradient of a split is one concatenation, that of each slice a full-sized zero tensor
        queries = q_THD.split([branches * t for branches, t, _ in self.runs])
        keys, values = (x.split([branches * length for branches, _, length in self.runs]) for x in (k_SKD, v_SKD))
        outputs = []
        for (branches, t, length), *parts in zip(self.runs, queries, keys, values, strict=True):
            q, k, v = (x.unflatten(0, (branches, -1)) for x in parts)
            mask = self._mask(t, length, scores.window, q)
            outputs.append(grouped_attention(q, k, v, scores, mask, causal=mask is None).flatten(0, 1))
        return torch.cat(outputs)

    def _history(self, x_TKD: Tensor) -> Tensor:
        return x_TKD if self.source_S is None else _History.apply(x_TKD, self.source_S)  # type: ignore[no-any-return]

    def _mask(self, t: int, length: int, window: int | None, like: Tensor) -> Tensor | None:
        """None: plainly causal. Otherwise what to add to the scores, the same in all layers."""
        narrow = window if window is not None and window < length else None
        if t == length and narrow is None:
            return None
        shape = (t, length, narrow)
        if shape not in self._masks:
            seen = visible(torch.tensor([length - t], device=like.device), t, length, narrow)
            self._masks[shape] = torch.zeros_like(seen, dtype=like.dtype).masked_fill(~seen, -torch.inf)
        return self._masks[shape]


def fits_one_call(q_THD: Tensor) -> bool:
    """What torch's variable-length flash attention takes."""
    return (
        q_THD.is_cuda
        and q_THD.dtype in (torch.bfloat16, torch.float16)
        and q_THD.shape[-1] % 8 == 0
        and q_THD.shape[-1] <= 256
        and torch.cuda.get_device_capability(q_THD.device) >= (8, 0)
    )


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    return placed(torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), device)


class _History(torch.autograd.Function):
    """Keys or values of every branch's whole history. The gradient of a token that many branches see is summed in
    float32: in bf16, what the last of them adds would be rounded away."""

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
