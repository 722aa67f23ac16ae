"""A decoded message equals the one that was sent, and every row belongs to exactly one rank."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_cases import uneven_episodes
from vision_cases import make_image, picture

from rally.config import ConfigError, load_config, load_sft_config
from rally.distributed.message_encoding import decode, encode, rows_of_arrays, rows_to_arrays
from rally.distributed.process_group import RankLayout, layout_of
from rally.images.loading import read_image
from rally.loops import LoopError
from rally.models.sharding import ALONE, Alone, M, Message
from rally.runs.build.models import RunPlan
from rally.runs.build.rollout import loops_of
from rally.runs.build.run_inputs import RunError
from rally.runs.evaluate import evaluate
from rally.runs.train import train
from rally.train.batch import build_batch, rows_of
from rally.train.micro_batches import (
    MicroBatches,
    MicroBatchLimits,
    MicroBatchShare,
    in_order,
    micro_batches_for,
    parts_of,
    share_of,
)
from rally.train.packing import FIELDS, Row
from rally.train.rank_messages import (
    ComputeLogits,
    ComputePlain,
    ComputeReference,
    ComputeValues,
    GatherCritic,
    GatherState,
    GatherWeights,
    PublishWeights,
    SftStep,
    Shutdown,
    StartEngine,
    UpdatePolicy,
)
from rally.types import ImageSpan

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ULYSSES = "ulysses_sequence_parallel_size"
TWO = ("trainer.n_gpus_per_node=2", "trainer.device=cpu")
AGENT_WORKERS = (f"{R}.agent.num_workers=2", f"{R}.agent_loop_class=black_box")


class Rank(Alone):
    """One of several. `posted` holds what rank 0 sends to each, and `numbers` what each has computed."""

    def __init__(self, rank: int, posted: list[bytearray], numbers: list[torch.Tensor]) -> None:
        self.rank, self.world_size = rank, len(posted)  # type: ignore[misc]
        self.posted, self.numbers = posted, numbers

    def scatter(self, messages: Sequence[M]) -> M:
        if self.rank == 0:
            self.posted[:] = map(encode, messages)
        assert len(messages) == (0 if self.rank else self.world_size)
        return decode(self.posted[self.rank])  # type: ignore[return-value]

    def all_gather(self, numbers_X: torch.Tensor) -> list[torch.Tensor]:
        return self.numbers


def content(row: Row) -> tuple[object, ...]:
    return row.episode, row.teacher, row.routes, *(getattr(row, name).tolist() for name in FIELDS)


def contents(rows: Iterable[Row]) -> list[tuple[object, ...]]:
    return list(map(content, rows))


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    rng = random.Random(draw(st.integers(0, 10_000)))
    found: list[Row] = []
    for episode in range(draw(st.integers(0, 9))):
        before = found[-1].ids.tolist() if found and rng.random() < 0.5 else []
        ids = (*before[: rng.randrange(30)], *(rng.randrange(5) for _ in range(rng.randrange(2, 30))))
        sampled = tuple(sorted(rng.sample(range(1, len(ids)), rng.randrange(1, len(ids)))))
        numbers = tuple(rng.uniform(-9, 9) for _ in sampled)
        equal = (rng.choice((-0.0, 0.5)),) * len(sampled)
        extra = {
            "weights": numbers,
            "values": numbers,
            "returns": numbers[::-1],
            "marked": tuple(x > 0 for x in numbers),
            "stale": (rng.random() < 0.5,) * len(sampled),
            "teacher": rng.randrange(3),
        }
        more = extra if rng.random() < 0.5 else {}
        found.append(Row(ids=ids, sampled=sampled, logprobs=numbers, episode=episode, advantages=equal, **more))
    return found


@given(rows(), st.integers(1, 4))
def test_rows_arrive_as_they_were(given: list[Row], size: int) -> None:
    plain = decode(encode(ComputePlain(given, 0.5)))
    assert isinstance(plain, ComputePlain) and contents(plain.rows) == contents(given) and plain.temperature == 0.5
    parts = [given[first : first + size] for first in range(0, len(given), size)]
    sent = decode(encode(MicroBatches([MicroBatchShare(part, len(part) == size) for part in parts])))
    assert isinstance(sent, MicroBatches) and [share.counts for share in sent.shares] == [len(p) == size for p in parts]
    assert [contents(share.rows) for share in sent.shares] == list(map(contents, parts))


def test_images_arrive_with_their_bytes(tmp_path: Path) -> None:
    """Each different one once, also from a file that another node does not have."""
    (tmp_path / "a.png").write_bytes(picture(1))
    one, other = read_image(tmp_path / "a.png"), make_image(2)
    plain = Row(ids=range(9), sampled=(8,), logprobs=(-1.0,), episode=0)
    spans = ((ImageSpan(1, 1, 2, one), ImageSpan(4, 2, 2, other)), (), (ImageSpan(1, 1, 2, one),))
    given = [replace(plain, episode=number, images=images) for number, images in enumerate(spans)]
    arrays = rows_to_arrays(given)
    assert len(arrays["images/bytes"]) == len(one.read()) + len(other.read())
    (tmp_path / "a.png").unlink()
    found = rows_of_arrays(arrays)
    assert contents(found) == contents(given) and tuple(row.images for row in found) == spans
    shown = found[2].images[0].image
    assert shown.read() == picture(1) and (shown.format, shown.width, shown.height) == ("png", one.width, one.height)


def test_the_sign_of_zero_arrives() -> None:
    mixed = Row(ids=(1, 2, 3), sampled=(1, 2), logprobs=(-0.0, 0.0), episode=0, advantages=(-0.0, -0.0))
    [row] = rows_of_arrays(rows_to_arrays([mixed]))
    assert np.signbit(row.logprobs).tolist() == [True, False] and np.signbit(row.advantages).all()


def test_a_group_takes_four_bytes_for_a_token_and_four_for_a_sampled_one() -> None:
    """The prompt of a group is sent once, and the equal advantages of a row as one number."""
    rng = np.random.default_rng(0)
    prompt, size, answers = rng.integers(0, 9, 3000), 5000, 8
    group = [
        Row(
            ids=np.concatenate([prompt, rng.integers(0, 9, size)]).astype(np.int32),
            sampled=np.arange(3000, 3000 + size, dtype=np.int32),
            logprobs=rng.random(size, np.float32),
            episode=number,
            advantages=np.full(size, number, np.float32),
        )
        for number in range(answers)
    ]
    computed = 3000 + answers * size
    bits = answers * (3000 + size) // 8
    assert len(encode(MicroBatches([MicroBatchShare(group)]))) < 4 * computed + 4 * answers * size + bits + 4000


def test_a_batch_arrives_as_it_was() -> None:
    """Without its rows, which follow as micro-batches."""
    batch = replace(build_batch(uneven_episodes()), rows=[])
    message = decode(encode(UpdatePolicy(batch, 7, 2**63 - 1)))
    assert isinstance(message, UpdatePolicy) and (message.step, message.seed) == (7, 2**63 - 1)
    assert message.batch.rows == []
    for name in ("rewards_N", "groups_N", "tokens_N"):
        assert torch.equal(getattr(message.batch, name), getattr(batch, name))


@pytest.mark.parametrize(
    "message",
    [
        ComputeLogits([1, 2, 3]),
        SftStep(12, 2**63 - 1),
        ComputeReference(),
        ComputeValues(),
        GatherWeights(),
        StartEngine(),
        StartEngine((3, 2**31)),
        PublishWeights(7),
        GatherState(Path("/run/checkpoints/.writing_global_step_3_7"), "a1"),
        GatherState(Path("here"), "a2", merged=True, background=True),
        GatherCritic(),
        Shutdown(),
    ],
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
    posted, numbers = [bytearray()] * count, [torch.zeros(0)] * count
    ranks = [Rank(rank, posted, numbers) for rank in range(count)]
    rounds = [
        micro_batches_for(rank, given if rank.rank == 0 else [], MicroBatchLimits(tokens, most)) for rank in ranks
    ]
    assert not any(rounds[1:])
    shares = [share_of(rank, own) for rank, own in zip(ranks, rounds, strict=True)]
    assert len({len(share) for share in shares}) == 1
    numbers[:] = [
        torch.tensor([float(row.episode) for part in share if part.counts for row in part.rows for _ in row.sampled])
        for share in shares
    ]
    expected = [[float(row.episode) for row in part for _ in row.sampled] for part in parts_of(rounds[0])]
    assert [one.tolist() for one in in_order(ranks[0], rounds[0], numbers[0])] == expected
    assert all(in_order(rank, [], numbers[rank.rank]) == [] for rank in ranks[1:])
    counted = [row.episode for share in shares for part in share if part.counts for row in part.rows]
    assert sorted(counted) == [row.episode for row in given]
    assert all(part.rows for share in shares for part in share)
    if len(given) >= count:
        assert all(any(part.counts for part in share) for share in shares) or len(parts_of(rounds[0])) < count


def test_what_a_rank_found_goes_back_to_its_rows() -> None:
    rounds = micro_batches_for(ALONE, rows_of(uneven_episodes()), MicroBatchLimits(50))
    assert all(len(one) == 1 for one in rounds)
    count = sum(len(row.sampled) for part in parts_of(rounds) for row in part)
    numbers_M = torch.arange(count, dtype=torch.float64)
    assert torch.equal(torch.cat(in_order(ALONE, rounds, numbers_M)), numbers_M)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([f"{A}.fsdp_config.fsdp_size=3"], "fsdp_size=3 must divide 2, the number of GPUs; choose another size"),
        (["actor_rollout_ref.ref.fsdp_config.fsdp_size=1"], f"{A}.fsdp_config.fsdp_size=-1 applies to all models"),
        ([f"{A}.{ULYSSES}=3"], f"{ULYSSES}=3 must divide 2, the number of GPUs; choose another size"),
        ([f"actor_rollout_ref.ref.{ULYSSES}=2"], f"has no effect: {A}.{ULYSSES} applies to all models"),
        (["algorithm.adv_estimator=gae", f"critic.{ULYSSES}=2"], f"has no effect: {A}.{ULYSSES} applies to all models"),
        (["trainer.n_gpus_per_node=4", f"{A}.{ULYSSES}=2", f"{A}.fsdp_config.{ULYSSES}=4"], "must be equal; keep one"),
        (
            ["actor_rollout_ref.ref.fsdp_config.reshard_after_forward=false"],
            f"has no effect: {A}.fsdp_config.reshard_after_forward applies to all models",
        ),
        ([f"{A}.ppo_micro_batch_size=4"], "is ambiguous with 2 GPUs; leave it out and set"),
        ([f"{R}.name=vllm", f"{R}.checkpoint_engine.backend=ipc"], "backend=ipc works on one GPU only"),
        ([f"{R}.deterministic=true", f"{R}.name=rally"], "has no effect with actor_rollout_ref.rollout.name=rally"),
        ([f"{R}.tensor_model_parallel_size=2"], "holds the whole model; set actor_rollout_ref.rollout.name=vllm"),
        ([f"{R}.data_parallel_size=2"], "has no effect with actor_rollout_ref.rollout.name=embedded, where every rank"),
        ([f"{R}.checkpoint_engine.backend=delta"], "has no effect with actor_rollout_ref.rollout.name=embedded"),
        ([f"{R}.agent.num_workers=2", f"{R}.skip_rollout=true", f"{R}.name=rally"], "skip_rollout does not work with"),
        ([f"{R}.agent.num_workers=2", f"{R}.skip_rollout=true"], "skip_rollout does not work with"),
        ([*AGENT_WORKERS, f"{R}.agent_loop_config.workers=true"], "workers=true does not work with"),
        ([*AGENT_WORKERS, f"{R}.agent_loop_config.port=8000"], "every loop worker has a gateway of its own"),
        (["trainer.node_heartbeat_timeout=5"], "node_heartbeat_timeout has no effect without Ray"),
        (["trainer.nnodes=2", "trainer.launcher=local"], "launcher=local is for one machine, and trainer.nnodes=2"),
    ],
)
def test_what_is_for_one_gpu_is_one_sentence(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[*TWO, *words])
    [problem] = caught.value.problems
    assert told in problem


def test_agent_workers_of_a_loop_file_are_refused_beside_loop_workers(tmp_path: Path) -> None:
    file = tmp_path / "loops.yaml"
    file.write_text("[{name: mine, _target_: rally.gateway.BlackBoxAgentLoop, command: [python], port: 8000}]")
    words = [*TWO, f"{R}.agent.agent_loop_config_path={file}", f"{R}.agent.num_workers=2"]
    with pytest.raises(LoopError, match=r"option port of the agent loop mine .*num_workers=2"):
        loops_of(load_config(overrides=words))
    assert "mine" in loops_of(load_config(overrides=words[:-1]))


def test_what_several_gpus_take_is_taken() -> None:
    words = [f"{A}.fsdp_config.reshard_after_forward=false", f"{A}.fsdp_config.fsdp_size=2", f"{A}.strategy=fsdp2"]
    words += [f"{R}.deterministic=true", f"{R}.agent.num_workers=2", f"{R}.server.timeout=60"]
    words += ["trainer.val_only=true", "data.val_files=pyproject.toml"]
    replayed = [f"{R}.enable_rollout_routing_replay=true", f"{A}.router_replay.mode=R3"]
    for more in ([], [f"{R}.name=rally"]):
        assert load_config(overrides=[*TWO, *replayed, *more]).rollout.enable_rollout_routing_replay
    assert load_config(overrides=[*TWO, *words]).trainer.n_gpus_per_node == 2


def test_loop_workers_have_heartbeats_without_ray() -> None:
    words = ["trainer.node_heartbeat_timeout=5", f"{R}.agent.num_workers=2"]
    for more in (TWO, [f"{R}.name=rally"]):
        assert load_config(overrides=[*more, *words]).trainer.node_heartbeat_timeout == 5


@pytest.mark.parametrize("place", [f"{A}.", f"{A}.fsdp_config."])
def test_the_keys_of_verl_lay_out_the_ranks(place: str) -> None:
    four = ["trainer.n_gpus_per_node=4", "trainer.device=cpu", "algorithm.adv_estimator=gae"]
    more = [f"{A}.fsdp_config.fsdp_size=1", f"actor_rollout_ref.ref.{ULYSSES}=2", f"critic.{ULYSSES}=1"]
    notes: list[str] = []
    config = load_config(overrides=[*four, f"{place}{ULYSSES}=2", *more], note=notes.append)
    assert layout_of(config) == RankLayout(fsdp_size=1, sequence_size=2) and not notes
    one = load_config(overrides=[f"{place}{ULYSSES}=2"], note=notes.append)
    assert layout_of(one) == RankLayout() and "there is one GPU, so no sequence is divided" in notes[0]
    sft = load_sft_config(overrides=[*four[:2], "engine.fsdp_size=2", f"{ULYSSES}=4"], note=notes.append)
    assert layout_of(sft) == RankLayout(fsdp_size=2, sequence_size=4) and len(notes) == 1


def test_who_starts_no_ranks_says_so() -> None:
    config = load_config(overrides=[*TWO, "actor_rollout_ref.model.path=a/b", "data.train_files=pyproject.toml"])
    for start in (train, evaluate):
        with pytest.raises(RunError, match=r"n_gpus_per_node=2 need `rally train`, `rally eval`, `rally sft`"):
            start(config)
