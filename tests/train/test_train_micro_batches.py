"""Micro-batch sizes follow verl's keys, and the host does not wait for a micro-batch."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from train_cases import calm_model, uneven_episodes

from rally.config import load_config
from rally.models import attention
from rally.runs.build.update_settings import update_settings_of
from rally.train.batch import build_batch
from rally.train.micro_batches import UNBOUND, MicroBatchLimits
from rally.train.packing import micro_batches
from rally.train.policy import OptimizerSettings, Policy
from rally.train.update import MicroBatchResult, UpdateMetrics, UpdateSettings, update_policy

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


class Waits(TorchDispatchMode):
    """The operations for which a host waits for its device: sizes and numbers that depend on data. Those of numbers
    that no device computed, such as a fill, do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put_") and any(x is not None and x.dtype == torch.bool for x in args[1])
        if masks or name in ("nonzero", "masked_select", "_local_scalar_dense", "unique_dim", "_unique2"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stale", [False, True])
def test_no_micro_batch_is_waited_for(stale: bool) -> None:
    """Only then the host packs the next one while the device computes."""
    batch = build_batch(uneven_episodes())
    if stale:
        first, *others = batch.rows
        flags = np.zeros(len(first.sampled), np.bool_)
        flags[0] = True
        batch = replace(batch, rows=[replace(first, stale=flags), *others])
    counts = {}
    for tokens in (10**6, 20):
        policy = Policy(calm_model(), OptimizerSettings(lr=0.0), 4)
        attention.install(policy.model)
        with Waits() as waits:
            update_policy(policy, batch, UpdateSettings(mini_batch_groups=10**6, max_tokens=tokens))
        counts[len(list(micro_batches(batch.rows, tokens)))] = waits.names
    few, many = sorted(counts)
    assert many > few == 1
    assert counts[many] == counts[few]


def test_stale_tokens_are_not_compared_with_the_rollout() -> None:
    metrics, fresh = UpdateMetrics(), torch.tensor([True, False, True, True])
    logp, recorded = torch.arange(4.0), torch.arange(4.0) - 10
    for mask in (fresh, torch.ones(4, dtype=torch.bool), ~torch.ones(4, dtype=torch.bool)):
        metrics.add(MicroBatchResult(logp, recorded, {}), fresh=mask, counts=True)
    assert [x.tolist() for x in metrics.trained] == [[0, 2, 3], [0, 1, 2, 3], []]
    assert [x.tolist() for x in metrics.recorded] == [[-10, -8, -7], [-10, -9, -8, -7], []]
