"""`algorithm.*`: how rewards become advantages."""

from __future__ import annotations

from typing import Literal, NamedTuple

from rally.config.actor import KlKind
from rally.config.base import Count, Float, Natural, NonNegative, Positive, Section, Share, Texts


class KlCtrl(Section):
    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive moves kl_coef until the KL is target_kl."""
    kl_coef: NonNegative = 0.001
    horizon: Count = 10000
    """Episodes in which a KL far off the target changes kl_coef by a fifth."""
    target_kl: Positive = 0.1
    """Mean KL of a sampled token, as actor/reward_kl_penalty shows it."""


class PfPpo(Section):
    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    weight_pow: Float = 2.0


class Rejection(NamedTuple):
    """Tokens or sequences whose divergence lies outside the bounds do not count."""

    test: str
    lowest: float
    highest: float


class RolloutCorrection(Section):
    rollout_is: Literal["token", "sequence"] | None = None
    """Weigh tokens, or whole sequences, by min(policy / sampler, rollout_is_threshold)."""
    rollout_is_threshold: Positive = 2.0
    rollout_rs: str | None = None
    """Tests that tokens must pass to count, such as token_k1 or seq_mean_k3; several are separated by commas."""
    rollout_rs_threshold: str | None = None
    """The largest divergence, or the lowest and highest ratio as 0.5_2.0 for k1; one for all tests or one for each."""
    bypass_mode: bool = False
    """The recorded log-probabilities are the old ones, as they are wherever nothing is corrected."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    rollout_is_batch_normalize: bool = False
    """Divide the weights of rollout_is by their mean over the batch."""

    @property
    def tests(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in (self.rollout_rs or "").split(",") if name.strip())

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """Each test with its bounds; k1 with one number is bounded by its inverse from below."""
        if self.rollout_rs_threshold is None:
            return ()
        bounds = [_bounds(text) for text in self.rollout_rs_threshold.split(",")]
        return tuple(Rejection(t, *b) for t, b in zip(self.tests, bounds * len(self.tests), strict=False))


def _bounds(text: str) -> tuple[float, float]:
    low, _, high = text.strip().rpartition("_")
    return (float(low) if low else 1 / float(high), float(high))


class Gigpo(Section):
    step_advantage_w: NonNegative = 1.0
    """How much a turn's advantage counts beside that of its episode."""


class FilterGroups(Section):
    enable: bool = False
    """Set groups aside whose metric is the same for all episodes, and begin other prompts in their place."""
    metric: str = "reward"
    """reward (or seq_reward, seq_final_reward), score, acc, or any number that the reward function reports."""
    max_num_gen_batches: Natural = 0
    """A step begins at most this many times data.gen_batch_size prompts. 0: until every row was tried."""
    max_inflight_gen_batches: Count = 1


class AlgorithmConfig(Section):
    adv_estimator: Literal[
        "grpo",
        "grpo_vectorized",
        "grpo_passk",
        "gae",
        "turn_gae",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "rloo",
        "rloo_vectorized",
        "opo",
        "gpg",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
        "gdpo",
        "gigpo",
    ] = "grpo"
    """gae and turn_gae train a critic beside the policy; all others compare the episodes of a prompt or batch."""
    norm_adv_by_std_in_grpo: bool = True
    """False is Dr. GRPO: groups are centred but not scaled."""

    turn_rewards: Literal["trajectory", "returns", "turn_baseline"] = "trajectory"
    """What turns earn on their own counts for nothing, as discounted returns over turns, or as these compared with
    turns of the same number."""
    gigpo: Gigpo = Gigpo()
    gamma: Share = 1.0
    """Discount from turn to turn; for gae and reinforce_plus_plus from sampled token to sampled token."""
    lam: Share = 1.0
    """Of gae and turn_gae: 1 trusts returns alone, 0 the critic alone."""
    allow_both_kl: bool = False
    """Let actor.use_kl_loss and use_kl_in_reward be on together."""
    use_kl_in_reward: bool = False
    kl_penalty: KlKind = "kl"
    kl_ctrl: KlCtrl = KlCtrl()
    use_pf_ppo: bool = False
    pf_ppo: PfPpo = PfPpo()
    rollout_correction: RolloutCorrection = RolloutCorrection()
    filter_groups: FilterGroups = FilterGroups()
    gdpo_reward_keys: Texts = ()
    """adv_estimator=gdpo: the numbers of the reward function that are compared one by one."""
