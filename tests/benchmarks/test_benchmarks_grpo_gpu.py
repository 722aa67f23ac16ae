"""Whole GRPO steps: nothing is measured that was not asked for."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import grpo_gpu
from benchmarks.grpo_gpu import MADE, Ended, Step, SystemFailed, Work, unusable

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
    times = {"timing_s/step": 2.0, "timing_s/gen": 0.5, "timing_s/update_actor": 1.5, "sampled_tokens/mean": 16.0}
    row = {"step": 2, **times, "perf/memory_retries": 0, "perf/max_memory_reserved_gb": 97.5}

    def run(command: list[str], log: Path, minutes: float | None, done: Callable[[], bool]) -> Ended:
        assert not done()
        (tmp_path / "rally-single").mkdir()
        (tmp_path / "rally-single" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        assert not done()
        (tmp_path / "rally-single" / "metrics.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"step": 6}))
        assert not done(), "its line is not whole"
        (tmp_path / "rally-single" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        return Ended("a traceback", "failed (1); the log ends")

    monkeypatch.setattr(grpo_gpu, "_run", run)
    steps = []
    with pytest.raises(SystemFailed, match="the log ends with:\na traceback"):
        for step in grpo_gpu.rally_steps(work, "python"):
            steps.append(step[1:])
    assert steps == [("single", 2, 2.0, 0.5, 1.5, 16.0)], "what was measured before it failed"
    printed = json.loads(capsys.readouterr().out)
    assert printed["last step"] == {"perf/max_memory_reserved_gb": 97.5, "perf/memory_retries": 0}


def test_a_process_is_ended_with_what_it_started(tmp_path: Path) -> None:
    begun, log = time.monotonic(), tmp_path / "log"
    program = "import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', WAIT])"
    program = program.replace("WAIT", repr("import time; print('inside', flush=True); time.sleep(300)"))
    ended = grpo_gpu._run([sys.executable, "-c", program], log, 3 / 60)
    assert ended.problem is not None and "was ended after 0.05 minutes" in ended.problem
    assert ended.text.startswith("begun") and time.monotonic() - begun < 200
    failed = grpo_gpu._run([sys.executable, "-c", "print('no'); raise SystemExit(3)"], log, None)
    assert failed.text == "no\n" and "failed (3)" in str(failed.problem)
    assert grpo_gpu._run([sys.executable, "-c", "print('yes')"], log, None) == ("yes\n", None)
    endless = "import time; print('measured', flush=True); time.sleep(300)"
    assert grpo_gpu._run([sys.executable, "-c", endless], log, None, lambda: bool(log.read_text())) == (
        "measured\n",
        None,
    )


def test_a_system_that_fails_costs_no_other_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def steps(system: str, *, fails: bool) -> Any:
        def made(work: Work, python: str) -> Iterator[Step]:
            yield Step(system, "single", 1, 9.0, 4.0, 5.0, 16.0)
            if fails:
                raise SystemFailed(f"{system} failed (1)")
            yield Step(system, "single", 2, 6.0, 2.0, 4.0, 16.0)

        return made

    systems = {"rally": steps("Rally", fails=True), "trl": steps("TRL", fails=False)}
    monkeypatch.setattr(grpo_gpu, "SYSTEMS", systems)
    monkeypatch.setattr(grpo_gpu, "make_work", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["grpo_gpu", str(tmp_path / "w"), "--tokenizer", "T", "--peer", "trl=P", "--tiny"])
    with pytest.raises(SystemExit, match=r"not all steps were made by rally \(single\)"):
        grpo_gpu.main()
    printed = capsys.readouterr()
    assert "Rally failed (1)" in printed.err
    assert [json.loads(line)["system"] for line in printed.out.splitlines()[:3]] == ["Rally", "TRL", "TRL"]
    assert "TRL    │ 6.00" in printed.out and "│ Rally" not in printed.out
