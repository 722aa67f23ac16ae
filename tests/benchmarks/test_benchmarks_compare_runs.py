"""Runs are compared by the number of sampled episodes, whatever the size of their steps."""

from pathlib import Path

import pytest

from benchmarks import compare_runs
from rally.track import RunFolder

KEY = "val-core/x/acc/mean@1"


def write_run(folder: Path, episodes: int, scores: list[float], *, looked: bool = True) -> None:
    folder.mkdir()
    run = RunFolder(folder)
    if looked:
        run.log_metrics(0, {KEY: 0.25})
    for step, score in enumerate(scores, start=1):
        metrics = {"episodes/count": episodes, "reward/score/mean": score, "timing_s/step": 30.0}
        metrics["train/num_gen_batches"] = episodes / 100  # `episodes/count` has all of them already
        run.log_metrics(step, metrics | ({KEY: score} if step % 2 == 0 else {}))


def test_runs_are_held_side_by_side_at_equal_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "plain", 100, [0.3, 0.4, 0.5, 0.6])
    write_run(tmp_path / "dapo", 200, [0.35, 0.7], looked=False)
    picture = tmp_path / "out.png"
    compare_runs.main([f"plain={tmp_path / 'plain'}", str(tmp_path / "dapo"), "--out", str(picture)])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert "400 episodes" in lines[0][2], "both sampled 400, dapo in two steps"
    assert lines[-2] == ["plain", "25.0% (at 0)", "60.0% (at 400)", "60.0% (at 400)", "2.0"]
    assert lines[-1] == ["dapo", "", "70.0% (at 400)", "70.0% (at 400)", "1.0"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_has_not_trained_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder(tmp_path).log_metrics(0, {KEY: 0.1})
    with pytest.raises(SystemExit):
        compare_runs.main([str(tmp_path)])
    assert "has no training step yet" in capsys.readouterr().err
