"""Log-probabilities that equal those of a deterministic rollout bit for bit.

Rollout and this forward run the same batch-invariant kernels, so on the same weights they agree exactly. The gradient
comes from the ordinary forward.

Shapes: T packed tokens, B branches, L keys of the longest, M sampled tokens, U different ones, C hidden size.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rally.engines.base import EngineError
from rally.models.attention import Scores
from rally.models.decoder_families import FAMILIES, kv_shape
from rally.models.fused_layers import FusedDecoder, fusable
from rally.models.kernels.attention_tiles import extend_tiles
from rally.models.kernels.dispatch import kernels_for
from rally.models.lm_head import chunk_rows, masks_of_chunks
from rally.train.packing import PackedRows


def exact_decoder(model: PreTrainedModel) -> FusedDecoder:
    if not fusable(model, invariant=True):
        raise EngineError(f"deterministic training supports only {', '.join(FAMILIES)} without adapters; turn it off")
    return FusedDecoder(model, kernels_for(model.device), invariant=True)


class _PackedReader:
    """A packed batch as a KV cache with pages of one token. All layers share its memory."""

    def __init__(self, packed: PackedRows, decoder: FusedDecoder) -> None:
        device, tokens = packed.ids_T.device, len(packed.ids_T)
        shape = kv_shape(decoder.model)
        self.kernels = decoder.kernels
        self.keys = torch.empty((tokens, shape.heads, shape.size), dtype=decoder.model.dtype, device=device)
        self.values = torch.empty_like(self.keys)
        source = torch.arange(tokens, device=device) if packed.source_S is None else packed.source_S
        rows = [part.int() for part in source.split(packed.keys)]
        self.table_BL = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        firsts = itertools.accumulate([0, *packed.queries])
        chunks = [
            (i, first, t, length - t)
            for i, (first, t, length) in enumerate(zip(firsts, packed.queries, packed.keys, strict=False))
        ]
        tiles = extend_tiles(np.array(chunks, np.int32), decoder.heads // decoder.kv_heads)
        self.tiles_N4 = torch.from_numpy(tiles).to(device)

    def pool(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def read(self, layer: int, q_THD: Tensor, scores: Scores) -> Tensor:
        out_THD = torch.empty_like(q_THD)
        self.kernels.paged_extend(
            q_THD,
            self.keys,
            self.values,
            self.table_BL,
            self.tiles_N4,
            out_THD,
            page_size=1,
            scale=scores.scale,
            window=scores.window,
        )
        return out_THD


@torch.no_grad()
def exact_logprobs(decoder: FusedDecoder, packed: PackedRows, temperature: float) -> Tensor:
    """Log-probability of each sampled token [M]."""
    places_T = torch.arange(len(packed.ids_T), device=packed.ids_T.device)
    hidden_TC = decoder(packed.ids_T, packed.positions_T, places_T, _PackedReader(packed, decoder))
    hidden_UC = hidden_TC.index_select(0, packed.predict_U)
    rows = chunk_rows(decoder.model.config.get_text_config().vocab_size, hidden_UC.device)
    divisor = torch.full((1,), temperature, device=hidden_UC.device)  # a number would be inverted
    parts = []
    chunks = masks_of_chunks(packed.masks, len(hidden_UC), rows)
    for hidden, targets, masks in zip(hidden_UC.split(rows), packed.targets_U.split(rows), chunks, strict=True):
        logits = decoder.logits(hidden) / divisor
        logp = torch.log_softmax(logits if masks is None else masks.applied(logits), dim=-1)
        parts.append(logp.gather(1, targets[:, None]).squeeze(1))
    return torch.cat(parts).index_select(0, packed.pair_M)


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logp_M: Tensor, exact_M: Tensor) -> Tensor:
        return exact_M.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def with_value(logp_M: Tensor, exact_M: Tensor) -> Tensor:
    """`exact_M`, with the gradient of `logp_M`."""
    result: Tensor = _Value.apply(logp_M, exact_M)
    return result
