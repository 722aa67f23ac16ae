"""An Episode becomes numbers, in killable workers, never silently 0."""

from rally.rewards.custom import load_reward_function
from rally.rewards.episodes import solution_text
from rally.rewards.functions import compute_score, register_reward
from rally.rewards.metrics import reward_metrics
from rally.rewards.result import RewardError, Score
from rally.rewards.shaping import Overlong, Shaping, outcome
from rally.rewards.sources import check_source
from rally.rewards.workers import RewardSpec, Scorer

__all__ = [
    "Overlong",
    "RewardError",
    "RewardSpec",
    "Score",
    "Scorer",
    "Shaping",
    "check_source",
    "compute_score",
    "load_reward_function",
    "outcome",
    "register_reward",
    "reward_metrics",
    "solution_text",
]
