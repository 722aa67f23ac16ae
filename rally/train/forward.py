"""The training forward: log-probabilities of sampled tokens, never holding all logits at once.

It runs the same module, attention registration and output head as the embedded engine, so rollout and training see the
same policy.

Shapes: M sampled tokens, U different ones among them (same history, same token), V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rally.engines.embedded.attention import head_logits, packed_hidden
from rally.train.packed import PackedAttention
from rally.train.packing import PackedRows

MAX_LOGITS = 16 * 2**20  # elements of one chunk of logits; more are computed again in the backward pass


class TokenLogprobs(NamedTuple):
    logp_M: Tensor
    entropy_M: Tensor


def token_logprobs(
    model: PreTrainedModel, packed: PackedRows, temperature: float = 1.0, entropy_gradient: bool = False
) -> TokenLogprobs:
    """Log-probability, under softmax(logits / temperature), of each sampled token, and the entropy there."""
    context = PackedAttention(packed)
    hidden_U = packed_hidden(model, packed.ids_T, packed.positions_T, context).index_select(0, packed.predict_U)
    vocabulary = model.config.get_text_config().vocab_size
    rows = max(1, MAX_LOGITS // vocabulary)
    if hidden_U.shape[0] <= rows:
        parts = [_chunk(model, hidden_U, packed.targets_U, temperature, entropy_gradient)]
    else:
        parts = [
            checkpoint(_chunk, model, h, t, temperature, entropy_gradient, use_reentrant=False)
            for h, t in zip(hidden_U.split(rows), packed.targets_U.split(rows), strict=True)
        ]
    logps, entropies = zip(*parts, strict=True)
    return TokenLogprobs(*(torch.cat(x).index_select(0, packed.pair_M) for x in (logps, entropies)))


def _chunk(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(head_logits(model, hidden).float() / temperature, dim=-1)
    seen = logp if entropy_gradient else logp.detach()
    entropy = -(seen.exp() * seen).sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy
