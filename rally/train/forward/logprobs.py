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

from rally.models.lm_head import HeadLogprobs, chunk_rows, head_logits, head_scale, masks_of_chunks, plain_weight
from rally.models.routing import Routing, routed
from rally.models.sequence_parallel import PairShare, pair_share
from rally.models.sharding import ranks_of
from rally.models.token_masks import TokenMasks
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
    """Log-probability, under softmax(logits / temperature), of each sampled token, and the entropy there. A token that
    was sampled under a grammar has the softmax over the tokens that were allowed. `routing`
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
    share = pair_share(ranks_of(model).sequence_group, packed.predict_U, len(packed.ids_T))
    hidden_UC = hidden_states(model, packed).index_select(0, share.positions_U)
    targets_U, masks = packed.targets_U[share.own], packed.masks
    if masks is not None and share.group is not None:
        masks = masks.within(share.own.start, share.own.stop)
    rows = chunk_rows(model.config.get_text_config().vocab_size, hidden_UC.device)
    weight = plain_weight(model)
    if weight is None:
        logp_U, entropy_U = _any_head(model, hidden_UC, targets_U, masks, temperature, rows, entropy_gradient)
    else:
        divisor = temperature / (head_scale(model) or 1.0)
        keep = packed.keep_probabilities and torch.is_grad_enabled() and not entropy_gradient
        options = (rows, entropy_gradient, masks, keep)
        logp_U, entropy_U = HeadLogprobs.apply(hidden_UC, weight, targets_U, divisor, *options)
    columns_U = (
        None if of_logits is None else _over_logits(model, hidden_UC, share, temperature, rows, of_logits, masks)
    )
    all_U = (None if x is None else share.gather(x) for x in (logp_U, entropy_U, columns_U))
    return TokenLogprobs(*(None if x is None else x.index_select(0, packed.pair_M) for x in all_U))  # type: ignore[arg-type]


def _over_logits(
    model: PreTrainedModel,
    hidden_UC: Tensor,
    share: PairShare,
    temperature: float,
    rows: int,
    function: LogitsFunction,
    masks: TokenMasks | None,
) -> Tensor:
    """The function of this rank's share of the logits, with those masked that a grammar forbids, in chunks whose logits
    the backward pass computes again."""

    def chunk(hidden: Tensor, at: slice, allowed: TokenMasks | None) -> Tensor:
        logits_UV = head_logits(model, hidden).float() / temperature
        return function(logits_UV if allowed is None else allowed.applied(logits_UV), at)

    begins = range(share.own.start, max(share.own.stop, share.own.start + 1), rows)
    places = [slice(first, min(first + rows, share.own.stop)) for first in begins]
    parts = zip(hidden_UC.split(rows), places, masks_of_chunks(masks, len(hidden_UC), rows), strict=True)
    return torch.cat([checkpoint(chunk, *part, use_reentrant=False) for part in parts])


def _any_head(
    model: PreTrainedModel,
    hidden_UC: Tensor,
    targets_U: Tensor,
    masks: TokenMasks | None,
    temperature: float,
    rows: int,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """The same through autograd, for output heads that are more than one matrix. It is the specification of
    `HeadLogprobs`."""
    parts = [
        checkpoint(_chunk, model, hidden, targets, temperature, entropy_gradient, allowed, use_reentrant=False)
        for hidden, targets, allowed in zip(
            hidden_UC.split(rows), targets_U.split(rows), masks_of_chunks(masks, len(hidden_UC), rows), strict=True
        )
    ]
    logp_U, entropy_U = (torch.cat(x) for x in zip(*parts, strict=True))
    return logp_U, entropy_U


def _chunk(
    model: PreTrainedModel,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy_gradient: bool,
    masks: TokenMasks | None,
) -> tuple[Tensor, Tensor]:
    logits = head_logits(model, hidden).float() / temperature
    logp = torch.log_softmax(logits if masks is None else masks.applied(logits), dim=-1)
    seen = logp if entropy_gradient else logp.detach()
    entropy = -(seen.exp() * seen).sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy
