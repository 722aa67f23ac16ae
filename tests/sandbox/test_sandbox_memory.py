"""The memory limit holds whatever kind of memory a program takes, with a memory cgroup and without one."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hostile_programs import PROGRAMS

from rally.sandbox import Limits, Outcome, Program, Sandbox, SandboxSettings, memory_cgroups
from rally.sandbox.memory_cgroups import MemoryCgroups, NoMemoryCgroup

LIMITS = Limits(memory_mb=256, disk_mb=32, files=2000, processes=48, open_files=128)
ROOT = Path(__file__).parents[2]
HELD = """
import mmap
held = []
for n in range(1, 13):
    m = mmap.mmap(-1, 25 << 20)
    for i in range(0, 25 << 20, 4096): m[i] = 1
    m.madvise(mmap.MADV_DONTNEED)
    held.append(m)
    print(n * 25, flush=True)
"""


def no_cgroups() -> MemoryCgroups:
    raise NoMemoryCgroup("this test has none")


@pytest.fixture(params=["cgroup", "no cgroup"])
async def limited(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sandbox]:
    if request.param == "no cgroup":
        monkeypatch.setattr(MemoryCgroups, "find", no_cgroups)
    else:
        usable_cgroups().close()
    async with Sandbox(SandboxSettings(limits=LIMITS, max_concurrent=4, isolation="bubblewrap")) as sandbox:
        yield sandbox


def usable_cgroups() -> MemoryCgroups:
    try:
        return MemoryCgroups.find()
    except NoMemoryCgroup as reason:
        pytest.skip(f"no memory cgroup here: {reason}")


def left_cgroups() -> list[Path]:
    return [path for parent, _ in memory_cgroups._candidates() for path in parent.glob("rally-sandbox-*")]


@pytest.mark.drill(
    "security",
    "A program holds shared memory that no process maps",
    "It is killed at its limit or refused the mapping",
)
async def test_shared_memory_that_is_not_resident_counts(limited: Sandbox, bubblewrap: None) -> None:
    outcome = await limited.run(Program(code=HELD, memory_mb=64, timeout=60.0))
    counted = limited._fork_server is not None and limited._fork_server.cgroups is not None
    if counted:
        assert outcome.last.reason == "memory", outcome
        assert int((outcome.last.stdout.split() or ["0"])[-1]) <= 64 + LIMITS.disk_mb + 32
        assert outcome.peak_memory > 40 << 20
    else:
        assert outcome.last.stdout == "" and "PermissionError" in outcome.last.stderr
    files = "import os\nopen('/dev/shm/x', 'wb').write(bytes(24 << 20))\nkeep = b'x' * (40 << 20)\nprint('both')"
    assert (await limited.run(Program(code=files, memory_mb=64))).last.stdout == "both\n", "disk is counted apart"


@pytest.mark.slow
@pytest.mark.drill("security", "Programs hide memory in mappings, sockets, pipes and files", "The limit holds for each")
async def test_memory_cannot_be_hidden(limited: Sandbox, bubblewrap: None) -> None:
    hogs = [p for p in PROGRAMS if any(word in p.name for word in ("memory", "socket buffers", "huge pages", "disk"))]
    assert len(hogs) > 12
    programs = (Program(code=p.code, language=p.language, timeout=3.0) for p in hogs)
    for hog, outcome in zip(hogs, await asyncio.gather(*map(limited.run, programs)), strict=True):
        assert "ESCAPED" not in outcome.last.stdout, (hog.name, outcome)
        assert outcome.peak_memory < 1 << 30, (hog.name, outcome.peak_memory >> 20)
    assert (await limited.run(Program(code="print(1)"))).last.stdout == "1\n"


async def test_programs_that_share_little_are_not_disturbed(limited: Sandbox, bubblewrap: None) -> None:
    code = (
        "import multiprocessing, numpy\n"
        "def double(shared): shared[0] *= 2\n"
        "if __name__ == '__main__':\n"
        "    shared = multiprocessing.Array('i', [21])\n"
        "    child = multiprocessing.Process(target=double, args=(shared,)); child.start(); child.join()\n"
        "    print(shared[0], open('/dev/zero', 'rb').read(3), numpy.memmap('m', 'u1', 'w+', shape=5).sum())"
    )
    outcome = await limited.run(Program(code=code))
    assert outcome.last.stdout == "42 b'\\x00\\x00\\x00' 0\n", outcome
    copied = await limited.run(Program(code="head -c 9 /dev/zero | wc -c; echo x > /dev/null", language="bash"))
    assert copied.last.stdout == "9\n", copied


async def test_a_kill_by_the_kernel_is_named(bubblewrap: None) -> None:
    """Between two measurements a program can take more than the hard limit; the kernel then kills it."""
    usable_cgroups().close()
    fast = "import mmap\nm, n = mmap.mmap(-1, 1 << 30), 1 << 24\nfor i in range(0, 1 << 30, n): m[i : i + n] = bytes(n)"
    async with Sandbox(SandboxSettings(limits=Limits(memory_mb=32, disk_mb=1))) as sandbox:
        outcome: Outcome = await sandbox.run(Program(code=fast, timeout=60.0))
    assert (outcome.last.reason, outcome.last.return_code) == ("memory", -9), outcome


@pytest.mark.drill("reliability", "A process with sandboxes is killed", "Its cgroups are removed by the next sandbox")
def test_cgroups_are_removed_also_those_of_a_killed_process() -> None:
    usable_cgroups().close()
    script = (
        "import os, signal\nfrom rally.sandbox.memory_cgroups import MemoryCgroups\n"
        "made = MemoryCgroups.find()\nmade.create(1 << 30)\nprint(made.folder, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    abandoned = Path(ran.stdout.strip())
    assert abandoned in left_cgroups(), ran.stderr
    mine = usable_cgroups()
    assert abandoned not in left_cgroups() and mine.folder in left_cgroups()
    other = usable_cgroups()
    assert mine.folder in left_cgroups(), "one that is in use stays"
    for cgroups in (mine, other):
        cgroups.close()
        assert cgroups.folder not in left_cgroups()


def test_a_delegated_cgroup_of_version_2_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = tmp_path / "user.slice" / "app.service"
    service.mkdir(parents=True)
    (service / "cgroup.subtree_control").write_text("\n")
    (tmp_path / "user.slice" / "cgroup.subtree_control").write_text("cpu memory pids\n")
    monkeypatch.setattr(memory_cgroups, "_own_paths", lambda: iter([("", "/user.slice/app.service")]))
    monkeypatch.setattr(memory_cgroups, "_mounts", lambda: iter([("cgroup2", ["rw"], "/", str(tmp_path))]))
    assert list(memory_cgroups._candidates()) == [(tmp_path / "user.slice", 2)]
    assert {name: value for name, value, _ in memory_cgroups._limits(2, 77)} == {
        "memory.max": 77,
        "memory.swap.max": 0,
        "memory.oom.group": 1,
    }
    with pytest.raises(NoMemoryCgroup, match=r"user\.slice"):  # these are not cgroups: nothing can be limited
        MemoryCgroups.find()
