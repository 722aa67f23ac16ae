"""Returns: what comes after a token or a turn, added up and discounted. Pure tensor functions.

Only sampled tokens are here, one episode after the other, so a span of observed tokens is bridged: the token before it
is followed by the one after it, and neither its length nor its content enters a return.

Shapes: M sampled tokens (or turns) of N episodes, L of the longest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class Gae(NamedTuple):
    """Advantages, and the returns that a critic is trained towards."""

    advantages_M: Tensor
    returns_M: Tensor


def discounted(values_M: Tensor, lengths_N: Tensor, gamma: float) -> Tensor:
    """Each value plus gamma times what the rest of its episode gives; `lengths_N` says where episodes end."""
    if not values_M.numel():
        return values_M.double()
    # Padding behind an episode is 0 and so adds nothing, whatever gamma is.
    sums_NL = pad_sequence(list(values_M.double().split(lengths_N.tolist())), batch_first=True)
    for at in range(sums_NL.shape[1] - 2, -1, -1):
        sums_NL[:, at] += gamma * sums_NL[:, at + 1]
    return sums_NL[torch.arange(sums_NL.shape[1]) < lengths_N[:, None]]


def gae(rewards_M: Tensor, values_M: Tensor, lengths_N: Tensor, *, gamma: float, lam: float) -> Gae:
    """Generalised advantage estimation; beyond the last sampled token of an episode the value is 0."""
    ends = torch.cumsum(lengths_N, 0)[lengths_N > 0] - 1
    following = torch.cat([values_M.double()[1:], torch.zeros(1, dtype=torch.float64)])[: values_M.numel()]
    following[ends] = 0.0
    surprise = rewards_M.double() + gamma * following - values_M.double()
    advantages = discounted(surprise, lengths_N, gamma * lam)
    return Gae(advantages.float(), (advantages + values_M.double()).float())
