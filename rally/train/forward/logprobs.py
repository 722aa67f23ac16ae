"""Log-probabilities and entropies of sampled tokens, without ever holding all logits in memory.

It runs the same module, attention registration and output head as the embedded engine, so rollout and training see the
same policy.

Shapes: M sampled tokens, U different ones among them (same history, same token), C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rally.models.lm_head import HeadLogprobs, chunk_rows, head_logits, head_scale, plain_weight
from rally.models.routing import Routing, routed
from rally.models.sharding import ranks_of
from rally.train.forward.fused_layers import hidden_states
from rally.train.packing import PackedRows

LogitsFunction = Callable[[Tensor, slice], Tensor]
"""Maps the logits [X, V], divided by the temperature, of a slice of the U positions to columns [X, any number]."""


class TokenLogprobs(NamedTuple):
    logp_M: Tensor
    entropy_M: Tensor
    columns_M: Tensor | None = None  # of a LogitsFunction


def token_logprobs(
    model: PreTrainedModel,
    packed: PackedRows,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    routing: Routing | None = None,
    of_logits: LogitsFunction | None = None,
) -> TokenLogprobs:
    """Log-probability, under softmax(logits / temperature), of each sampled token, and the entropy there. `routing`
    records or replays the experts of a mixture-of-experts model. `of_logits` is a further function of the logits, with
    a gradient."""
    with routed(routing):
        return ranks_of(model).summon(model, _token_logprobs, packed, temperature, entropy_gradient, of_logits)


def _token_logprobs(
    model: PreTrainedModel,
    packed: PackedRows,
    temperature: float,
    entropy_gradient: bool,
    of_logits: LogitsFunction | None,
) -> TokenLogprobs:
    hidden_TC = hidden_states(model, packed)
    hidden_UC = hidden_TC.index_select(0, packed.predict_U)
    rows = chunk_rows(model.config.get_text_config().vocab_size, hidden_UC.device)
    weight = plain_weight(model)
    if weight is None:
        logp_U, entropy_U = _any_head(model, hidden_UC, packed.targets_U, temperature, rows, entropy_gradient)
    else:
        divisor = temperature / (head_scale(model) or 1.0)
        logp_U, entropy_U = HeadLogprobs.apply(hidden_UC, weight, packed.targets_U, divisor, rows, entropy_gradient)
    columns_U = None if of_logits is None else _over_logits(model, hidden_UC, temperature, rows, of_logits)
    found = (None if x is None else x.index_select(0, packed.pair_M) for x in (logp_U, entropy_U, columns_U))
    return TokenLogprobs(*found)  # type: ignore[arg-type]


def _over_logits(
    model: PreTrainedModel, hidden_UC: Tensor, temperature: float, rows: int, function: LogitsFunction
) -> Tensor:
    """The function of all logits, in chunks whose logits the backward pass computes again."""

    def chunk(hidden: Tensor, at: slice) -> Tensor:
        return function(head_logits(model, hidden).float() / temperature, at)

    places = [slice(first, first + rows) for first in range(0, len(hidden_UC), rows)]
    return torch.cat([checkpoint(chunk, hidden_UC[at], at, use_reentrant=False) for at in places])


def _any_head(
    model: PreTrainedModel, hidden_UC: Tensor, targets_U: Tensor, temperature: float, rows: int, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """The same through autograd, for output heads that are more than one matrix. It is the specification of
    `HeadLogprobs`."""
    parts = [
        checkpoint(_chunk, model, hidden, targets, temperature, entropy_gradient, use_reentrant=False)
        for hidden, targets in zip(hidden_UC.split(rows), targets_U.split(rows), strict=True)
    ]
    logp_U, entropy_U = (torch.cat(x) for x in zip(*parts, strict=True))
    return logp_U, entropy_U


def _chunk(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(head_logits(model, hidden).float() / temperature, dim=-1)
    seen = logp if entropy_gradient else logp.detach()
    entropy = -(seen.exp() * seen).sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy
