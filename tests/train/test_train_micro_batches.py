"""Micro-batch sizes follow verl's keys."""

from train_cases import uneven_episodes

from rally.config import load_config
from rally.runs.build.update_settings import update_settings_of
from rally.train.batch import build_batch
from rally.train.micro_batches import UNBOUND, MicroBatchLimits
from rally.train.packing import micro_batches
from rally.train.update import UpdateSettings

A, R, F = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"


def settings(*overrides: str) -> UpdateSettings:
    return update_settings_of(load_config(overrides=overrides))


def test_each_pass_keeps_to_its_own_keys() -> None:
    written = settings(
        f"{A}.ppo_micro_batch_size_per_gpu=8",
        f"{A}.ppo_max_token_len_per_gpu=1000",
        f"{R}.log_prob_micro_batch_size_per_gpu=16",
        f"{R}.log_prob_max_token_len_per_gpu=4000",
        f"{F}.log_prob_micro_batch_size_per_gpu=4",
    )
    assert written.limits == MicroBatchLimits(1000, 8)
    assert written.log_prob_limits == MicroBatchLimits(4000, 16)
    assert written.reference_limits == MicroBatchLimits(1000, 4)


def test_a_reference_in_the_loss_bounds_the_update_as_well() -> None:
    written = settings(
        f"{A}.use_kl_loss=true", f"{A}.ppo_micro_batch_size_per_gpu=8", f"{F}.log_prob_micro_batch_size_per_gpu=4"
    )
    assert written.limits == MicroBatchLimits(16384, 4)


def test_without_a_token_budget_the_count_alone_cuts() -> None:
    written = settings(f"{A}.use_dynamic_bsz=false", f"{A}.ppo_micro_batch_size_per_gpu=3")
    assert written.limits == written.log_prob_limits == MicroBatchLimits(UNBOUND, 3)
    rows = build_batch(uneven_episodes()).rows
    sizes = [len(part) for part in micro_batches(rows, *written.limits)]
    assert sum(sizes) == len(rows) and max(sizes) == 3
