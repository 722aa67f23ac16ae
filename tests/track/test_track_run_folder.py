"""The run folder keeps everything, survives a kill and counts nothing twice."""

import json
import logging
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from track_episodes import NASTY, episodes, make_episode

from rally import redact
from rally.track import MetricsRow, RunFolder
from rally.types import Episode, RallyError, StopReason


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run").create()


def test_metrics_come_back_exactly(folder: RunFolder) -> None:
    folder.log_metrics(1, {"a/b": 0.1 + 0.2, "c": 3})
    folder.log_metrics(2, {"a/b": 1e-300})
    assert folder.read_metrics() == [MetricsRow(1, {"a/b": 0.1 + 0.2, "c": 3.0}), MetricsRow(2, {"a/b": 1e-300})]


def test_two_lines_of_a_step_are_one_row_and_the_later_value_counts(folder: RunFolder) -> None:
    folder.log_metrics(1, {"a": 1, "b": 1})
    folder.log_metrics(0, {"val": 5})
    folder.log_metrics(1, {"b": 2})
    assert folder.read_metrics() == [MetricsRow(0, {"val": 5}), MetricsRow(1, {"a": 1, "b": 2})]


def test_nan_is_valid_json_counted_and_read_as_nan(folder: RunFolder) -> None:
    folder.log_metrics(1, {"loss": math.nan, "norm": math.inf, "ok": 1.0})

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    line = json.loads(folder.metrics_path.read_text(), parse_constant=refuse)
    assert line == {"step": 1, "loss": None, "norm": None, "ok": 1.0, "track/nonfinite": 2}
    metrics = folder.read_metrics()[0].metrics
    assert math.isnan(metrics["loss"]) and metrics["ok"] == 1.0


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RallyError, match=r"there is no run folder at .*nowhere"):
        RunFolder(tmp_path / "nowhere").read_metrics()


def test_a_torn_last_line_is_ignored_then_repaired_with_a_warning(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.log_metrics(1, {"a": 1})
    with folder.metrics_path.open("a") as file:
        file.write('{"step": 2, "a": 0.12')
    assert [row.step for row in folder.read_metrics()] == [1]
    with caplog.at_level(logging.WARNING):
        RunFolder(folder.path).create()
    assert "torn last line" in caplog.text
    folder.log_metrics(2, {"a": 2})
    assert folder.read_metrics() == [MetricsRow(1, {"a": 1}), MetricsRow(2, {"a": 2})]


def test_a_line_that_only_lost_its_newline_is_kept(folder: RunFolder) -> None:
    folder.metrics_path.write_text('{"step": 1, "a": 1}')
    folder.create()
    folder.log_metrics(2, {"a": 2})
    assert [row.step for row in folder.read_metrics()] == [1, 2]


def test_a_spoiled_line_in_the_middle_is_named(folder: RunFolder) -> None:
    folder.metrics_path.write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
    with pytest.raises(RallyError, match="line 2 of"):
        folder.read_metrics()


def test_metrics_of_a_killed_process_are_all_there(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from rally.track import RunFolder; f = RunFolder(sys.argv[1]).create()\n"
        "for step in range(1, 6): f.log_metrics(step, {'a': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, cwd=Path(__file__).parents[2])
    assert [row.step for row in RunFolder(tmp_path).read_metrics()] == [1, 2, 3, 4, 5]


def test_episodes_come_back_exactly_by_step_and_kind(folder: RunFolder) -> None:
    train = [make_episode("a", extra={"text": NASTY}), make_episode("b\u2028c\n")]
    folder.log_episodes(1, train)
    folder.log_episodes(1, [make_episode("v")], validate=True)
    assert (folder.path / "episodes" / "train_000001.jsonl").exists()
    assert folder.read_episodes(1) == train
    assert [e.id for e in folder.read_episodes(1, validate=True)] == ["v"]


def test_asking_for_episodes_that_are_not_there_says_which_are(folder: RunFolder) -> None:
    folder.log_episodes(3, [make_episode()])
    with pytest.raises(RallyError, match=r"no training episodes of step 9; the steps it has are: 3"):
        folder.read_episodes(9)


def test_a_failure_while_writing_leaves_the_old_episodes(folder: RunFolder) -> None:
    folder.log_episodes(1, [make_episode("old")])
    with pytest.raises(AttributeError):
        folder.log_episodes(1, [make_episode("new"), None])  # type: ignore[list-item]
    assert [e.id for e in folder.read_episodes(1)] == ["old"]
    folder.create()
    assert [p.name for p in folder.episodes_path.iterdir()] == ["train_000001.jsonl"]


def test_rewind_sets_later_steps_aside_and_loses_nothing(folder: RunFolder) -> None:
    for step in (1, 2, 3):
        folder.log_metrics(step, {"a": step + 0.1})
        folder.log_episodes(step, [make_episode(f"e{step}")])
    folder.log_episodes(3, [make_episode("v3")], validate=True)

    aside = folder.rewind(1)

    assert [row.step for row in folder.read_metrics()] == [1]
    assert folder.episode_steps() == [1] and folder.episode_steps(validate=True) == []
    assert aside is not None and aside.name == "rewound-1"
    kept = RunFolder(aside)
    assert kept.read_metrics() == [MetricsRow(2, {"a": 2.1}), MetricsRow(3, {"a": 3.1})]
    assert kept.episode_steps() == [2, 3]
    assert [e.id for e in kept.read_episodes(3, validate=True)] == ["v3"]


def test_a_second_rewind_gets_its_own_folder_and_an_empty_one_none(folder: RunFolder) -> None:
    assert folder.rewind(0) is None
    for expected in ("rewound-1", "rewound-2"):
        folder.log_metrics(5, {"a": 1})
        aside = folder.rewind(4)
        assert aside is not None and aside.name == expected
    assert folder.rewind(4) is None


def test_config_and_versions_are_kept(folder: RunFolder) -> None:
    folder.save_config("seed: 1\n")
    folder.save_versions()
    versions = json.loads((folder.path / "versions.json").read_text())
    assert (folder.path / "config.yaml").read_text() == "seed: 1\n"
    assert versions["python"].startswith("3.") and versions["torch"] and versions["rally"]


def test_writing_versions_imports_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys; from rally.track import RunFolder; RunFolder(sys.argv[1]).create().save_versions()\n"
        "sys.exit(', '.join({'torch', 'transformers', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "versions.json").exists()


def written_with(folder: RunFolder, *secrets: str, **changes: Any) -> Episode:
    """An episode read back after it was written with these secrets known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redact, "_known", {})
        redact.learn_tree([{"password": secret} for secret in secrets])
        folder.log_episodes(1, [make_episode("t000001-00000-0", **changes)])
    [episode] = folder.read_episodes(1)
    return episode


def test_a_secret_that_is_also_a_number_or_a_field_or_a_reason_is_hidden_in_texts_alone(folder: RunFolder) -> None:
    segment = replace(make_episode().segments[0], prompt_ids=(123456, 1234567))
    changes = {"segments": (segment,), "seed": 9123456, "stop_reason": StopReason.LENGTH, "extra": {"reward": 0.123456}}
    told = {"text": "pin 123456 of length", "odd": "123456 \ud800", "big": 0x123456 << 20_000, "bad": math.inf}
    secrets = ("123456", "length", "reward", "assistant", "000001", "segments")
    episode = written_with(folder, *secrets, **changes, reward_info=told)
    hidden = {"text": "pin *** of ***", "odd": "*** \ud800"}
    assert episode == make_episode("t000001-00000-0", **changes, reward_info=told | hidden)


@settings(max_examples=30)
@given(episodes())
def test_an_episode_is_read_back_whatever_the_secrets_are(episode: Episode) -> None:
    with TemporaryDirectory() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(redact, "_known", dict.fromkeys("0123456789abcdefghijklmnopqrstuvwxyz", "*"))
        folder = RunFolder(path).create()
        folder.log_episodes(1, [episode])
        [read] = folder.read_episodes(1)
    names = ("id", "group", "segments", "reward", "seed", "stop_reason")
    assert [getattr(read, name) for name in names] == [getattr(episode, name) for name in names]


def test_a_configuration_with_a_number_that_is_a_secret_can_be_loaded(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redact, "_known", {"123456": "***"})
    folder.save_config("trainer:\n  seed: 123456\n  note: my 123456\n")
    assert yaml.safe_load(folder.config_path.read_text()) == {"trainer": {"seed": 123456, "note": "my ***"}}
