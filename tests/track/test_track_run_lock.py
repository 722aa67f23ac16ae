"""Two runs never write to one folder: the error names the owner, and a kill leaves no stale lock."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rally.track.run_folder.folder import FolderInUse, sole_writer

HOLDER = """
import sys
from pathlib import Path
from rally.track.run_folder.folder import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "mine"


@pytest.fixture
def other(run: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_second_run_is_told_who_writes_to_the_folder(run: Path, other: subprocess.Popen[bytes]) -> None:
    told = f"is being written by another run .process {other.pid} on .*experiment_name"
    with pytest.raises(FolderInUse, match=told), sole_writer(run):
        pytest.fail("both would write")


def test_a_killed_run_can_be_resumed_at_once(run: Path, other: subprocess.Popen[bytes]) -> None:
    other.kill()
    other.wait()
    with sole_writer(run):
        pass


def test_one_process_may_train_in_a_folder_twice(run: Path) -> None:
    for _ in range(2):
        with sole_writer(run):
            assert run.is_dir()
