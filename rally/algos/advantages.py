"""Advantages: rewards of episodes become one number per episode. Pure tensor functions.

Shapes: N episodes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class GroupStatistics(NamedTuple):
    """Per episode: the mean, the unbiased standard deviation and the size of its group."""

    mean_N: Tensor
    std_N: Tensor
    size_N: Tensor


def group_statistics(rewards_N: Tensor, groups_N: Tensor) -> GroupStatistics:
    """Statistics of each episode's group, in float64: all-equal rewards have a standard deviation of exactly 0."""
    rewards = rewards_N.double()
    count = int(groups_N.max()) + 1 if groups_N.numel() else 0
    size = torch.zeros(count, dtype=torch.float64).index_add(0, groups_N, torch.ones_like(rewards))
    low = torch.full((count,), torch.inf, dtype=torch.float64).scatter_reduce(0, groups_N, rewards, "amin")
    shifted = rewards - low[groups_N]  # exact zeros for equal rewards, where summing the rewards would round
    mean = torch.zeros(count, dtype=torch.float64).index_add(0, groups_N, shifted) / size
    squares = torch.zeros(count, dtype=torch.float64).index_add(0, groups_N, (shifted - mean[groups_N]) ** 2)
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return GroupStatistics((low + mean)[groups_N], std[groups_N], size[groups_N])


def grpo(rewards_N: Tensor, groups_N: Tensor, *, by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """Group-relative advantage: (reward - group mean) / (group std + epsilon); without the division it is Dr. GRPO.

    A group whose rewards are all equal carries no signal and gets exactly 0. A group of one is its own baseline of 0,
    as users of this field expect: mean 0, std 1.
    """
    statistics = group_statistics(rewards_N, groups_N)
    alone = statistics.size_N == 1
    centred = torch.where(alone, rewards_N.double(), rewards_N.double() - statistics.mean_N)
    flat = (statistics.std_N == 0) & ~alone
    scale = torch.where(alone, torch.ones_like(centred), statistics.std_N + epsilon) if by_std else 1.0
    return torch.where(flat, torch.zeros_like(centred), centred / scale).float()
