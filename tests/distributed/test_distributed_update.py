"""Several ranks make the update of one: same weights, same metrics, same saved state."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from forked import forked_command
from pair import (
    BUCKETS,
    CASES,
    CRITIC_IMAGES,
    DTYPES,
    FOUR,
    FOUR_LAYOUT,
    Case,
    Result,
    Taught,
    compared,
    result_of,
    resumed,
    settings,
    taught,
    together,
)
from small_models import make_model
from torch import Tensor
from train_cases import uneven_episodes

from benchmarks.architectures import small_model
from rally.distributed import worker
from rally.distributed.worker import Worker
from rally.models.sequence_parallel import SequenceParallelError, check_divisible
from rally.train.batch import rows_of
from rally.train.micro_batches import MicroBatchLimits, micro_batches_for
from rally.train.packing import SortedRows
from rally.train.policy import OptimizerSettings, Policy
from rally.train.rank_messages import ComputeLogits
from rally.train.startup_check import Difference

HERE = Path(__file__).parent


class Pair(NamedTuple):
    """The results of several processes for every case, and for critics."""

    results: dict[str, Result]
    critics: dict[torch.dtype, Taught]
    more: Any  # what the start-up check has found, or a state that was read
    seeing: Taught | None = None  # a critic that is shown images
    fused: Taught | None = None  # a critic of fused layers


@contextmanager
def several(folder: Path, world_size: int) -> Iterator[Worker]:
    """Rank 0, with the others in further processes."""
    rendezvous = folder / "rendezvous"
    path = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent / "helpers", HERE)))
    command = forked_command([str(HERE / "pair.py"), str(rendezvous), str(world_size)])
    others = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, start_new_session=True)
    try:
        yield together(0, rendezvous, world_size)
        assert others.wait(60) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(others.pid, signal.SIGKILL)
        others.wait()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    with several(tmp_path_factory.mktemp("pair"), 2) as ranks:
        results = {name: result_of(case, ranks) for name, case in CASES.items()}
        critics = {dtype: taught(dtype, ranks) for dtype in DTYPES}
        seeing = taught(torch.float32, ranks, images=CRITIC_IMAGES)
        fused = taught(torch.float32, ranks, fused=True)
        return Pair(results, critics, compared(ranks._group), seeing, fused)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    with several(tmp_path_factory.mktemp("four"), 4) as ranks:
        results = {name: result_of(case, ranks) for name, case in FOUR.items()}
        critics = {torch.float32: taught(torch.float32, ranks, FOUR_LAYOUT)}
        return Pair(results, critics, resumed(ranks._group))


def assert_alike(alone: dict[str, Tensor], both: dict[str, Tensor], tolerance: float) -> None:
    assert alone.keys() == both.keys()
    for key, weight in alone.items():
        assert torch.allclose(both[key], weight, rtol=0, atol=tolerance), key


def assert_told_alike(alone: list[dict[str, float]], both: list[dict[str, float]], **tolerance: float) -> None:
    for one, two in zip(alone, both, strict=True):
        assert one.keys() == two.keys()
        assert two == pytest.approx(one, **tolerance)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.like])
def test_two_ranks_make_the_update_of_one(pair: Pair, name: str) -> None:
    assert_same_update(CASES[name], pair.results[name])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_make_the_update_of_one(four: Pair, name: str) -> None:
    assert_same_update(FOUR[name], four.results[name])


def assert_same_update(case: Case, both: Result) -> None:
    alone, half = result_of(case), case.dtype != torch.float32
    assert_alike(alone.weights, both.weights, 2e-3 if half else 1e-6)
    assert_told_alike(alone.metrics, both.metrics, rel=0.05 if half else 1e-5, abs=2e-2 if half else 1e-5)
    assert torch.allclose(alone.reference_M, both.reference_M, atol=0.1 if half else 1e-5)
    assert alone.state["optimizer"]["param_groups"] == both.state["optimizer"]["param_groups"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.like])
def test_offloading_on_two_ranks_changes_no_bit(pair: Pair, name: str) -> None:
    plain, offloaded = pair.results[CASES[name].like], pair.results[name]
    assert plain.weights.keys() == offloaded.weights.keys()
    assert all(torch.equal(plain.weights[key], offloaded.weights[key]) for key in plain.weights)
    assert plain.metrics == offloaded.metrics and torch.equal(plain.reference_M, offloaded.reference_M)
    assert_same_shape(plain.state, offloaded.state)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.copied])
def test_every_rank_gets_the_bits_of_the_policy(pair: Pair, name: str) -> None:
    assert len(pair.results[name].copies) == 1 + len(BUCKETS)
    for policy_X, ranks_X in pair.results[name].copies:
        assert len(ranks_X) == 2
        assert all(torch.equal(rank_X, policy_X) for rank_X in ranks_X)


def assert_same_shape(one: Any, two: Any) -> None:
    """The state for a checkpoint is complete, under the same names."""
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for key, value in one.items():
            assert_same_shape(value, two[key])
    elif isinstance(one, Tensor):
        assert one.shape == two.shape and one.dtype == two.dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ranks_teach_a_critic_what_one_teaches(pair: Pair, dtype: torch.dtype) -> None:
    assert_same_critic(dtype, pair.critics[dtype])


def test_a_critic_is_sharded_replicated_and_divided(four: Pair) -> None:
    assert_same_critic(torch.float32, four.critics[torch.float32])


def test_two_ranks_teach_a_critic_that_is_shown_images(pair: Pair) -> None:
    assert pair.seeing is not None
    assert_same_critic(torch.float32, pair.seeing, CRITIC_IMAGES)


def test_two_ranks_teach_a_critic_of_fused_layers(pair: Pair) -> None:
    assert pair.fused is not None
    assert_same_critic(torch.float32, pair.fused)


def assert_same_critic(dtype: torch.dtype, both: Taught, images: str = "") -> None:
    alone, half = taught(dtype, images=images), dtype != torch.float32
    assert_alike(alone.weights, both.weights, 2e-2 if half else 1e-5)
    assert_told_alike(alone.metrics, both.metrics, rel=0.05 if half else 1e-4, abs=2e-2 if half else 1e-5)
    assert torch.allclose(alone.values_M, both.values_M, atol=2e-2 if half else 1e-5)
    assert float(alone.values_M.std()) > 0, "it has learned something"


def test_the_startup_check_compares_the_divided_forward(pair: Pair) -> None:
    right, wrong = pair.more
    assert isinstance(right, Difference) and right.largest < 1e-5
    assert (
        isinstance(wrong, str) and "Qwen2ForCausalLM is not computed correctly: the training forward differs" in wrong
    )


def test_a_checkpoint_of_one_process_is_read_by_shards_and_replicas(four: Pair) -> None:
    whole, (mine, places) = result_of(FOUR["replicas of half precision"]).state, four.more
    assert (
        mine["schedule"] == whole["schedule"]
        and mine["optimizer"]["param_groups"] == whole["optimizer"]["param_groups"]
    )
    assert any(place.size != place.shape for place in places.values()), "it has a part of some"
    for number, (name, place) in enumerate(places.items()):
        assert torch.equal(mine["masters"][name], whole["masters"][name][place.slices])
        for key, value in whole["optimizer"]["state"][number].items():
            expected = value[place.slices] if value.dim() else value
            assert torch.equal(mine["optimizer"]["state"][number][key], expected)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("llama", "ulysses_sequence_parallel_size=4 must divide the 6 attention heads of LlamaForCausalLM"),
        ("qwen3_5_text", "has layers that carry a state from token to token"),
        ("phi3", r"the rotary embedding of Phi3ForCausalLM \(longrope\) depends on the longest position"),
    ],
)
def test_models_whose_sequences_cannot_be_divided_are_refused(name: str, sentence: str) -> None:
    model = make_model(name) if name == "llama" else small_model(name)
    if name == "phi3":
        factors = {"short_factor": [1.0], "long_factor": [2.0], "original_max_position_embeddings": 16}
        model.config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    with pytest.raises(SequenceParallelError, match=sentence):
        check_divisible(model, 4)


def test_the_token_limit_is_that_of_one_rank_of_a_group() -> None:
    rows = rows_of(uneven_episodes())
    tokens = []
    for size in (1, 2):
        ranks = Mock(rank=0, world_size=size, sequence_group=Mock(size=size))
        tokens.append([SortedRows(part).computed for [part] in micro_batches_for(ranks, rows, MicroBatchLimits(25))])
    one, two = tokens
    assert len(two) < len(one) and max(one) == 40, "a single long row"
    assert max(two) == 50


@pytest.mark.parametrize("shares_gpu", [False, True])
def test_a_rank_keeps_its_memory_unless_others_need_it(shares_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its GPU would allocate all activations anew in each update, and rank 0 would wait."""
    emptied: list[torch.device] = []
    monkeypatch.setattr(worker, "empty_cache", emptied.append)
    policy = Policy(make_model(), OptimizerSettings(), 1)
    worker.Executor(policy, settings(), shares_gpu=shares_gpu).execute(ComputeLogits([1, 2, 3]))
    assert emptied == ([policy.device] if shares_gpu else [])
