"""`algorithm.*` and `critic.*`: how rewards become advantages."""

from __future__ import annotations

from typing import Literal

from rally.config.actor import CheckpointConfig, FsdpConfig, KlKind, LossAggMode, OptimConfig, Strategy
from rally.config.base import Count, Float, Natural, NonNegative, Positive, Section, Share, Texts
from rally.config.model import ModelConfig


class KlCtrl(Section):
    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: NonNegative = 0.001
    horizon: Count = 10000
    target_kl: Positive = 0.1


class PfPpo(Section):
    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    weight_pow: Float = 2.0


class RolloutCorrection(Section):
    rollout_is: Literal["token", "sequence"] | None = None
    rollout_is_threshold: Positive = 2.0
    rollout_rs: str | None = None
    rollout_rs_threshold: str | None = None
    bypass_mode: bool = False
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    rollout_is_batch_normalize: bool = False


class FilterGroups(Section):
    enable: bool = False
    metric: str = "reward"
    max_num_gen_batches: Natural = 0
    max_inflight_gen_batches: Count = 1


class AlgorithmConfig(Section):
    adv_estimator: Literal[
        "grpo",
        "grpo_vectorized",
        "grpo_passk",
        "gae",
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
    ] = "grpo"
    """The ecosystem's gae needs a critic as large as the policy."""
    norm_adv_by_std_in_grpo: bool = True
    """False is Dr. GRPO: groups are centred but not scaled."""

    gamma: Share = 1.0
    lam: Share = 1.0
    use_kl_in_reward: bool = False
    kl_penalty: KlKind = "kl"
    kl_ctrl: KlCtrl = KlCtrl()
    use_pf_ppo: bool = False
    pf_ppo: PfPpo = PfPpo()
    rollout_correction: RolloutCorrection = RolloutCorrection()
    filter_groups: FilterGroups = FilterGroups()
    gdpo_reward_keys: Texts = ()


class CriticOptim(OptimConfig):
    lr: Positive = 1e-5


class CriticConfig(Section):
    enable: bool | None = None
    strategy: Strategy = "single"
    optim: CriticOptim = CriticOptim()
    model: ModelConfig = ModelConfig()
    ppo_mini_batch_size: Count | None = None
    ppo_micro_batch_size_per_gpu: Count | None = None
    forward_micro_batch_size_per_gpu: Count | None = None
    use_dynamic_bsz: bool = True
    ppo_max_token_len_per_gpu: Count = 32768
    forward_max_token_len_per_gpu: Count = 32768
    ppo_epochs: Count = 1
    shuffle: bool = False
    cliprange_value: Positive = 0.5
    loss_agg_mode: LossAggMode = "token-mean"
    grad_clip: Positive = 1.0
    fsdp_config: FsdpConfig = FsdpConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
