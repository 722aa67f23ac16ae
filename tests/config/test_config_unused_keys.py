"""Keys without effect are reported; verl's defaults, spelled out, always pass."""

import pytest

from rally.config import ConfigError, load_config, load_sft_config

A, K = "actor_rollout_ref.actor", "reward_model.reward_kwargs"
GAE = "algorithm.adv_estimator=gae"
BUFFER = f"{K}.overlong_buffer_cfg"
HF = "[model, optimizer, extra, hf_model]"


@pytest.mark.parametrize(
    ("lines", "key", "cure"),
    [
        ((f"{A}.kl_loss_coef=0.01",), f"{A}.kl_loss_coef=0.01", f"{A}.use_kl_loss=true"),
        ((f"{A}.kl_loss_type=k3",), f"{A}.kl_loss_type=k3", f"{A}.use_kl_loss=true"),
        ((f"{A}.data_loader_seed=7",), f"{A}.data_loader_seed=7", f"{A}.shuffle=true"),
        ((f"{BUFFER}.len=256",), f"{BUFFER}.len=256", f"{BUFFER}.enable=true"),
        ((f"{BUFFER}.penalty_factor=0.5",), f"{BUFFER}.penalty_factor=0.5", f"{BUFFER}.enable=true"),
        ((f"{K}.max_resp_len=256",), f"{K}.max_resp_len=256", f"{BUFFER}.enable=true"),
        ((f"{A}.optim.min_lr_ratio=0.1",), f"{A}.optim.min_lr_ratio=0.1", "lr_scheduler_type=cosine"),
        (
            (f"{A}.optim={{lr_scheduler_type: linear, num_cycles: 1}}",),
            f"{A}.optim.num_cycles=1.0",
            "set lr_scheduler_type",
        ),
        ((GAE, "critic.optim.min_lr_ratio=0.1"), "critic.optim.min_lr_ratio=0.1", "lr_scheduler_type=cosine"),
        (
            (GAE, "critic.model={enable_gradient_checkpointing: false, recompute_num_layers: 2}"),
            "critic.model.recompute_num_layers=2",
            "leave it out",
        ),
        ((f"{A}.checkpoint.load_contents={HF}",), f"{A}.checkpoint.load_contents=hf_model", "leave it out"),
        ((GAE, f"critic.checkpoint.save_contents={HF}"), "critic.checkpoint.save_contents=hf_model", "leave it out"),
    ],
)
def test_a_key_without_effect_is_reported_with_what_to_do(lines: tuple[str, ...], key: str, cure: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=lines)
    [problem] = caught.value.problems
    assert problem.startswith(f"{key} has no effect") and cure in problem


@pytest.mark.parametrize(
    "lines",
    [
        (f"{A}={{use_kl_loss: true, kl_loss_coef: 0.01, kl_loss_type: k3}}",),
        (f"{A}={{use_kl_loss: false, kl_loss_coef: 0.0, kl_loss_type: low_var_kl}}",),
        (f"{A}={{shuffle: false, data_loader_seed: 42}}",),
        (f"{A}={{shuffle: true, data_loader_seed: 7}}",),
        (f"{BUFFER}={{enable: false, len: 512, penalty_factor: 1.0, log: false}}", f"{K}.max_resp_len=null"),
        (f"{BUFFER}={{enable: true, len: 64}}", f"{K}.max_resp_len=256", "reward_model.reward_manager=dapo"),
        (f"{A}.optim={{lr_scheduler_type: cosine, min_lr_ratio: 0.1, num_cycles: 1}}",),
        (f"{A}.optim={{lr_scheduler_type: linear, min_lr_ratio: 0.1}}",),
        (f"{A}.checkpoint={{save_contents: {HF}, load_contents: {HF}}}",),
    ],
)
def test_defaults_and_keys_with_an_effect_load(lines: tuple[str, ...]) -> None:
    load_config(overrides=lines)


def test_fine_tuning_has_the_same_rules() -> None:
    load_sft_config(overrides=["optim.min_lr_ratio=0.1"])
    with pytest.raises(ConfigError, match=r"optim\.min_lr_ratio=0\.1 has no effect with optim\.lr_scheduler=constant"):
        load_sft_config(overrides=["optim.min_lr_ratio=0.1", "optim.lr_scheduler=constant"])
    with pytest.raises(ConfigError, match="load_contents=hf_model has no effect"):
        load_sft_config(overrides=[f"trainer.checkpoint.load_contents={HF}"])
