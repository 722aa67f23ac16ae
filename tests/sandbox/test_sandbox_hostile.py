"""Nothing a program does reaches the host, outlives its run or keeps the sandbox from answering the next one."""

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hostile_programs import PROGRAMS, Hostile

from rally.sandbox import Limits, Outcome, Program, Sandbox, SandboxSettings

TIMEOUTS = {"contained": 30.0, "died": 30.0, "stopped": 3.0, "any": 3.0}
LIMITS = Limits(memory_mb=256, disk_mb=32, files=2000, processes=48, open_files=128)
SECRET = "rally-hostile-secret"


@dataclass(frozen=True)
class Host:
    """What must not be found, reached or changed."""

    folder: Path
    server: socket.socket
    abstract: socket.socket

    def prepared(self, hostile: Hostile) -> Program:
        def filled(text: str) -> str:
            places = {"secret": self.folder / SECRET, "folder": self.folder, "name": SECRET}
            for name, value in {**places, "port": self.server.getsockname()[1]}.items():
                text = text.replace("{" + name + "}", str(value))
            return text

        return Program(
            code=filled(hostile.code),
            language=hostile.language,
            timeout=TIMEOUTS[hostile.ends],
            compile_timeout=5.0,
            files=hostile.files,
            fetch_files=tuple(map(filled, hostile.fetch)),
        )

    def untouched(self) -> None:
        for listener in (self.server, self.abstract):
            with pytest.raises(BlockingIOError):
                listener.accept()
        assert sorted(p.name for p in self.folder.iterdir()) == [SECRET, "socket"]
        assert (self.folder / SECRET).read_text() == "secret"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("RALLY_TEST_SECRET", "RALLY_TEST_SECRET")
    (tmp_path / SECRET).write_text("secret")
    monkeypatch.chdir(tmp_path)
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
        server.bind(("127.0.0.1", 0))
        abstract.bind(f"\0{SECRET}")
        named.bind("socket")
        for listener in (server, abstract, named):
            listener.listen()
            listener.setblocking(False)
        yield Host(tmp_path, server, abstract)


def processes() -> dict[int, str]:
    """All of this machine with their command lines, as far as they can be seen."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                )
            except OSError:
                continue
    return found


def below(pid: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | below(child)
    return found


async def until_empty(root: int, expected: int) -> set[int]:
    """The processes of the fork_server: a killed namespace is gone in a moment, not at once."""
    deadline = time.monotonic() + 100
    while len(remaining := below(root)) > expected and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return remaining


def how(outcome: Outcome | BaseException) -> str:
    if isinstance(outcome, BaseException):
        return f"the sandbox failed: {outcome}"
    result = outcome.last
    if result.reason:
        return "stopped"
    if not result.ok:
        return "died"
    return "contained" if "contained" in result.stdout else "lost its last word"


def escaped(outcome: Outcome) -> bool:
    return "ESCAPED" in outcome.last.stdout or b"secret" in b"".join(outcome.files.values())


def shown(outcome: Outcome | BaseException) -> str:
    if isinstance(outcome, BaseException):
        return ""
    return f"{outcome.last.reason} {outcome.last.stdout[-300:]!r} {outcome.last.stderr[-600:]!r}"


@pytest.mark.slow
@pytest.mark.drill("security", "More than a hundred programs attack the sandbox", "None escapes, and nothing is left")
async def test_every_hostile_program_is_contained(host: Host) -> None:
    assert len(PROGRAMS) >= 60 and len({p.name for p in PROGRAMS}) == len(PROGRAMS)
    shared_memory = Path("/proc/sysvipc/shm").read_text()
    mounts, files = Path("/proc/self/mountinfo").read_text(), set(os.listdir("/dev/shm"))
    name, users = os.uname().nodename, Path("/etc/passwd").read_bytes()
    async with Sandbox(SandboxSettings(limits=LIMITS, max_concurrent=6, isolation="bubblewrap")) as sandbox:
        fork_server = sandbox._fork_server
        assert fork_server is not None
        cgroups = fork_server.cgroups
        quiet = len(below(fork_server.process.pid))
        runs = (sandbox.run(host.prepared(p)) for p in PROGRAMS)
        outcomes = await asyncio.gather(*runs, return_exceptions=True)
        problems = [
            f"{p.name}: {how(o)}, not {p.ends}: {shown(o)}"
            for p, o in zip(PROGRAMS, outcomes, strict=True)
            if not isinstance(o, Outcome) or escaped(o) or p.ends not in (how(o), "any")
        ]
        assert not problems, "\n".join(problems)
        after = await sandbox.run(Program(code="import numpy; print(numpy.arange(3).sum())"))
        assert after.last.stdout == "3\n", "the sandbox still answers, with an interpreter nobody poisoned"
        assert sandbox._fork_server is fork_server, "and it is the same one"
        assert len(await until_empty(fork_server.process.pid, quiet)) <= quiet, "no process of any run is left"
    assert not [line for line in processes().values() if "rally-hostile" in line and "pytest" not in line]
    assert Path("/proc/self/mountinfo").read_text() == mounts
    left = {name for name in set(os.listdir("/dev/shm")) - files if "rally" in name}
    assert all(name.startswith("rally-weights") for name in left), "those are of another test, for its servers"
    assert Path("/proc/sysvipc/shm").read_text() == shared_memory
    assert cgroups is None or not cgroups.folder.exists()
    assert (os.uname().nodename, Path("/etc/passwd").read_bytes()) == (name, users)
    host.untouched()


@pytest.mark.slow
async def test_what_programs_use_stays_under_the_caps(host: Host) -> None:
    """The caps are the sandbox's own, whatever the program measures: checked by the peak of the whole tree."""
    hogs = [p for p in PROGRAMS if p.name in ("memory of many processes", "shared anonymous memory", "growing list")]
    async with Sandbox(SandboxSettings(limits=replace(LIMITS, memory_mb=128), max_concurrent=1)) as sandbox:
        for hog in hogs:
            outcome = await sandbox.run(host.prepared(hog))
            assert outcome.peak_memory < 512 << 20, f"{hog.name} reached {outcome.peak_memory >> 20} MB"
