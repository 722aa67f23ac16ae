"""Checks of the critic's keys and of the adaptive KL coefficient."""

import pytest
from test_config_checks import error_text, load

from rally.runs.build.policy_and_critic import critic_settings_of, kl_control_of

GAE = "algorithm.adv_estimator=gae"
KL = "algorithm.use_kl_in_reward=true"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("critic.enable=true",), "critic.enable=true has no effect with grpo; set algorithm.adv_estimator=gae"),
        ((GAE, "critic.enable=false"), "critic.enable=false contradicts adv_estimator=gae"),
        ((GAE, "critic.ppo_mini_batch_size=2000"), "is more than data.train_batch_size"),
        ((GAE, "trainer.critic_warmup=5", "trainer.total_training_steps=5"), "leaves none of 5 steps for the policy"),
        (
            (GAE, "trainer.max_critic_ckpt_to_keep=3", "trainer.max_actor_ckpt_to_keep=2"),
            "trainer.max_critic_ckpt_to_keep=3 is more than trainer.max_actor_ckpt_to_keep=2",
        ),
        ((GAE, "critic.model.tokenizer_path=other"), "but the critic reads the policy's tokens; leave it out."),
        ((GAE, "critic.model.custom_chat_template=x"), "the critic reads the policy's tokens"),
        ((GAE, "critic.model.dtype=float32"), "critic.model.dtype=float32 has no effect without critic.model.path"),
        (
            (GAE, "critic.optim.clip_grad=2", "critic.grad_clip=1"),
            "critic.optim.clip_grad=2.0 must equal critic.grad_clip=1.0",
        ),
        ((GAE, "critic.model.lora_rank=8"), "critic.model.lora_rank=8 is not built yet"),
        ((GAE, "critic.model.path=./nowhere"), "critic.model.path=./nowhere does not exist"),
        ((GAE, "algorithm.turn_rewards=turn_baseline"), "turn_baseline is not supported with gae; set it to returns."),
        ((GAE, "algorithm.norm_adv_by_std_in_grpo=false"), "has no effect with gae"),
        (("algorithm.kl_ctrl.type=adaptive",), "has no effect without algorithm.use_kl_in_reward=true"),
        ((KL, "algorithm.kl_ctrl.target_kl=0.2"), "target_kl=0.2 has no effect with algorithm.kl_ctrl.type=fixed"),
        ((KL, "algorithm.kl_ctrl={type: adaptive, kl_coef: 0}"), "stays 0 with kl_ctrl.type=adaptive"),
        ((KL, "algorithm.kl_ctrl={type: adaptive, horizon: 1}"), "horizon=1 is too short for"),
        ((KL, "actor_rollout_ref.actor.use_kl_loss=true"), "count the KL twice"),
    ],
)
def test_a_contradiction_is_reported_in_one_sentence(lines: tuple[str, ...], message: str) -> None:
    line = error_text(*lines)
    assert message in line and len(line.splitlines()) == 1


def test_a_critic_needs_one_episode_per_prompt() -> None:
    assert load(GAE, "actor_rollout_ref.rollout.n=1", "critic.enable=true", "algorithm.gamma=0.99").needs_critic
    assert load("algorithm.adv_estimator=turn_gae", "actor_rollout_ref.rollout.n=1", "algorithm.lam=0.95").needs_critic


def test_the_critics_mini_batch_defaults_to_the_actors() -> None:
    actor = "actor_rollout_ref.actor.ppo_mini_batch_size=8"
    assert critic_settings_of(load(GAE, actor)).mini_batch_groups == 8
    settings = critic_settings_of(load(GAE, actor, "critic={ppo_mini_batch_size: 4, shuffle: true}", "trainer.seed=7"))
    assert settings.mini_batch_groups == 4 and settings.shuffle_seed == 7


def test_the_kl_coefficient_is_fixed_by_default() -> None:
    assert kl_control_of(load(), None) is None
    fixed = kl_control_of(load(KL), None)
    moving = kl_control_of(load(KL, "algorithm.kl_ctrl={type: adaptive, target_kl: 0.5}"), None)
    assert fixed is not None and fixed.target is None and fixed.coefficient == 0.001
    assert moving is not None and moving.target == 0.5
