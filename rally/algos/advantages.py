"""Advantage estimators: group-relative ones (GRPO, RLOO, OPO, GPG, ...) and GAE. Pure tensor functions.

A sample is an episode or, if turns have rewards, a turn; `credit_assignment.py` decides which. All arithmetic is in
float64, so that a group whose rewards are all equal gets advantages of exactly 0.

Shapes: N samples, M sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class Gae(NamedTuple):
    """Advantages, and the returns that a critic is trained on."""

    advantages_M: Tensor
    returns_M: Tensor


def discounted(values_M: Tensor, lengths_N: Tensor, gamma: float) -> Tensor:
    """The discounted sum from each value to the end of its episode. `lengths_N` are the lengths of the episodes."""
    if not values_M.numel():
        return values_M.double()
    # Padding after an episode is 0 and adds nothing.
    sums_NL = pad_sequence(list(values_M.double().split(lengths_N.tolist())), batch_first=True)
    for at in range(sums_NL.shape[1] - 2, -1, -1):
        sums_NL[:, at] += gamma * sums_NL[:, at + 1]
    return sums_NL[torch.arange(sums_NL.shape[1]) < lengths_N[:, None]]


def gae(rewards_M: Tensor, values_M: Tensor, lengths_N: Tensor, *, gamma: float, lam: float) -> Gae:
    """Generalized advantage estimation. After the last sampled token of an episode the value is 0."""
    ends = torch.cumsum(lengths_N, 0)[lengths_N > 0] - 1
    following = torch.cat([values_M.double()[1:], torch.zeros(1, dtype=torch.float64)])[: values_M.numel()]
    following[ends] = 0.0
    deltas = rewards_M.double() + gamma * following - values_M.double()
    advantages = discounted(deltas, lengths_N, gamma * lam)
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
    """The statistics of each sample's group, in float64. Equal rewards have a standard deviation of exactly 0."""
    size = group_sum(torch.ones_like(rewards_N), groups_N)
    low = group_extreme(rewards_N, groups_N, "amin")
    shifted = rewards_N.double() - low  # exact zeros for equal rewards, where summing the rewards would round
    mean = group_sum(shifted, groups_N) / size
    std = (group_sum((shifted - mean) ** 2, groups_N) / (size - 1).clamp(min=1)).sqrt()
    return GroupStatistics(low + mean, std, size)


def grpo(rewards_N: Tensor, groups_N: Tensor, *, by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """GRPO: (reward - group mean) / (group std + epsilon); without the division, Dr. GRPO.

    A group whose rewards are all equal gets exactly 0. A group of one has mean 0 and std 1, as in verl.
    """
    statistics = group_statistics(rewards_N, groups_N)
    alone = statistics.size_N == 1
    centred = torch.where(alone, rewards_N.double(), _centred(rewards_N, statistics))
    scale = torch.where(alone, torch.ones_like(centred), statistics.std_N + epsilon) if by_std else 1.0
    return (centred / scale).float()


def centred(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """The reward minus the mean of its group."""
    return _centred(rewards_N, group_statistics(rewards_N, groups_N)).float()


def rloo(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """RLOO: the reward minus the mean of the others in its group; 0 for a group of one."""
    statistics = group_statistics(rewards_N, groups_N)
    size = statistics.size_N
    return (_centred(rewards_N, statistics) * size / (size - 1).clamp(min=1)).float()


def opo(rewards_N: Tensor, groups_N: Tensor, tokens_N: Tensor) -> Tensor:
    """OPO: the reward minus the mean of its group weighted by sampled tokens, which minimizes the variance if the
    gradient of a sample grows with its length."""
    low = group_extreme(rewards_N, groups_N, "amin")
    shifted = rewards_N.double() - low
    weights = tokens_N.double()
    baseline = group_sum(shifted * weights, groups_N) / group_sum(weights, groups_N).clamp(min=1)
    return (shifted - baseline).float()


def gpg(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """GPG: the reward minus the mean of its group, divided by the share of samples in groups with differing rewards."""
    statistics = group_statistics(rewards_N, groups_N)
    nonzero = int((statistics.std_N > 0).sum())
    return (_centred(rewards_N, statistics) * (rewards_N.numel() / max(1, nonzero))).float()


def grpo_passk(rewards_N: Tensor, groups_N: Tensor, *, by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """Pass@k GRPO: the best of a group gets its margin over the second best, all others 0. A tie gives 0 to all."""
    best = group_extreme(rewards_N, groups_N, "amax")
    leads = rewards_N.double() == best
    others = torch.where(leads, torch.full_like(best, -torch.inf), rewards_N.double())
    margin = best - group_extreme(others, groups_N, "amax")
    sole = leads & (group_sum(leads, groups_N) == 1) & margin.isfinite()
    scale = group_statistics(rewards_N, groups_N).std_N + epsilon if by_std else 1.0
    return torch.where(sole, margin / scale, torch.zeros_like(best)).float()


def whiten(advantages_M: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Normalize to mean 0 and variance 1 over all sampled tokens of the batch; constant values become 0."""
    if advantages_M.numel() < 2:
        return torch.zeros_like(advantages_M)
    shifted = advantages_M.double() - advantages_M.double()[0]  # exact zeros for constant values
    off = shifted - shifted.mean()
    return (off * (off.square().sum() / (off.numel() - 1) + epsilon).rsqrt()).float()


def optimal_token_baseline(
    returns_M: Tensor, energies_M: Tensor, lengths_N: Tensor, groups_N: Tensor, epsilon: float = 1e-8
) -> Tensor:
    """The return of each token minus the optimal baseline of its place among the sampled tokens: the mean of its
    group's returns there, weighted by the energy up to there, as in verl. `energies_M` are 1 - 2 p + sum(p^2).

    Episodes that have ended do not count. An episode without others, and the part of the longest one of a group that
    no other one reaches, have no baseline."""
    if not returns_M.numel():
        return returns_M.float()
    returns_NL, energies_NL = (
        pad_sequence(list(values_M.double().split(lengths_N.tolist())), batch_first=True)
        for values_M in (returns_M, energies_M)
    )
    present_NL = torch.arange(returns_NL.shape[1]) < lengths_N[:, None]
    weights_NL = energies_NL.cumsum(1) * present_NL
    count = int(groups_N.max()) + 1
    zeros = torch.zeros((count, returns_NL.shape[1]), dtype=torch.float64)
    above, below = (zeros.index_add(0, groups_N, x) for x in (returns_NL * weights_NL, weights_NL))
    others = zeros.index_add(0, groups_N, present_NL.double()) > 1
    baselines_NL = torch.where(others, above / (below + epsilon), zeros)[groups_N]
    return (returns_NL - baselines_NL)[present_NL].float()


def pf_ppo_weights(rewards_N: Tensor, method: str, power: float) -> Tensor:
    """The weights with which PF-PPO draws the episodes of an update, as in verl: by the size of the reward to a power,
    only the best and worst ones (max_min), or four times as often the best ones (max_random)."""
    rewards_N = rewards_N.double()
    if method == "pow":
        weights_N = rewards_N.abs() ** power
    elif method == "max_min":
        weights_N = ((rewards_N == rewards_N.max()) | (rewards_N == rewards_N.min())).double()
    else:
        weights_N = torch.where(rewards_N == rewards_N.max(), 0.4, 0.1).double()
    return (weights_N + 1e-8).clamp_min(1e-8)


def _centred(rewards_N: Tensor, statistics: GroupStatistics) -> Tensor:
    off = rewards_N.double() - statistics.mean_N
    return torch.where(statistics.std_N == 0, torch.zeros_like(off), off)


Estimator = Callable[..., Tensor]
"""(rewards, groups, sampled tokens, by_std, **kwargs) of samples -> their advantages."""

ESTIMATORS: dict[str, Estimator] = {
    "grpo": lambda rewards, groups, _tokens, by_std: grpo(rewards, groups, by_std=by_std),
    "grpo_passk": lambda rewards, groups, _tokens, by_std: grpo_passk(rewards, groups, by_std=by_std),
    "rloo": lambda rewards, groups, _tokens, _by_std: rloo(rewards, groups),
    "opo": lambda rewards, groups, tokens, _by_std: opo(rewards, groups, tokens),
    "gpg": lambda rewards, groups, _tokens, _by_std: gpg(rewards, groups),
    "reinforce_plus_plus_baseline": lambda rewards, groups, _tokens, _by_std: centred(rewards, groups),
}
ESTIMATORS |= {f"{name}_vectorized": ESTIMATORS[name] for name in ("grpo", "rloo")}
