"""Schema of `algorithm.*`: advantage estimation, KL in the reward, off-policy correction, dynamic sampling."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import Field

from rally.config.actor import KlKind
from rally.config.base import Count, Natural, NonNegative, Positive, Section, Share, Texts


class KlCtrl(Section):
    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive changes kl_coef after each step until the KL is target_kl."""
    kl_coef: NonNegative = 0.001
    """The weight of the KL penalty in the reward; with type=adaptive its initial value."""
    horizon: Count = 10000
    """type=adaptive: episodes over which a KL far from target_kl changes kl_coef by a fifth."""
    target_kl: Positive = 0.1
    """type=adaptive: the desired mean KL per sampled token, as actor/reward_kl_penalty reports it."""


class PfPpo(Section):
    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """The weight of an episode: its reward without sign to the power weight_pow, only the best and the worst ones, or
    0.4 for the best ones and 0.1 for the others."""
    weight_pow: NonNegative = 2.0
    """reweight_method=pow: the power."""


class Rejection(NamedTuple):
    """A rejection test: tokens or sequences whose divergence is outside the bounds are left out of the loss."""

    test: str
    lowest: float
    highest: float


class RolloutCorrection(Section):
    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights per token or per sequence: min(policy / sampler, rollout_is_threshold). null uses none."""
    rollout_is_threshold: Positive = 2.0
    """The largest importance weight of rollout_is."""
    rollout_rs: str | None = None
    """Rejection tests that tokens must pass to enter the loss, such as token_k1 or seq_mean_k3; several are separated
    by commas."""
    rollout_rs_threshold: str | None = None
    """The largest divergence that passes, or for k1 the lowest and highest ratio, such as 0.5_2.0. One for all tests,
    or one for each."""
    bypass_mode: bool = False
    """Take the recorded log-probabilities as the old ones, as without any correction. Weights and rejection tests then
    compare the policy of each mini-batch with the sampler, in a forward pass of their own."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """The objective with bypass_mode: ppo_clip, whose ratio takes the place of rollout_is, or reinforce, the policy
    gradient times the weights of rollout_is."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights of rollout_is by their mean over the batch."""

    @property
    def is_reinforce(self) -> bool:
        return self.bypass_mode and self.loss_type == "reinforce"

    @property
    def tests(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in (self.rollout_rs or "").split(",") if name.strip())

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """Each test with its bounds. With one number, the lower bound of k1 is its inverse."""
        if self.rollout_rs_threshold is None:
            return ()
        bounds = [_bounds(text) for text in self.rollout_rs_threshold.split(",")]
        return tuple(Rejection(t, *b) for t, b in zip(self.tests, bounds * len(self.tests), strict=False))


def _bounds(text: str) -> tuple[float, float]:
    low, _, high = text.strip().rpartition("_")
    return (float(low) if low else 1 / float(high), float(high))


class Gigpo(Section):
    step_advantage_w: NonNegative = 1.0
    """The weight of a turn's advantage relative to that of its episode."""


class FilterGroups(Section):
    enable: bool = False
    """Set aside groups whose episodes all have the same metric, and start other prompts in their place."""
    metric: str = "reward"
    """reward (or seq_reward, seq_final_reward), score, acc, or any number that the reward function reports."""
    max_num_gen_batches: Natural = 0
    """A step starts at most this many times data.gen_batch_size prompts. 0 goes on until every row was tried."""
    max_inflight_gen_batches: Count = 1


GRPO = ("grpo", "grpo_vectorized")
"""Estimators that pay a group of one its reward, as in verl; `load_config` notes it."""
TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
ESTIMATORS = (
    *(*GRPO, "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus"),
    *("reinforce_plus_plus_baseline", "remax", *TOKEN_BASELINES, "gdpo", "gigpo", "gae", "turn_gae"),
)


class AlgorithmConfig(Section):
    adv_estimator: str = "grpo"
    """The advantage estimator (docs/methods.md): grpo, grpo_vectorized, grpo_passk, rloo, rloo_vectorized, opo, gpg,
    reinforce_plus_plus, reinforce_plus_plus_baseline, remax, optimal_token_baseline, tir_optimal_token_baseline, gdpo
    or gigpo, which compare the episodes of a prompt or batch; gae or turn_gae, which train a critic; or the name under
    which a module of model.external_lib registers yours."""
    adv_estimator_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of an estimator of your own. One written for verl reads them as config.<name>."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide advantages by the standard deviation of their group. false is Dr. GRPO."""

    turn_rewards: Literal["trajectory", "returns", "turn_baseline"] = "trajectory"
    """How rewards of single turns are used: trajectory ignores them, returns adds them up as discounted returns over
    turns, turn_baseline compares these returns with turns of the same number."""
    gigpo: Gigpo = Gigpo()
    gamma: Share = 1.0
    """The discount per turn; for gae and reinforce_plus_plus per sampled token."""
    lam: Share = 1.0
    """GAE's lambda, for gae and turn_gae: 1 uses returns alone, 0 the critic alone."""
    allow_both_kl: bool = False
    """Allow actor.use_kl_loss and use_kl_in_reward at the same time."""
    use_kl_in_reward: bool = False
    """Penalise the KL divergence from the reference model in the reward of each sampled token."""
    kl_penalty: KlKind = "kl"
    """The KL estimator of use_kl_in_reward: k1 (kl), k2 (mse), k3 (low_var_kl) or abs."""
    kl_ctrl: KlCtrl = KlCtrl()
    use_pf_ppo: bool = False
    """adv_estimator=gae: draw the episodes of an update with replacement, by weights from their rewards (PF-PPO)."""
    pf_ppo: PfPpo = PfPpo()
    rollout_correction: RolloutCorrection = RolloutCorrection()
    filter_groups: FilterGroups = FilterGroups()
    gdpo_reward_keys: Texts = ()
    """adv_estimator=gdpo: the numbers of the reward function that are normalised one by one."""
