"""Locks are exclusive, end with their holder, and leave no file behind where they are temporary."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rally.util.locks import LockFile, hold

# Takes the lock, forks a child that stays, and prints the child's pid.
HOLDER = """
import os, sys, time
from pathlib import Path
from rally.util.locks import LockFile
lock = LockFile(Path(sys.argv[1]), per_process=sys.argv[2] == "process")
assert lock.acquire()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""


def test_a_second_lock_file_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with LockFile(path) as second:
        with LockFile(path) as first:
            assert first.acquire() and not second.acquire() and not second.acquire(timeout=0.2)
        assert second.acquire(timeout=5.0)


def test_the_holder_may_leave_a_note(tmp_path: Path) -> None:
    with LockFile(tmp_path / "lock") as first, LockFile(tmp_path / "lock") as second:
        first.write("a longer note")
        first.write("process 7")
        assert second.read() == "process 7"


@pytest.mark.parametrize(("owner", "free"), [("process", True), ("file", False)])
def test_only_a_lock_of_the_process_ends_with_it_while_a_child_lives(tmp_path: Path, owner: str, free: bool) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, str(path), owner]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with LockFile(path, per_process=owner == "process") as other:
                assert not other.acquire()
                holder.kill()
                holder.wait()
                assert other.acquire() is free
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_temporary_lock_is_removed_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = hold(path)
    assert lock is not None and hold(path) is None
    lock.release()
    assert not path.exists()
    again = hold(path)
    assert again is not None
    again.release()


def test_a_file_left_by_a_killed_program_can_be_locked(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    lock = hold(tmp_path / "lock")
    assert lock is not None
    lock.release()
