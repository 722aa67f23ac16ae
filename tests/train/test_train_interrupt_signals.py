"""The first Ctrl-C ends and saves the step and prints the command that continues. The second stops at once."""

import fcntl
import gc
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import yaml
from train_cases import run_tree

from rally.cli.main import main
from rally.track import RunFolder
from rally.train import interrupt_signals
from rally.train.interrupt_signals import EXIT_CODE, Interrupt, resume_command

FORK = multiprocessing.get_context("fork")  # keeps the modules that are imported already
STEPS, EPISODES = 3, 12  # a step's episodes: 3 prompts x 4
PATIENCE = 120.0

REWARD = """
import pathlib, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    here = pathlib.Path(__file__).parent
    with (here / "scored").open("a") as file:
        file.write(".")
    while (here / "hold").exists() and (here / "scored").stat().st_size > {held}:
        time.sleep(0.02)
    return (sum(map(ord, solution_str)) % 7) / 7
"""


def command_line(output: Path | int, words: list[str], not_theirs: int | None = None) -> None:
    """Does what a shell does: a process group of its own, both outputs in one file, pipe or terminal, the arguments."""
    os.setsid()
    if not_theirs is not None:
        os.close(not_theirs)
    if isinstance(output, int) and os.isatty(output):
        fcntl.ioctl(output, termios.TIOCSCTTY, 0)
    with open(output, "w", buffering=1, encoding="utf-8") as sys.stdout:
        os.dup2(sys.stdout.fileno(), 2)
        sys.stderr, sys.argv = sys.stdout, ["rally", *words]
        main()


class Run:
    """`rally train` in its own process group, held in the middle of its first step until it is released."""

    def __init__(
        self, home: Path, folder: Path, *overrides: str, output: int | None = None, not_theirs: int | None = None
    ) -> None:
        self.output, self.not_theirs = output, not_theirs
        self.out, self.log, self.hold = folder / "run", folder / "log", folder / "hold"
        self.scored, held = folder / "scored", EPISODES // 2
        (folder / "reward.py").write_text(REWARD.format(held=held), encoding="utf-8")
        tree = run_tree(home, self.out)
        tree["data"].pop("val_files")
        tree["custom_reward_function"] = {"path": str(folder / "reward.py")}
        tree["trainer"] |= {"total_training_steps": STEPS, "save_freq": -1}
        (folder / "given.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        self.hold.touch()
        self.process = self.start("train", str(folder / "given.yaml"), *overrides)
        self.until(lambda: self.scored.exists() and self.scored.stat().st_size > held)

    def start(self, *words: str) -> BaseProcess:
        process = FORK.Process(target=command_line, args=(self.output or self.log, list(words), self.not_theirs))
        gc.collect()  # garbage of other tests may own threads; collecting it in a fork would abort
        process.start()
        return process

    def until(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not there():
            assert self.process.is_alive() and time.monotonic() < deadline, self.told
            time.sleep(0.02)

    def send(self, number: signal.Signals, expected: str) -> None:
        """Signals the whole group, as a terminal does, and waits until the signal is handled."""
        os.killpg(self.pid, number)
        self.until(lambda: expected in self.told)

    def wait(self) -> int | None:
        self.process.join(PATIENCE)
        return self.process.exitcode

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def told(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def end(self) -> None:
        self.hold.unlink(missing_ok=True)
        if self.process.is_alive():
            os.killpg(self.pid, signal.SIGKILL)
        self.process.join()


@pytest.fixture
def run(home: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Run:
    made = Run(home, tmp_path, *getattr(request, "param", ()))
    request.addfinalizer(made.end)
    return made


@pytest.mark.parametrize("run", [("trainer.resume_mode=disable",)], indirect=True)
def test_once_the_step_ends_and_is_saved_and_the_printed_command_goes_on(run: Run) -> None:
    run.send(signal.SIGINT, "interrupt again to stop now")
    assert run.process.is_alive(), "the step is still under way"
    run.hold.unlink()
    assert run.wait() == EXIT_CODE
    folder = RunFolder(run.out)
    [row] = folder.read_metrics()
    assert row.step == 1 and row.metrics["failures/reward"] == 0, "who scores is not reached by Ctrl-C"
    words = "stopped after step 1 of 3, which is saved; to resume: "
    [command] = [line.partition(words)[2] for line in run.told.splitlines() if words in line]
    assert command == f"rally train {run.out / 'config.yaml'} trainer.resume_mode=auto"

    run.process = run.start(*shlex.split(command)[1:])
    assert run.wait() == 0, run.told
    assert "global_step_1, step 1" in run.told and "Run summary" in run.told
    assert [row.step for row in folder.read_metrics()] == [1, 2, 3], "each step exactly once"


def test_twice_it_stops_at_once(run: Run) -> None:
    run.send(signal.SIGTERM, "interrupt again to stop now")
    began = time.monotonic()
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait() == EXIT_CODE
    assert time.monotonic() - began < PATIENCE and "stopping now" in run.told and "Traceback" not in run.told
    assert RunFolder(run.out).read_metrics() == [] and not list((run.out / "checkpoints").glob("*"))


def test_signals_are_left_as_they_were() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    interrupt = Interrupt()
    with interrupt.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.requested
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_configuration_without_its_secrets_cannot_go_on_by_itself() -> None:
    assert resume_command("train", Path("a b/config.yaml"), "x: 1", "auto") == "rally train 'a b/config.yaml'"
    assert resume_command("sft", Path("c.yaml"), "x: 1", "auto") == "rally sft c.yaml"
    assert resume_command("train", Path("c.yaml"), "key: '***'", "auto") == "the same command again"


def test_the_step_is_saved_although_ctrl_c_also_ended_who_read_the_output(
    home: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with subprocess.Popen(["tee"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as tee:
        assert tee.stdin is not None
        run = Run(home, tmp_path, output=tee.stdin.fileno())
        request.addfinalizer(run.end)
        tee.kill()
    os.killpg(run.pid, signal.SIGINT)
    time.sleep(0.2)
    run.hold.unlink()
    assert run.wait() == EXIT_CODE
    last = RunFolder(run.out).read_metrics()[-1].step
    assert last < STEPS and (run.out / "checkpoints" / f"global_step_{last}").is_dir()


@pytest.mark.drill("reliability", "The terminal of a run closes (SIGHUP)", "The step is finished and saved")
def test_the_step_is_saved_when_the_terminal_closes(home: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    terminal, theirs = os.openpty()
    os.set_blocking(terminal, False)
    closing = threading.Event()

    def show() -> None:
        """Read what the run prints, as a terminal does: it would wait otherwise."""
        while not closing.wait(0.01):
            with suppress(OSError):
                os.read(terminal, 65536)

    with ThreadPoolExecutor(1) as window:
        showing = window.submit(show)
        run = Run(home, tmp_path, output=theirs, not_theirs=terminal)
        request.addfinalizer(run.end)
        os.close(theirs)
        closing.set()
        showing.result()
    os.close(terminal)  # the kernel sends SIGHUP
    time.sleep(0.2)
    os.kill(run.pid, signal.SIGHUP)  # and so may the shell
    time.sleep(0.2)
    assert run.process.is_alive(), "the step is still under way"
    run.hold.unlink()
    assert run.wait() == EXIT_CODE
    [row] = RunFolder(run.out).read_metrics()
    assert row.step == 1 and (run.out / "checkpoints" / "global_step_1").is_dir()


def test_nohup_is_respected() -> None:
    interrupt, before = Interrupt(), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupt.listening():
            signal.raise_signal(signal.SIGHUP)
            assert not interrupt.requested and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_hangup_does_not_stop_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt_signals, "_leave", lambda: None)  # which would end this process after some seconds
    interrupt = Interrupt()
    with interrupt.listening():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
