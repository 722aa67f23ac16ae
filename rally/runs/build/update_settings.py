"""Builds the settings of the trainer, the update, the optimizer and the advantage estimator from a Config."""

from __future__ import annotations

import sys
from dataclasses import replace

from rally.algos import credit_assignment, losses
from rally.algos.advantages import ESTIMATORS
from rally.algos.credit_assignment import CreditSettings, EstimatorError, check_estimator
from rally.algos.distillation import DistillationSettings
from rally.algos.losses import PolicyLossError, SurrogateSettings, check_policy_loss
from rally.algos.off_policy_correction import CorrectionSettings
from rally.config import Config
from rally.config.actor import FsdpConfig, LogProbKeys, OptimConfig
from rally.config.sft import SftOptim
from rally.config.trainer import GradientGuards
from rally.data.samplers import total_steps
from rally.models.load import pick_device
from rally.train.divergence import GradientLimits
from rally.train.health_checks import HealthSettings
from rally.train.micro_batches import MicroBatchLimits, limits_of
from rally.train.offload import OffloadSettings
from rally.train.policy import OptimizerSettings
from rally.train.rollout.dynamic_sampling import FilterSettings
from rally.train.trainer import ResamplingSettings, TrainerSettings
from rally.train.update import UpdateSettings


def update_limits(config: Config) -> MicroBatchLimits:
    """The micro-batch limits of the update. A reference in the loss runs on the same micro-batches, within its own
    limits."""
    actor = config.actor
    own = limits_of(actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz)
    return own.within(log_prob_limits(config, config.actor_rollout_ref.ref)) if actor.use_kl_loss else own


def critic_limits(config: Config) -> MicroBatchLimits:
    """The micro-batch limits of the critic's update."""
    keys = config.critic
    return limits_of(keys.ppo_max_token_len_per_gpu, keys.ppo_micro_batch_size_per_gpu, keys.use_dynamic_bsz)


def log_prob_limits(config: Config, keys: LogProbKeys) -> MicroBatchLimits:
    """The micro-batch limits of a pass for log-probabilities only. Keys that are not set default to the actor's."""
    actor = config.actor
    dynamic = actor.use_dynamic_bsz if keys.log_prob_use_dynamic_bsz is None else keys.log_prob_use_dynamic_bsz
    return limits_of(
        keys.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu,
        keys.log_prob_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu,
        dynamic,
    )


def update_settings_of(config: Config) -> UpdateSettings:
    actor, limits = config.actor, update_limits(config)
    return UpdateSettings(
        mini_batch_groups=config.mini_batch_size,
        surrogate=surrogate_settings_of(config),
        correction=correction_settings_of(config),
        aggregation=actor.loss_agg_mode,
        loss_scale=actor.loss_scale_factor or float(config.response_length),
        entropy_coeff=actor.entropy_coeff,
        kl_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_kind=actor.kl_loss_type,
        epochs=actor.ppo_epochs,
        max_tokens=limits.max_tokens,
        max_rows=limits.max_rows,
        log_prob_limits=log_prob_limits(config, config.rollout),
        reference_limits=log_prob_limits(config, config.actor_rollout_ref.ref),
        temperature=config.rollout.temperature,
        mismatch_limit=config.rollout.mismatch_limit,
        deterministic=config.rollout.deterministic and config.trainer.world_size == 1,  # of whole layers
        shuffle_seed=_shuffle_seed(config),
        router_replay=actor.router_replay.mode,
        distillation=distillation_settings_of(config),
    )


def distillation_settings_of(config: Config) -> DistillationSettings | None:
    keys = config.distillation.distillation_loss
    if not config.distillation.enabled:
        return None
    return DistillationSettings(
        mode=keys.loss_mode,
        topk=keys.topk,
        with_rewards=keys.use_task_rewards,
        coefficient=keys.distillation_loss_coef,
        max_loss=keys.loss_max_clamp,
        min_logp=keys.log_prob_min_clamp,
        policy_gradient=keys.use_policy_gradient,
        low=keys.clip_ratio_low or keys.clip_ratio,
        high=keys.clip_ratio_high or keys.clip_ratio,
        beta=keys.jsd_beta,
    )


def surrogate_settings_of(config: Config) -> SurrogateSettings:
    actor, chosen = config.actor, config.actor.policy_loss
    bounds = {"clip_ratio_low": actor.clip_low, "clip_ratio_high": actor.clip_high}
    return SurrogateSettings(
        mode="gpg" if config.algorithm.rollout_correction.is_reinforce else chosen.loss_mode,
        low=actor.clip_low,
        high=actor.clip_high,
        dual=actor.clip_ratio_c,
        tau_positive=actor.tau_pos,
        tau_negative=actor.tau_neg,
        marked_share=chosen.kl_cov_ratio if chosen.loss_mode == "kl_cov" else chosen.clip_cov_ratio,
        covariance_low=chosen.clip_cov_lb,
        covariance_high=chosen.clip_cov_ub,
        marked_kl=chosen.ppo_kl_coef,
        dro_beta=chosen.dro_beta or 0.0,
        kwargs=chosen.loss_kwargs,
        keys={} if chosen.loss_mode in losses.BUILT_IN else actor.model_dump(mode="json") | bounds,
    )


def credit_settings_of(config: Config) -> CreditSettings:
    algorithm = config.algorithm
    return CreditSettings(
        estimator=algorithm.adv_estimator,
        by_std=algorithm.norm_adv_by_std_in_grpo,
        turn_rewards=algorithm.turn_rewards,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        step_weight=algorithm.gigpo.step_advantage_w,
        components=algorithm.gdpo_reward_keys,
        kwargs=algorithm.adv_estimator_kwargs,
        keys={} if algorithm.adv_estimator in credit_assignment.BUILT_IN else algorithm.model_dump(mode="json"),
    )


def check_objective(config: Config) -> None:
    """Raise, before any weight is loaded, if the policy loss or the advantage estimator is not registered, or cannot
    be trained with."""
    surrogate, credit = surrogate_settings_of(config), credit_settings_of(config)
    if surrogate.mode not in losses.SURROGATES:
        key = f"actor_rollout_ref.actor.policy_loss.loss_mode={surrogate.mode}"
        raise PolicyLossError(_unregistered(config, key, f"@register_policy_loss({surrogate.mode!r})"))
    if credit.estimator not in {*credit_assignment.BUILT_IN, *ESTIMATORS, *credit_assignment.TOKEN_ESTIMATORS}:
        key = f"algorithm.adv_estimator={credit.estimator}"
        raise EstimatorError(_unregistered(config, key, f"@register_adv_estimator({credit.estimator!r})"))
    if surrogate.mode not in losses.BUILT_IN:
        check_policy_loss(surrogate, pick_device(config.trainer.device))
    check_estimator(credit)


def _unregistered(config: Config, key: str, decorator: str) -> str:
    modules = ", ".join(name for _, name in config.external_libs)
    if hasattr(sys.modules.get("verl.trainer.ppo.core_algos"), "POLICY_LOSS_REGISTRY"):
        problem = f"{key} was not registered with Rally, because {modules} uses the installed verl"
        return f"{problem}; use an environment without verl, where Rally provides its names"
    return f"{key} was not registered by {modules}; decorate your function with {decorator}"


def resampling_settings_of(config: Config) -> ResamplingSettings | None:
    """PF-PPO, if it is enabled."""
    keys = config.algorithm.pf_ppo
    return ResamplingSettings(keys.reweight_method, keys.weight_pow) if config.algorithm.use_pf_ppo else None


def filter_settings_of(config: Config) -> FilterSettings | None:
    """DAPO's dynamic sampling, if it is enabled. A generation batch is the number of prompts that a step starts
    with."""
    chosen = config.algorithm.filter_groups
    first = config.data.gen_batch_size or config.data.train_batch_size
    if not chosen.enable:
        return None
    return FilterSettings(metric=chosen.metric, first=first, most=chosen.max_num_gen_batches * first or None)


def correction_settings_of(config: Config) -> CorrectionSettings:
    correction = config.algorithm.rollout_correction
    clips = correction.bypass_mode and correction.loss_type == "ppo_clip"  # the ratio holds the importance weight
    return CorrectionSettings(
        level=None if clips else correction.rollout_is,
        threshold=correction.rollout_is_threshold,
        rejections=correction.rejections,
        normalize=correction.rollout_is_batch_normalize,
        bypass=correction.bypass_mode,
    )


def reward_kl_coef(config: Config) -> float:
    algorithm = config.algorithm
    return algorithm.kl_ctrl.kl_coef if algorithm.use_kl_in_reward else 0.0


def _shuffle_seed(config: Config) -> int | None:
    own = config.actor.data_loader_seed
    return (config.trainer.seed if own is None else own) if config.actor.shuffle else None


def optimizer_settings_of(config: Config) -> OptimizerSettings:
    return optimizer_settings(config.actor.optim, config.actor.grad_clip, gradient_limits_of(config.trainer.guards))


def optimizer_settings(optim: OptimConfig | SftOptim, grad_clip: float, limits: GradientLimits) -> OptimizerSettings:
    return OptimizerSettings(
        lr=optim.lr,
        moments_8bit=optim.optimizer == "AdamW8bit",
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        grad_clip=optim.clip_grad or grad_clip,
        schedule=optim.lr_scheduler_type,
        warmup_steps=optim.lr_warmup_steps,
        warmup_ratio=optim.lr_warmup_steps_ratio,
        min_lr_ratio=optim.min_lr_ratio,
        num_cycles=optim.num_cycles,
        limits=limits,
    )


def policy_offload_of(config: Config) -> OffloadSettings:
    """What of the policy rests in main memory. An engine over the trainer's own module samples from its weights, so
    they stay; the engines of ranks have copies."""
    keys, activations = config.actor.fsdp_config, config.model.enable_activation_offload
    settings = offload_settings(keys, activations, config.trainer.world_size)
    apart = config.rollout.name != "embedded" or config.samples_in_ranks
    return replace(settings, params=settings.params and apart)


def critic_recompute_of(config: Config) -> int | None:
    """How many layers of the critic are computed again; None: as few as memory allows."""
    own: int | None = config.critic.model.recompute_num_layers
    return config.model.recompute_num_layers if own is None else own


def critic_offload_of(config: Config) -> OffloadSettings:
    """What of the critic rests in main memory."""
    keys, activations = config.critic.fsdp_config, config.critic.model.enable_activation_offload
    return offload_settings(keys, activations, config.trainer.world_size)


def offload_settings(keys: FsdpConfig, activations: bool, world_size: int) -> OffloadSettings:
    """What of a trained model rests in main memory. With FSDP2's own offloading, weights and optimizer are always
    there."""
    other = not (keys.offload_policy and world_size > 1)
    return OffloadSettings(
        optimizer=keys.optimizer_offload and other, params=keys.param_offload and other, activations=activations
    )


def gradient_limits_of(guards: GradientGuards) -> GradientLimits:
    return GradientLimits(factor=guards.grad_norm_factor, highest=guards.max_grad_norm)


def health_settings_of(config: Config) -> HealthSettings:
    guards = config.trainer.guards
    return HealthSettings(
        patience=guards.patience,
        entropy_share=guards.entropy_share,
        tool_share=guards.tool_share,
        clipped_share=guards.clipped_share,
    )


def trainer_settings_of(config: Config, steps: int) -> TrainerSettings:
    trainer, data = config.trainer, config.data
    return TrainerSettings(
        total_steps=steps,
        batch_size=data.train_batch_size,
        n=config.rollout.n,
        seed=trainer.seed if data.seed is None else data.seed,
        credit=credit_settings_of(config),
        resampling=resampling_settings_of(config),
        filter=filter_settings_of(config),
        reward_kl_kind=config.algorithm.kl_penalty,
        save_freq=trainer.save_freq,
        test_freq=trainer.test_freq,
        val_before_train=trainer.val_before_train or steps == 0,
        val_batch_size=data.val_batch_size,
        max_prompt_length=data.max_prompt_length,
        mismatch_alarm=config.rollout.mismatch_alarm,
        watch=health_settings_of(config),
        show_validation=trainer.log_val_generations,
    )


def total_steps_of(config: Config, rows: int) -> int:
    by_epochs = total_steps(rows, config.data.train_batch_size, config.trainer.total_epochs)
    return config.trainer.total_training_steps or by_epochs
