"""The export process of a run: it starts first, follows new records, and has sent everything when the run ends."""

import io
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rally.track import RunConsole, RunFolder, build_sinks
from rally.track.export import ExportSettings, export_process
from rally.types import RallyError


def paper() -> tuple[RunConsole, io.StringIO]:
    out = io.StringIO()
    return RunConsole(Console(file=out, width=500)), out


def steps_told(folder: RunFolder, name: str) -> list[int]:
    return [e.step for e in EventAccumulator(str(folder.path / "tensorboard"), {"scalars": 0}).Reload().Scalars(name)]


def test_everything_arrives_although_the_run_is_interrupted(tmp_path: Path) -> None:
    console, out = paper()
    folder = RunFolder(tmp_path / "run with spaces").create()
    settings = ExportSettings(folder=str(folder.path), project="p", name="n", trackers=("tensorboard",))
    with pytest.raises(KeyboardInterrupt), build_sinks(["tensorboard"], folder, console, 500, settings) as sinks:
        for step in range(1, 301):
            sinks.log(step, {"a": step / 7, "b@2": float("nan")})
        raise KeyboardInterrupt
    assert steps_told(folder, "a") == list(range(1, 301))
    assert len(folder.read_metrics()) == 300  # in the run folder although `file` was not named
    assert f"tensorboard: tensorboard --logdir {folder.path / 'tensorboard'}" in out.getvalue()
    assert "warning" not in out.getvalue()


def test_a_tracker_that_cannot_be_opened_stops_the_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "file" / "below"))
    folder = RunFolder(tmp_path / "run").create()
    settings = ExportSettings(folder=str(folder.path), project="p", name="n", trackers=("tensorboard",))
    sinks = build_sinks(["tensorboard"], folder, paper()[0], 3, settings)
    with pytest.raises(RallyError, match=r"^tensorboard cannot be opened \(NotADirectoryError: .*; fix that"):
        sinks.__enter__()


def test_a_process_that_never_gets_ready_stops_the_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path).create()
    settings = ExportSettings(folder=str(folder.path), project="p", name="n", trackers=("tensorboard",))
    (tmp_path / "tracking").mkdir()
    (tmp_path / "tracking" / "tensorboard.json").write_text("{")
    with pytest.raises(RallyError, match=r"cannot be opened: the export process ended; see .*tracking/log\.txt"):
        build_sinks(["tensorboard"], folder, paper()[0], 3, settings).__enter__()
    assert "JSONDecodeError" in (tmp_path / "tracking" / "log.txt").read_text()
    monkeypatch.setattr(export_process, "OPENING_SECONDS", 0.0)
    with pytest.raises(RallyError, match=r"they did not answer within 0 s"):
        build_sinks(["tensorboard"], folder, paper()[0], 3, settings).__enter__()


def test_a_process_that_dies_is_told_of_once_and_training_goes_on(tmp_path: Path) -> None:
    console, out = paper()
    folder = RunFolder(tmp_path).create()
    settings = ExportSettings(folder=str(folder.path), project="p", name="n", trackers=("tensorboard",))
    with build_sinks(["tensorboard"], folder, console, 9, settings) as sinks:
        assert sinks.exporter is not None
        sinks.exporter._process.kill()
        sinks.exporter._process.wait()
        for step in range(3):
            sinks.log(step, {"a": 1.0})
    assert out.getvalue().count("nothing more is sent to trackers") == 1
    assert len(folder.read_metrics()) == 3
