"""Child processes: a program ends with everything it started, and the end of a server's log is quoted."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from rally.util.subprocesses import QUOTED_BYTES, QUOTED_LINES, ServerProcess, run_process


async def test_the_end_of_a_long_log_is_quoted(tmp_path: Path) -> None:
    program = f"print('x' * {3 * QUOTED_BYTES})\nfor i in range(100): print('line', i)"
    process = ServerProcess([sys.executable, "-c", program], {}, tmp_path / "log")
    async with asyncio.timeout(60):
        await process.ended()
    quoted = process.log_tail().splitlines()
    assert len(quoted) == 1 + QUOTED_LINES and quoted[-2].strip() == "line 99", "the last line says how it ended"
    assert "x" * 100 not in process.log_tail()
    (tmp_path / "log").unlink()
    assert process.log_tail() == f"its log, {tmp_path / 'log'}, cannot be read (No such file or directory)"
    await process.stop()


async def test_a_program_that_leaves_a_process_behind_has_ended() -> None:
    async with asyncio.timeout(60):
        ended = await run_process(["sh", "-c", "sleep 600 & echo $!"])
        while Path(f"/proc/{int(ended.text)}").exists():
            await asyncio.sleep(0.02)
    assert ended.code == 0


DAEMON = "import subprocess, sys, time; pid = subprocess.Popen(['sleep', '600'], start_new_session=True).pid; "


async def test_nobody_waits_for_a_daemon_that_holds_the_output_open() -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with asyncio.timeout(60):
        await run_process(["true"])  # what asyncio opens once
        await asyncio.sleep(0.01)
        before = files()
        ended = await run_process([sys.executable, "-c", f"{DAEMON}print(pid); print('x' * 300_000)"], b"y" * 300_000)
    pid, _, rest = ended.text.partition("\n")
    os.kill(int(pid), signal.SIGKILL)
    assert ended.code == 0 and len(rest) == 300_001
    async with asyncio.timeout(60):
        while files() > before:
            await asyncio.sleep(0.01)


async def test_nor_does_who_gives_up_a_program_that_started_one(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = f"{DAEMON}open(sys.argv[1], 'w').write(str(pid)); time.sleep(600)"
    running = asyncio.create_task(run_process([sys.executable, "-c", program, str(note)]))
    async with asyncio.timeout(60):
        while not note.exists() or not note.read_text():
            await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.wait([running])
    os.kill(int(note.read_text()), signal.SIGKILL)


async def test_what_a_server_started_ends_even_if_the_guard_was_killed(tmp_path: Path) -> None:
    program = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    process, log = ServerProcess([sys.executable, "-c", program], {}, tmp_path / "log"), tmp_path / "log"
    async with asyncio.timeout(60):
        while not (last := log.read_text().splitlines()[-1]).isdigit():
            await asyncio.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        await process.ended()
        await process.stop()
        assert not process.alive
        while Path(f"/proc/{last}").exists():
            await asyncio.sleep(0.02)
