"""Rewards: scores episodes with built-in or user functions. A failure is an error of the episode, never a silent 0."""

from rally.rewards.custom_functions import JudgeAddress, load_reward_function
from rally.rewards.registry import check_truth, compute_score, register_reward
from rally.rewards.score import RewardError, Score, reward_metrics
from rally.rewards.score_inputs import solution_text
from rally.rewards.shaping import Overlong, Shaping, outcome
from rally.rewards.worker_pool import RewardSpec, Scorer

__all__ = [
    "JudgeAddress",
    "Overlong",
    "RewardError",
    "RewardSpec",
    "Score",
    "Scorer",
    "Shaping",
    "check_truth",
    "compute_score",
    "load_reward_function",
    "outcome",
    "register_reward",
    "reward_metrics",
    "solution_text",
]
