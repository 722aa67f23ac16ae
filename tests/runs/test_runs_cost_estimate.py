"""The memory formula agrees with measured peaks, and a cheaper run costs less."""

import pytest
from transformers import Qwen2Config

from rally.config import Config, load_config
from rally.models.lora import LoraSettings
from rally.runs.cost_estimate import Hardware, activation_bytes, at_once, size_from, step_time, training_costs

A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
QWEN = Qwen2Config(
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
H200 = Hardware("H200", 141 * 10**9, 989e12, 4.8e12)


def config_of(*keys: str) -> Config:
    return load_config(overrides=[f"{R}.n=64", *keys])


@pytest.mark.parametrize(("tokens", "checkpointing", "measured_gb"), [(16384, True, 29.1), (16384, False, 59.1)])
def test_the_formula_lies_a_little_above_the_peaks_of_docs_benchmarks(
    tokens: int, checkpointing: bool, measured_gb: float
) -> None:
    keys = (f"{A}.ppo_max_token_len_per_gpu={tokens}", f"{M}.enable_gradient_checkpointing={checkpointing}")
    costs = training_costs(config_of(*keys), QWEN, size_from(QWEN), 2)
    assert 1.0 < sum(one.bytes for one in costs) / (measured_gb * 1e9) < 1.08


def test_adapters_need_no_optimizer_for_the_base_and_no_reference() -> None:
    size = size_from(QWEN, LoraSettings(rank=16))
    per_layer = 16 * (2 * (1536 + 1536) + 2 * (1536 + 256) + 3 * (1536 + 8960))
    assert size.trained == 28 * per_layer
    kl = f"{A}.use_kl_loss=true"
    full = {one.what: one.bytes for one in training_costs(config_of(kl), QWEN, size_from(QWEN), 2)}
    lora = {one.what: one.bytes for one in training_costs(config_of(kl, f"{M}.lora_rank=16"), QWEN, size, 2)}
    assert full["reference policy"] == full["weights"] == lora["weights"] and "reference policy" not in lora
    assert lora["Adam's two moments, float32"] < full["Adam's two moments, float32"] / 50


def test_a_critic_is_counted_with_its_optimizer() -> None:
    size = size_from(QWEN)
    costs = {one.what: one.bytes for one in training_costs(config_of("algorithm.adv_estimator=gae"), QWEN, size, 2)}
    assert costs["critic with its optimizer"] == 18 * size.parameters


def test_time_falls_with_what_the_hardware_can_do_and_grows_with_the_work() -> None:
    config, size = config_of(), size_from(QWEN)
    running = at_once(config, QWEN, 2, 40 * 2**30)
    assert 0 < running <= config.rollout.max_num_seqs
    usual = step_time(config, QWEN, size, H200, running, 2)
    slow = step_time(config, QWEN, size, H200._replace(flops=H200.flops / 2), running, 2)
    longer = step_time(config_of("data.max_response_length=1024"), QWEN, size, H200, running, 2)
    assert slow.update == pytest.approx(2 * usual.update) and longer.total > usual.total
    assert activation_bytes(config_of("data.train_batch_size=1", f"{R}.n=2"), QWEN, 2) < activation_bytes(
        config, QWEN, 2
    )
