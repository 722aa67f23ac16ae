"""A decoded message equals the one that was sent, and every row belongs to exactly one rank."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_cases import uneven_episodes

from rally.config import ConfigError, load_config
from rally.config.checks.multi_gpu import with_rollout_servers
from rally.distributed.message_encoding import decode, encode
from rally.models.sharding import ALONE, Alone, Message
from rally.runs.build.models import RunPlan
from rally.runs.build.run_inputs import RunError
from rally.runs.evaluate import evaluate
from rally.runs.train import train
from rally.train.batch import build_batch, rows_of
from rally.train.micro_batches import MicroBatchLimits, in_order, micro_batches_for, share_of
from rally.train.packing import Row
from rally.train.rank_messages import (
    ComputeLogits,
    ComputeReference,
    GatherCritic,
    GatherState,
    GatherWeights,
    Shutdown,
    UpdatePolicy,
)

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TWO = ("trainer.n_gpus_per_node=2", "trainer.device=cpu")


class Rank(Alone):
    """One of several, none of which is asked anything."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size  # type: ignore[misc]


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    rng = random.Random(draw(st.integers(0, 10_000)))
    found = []
    for episode in range(draw(st.integers(0, 9))):
        ids = tuple(rng.randrange(5) for _ in range(rng.randrange(2, 30)))
        sampled = tuple(sorted(rng.sample(range(1, len(ids)), rng.randrange(1, len(ids)))))
        numbers = tuple(rng.uniform(-9, 9) for _ in sampled)
        extra = {
            "weights": numbers,
            "values": numbers,
            "returns": numbers[::-1],
            "marked": tuple(x > 0 for x in numbers),
        }
        more = extra if rng.random() < 0.5 else {}
        found.append(Row(ids=ids, sampled=sampled, logprobs=numbers, episode=episode, advantages=numbers, **more))
    return found


@given(rows())
def test_rows_arrive_as_they_were(given: list[Row]) -> None:
    message = decode(encode(ComputeReference(given)))
    assert isinstance(message, ComputeReference) and message.rows == given


def test_a_batch_arrives_as_it_was() -> None:
    batch = build_batch(uneven_episodes())
    message = decode(encode(UpdatePolicy(batch, 7, 2**63 - 1)))
    assert isinstance(message, UpdatePolicy) and (message.step, message.seed) == (7, 2**63 - 1)
    assert message.batch.rows == batch.rows
    for name in ("rewards_N", "groups_N", "tokens_N"):
        assert torch.equal(getattr(message.batch, name), getattr(batch, name))


@pytest.mark.parametrize(
    "message",
    [ComputeLogits([1, 2, 3]), GatherWeights(), GatherState(), GatherState(merged=True), GatherCritic(), Shutdown()],
)
def test_small_messages_arrive_as_they_were(message: Message) -> None:
    assert decode(encode(message)) == message


def test_a_plan_arrives_as_it_was() -> None:
    words = ["actor_rollout_ref.model.path=a/b", f"{A}.optim.betas=[0.8,0.9]", "algorithm.gdpo_reward_keys=[a,b]"]
    plan = RunPlan(load_config(overrides=[*TWO, *words, "algorithm.adv_estimator=gdpo"]), Path("/x/global_step_3"), 9)
    assert decode(encode(plan)) == plan


@given(rows(), st.integers(1, 5), st.integers(1, 60), st.integers(1, 4) | st.none())
def test_every_row_is_of_one_rank_and_all_compute_equally_often(
    given: list[Row], count: int, tokens: int, most: int | None
) -> None:
    ranks = [Rank(rank, count) for rank in range(count)]
    cuts = [micro_batches_for(rank, given, MicroBatchLimits(tokens, most)) for rank in ranks]
    assert all(cut == cuts[0] for cut in cuts)
    shares = [share_of(rank, cuts[0]) for rank in ranks]
    assert len({len(share) for share in shares}) == 1
    counted = [row.episode for share in shares for part in share if part.counts for row in part.rows]
    assert sorted(counted) == [row.episode for row in given]
    assert all(part.rows for share in shares for part in share)
    if len(given) >= count:
        assert all(any(part.counts for part in share) for share in shares) or len(cuts[0]) < count


def test_what_a_rank_found_goes_back_to_its_rows() -> None:
    given = rows_of(uneven_episodes())
    parts = micro_batches_for(ALONE, given, MicroBatchLimits(50))
    numbers_M = torch.arange(sum(len(row.sampled) for part in parts for row in part), dtype=torch.float64)
    assert torch.equal(torch.cat(in_order(ALONE, parts, numbers_M)), numbers_M)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["algorithm.adv_estimator=gae", "critic.fsdp_config.optimizer_offload=true"],
            "critic.fsdp_config.optimizer_offload=true asks for an optimizer in main memory",
        ),
        (
            ["trainer.val_only=true", "data.val_files=pyproject.toml"],
            "validation without training, which works on one GPU only",
        ),
        ([f"{A}.fsdp_config.optimizer_offload=true"], "an optimizer in main memory, which works on one GPU only"),
        (["actor_rollout_ref.ref.fsdp_config.param_offload=true"], "a reference model in main memory"),
        ([f"{A}.fsdp_config.fsdp_size=1"], "must be -1 or 2, the number of GPUs; leave it out"),
        (
            ["actor_rollout_ref.ref.fsdp_config.reshard_after_forward=false"],
            f"has no effect: {A}.fsdp_config.reshard_after_forward applies to all models",
        ),
        ([f"{A}.ppo_micro_batch_size=4"], "is ambiguous with 2 GPUs; leave it out and set"),
        ([f"{R}.name=vllm", f"{R}.checkpoint_engine.backend=ipc"], "backend=ipc works on one GPU only"),
        ([f"{R}.deterministic=true"], "has no effect with actor_rollout_ref.rollout.name=rally"),
        (["trainer.nnodes=2"], "is not built yet; set it to 1 to train on this machine"),
    ],
)
def test_what_is_for_one_gpu_is_one_sentence(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[*TWO, *words])
    [problem] = caught.value.problems
    assert told in problem


def test_what_several_gpus_take_is_taken() -> None:
    words = [f"{A}.fsdp_config.reshard_after_forward=false", f"{A}.fsdp_config.fsdp_size=2", f"{A}.strategy=fsdp2"]
    assert load_config(overrides=[*TWO, *words]).trainer.n_gpus_per_node == 2


def test_a_policy_on_several_gpus_is_sampled_by_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rally.config.checks.consistency.count_gpus", lambda: 4)
    for words, name, servers in (
        (["trainer.n_gpus_per_node=4"], "rally", 4),
        (["trainer.n_gpus_per_node=4", f"{R}.data_parallel_size=2"], "rally", 2),
        (["trainer.n_gpus_per_node=4", f"{R}.name=vllm"], "vllm", 1),
        (TWO, "rally", 1),
        ([], "embedded", 1),
    ):
        rollout = with_rollout_servers(load_config(overrides=list(words))).rollout
        assert (rollout.name, rollout.data_parallel_size) == (name, servers)


def test_who_starts_no_ranks_says_so() -> None:
    config = load_config(overrides=[*TWO, "actor_rollout_ref.model.path=a/b", "data.train_files=pyproject.toml"])
    for start in (train, evaluate):
        with pytest.raises(RunError, match=r"n_gpus_per_node=2 needs `rally train`, `rally sft` or rally\.distributed"):
            start(config)
