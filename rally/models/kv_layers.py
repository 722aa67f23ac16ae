"""What a model caches: the sizes of keys and values of each attention call, and states, found by running the model.

A configuration says this under a different name in every family, and some layers say nothing at all. Two tokens
through the module show it: how often attention is called, with which shapes, and which calls use the keys and values
of an earlier one (Gemma 4). The number of a call in the forward identifies it, since some families run one module
several times.

Shapes: T packed tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rally.models.attention import Scores, packed_hidden
from rally.models.kernels.attention_tiles import group_parts
from rally.models.segment_tree import SegmentTree, StateSegment


class KVLayer(NamedTuple):
    """Keys and values of one attention call. `values_in_keys`: values are the first part of the keys. `source` is an
    earlier call whose keys and values this one reads; it then stores nothing."""

    heads: int
    key_size: int
    value_size: int
    values_in_keys: bool = False
    source: int | None = None

    @property
    def numbers(self) -> int:
        """Stored numbers per token."""
        if self.source is not None:
            return 0
        return self.heads * (self.key_size + (0 if self.values_in_keys else self.value_size))


class _Recorder:
    """A context that records the attention calls and the states of a forward over two tokens."""

    compressed = True
    keeps_states = True

    def __init__(self, device: torch.device) -> None:
        self.tree = SegmentTree([StateSegment(2)], device)
        self.states: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self.layers: list[KVLayer] = []
        self.groups: set[int] = set()
        self.chunks: set[int] = set()
        self._stored: list[tuple[Tensor, Tensor]] = []  # kept, so that no later tensor gets the same address

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scores: Scores) -> Tensor:
        same = [i for i, stored in enumerate(self._stored) if all(map(_same, stored, (k_TKD, v_TKD)))]
        inside = v_TKD.data_ptr() == k_TKD.data_ptr()
        source = same[0] if same else None
        self.layers.append(KVLayer(k_TKD.shape[1], k_TKD.shape[2], v_TKD.shape[2], inside, source))
        self._stored.append((k_TKD, v_TKD))
        self.groups.add(q_THD.shape[1] // k_TKD.shape[1])
        self.chunks |= set() if scores.chunk is None else {scores.chunk}
        return q_THD.new_zeros((*q_THD.shape[:2], v_TKD.shape[2]))

    def initial_states(self, name: str) -> None:
        return None

    def store_final_states(self, name: str, states: Tensor) -> None:
        self.states[name] = (states.shape[1:], states.dtype)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape


class CachedParts(NamedTuple):
    """What a forward leaves for the next token: the keys and values of its attention calls, in order, and the states of
    other layers by name. `group` is the largest number of query heads per key/value head."""

    layers: tuple[KVLayer, ...]
    group: int
    chunk: int | None  # the smallest size of the chunks that tokens attend within
    states: dict[str, tuple[torch.Size, torch.dtype]]


@torch.no_grad()
def cached_parts(model: PreTrainedModel, axes: int = 1) -> CachedParts:
    """Run `model`, which uses `rally_attention`, on two tokens and record what it caches. `axes` is the number of axes
    of positions."""
    recorder = _Recorder(model.device)
    at = torch.arange(2, device=model.device)
    training = model.training
    model.eval()
    try:
        packed_hidden(model, torch.zeros_like(at), at if axes == 1 else at.expand(axes, 2), recorder)
    finally:
        model.train(training)
    return CachedParts(
        tuple(recorder.layers),
        max(recorder.groups, default=1, key=lambda g: g // group_parts(g)),
        min(recorder.chunks, default=None),
        recorder.states,
    )
