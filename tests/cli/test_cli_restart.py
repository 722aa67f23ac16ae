"""`--restart`: what is run again and how often, and that the run does not outlive its supervisor."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rally.cli import restart
from rally.cli.restart import run_with_restarts
from rally.types import LOST_EXIT_CODE


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "PAUSE_SECONDS", 0.0)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def run(tmp_path: Path, program: str) -> tuple[int, int, list[str]]:
    """The exit code, how often the program ran, and the notes."""
    notes: list[str] = []
    counted = f"n = open({str(tmp_path / 'runs')!r}, 'a+'); n.write('x'); n.flush(); n.seek(0); runs = len(n.read())\n"
    command = [sys.executable, "-c", f"import os, signal, sys\n{counted}{program}"]
    code = run_with_restarts(command, tmp_path / "checkpoints", notes.append)
    return code, len((tmp_path / "runs").read_text()), notes


def test_a_run_that_is_always_lost_is_given_up(tmp_path: Path) -> None:
    code, runs, notes = run(tmp_path, f"sys.exit({LOST_EXIT_CODE})")
    assert (code, runs) == (LOST_EXIT_CODE, 1 + restart.MAX_RESTARTS)
    assert notes[0] == "starting the run again from the beginning, because there is no checkpoint (restart 1)"
    assert notes[-1] == "the run was lost 4 times without a new checkpoint; not starting it again"


def test_progress_allows_more_restarts_and_a_kill_is_a_loss(tmp_path: Path) -> None:
    progress = f"os.makedirs(f'{tmp_path}/checkpoints/global_step_{{runs}}', exist_ok=True)\n"
    code, runs, notes = run(tmp_path, f"{progress}if runs < 8: os.kill(os.getpid(), signal.SIGKILL)")
    assert (code, runs) == (0, 8) and notes[-1] == "starting the run again from step 7 (restart 1)"


def test_an_abort_is_a_loss(tmp_path: Path) -> None:
    """torch aborts a process whose NCCL operation fails because another rank is gone."""
    code, runs, notes = run(tmp_path, "if runs < 2: os.abort()")
    assert (code, runs) == (0, 2) and "SIGABRT" in notes[0] and "(restart 1)" in notes[1]


def test_a_run_goes_on_from_its_own_checkpoint_wherever_it_first_began(tmp_path: Path) -> None:
    """`resume_mode=resume_path` would go back to the same old checkpoint after every loss."""
    given = tmp_path / "given"
    told = f"open({str(given)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
    saves = f"if runs > 1: os.makedirs(f'{tmp_path}/checkpoints/global_step_{{runs + 5}}', exist_ok=True)\n"
    (tmp_path / "checkpoints/global_step_3").mkdir(parents=True)  # of an earlier run
    code, runs, _ = run(tmp_path, f"{told}{saves}sys.exit({LOST_EXIT_CODE} if runs < 4 else 0)")
    assert (code, runs) == (0, 4)
    own = "trainer.resume_mode=auto trainer.resume_from_path=null"
    assert given.read_text().splitlines() == ["", "", own, own], "it had written none when it was lost first"


@pytest.mark.parametrize(("program", "expected"), [("sys.exit(2)", 2), ("os.kill(os.getpid(), signal.SIGSEGV)", 139)])
def test_an_error_is_no_loss(tmp_path: Path, program: str, expected: int) -> None:
    assert run(tmp_path, program) == (expected, 1, [])


@pytest.mark.drill("reliability", "`kill -9` of `rally train --restart`", "The run that it watches is asked to stop")
def test_the_run_ends_with_its_supervisor(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    sleeper = f"import os, time; open({str(pid_file)!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(600)"
    supervisor = (
        "import sys\nfrom pathlib import Path\nfrom rally.cli.restart import run_with_restarts\n"
        f"run_with_restarts([sys.executable, '-c', {sleeper!r}], Path('nowhere'), print)"
    )
    started = subprocess.Popen([sys.executable, "-c", supervisor])
    until(lambda: pid_file.exists() and pid_file.read_text().endswith(" "))
    started.send_signal(signal.SIGKILL)
    started.wait()
    pid = int(pid_file.read_text())
    until(lambda: not Path(f"/proc/{pid}").exists())
