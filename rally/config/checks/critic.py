"""What the keys of a critic and of a KL coefficient that adapts must hold together, one sentence per contradiction."""

from __future__ import annotations

from collections.abc import Iterator

from rally.config.base import look_up
from rally.config.errors import shown
from rally.config.schema import Config

CRITIC_ONLY = ("algorithm.lam", "trainer.critic_warmup", "trainer.max_critic_ckpt_to_keep")
OF_ITS_OWN = ("critic.model.dtype", "critic.model.trust_remote_code", "critic.model.override_config")
ADAPTIVE_ONLY = ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl")


def critic(config: Config) -> Iterator[str]:
    estimator = config.algorithm.adv_estimator
    if not config.needs_critic:
        keys = [key for key, _ in config.critic.leaves("critic.") if key not in ("critic.enable", "critic.strategy")]
        for key in _written(config, (*CRITIC_ONLY, *keys)):
            yield f"{key} has no effect with {estimator}, which needs no critic; leave it out."
        if config.critic.enable:
            yield f"critic.enable=true does not go with {estimator}; set algorithm.adv_estimator=gae or turn_gae."
        return
    if config.critic.enable is False:
        yield f"critic.enable=false does not go with {estimator}, which needs one; leave it out."
    yield from _critic_batch(config)
    yield from _critic_model(config)


def _critic_batch(config: Config) -> Iterator[str]:
    mini, train = config.critic.ppo_mini_batch_size or 1, config.data.train_batch_size
    warmup, steps = config.trainer.critic_warmup, config.trainer.total_training_steps
    ours, theirs = config.trainer.max_critic_ckpt_to_keep, config.trainer.max_actor_ckpt_to_keep
    if mini > train:
        yield f"critic.ppo_mini_batch_size={mini} is more than data.train_batch_size={train}; make it {train} or less."
    if steps is not None and warmup >= steps:
        told = f"trainer.critic_warmup={warmup} leaves no step of {steps} to train the policy in"
        yield f"{told}; make it smaller."
    if ours is not None and theirs is not None and ours > theirs:
        told = f"trainer.max_critic_ckpt_to_keep={ours} is more than trainer.max_actor_ckpt_to_keep={theirs}"
        yield f"{told}, and a critic goes with its checkpoint; make it {theirs} or less."
    optim = config.critic.optim
    if optim.lr_warmup_steps >= 0 and optim.lr_warmup_steps_ratio > 0:
        yield "critic.optim.lr_warmup_steps and lr_warmup_steps_ratio both set the warm-up; keep one of them."


def _critic_model(config: Config) -> Iterator[str]:
    tokenizer, model = config.critic.model.tokenizer_path, config.model
    if tokenizer not in (None, model.path, model.tokenizer_path, config.critic.model.path):
        told = f"critic.model.tokenizer_path={tokenizer} would be another tokenizer"
        yield f"{told}, but the critic reads the policy's tokens; leave it out."
    if config.critic.model.path is None:
        for key in _written(config, OF_ITS_OWN):
            yield f"{key} has no effect without critic.model.path; set that, or the policy's own key for both models."


def kl_control(config: Config) -> Iterator[str]:
    algorithm, given = config.algorithm, config.algorithm.kl_ctrl
    adaptive, episodes = given.type == "adaptive", config.data.train_batch_size * config.rollout.n
    if adaptive and not algorithm.use_kl_in_reward:
        yield "algorithm.kl_ctrl.type=adaptive has no effect without algorithm.use_kl_in_reward=true; set that."
    if adaptive and given.kl_coef == 0:
        yield "algorithm.kl_ctrl.kl_coef=0 stays 0 however it is adapted; set it above 0."
    if adaptive and episodes >= 5 * given.horizon:
        told = f"algorithm.kl_ctrl.horizon={given.horizon} is too short for {episodes} episodes a step"
        yield f"{told}; make it more than {episodes // 5}."
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
