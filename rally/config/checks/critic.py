"""Checks of the critic's keys and of the adaptive KL coefficient. Each problem is one sentence."""

from __future__ import annotations

from collections.abc import Iterator

from rally.config.base import look_up
from rally.config.errors import shown
from rally.config.schema import Config

CRITIC_ONLY = ("algorithm.lam", "trainer.critic_warmup", "trainer.max_critic_ckpt_to_keep")
OWN_MODEL_ONLY = ("critic.model.dtype", "critic.model.trust_remote_code", "critic.model.override_config")
ADAPTIVE_ONLY = ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl")


def critic(config: Config) -> Iterator[str]:
    estimator = config.algorithm.adv_estimator
    if not config.needs_critic:
        keys = [key for key, _ in config.critic.leaves("critic.") if key not in ("critic.enable", "critic.strategy")]
        for key in _written(config, (*CRITIC_ONLY, *keys)):
            yield f"{key} has no effect with {estimator}, which needs no critic; leave it out."
        if config.critic.enable:
            yield f"critic.enable=true has no effect with {estimator}; set algorithm.adv_estimator=gae or turn_gae."
        return
    if config.critic.enable is False:
        yield f"critic.enable=false contradicts adv_estimator={estimator}, which needs a critic; leave it out."
    yield from _critic_batch(config)
    yield from _critic_model(config)


def _critic_batch(config: Config) -> Iterator[str]:
    mini, train = config.critic.ppo_mini_batch_size or 1, config.data.train_batch_size
    warmup, steps = config.trainer.critic_warmup, config.trainer.total_training_steps
    critics, actors = config.trainer.max_critic_ckpt_to_keep, config.trainer.max_actor_ckpt_to_keep
    if mini > train:
        yield f"critic.ppo_mini_batch_size={mini} is more than data.train_batch_size={train}; make it {train} or less."
    if steps is not None and warmup >= steps:
        problem = f"trainer.critic_warmup={warmup} leaves none of {steps} steps for the policy"
        yield f"{problem}; make it smaller."
    if critics is not None and actors is not None and critics > actors:
        problem = f"trainer.max_critic_ckpt_to_keep={critics} is more than trainer.max_actor_ckpt_to_keep={actors}"
        yield f"{problem}, but a critic is part of its checkpoint; make it {actors} or less."
    optim = config.critic.optim
    if optim.lr_warmup_steps >= 0 and optim.lr_warmup_steps_ratio > 0:
        yield "critic.optim.lr_warmup_steps and lr_warmup_steps_ratio both set the warm-up; keep one of them."


def _critic_model(config: Config) -> Iterator[str]:
    tokenizer, model = config.critic.model.tokenizer_path, config.model
    if tokenizer not in (None, model.path, model.tokenizer_path, config.critic.model.path):
        problem = f"critic.model.tokenizer_path={tokenizer} differs from the policy's tokenizer"
        yield f"{problem}, but the critic reads the policy's tokens; leave it out."
    if config.critic.model.path is None:
        for key in _written(config, OWN_MODEL_ONLY):
            yield f"{key} has no effect without critic.model.path; set that, or the policy's own key for both models."


def kl_control(config: Config) -> Iterator[str]:
    algorithm, control = config.algorithm, config.algorithm.kl_ctrl
    adaptive, episodes = control.type == "adaptive", config.data.train_batch_size * config.rollout.n
    if adaptive and not algorithm.use_kl_in_reward:
        yield "algorithm.kl_ctrl.type=adaptive has no effect without algorithm.use_kl_in_reward=true; set that."
    if adaptive and control.kl_coef == 0:
        yield "algorithm.kl_ctrl.kl_coef=0 stays 0 with kl_ctrl.type=adaptive; set it above 0."
    if adaptive and episodes >= 5 * control.horizon:
        problem = f"algorithm.kl_ctrl.horizon={control.horizon} is too short for {episodes} episodes per step"
        yield f"{problem}; make it more than {episodes // 5}."
    if not adaptive:
        for key in _written(config, ADAPTIVE_ONLY):
            yield f"{key} has no effect with algorithm.kl_ctrl.type=fixed; leave it out, or set type=adaptive."


def _written(config: Config, keys: tuple[str, ...]) -> Iterator[str]:
    """Keys that differ from their default, with their values."""
    defaults = Config()
    for key in keys:
        value = look_up(config, key)
        if value != look_up(defaults, key):
            yield f"{key}={shown(value)}"
