"""Two ranks make the update that one makes: the same weights, the same numbers told, the same state kept."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pair import CASES, Result, result_of, together

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Result]]:
    """What two processes make of every case."""
    meeting = tmp_path_factory.mktemp("pair") / "meeting"
    path = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent, HERE, HERE.parent / "train")))
    second = subprocess.Popen(
        [sys.executable, str(HERE / "pair.py"), str(meeting)], env={**os.environ, "PYTHONPATH": path}
    )
    try:
        run = together(0, meeting)
        yield {name: run(case) for name, case in CASES.items()}
        assert second.wait(30) == 0
    finally:
        second.kill()
        second.wait()
        dist.destroy_process_group()


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_make_the_update_of_one(pair: dict[str, Result], name: str) -> None:
    alone, both = result_of(CASES[name]), pair[name]
    half = CASES[name].dtype != torch.float32
    assert alone.weights.keys() == both.weights.keys()
    for key, weight in alone.weights.items():
        assert torch.allclose(both.weights[key], weight, rtol=0, atol=2e-3 if half else 1e-6), key
    for one, two in zip(alone.metrics, both.metrics, strict=True):
        assert one.keys() == two.keys()
        assert two == pytest.approx(one, rel=0.05 if half else 1e-5, abs=2e-2 if half else 1e-5)
    assert torch.allclose(alone.reference_M, both.reference_M, atol=0.1 if half else 1e-5)
