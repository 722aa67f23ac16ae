"""Chooses which layers are computed again in the backward pass, so that activations fill the memory that is free.

With gradient checkpointing a layer keeps only its input and is computed again; the other layers keep all that their
backward pass needs. Both give the same bits. The last layers keep everything, because the backward pass frees them
first. What a layer keeps is measured once, on a few tokens; a model whose activations grow faster than its tokens
recomputes all layers. If no layer is computed again and memory is left, the output head keeps its probabilities. They
leave room for the KV cache, which would otherwise ask torch for its memory after each update.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from rally.models.attention import body_of, causal_of
from rally.models.lm_head import chunk_rows, plain_weight
from rally.models.residence import device_of
from rally.platforms import memory_left
from rally.train.forward.fused_layers import hidden_states
from rally.train.packing import PackedRows, Row, pack

RESERVED = 0.08  # of the memory that is left: for fragmentation, and what is not counted here
PROBE_TOKENS = 256
CHUNKS, CHUNKS_BY_AUTOGRAD = 3, 6
"""How often the output head holds a chunk of logits in float32: the fused one, and one through autograd."""


class LayerBytes(NamedTuple):
    """What a layer keeps for its backward pass: for each packed token, for each key of all branches, and for each pair
    of a query and a key, which plain attention keeps under a mask."""

    per_token: float
    per_key: float
    per_pair: float

    def of(self, packed: PackedRows) -> float:
        pairs = sum(t * length for t, length in zip(packed.queries, packed.keys, strict=True)) if self.per_pair else 0
        return len(packed.ids_T) * self.per_token + sum(packed.keys) * self.per_key + pairs * self.per_pair


class Choice(NamedTuple):
    """How many layers are computed again, and whether the output head keeps its probabilities."""

    layers: int
    keep_probabilities: bool = False


class Recompute:
    """The checkpointed layers of a model. `count`: how many are computed again; None: as few as memory allows.
    `probabilities`: the output head may keep them, which rounds its gradient differently."""

    def __init__(self, model: PreTrainedModel, count: int | None = None, *, probabilities: bool = False) -> None:
        self.model, self.count, self.probabilities = model, count, probabilities
        layers: Sequence[Any] = getattr(body_of(model), "layers", ())
        self.layers = list(layers) if all(hasattr(layer, "gradient_checkpointing") for layer in layers) else []
        self.chosen: list[int] = []  # for each micro-batch since `begin`
        self.spare = 0  # bytes that probabilities leave free, because the engine takes them after the update
        self._free: int | None = None
        self._measured: LayerBytes | None = None
        self._probed = False

    def begin(self, pending: int) -> None:
        """Called when an update begins, with the bytes that it will allocate beside activations, teachers that rest in
        main memory included."""
        self.chosen = []
        left = memory_left(device_of(self.model)) if self.count is None else None
        self._free = None if left is None else int(left * (1 - RESERVED)) - pending

    def choose(self, packed: PackedRows, further_chunks: int = 0) -> PackedRows:
        """Choose the layers for the next forward, which computes `packed`. Returns it with the choice for the head.
        `further_chunks`: how often a function of the logits holds a chunk of them in float32."""
        choice = self._choice(packed, further_chunks)
        self.chosen.append(choice.layers)
        for number, layer in enumerate(self.layers):
            layer.gradient_checkpointing = number < choice.layers
        return replace(packed, keep_probabilities=choice.keep_probabilities)

    def _choice(self, packed: PackedRows, further_chunks: int) -> Choice:
        every = len(self.layers)
        if self.count is not None:
            return Choice(min(self.count, every))
        if self._free is None or packed.images is not None:
            return Choice(every)
        if not self._probed:
            self._measured, self._probed = self._measure(), True
        if self._measured is None:
            return Choice(every)
        config = self.model.config.get_text_config()
        layer = self._measured.of(packed)
        own = len(packed.ids_T) * config.hidden_size * self.model.dtype.itemsize  # the input of a layer
        positions = min(len(packed.predict_U), chunk_rows(config.vocab_size, device_of(self.model)))
        # The peak is at the output head. The backward pass then frees a layer for each one that it computes again.
        chunks = further_chunks + (CHUNKS if self._fused_head else CHUNKS_BY_AUTOGRAD)
        fixed = every * own + 4 * chunks * positions * config.vocab_size + layer / 2
        kept = max(0, int((self._free - fixed) / max(1.0, layer - own)))
        if not _alike(self.layers):
            kept = every if kept >= every else 0
        left = self._free - fixed - every * (layer - own)
        probabilities = len(packed.predict_U) * config.vocab_size * self.model.dtype.itemsize
        return Choice(every - min(every, kept), self.probabilities and left >= probabilities + self.spare)

    @functools.cached_property
    def _fused_head(self) -> bool:
        """Also where there is no output head: a critic."""
        return causal_of(self.model).get_output_embeddings() is None or plain_weight(self.model) is not None

    def _measure(self) -> LayerBytes | None:
        """From a row and one twice as long, and from two rows that share half of their tokens, in two lengths."""
        n, layers = PROBE_TOKENS, len(self.layers)
        row, long_row = self._kept([self._row(n)]), self._kept([self._row(2 * n)])
        branch, long_branch = (self._kept([self._row(m), self._row(m, shared=m // 2)]) for m in (n, 2 * n))
        if long_row > 2.05 * row:
            return None
        # A row has n tokens and n keys. Two have 1.5 n tokens, 2 n keys and n * n / 2 pairs under a mask.
        per_pair = max(0.0, (long_branch - 2 * branch) / n**2)
        per_key = max(0.0, (branch - per_pair * n**2 / 2 - 1.5 * row) / (n / 2))
        per_token = max(0.0, row / n - per_key)
        return LayerBytes(per_token / layers, per_key / layers, per_pair / layers)

    def _row(self, tokens: int, shared: int | None = None) -> Row:
        """A row of so many computed tokens; `shared`: how many it has in common with the row without it."""
        ids = np.arange(tokens + 1, dtype=np.int32)
        ids[tokens if shared is None else shared :] += 1
        ids %= self.model.config.get_text_config().vocab_size
        return Row(ids=ids, sampled=np.array([tokens], np.int32), logprobs=np.zeros(1, np.float32), episode=0)

    def _kept(self, rows: Sequence[Row]) -> int:
        """The bytes that all layers keep of the rows if none is computed again."""
        weights = {p.untyped_storage().data_ptr() for p in (*self.model.parameters(), *self.model.buffers())}
        kept: dict[int, int] = {}

        def count(value: Tensor) -> Tensor:
            storage = value.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return value.detach()  # the tensor itself may be an output, which would keep its own graph alive

        for layer in self.layers:
            layer.gradient_checkpointing = False
        with saved_tensors_hooks(count, lambda value: value), torch.enable_grad():
            hidden = hidden_states(self.model, pack(rows, device_of(self.model)))
        assert hidden.requires_grad, "nothing is trained"
        return sum(kept.values())


def _alike(layers: Sequence[nn.Module]) -> bool:
    """Whether the layers have the same class and the same shapes, so that each keeps as much as the next."""
    shapes = {(type(layer), tuple(p.shape for p in layer.parameters())) for layer in layers}
    return len(shapes) == 1
