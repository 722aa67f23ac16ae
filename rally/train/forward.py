"""The training forward: log-probabilities of sampled tokens, never holding all logits at once.

It runs the same module, attention registration and output head as the embedded engine, so rollout and training see the
same policy.

Shapes: M sampled tokens, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rally.engines.embedded.attention import PackedAttention, head_logits, packed_hidden
from rally.train.packing import PackedRows

MAX_LOGITS = 16 * 2**20  # elements of one chunk of logits; more are computed again in the backward pass


class TokenLogprobs(NamedTuple):
    logp_M: Tensor
    entropy_M: Tensor


def token_logprobs(
    model: PreTrainedModel, packed: PackedRows, temperature: float = 1.0, entropy_gradient: bool = False
) -> TokenLogprobs:
    """Log-probability, under softmax(logits / temperature), of each sampled token, and the entropy there."""
    context = PackedAttention(packed.lengths)
    hidden_M = packed_hidden(model, packed.ids_T, packed.positions_T, context)[packed.predict_M]
    vocabulary = model.config.get_text_config().vocab_size
    rows = max(1, MAX_LOGITS // vocabulary)
    if hidden_M.shape[0] <= rows:
        return TokenLogprobs(*_chunk(model, hidden_M, packed.targets_M, temperature, entropy_gradient))
    parts = [
        checkpoint(_chunk, model, h, t, temperature, entropy_gradient, use_reentrant=False)
        for h, t in zip(hidden_M.split(rows), packed.targets_M.split(rows), strict=True)
    ]
    logps, entropies = zip(*parts, strict=True)
    return TokenLogprobs(torch.cat(logps), torch.cat(entropies))


def _chunk(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(head_logits(model, hidden).float() / temperature, dim=-1)
    seen = logp if entropy_gradient else logp.detach()
    entropy = -(seen.exp() * seen).sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy
