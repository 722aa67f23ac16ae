"""An unprivileged user gets the same isolation as root, and the weaker level keeps its documented guarantees."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rally.sandbox.inside import landlock

PACKAGE = Path(__file__).parents[2] / "rally"
ORDINARY = 1234

PROGRAM = """
import os, socket
def attempt(name, action):
    try:
        action()
    except OSError as error:
        print(name, "refused")
    else:
        print(name, "ESCAPED")
attempt("host", lambda: open({canary!r}).read())
attempt("system", lambda: open("/usr/x", "w"))
attempt("network", lambda: socket.create_connection(("127.0.0.1", 22), 1))
attempt("vsock", lambda: socket.socket(40, socket.SOCK_STREAM))
attempt("ptrace", lambda: open("/proc/1/mem"))
attempt("stranger", lambda: os.kill({stranger}, 15))
open("own", "w").write("fine")
print(open("own").read())
"""
BOMB = """
import os, time
for _ in range(10):
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        pass
time.sleep(60)
"""
DISK = """
import time
for number in range(40):
    open(str(number), "wb").write(bytes(1 << 20))
time.sleep(60)
"""
SCRIPT = """
import asyncio, json, sys
from rally.sandbox import Limits, Program, Sandbox, SandboxSettings

async def main():
    settings = SandboxSettings(isolation=sys.argv[1], limits=Limits(disk_mb=8))
    async with Sandbox(settings) as sandbox:
        outcomes = [await sandbox.run(Program(code=code, timeout=3.0)) for code in json.load(sys.stdin)]
    results = [(o.isolation, o.last.reason, o.last.stdout, o.last.stderr) for o in outcomes]
    print(json.dumps(results))

asyncio.run(main())
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A copy of the sandbox that other users can read; pytest's own folders and many homes are closed to them."""
    folder = Path(tempfile.mkdtemp(prefix="rally-levels-"))
    for name in ("__init__.py", "module_aliases.py", "types.py", "util", "sandbox"):
        copy = shutil.copytree if (PACKAGE / name).is_dir() else shutil.copy
        target = folder / "rally" / name
        target.parent.mkdir(exist_ok=True)
        copy(PACKAGE / name, target)
    (folder / "canary").write_text("secret")
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    yield folder
    shutil.rmtree(folder)


def as_ordinary_user(folder: Path, level: str, programs: list[str]) -> list[tuple[str, str, str, str]]:
    command, environment = [sys.executable], {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"]}
    if os.geteuid() == 0:
        python = shutil.which("python3", path="/usr/bin")
        version = "import sys; sys.exit(sys.version_info < (3, 11))"
        if python is None or subprocess.run([python, "-c", version]).returncode:
            pytest.skip("no Python 3.11 that an ordinary user could run")
        command = ["setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups", python]
    command += ["-c", SCRIPT, level]
    given = json.dumps(programs)
    ran = subprocess.run(command, input=given, env=environment, cwd="/", capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return [tuple(result) for result in json.loads(ran.stdout)]


@pytest.mark.parametrize("level", ["bubblewrap", "landlock"])
def test_an_ordinary_user_is_protected_too(open_folder: Path, level: str, bubblewrap: None) -> None:
    if level == "landlock" and landlock.abi() < landlock.NEEDED_ABI:
        pytest.skip(f"this kernel has no Landlock {landlock.NEEDED_ABI}")
    stranger = subprocess.Popen(["sleep", "60"], user=ORDINARY if os.geteuid() == 0 else None)
    try:
        spy = PROGRAM.format(canary=str(open_folder / "canary"), stranger=stranger.pid)
        spied, bombed, filled = as_ordinary_user(open_folder, level, [spy, BOMB, DISK])
        assert stranger.poll() is None, "a process of the same user was killed"
    finally:
        stranger.kill()
        stranger.wait()
    assert spied[0] == level
    assert "ESCAPED" not in spied[2] and spied[2].endswith("fine\n"), spied
    assert bombed[1] in ("processes", "timeout"), bombed
    assert filled[1] == "disk" or "No space left" in filled[3], filled
    assert not list(Path(tempfile.gettempdir()).glob("rally-sandbox-*")), "a scratch folder was left behind"
