"""Group-relative advantages: a sample's reward becomes how much better it was than its peers. Pure tensor functions.

A sample is an episode or, where turns have rewards of their own, a turn; `credit.py` decides which. All arithmetic is
in float64, so that a group whose rewards are all equal gets exactly 0 from each of them.

Shapes: N samples, M sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable
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


class GroupStatistics(NamedTuple):
    """Per sample: the mean, the unbiased standard deviation and the size of its group."""

    mean_N: Tensor
    std_N: Tensor
    size_N: Tensor


def group_sum(values_N: Tensor, groups_N: Tensor) -> Tensor:
    """Per sample: the sum over its group."""
    count = int(groups_N.max()) + 1 if groups_N.numel() else 0
    return torch.zeros(count, dtype=torch.float64).index_add(0, groups_N, values_N.double())[groups_N]


def group_extreme(values_N: Tensor, groups_N: Tensor, which: str) -> Tensor:
    """Per sample: the smallest ("amin") or largest ("amax") value of its group."""
    count = int(groups_N.max()) + 1 if groups_N.numel() else 0
    none = torch.full((count,), torch.inf if which == "amin" else -torch.inf, dtype=torch.float64)
    return none.scatter_reduce(0, groups_N, values_N.double(), which)[groups_N]


def group_statistics(rewards_N: Tensor, groups_N: Tensor) -> GroupStatistics:
    """Statistics of each sample's group, in float64: all-equal rewards have a standard deviation of exactly 0."""
    size = group_sum(torch.ones_like(rewards_N), groups_N)
    low = group_extreme(rewards_N, groups_N, "amin")
    shifted = rewards_N.double() - low  # exact zeros for equal rewards, where summing the rewards would round
    mean = group_sum(shifted, groups_N) / size
    std = (group_sum((shifted - mean) ** 2, groups_N) / (size - 1).clamp(min=1)).sqrt()
    return GroupStatistics(low + mean, std, size)


def grpo(rewards_N: Tensor, groups_N: Tensor, *, by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """Group-relative advantage: (reward - group mean) / (group std + epsilon); without the division it is Dr. GRPO.

    A group whose rewards are all equal carries no signal and gets exactly 0. A group of one is its own baseline of 0,
    as users of this field expect: mean 0, std 1.
    """
    statistics = group_statistics(rewards_N, groups_N)
    alone = statistics.size_N == 1
    centred = torch.where(alone, rewards_N.double(), _centred(rewards_N, statistics))
    scale = torch.where(alone, torch.ones_like(centred), statistics.std_N + epsilon) if by_std else 1.0
    return (centred / scale).float()


def centred(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Reward less the mean of its group."""
    return _centred(rewards_N, group_statistics(rewards_N, groups_N)).float()


def rloo(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Reward less the mean of the others of its group; a group of one has no others and gets 0."""
    statistics = group_statistics(rewards_N, groups_N)
    size = statistics.size_N
    return (_centred(rewards_N, statistics) * size / (size - 1).clamp(min=1)).float()


def opo(rewards_N: Tensor, groups_N: Tensor, tokens_N: Tensor) -> Tensor:
    """Reward less the mean of its group weighted by sampled tokens, the baseline of least variance if the gradient of
    a sample grows with its length."""
    low = group_extreme(rewards_N, groups_N, "amin")
    shifted = rewards_N.double() - low
    weights = tokens_N.double()
    baseline = group_sum(shifted * weights, groups_N) / group_sum(weights, groups_N).clamp(min=1)
    return (shifted - baseline).float()


def gpg(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Reward less the mean of its group, scaled up by the share of samples whose group carries a signal."""
    statistics = group_statistics(rewards_N, groups_N)
    live = int((statistics.std_N > 0).sum())
    return (_centred(rewards_N, statistics) * (rewards_N.numel() / max(1, live))).float()


def grpo_passk(rewards_N: Tensor, groups_N: Tensor, *, by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """Only the best of a group learns: by how much it beats the second best. A tie for the best teaches nothing."""
    best = group_extreme(rewards_N, groups_N, "amax")
    leads = rewards_N.double() == best
    others = torch.where(leads, torch.full_like(best, -torch.inf), rewards_N.double())
    margin = best - group_extreme(others, groups_N, "amax")
    sole = leads & (group_sum(leads, groups_N) == 1) & margin.isfinite()
    scale = group_statistics(rewards_N, groups_N).std_N + epsilon if by_std else 1.0
    return torch.where(sole, margin / scale, torch.zeros_like(best)).float()


def whiten(advantages_M: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Mean 0 and variance 1 over all sampled tokens of the batch; what does not vary becomes 0."""
    if advantages_M.numel() < 2:
        return torch.zeros_like(advantages_M)
    shifted = advantages_M.double() - advantages_M.double()[0]  # exact zeros where nothing varies
    off = shifted - shifted.mean()
    return (off * (off.square().sum() / (off.numel() - 1) + epsilon).rsqrt()).float()


def _centred(rewards_N: Tensor, statistics: GroupStatistics) -> Tensor:
    off = rewards_N.double() - statistics.mean_N
    return torch.where(statistics.std_N == 0, torch.zeros_like(off), off)


Estimator = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""(rewards, groups, sampled tokens, by_std) of samples -> their advantages."""

ESTIMATORS: dict[str, Estimator] = {
    "grpo": lambda rewards, groups, _tokens, by_std: grpo(rewards, groups, by_std=by_std),
    "grpo_passk": lambda rewards, groups, _tokens, by_std: grpo_passk(rewards, groups, by_std=by_std),
    "rloo": lambda rewards, groups, _tokens, _by_std: rloo(rewards, groups),
    "opo": lambda rewards, groups, tokens, _by_std: opo(rewards, groups, tokens),
    "gpg": lambda rewards, groups, _tokens, _by_std: gpg(rewards, groups),
    "reinforce_plus_plus_baseline": lambda rewards, groups, _tokens, _by_std: centred(rewards, groups),
}
ESTIMATORS |= {f"{name}_vectorized": ESTIMATORS[name] for name in ("grpo", "rloo")}
