"""A run that fails costs no other its results."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import async_training
from benchmarks.async_training import Measured


def test_a_run_that_fails_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(out: Path, model: Path, data: Path, mode: str, *others: Any) -> Measured:
        if mode == "sync":
            raise RuntimeError("no GPU is left")
        return Measured(20.0 if mode == "async" else 30.0, 0.1, 0.5, 1.0, 1.0, 0.5)

    monkeypatch.setattr(async_training, "measure", measure)
    monkeypatch.setattr(async_training, "demo_models", lambda *_: SimpleNamespace(start=tmp_path, data=tmp_path))
    chosen = ["--out", str(tmp_path), "--seeds", "0", "--modes", "sync", "async", "lag"]
    monkeypatch.setattr(sys, "argv", ["async_training", *chosen])
    async_training.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("sync") and lines[0].endswith("failed: RuntimeError: no GPU is left")
    assert lines[-1].startswith("lag") and "1.50 times the samples/s of async" in lines[-1]
    monkeypatch.setattr(sys, "argv", ["async_training", "--out", str(tmp_path), "--modes", "sync"])
    with pytest.raises(SystemExit, match="no run was measured"):
        async_training.main()
