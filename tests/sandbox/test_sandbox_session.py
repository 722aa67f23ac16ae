"""A session keeps its variables from call to call, through errors and time-outs, and ends on close."""

import asyncio

import pytest

from rally.sandbox import Program, Sandbox, SandboxSession


@pytest.fixture
def session(sandbox: Sandbox) -> SandboxSession:
    return sandbox.session(Program(code="", echo=True, memory_mb=256))


async def test_variables_survive_calls_errors_and_time_outs(session: SandboxSession) -> None:
    assert (await session.run("x = 20")).ok
    failed = await session.run("y = 1\n1 / 0")
    assert failed.last.return_code == 1 and not failed.state_lost
    assert 'File "<cell 2>", line 2' in failed.last.stderr and "1 / 0" in failed.last.stderr
    late = await session.run("while True: x += 1", timeout=0.3)
    assert late.last.status == "TimeLimitExceeded" and not late.state_lost
    assert (await session.run("x > 20, y")).echo == "(True, 1)"
    assert (await session.run("exit(3)")).last.return_code == 3
    assert (await session.run("print(y)")).last.stdout == "1\n"
    await session.close()


async def test_state_that_is_lost_is_said_to_be_lost(session: SandboxSession) -> None:
    await session.run("x = 1")
    stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    assert (await session.run(stubborn, timeout=0.3)).state_lost
    fresh = await session.run("x")
    assert "NameError" in fresh.last.stderr and not fresh.state_lost
    assert (await session.run("import os; os._exit(5)")).state_lost
    hog = await session.run("import time\nkeep = [b'x' * 200_000_000 + bytes([i]) for i in range(2)]; time.sleep(9)")
    assert hog.state_lost or "MemoryError" in hog.last.stderr
    await session.close()


async def test_nothing_runs_between_calls(session: SandboxSession) -> None:
    ticking = "import threading, time\nn = 0\ndef tick():\n    global n\n    while True: n += 1; time.sleep(0.001)\n"
    await session.run(f"{ticking}threading.Thread(target=tick, daemon=True).start()")
    before = int((await session.run("n")).echo or 0)
    await asyncio.sleep(0.5)
    assert int((await session.run("n")).echo or 0) - before < 200
    await session.close()


async def test_sessions_do_not_see_each_other_and_a_closed_one_starts_anew(
    sandbox: Sandbox, session: SandboxSession
) -> None:
    other = sandbox.session(Program(code=""))
    await asyncio.gather(session.run("x = 1; open('/tmp/f', 'w').close()"), other.run("x = 2"))
    seen = await other.run("import os; print(x, os.path.exists('/tmp/f'))")
    assert seen.last.stdout == "2 False\n"
    await session.close()
    assert "NameError" in (await session.run("x")).last.stderr
    await asyncio.gather(session.close(), other.close())
