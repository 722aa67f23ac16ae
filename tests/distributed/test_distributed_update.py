"""Two ranks make the update of one: same weights, same metrics, same saved state."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from pair import CASES, DTYPES, Result, Taught, result_of, taught, together
from torch import Tensor

HERE = Path(__file__).parent


class Pair(NamedTuple):
    """The results of two processes for every case, and for critics."""

    results: dict[str, Result]
    critics: dict[torch.dtype, Taught]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    rendezvous = tmp_path_factory.mktemp("pair") / "rendezvous"
    path = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent / "helpers", HERE)))
    command = [sys.executable, str(HERE / "pair.py"), str(rendezvous)]
    second = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    try:
        ranks = together(0, rendezvous)
        results = {name: result_of(case, ranks) for name, case in CASES.items()}
        yield Pair(results, {dtype: taught(dtype, ranks) for dtype in DTYPES})
        assert second.wait(30) == 0
    finally:
        second.kill()
        second.wait()
        dist.destroy_process_group()


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
    alone, both = result_of(CASES[name]), pair.results[name]
    half = CASES[name].dtype != torch.float32
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


@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_the_bits_of_the_policy(pair: Pair, name: str) -> None:
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
    alone, both, half = taught(dtype), pair.critics[dtype], dtype != torch.float32
    assert_alike(alone.weights, both.weights, 2e-2 if half else 1e-5)
    assert_told_alike(alone.metrics, both.metrics, rel=0.05 if half else 1e-4, abs=2e-2 if half else 1e-5)
    assert torch.allclose(alone.values_M, both.values_M, atol=2e-2 if half else 1e-5)
    assert float(alone.values_M.std()) > 0, "it has learned something"
