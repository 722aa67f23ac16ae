"""The training-step benchmark completes on a small shape, and its correctness check passes."""

import re
from pathlib import Path

import pytest


def test_the_benchmark_runs_on_a_small_shape(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    from benchmarks import train_step

    monkeypatch.setattr("sys.argv", ["train_step", "--tiny"])
    train_step.main()
    told = capsys.readouterr().out
    assert "out of memory" not in told
    assert len(re.findall(r"4 x 24", told)) == 4 and "one micro-batch of 192" in told
    computed = [int(n) for n in re.findall(r"(\d+) computed", told)]
    assert computed == [3 * 4 * 23, 3 * (16 + 4 * 7)]
    largest = [float(x) for x in re.findall(r"largest ([\d.e+-]+),", told)]
    assert len(largest) == 2 and max(largest) < (1e-5 if "Rally float32" in told else 0.1)
