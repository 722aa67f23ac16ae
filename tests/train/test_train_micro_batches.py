"""Micro-batch sizes follow verl's keys, and offloading to main memory changes no result."""

from typing import Any

import pytest
import torch
from small_models import make_model
from train_cases import same, uneven_episodes, weights

from rally.config import load_config
from rally.models import attention
from rally.runs.build.update_settings import update_settings_of
from rally.train.batch import build_batch
from rally.train.micro_batches import UNBOUND, MicroBatchLimits
from rally.train.packing import micro_batches, pack
from rally.train.policy import OptimizerSettings, Policy
from rally.train.reference import FrozenModel, awake
from rally.train.update import UpdateSettings, update_policy

A, R, F = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
UPDATE = UpdateSettings(mini_batch_groups=2, kl_coef=0.1)


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


def trained(offload: bool, device: str, dtype: Any) -> tuple[Policy, FrozenModel]:
    model, reference = make_model().to(device), FrozenModel(make_model().to(device), offload=offload)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    attention.install(model)
    policy = Policy(model, OptimizerSettings(lr=1e-3), 4, offload=offload)
    for seed in (0, 1):
        with awake(reference):
            update_policy(policy, build_batch(uneven_episodes(seed)), UPDATE, reference=reference)
    return policy, reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_waits_in_main_memory_trains_the_same(dtype: Any) -> None:
    (there, _), (here, _) = trained(True, "cpu", dtype), trained(False, "cpu", dtype)
    assert same(weights(there.model), weights(here.model))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_between_updates_the_device_holds_the_policy_alone(dtype: Any) -> None:
    policy, reference = trained(True, "cuda", dtype)
    kept = [value for state in policy.optimizer.state.values() for value in state.values()]
    assert kept and all(value.device.type == "cpu" for value in kept)
    assert reference.model.device.type == "cpu" and policy.device.type == "cuda"
    assert dtype == torch.float32 or all(master.device.type == "cpu" for master in policy.masters.values())
    again = Policy(policy.model, OptimizerSettings(lr=1e-3), 4, offload=True)
    again.load_state(policy.state())
    assert all(value.device.type == "cpu" for state in again.optimizer.state.values() for value in state.values())
    with awake(reference):
        update_policy(again, build_batch(uneven_episodes(2)), UPDATE, reference=reference)
    plain, beside = trained(False, "cuda", dtype)
    update_policy(plain, build_batch(uneven_episodes(2)), UPDATE, reference=beside)
    assert same(weights(again.model), weights(plain.model))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_reference_that_rests_cannot_be_asked_by_accident() -> None:
    _, reference = trained(True, "cuda", torch.float32)
    packed = pack(build_batch(uneven_episodes()).rows, torch.device("cuda"))
    with pytest.raises(RuntimeError):
        reference(packed, 1.0)
