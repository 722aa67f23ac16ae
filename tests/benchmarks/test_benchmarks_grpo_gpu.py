"""Whole GRPO steps: nothing is measured that was not asked for."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import grpo_gpu
from benchmarks.grpo_gpu import MADE, unusable

SMALL: dict[str, Any] = {"tiny": True, "tokenizer": "/tokenizer"}


def test_a_folder_of_other_sizes_or_with_a_run_is_refused(tmp_path: Path) -> None:
    assert unusable(tmp_path / "new", ["single", "tools"], SMALL, 3) is None
    assert "ask for at least 2" in str(unusable(tmp_path, ["single"], SMALL, 1))
    (tmp_path / MADE).write_text(json.dumps(SMALL))
    assert unusable(tmp_path, ["single"], SMALL, 3) is None
    assert "another --tiny" in str(unusable(tmp_path, ["single"], {**SMALL, "tiny": False}, 3))
    (tmp_path / "rally-single").mkdir()
    assert unusable(tmp_path, ["tools"], SMALL, 3) is None
    assert "would be resumed" in str(unusable(tmp_path, ["single"], SMALL, 3))


def test_memory_is_printed_beside_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = grpo_gpu.Work(folder=tmp_path, task="single", model=tmp_path, rows=tmp_path)
    steps = {"timing_s/step": 2.0, "timing_s/gen": 0.5, "timing_s/update_actor": 1.5, "sampled_tokens/mean": 16.0}
    row = {"step": 2, **steps, "perf/memory_retries": 0, "perf/max_memory_reserved_gb": 97.5}

    def run(command: list[str], log: Path) -> str:
        (tmp_path / "rally-single").mkdir()
        (tmp_path / "rally-single" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        return ""

    monkeypatch.setattr(grpo_gpu, "_run", run)
    assert [step[1:] for step in grpo_gpu.rally_steps(work, "python")] == [("single", 2, 2.0, 0.5, 1.5, 16.0)]
    printed = json.loads(capsys.readouterr().out)
    assert printed["last step"] == {"perf/max_memory_reserved_gb": 97.5, "perf/memory_retries": 0}
