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
    assert len(re.findall(r"4 x 24", told)) == 5 and "one micro-batch of 192" in told
    computed = [int(n) for n in re.findall(r"(\d+) computed", told)]
    assert computed == [3 * 4 * 23, *[3 * (16 + 4 * 7)] * 2]
    largest = [float(x) for x in re.findall(r"largest ([\d.e+-]+),", told)]
    assert len(largest) == 2 and max(largest) < (1e-5 if "Rally float32" in told else 0.1)


def test_a_size_that_cannot_be_read_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    from benchmarks import train_step

    for wrong in ("128x8", "4x0:16+8", "four"):
        monkeypatch.setattr("sys.argv", ["train_step", "--tiny", "--grpo", wrong])
        with pytest.raises(SystemExit):
            train_step.main()
        assert f"--grpo {wrong} is no size" in capsys.readouterr().err
