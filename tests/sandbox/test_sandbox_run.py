"""A program receives its input, and its output, files and exit status are returned."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rally.sandbox import Limits, Outcome, Program, Sandbox, SandboxError, SandboxSettings, installed
from rally.sandbox.inside import landlock
from rally.types import RallyError

ROOT = Path(__file__).parents[2]
HOST = """
import asyncio
from rally.sandbox import Program, Sandbox

async def main():
    sandbox = Sandbox()
    await sandbox.start()
    print(sandbox._fork_server.process.pid, flush=True)
    code = "import os; os.execv('/bin/sleep', ['rally-orphan', '60'])"
    await sandbox.run(Program(code=code, timeout=60))

asyncio.run(main())
"""


async def run(sandbox: Sandbox, code: str, **fields: object) -> Outcome:
    return await sandbox.run(Program(code=code, **fields))  # type: ignore[arg-type]


async def test_output_exit_code_and_traceback_are_those_of_a_script(sandbox: Sandbox) -> None:
    good = await run(sandbox, "import sys\nprint('one')\nprint('two', file=sys.stderr)")
    assert (good.last.stdout, good.last.stderr, good.last.return_code, good.ok) == ("one\n", "two\n", 0, True)
    bad = await run(sandbox, "def f():\n    return 1 / 0\n\nf()")
    assert bad.last.return_code == 1 and bad.last.status == "Finished"
    assert bad.last.stderr.startswith('Traceback (most recent call last):\n  File "/tmp/work/main.py", line 4')
    assert bad.last.stderr.endswith("ZeroDivisionError: division by zero\n") and "rally" not in bad.last.stderr
    assert (await run(sandbox, "import sys; sys.exit(7)")).last.return_code == 7
    assert (await run(sandbox, "import os; os.abort()")).last.return_code == -signal.SIGABRT
    assert "SyntaxError" in (await run(sandbox, "def (")).last.stderr


async def test_it_is_a_whole_script_threads_exit_handlers_and_processes_included(sandbox: Sandbox) -> None:
    code = (
        "import atexit, multiprocessing, threading, time, os, __main__\n"
        "def double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    atexit.register(print, 'last')\n"
        "    threading.Thread(target=lambda: (time.sleep(0.05), print('thread', flush=True))).start()\n"
        "    with multiprocessing.Pool(2) as pool: print(pool.map(double, [1, 2]))\n"
        "    print(os.path.basename(__main__.__file__), os.getcwd())"
    )
    lines = (await run(sandbox, code)).last.stdout.splitlines()
    assert sorted(lines) == ["[2, 4]", "last", "main.py /tmp/work", "thread"] and lines[-1] == "last"


async def test_stdin_files_and_fetched_files_arrive_whole(sandbox: Sandbox) -> None:
    code = (
        "import sys, helper\nprint(sys.stdin.read() + helper.word)\nopen('out', 'wb').write(bytes(range(256)))\n"
        "open('/mnt/b', 'w').write('b')"
    )
    files = {"helper.py": b"word = 'help'", "deep/data.bin": b"\0\xff"}
    fetch = ("out", "deep/data.bin", "/mnt/b", "missing")
    outcome = await run(sandbox, code, stdin="in ☃ ", files=files, fetch_files=fetch)
    assert outcome.last.stdout == "in ☃ help\n"
    assert outcome.files == {"out": bytes(range(256)), "deep/data.bin": b"\0\xff", "/mnt/b": b"b"}


@pytest.mark.parametrize(
    ("language", "code", "printed"),
    [
        ("bash", "read x; echo $((x + 1))", "42"),
        ("nodejs", "console.log(Number(require('fs').readFileSync(0)) + 1)", "42"),
        ("cpp", "#include <iostream>\nint main() { int x; std::cin >> x; std::cout << x + 1; }", "42"),
        ("pytest", "def test_it(): assert 41 + 1 == 42", "1 passed"),
    ],
)
async def test_other_languages_run_where_they_are_installed(
    sandbox: Sandbox, language: str, code: str, printed: str
) -> None:
    if language not in installed():
        pytest.skip(f"{language} is not installed")
    timeouts = {"timeout": 30.0, "compile_timeout": 30.0}
    outcome = await run(sandbox, code, language=language, stdin="41", **timeouts)
    assert outcome.ok and printed in outcome.last.stdout, outcome


async def test_what_does_not_compile_does_not_run(sandbox: Sandbox) -> None:
    if "cpp" not in installed():
        pytest.skip("g++ is not installed")
    outcome = await run(sandbox, "int main() {", language="cpp", compile_timeout=30.0)
    assert outcome.run is None and not outcome.ok and "expected" in outcome.last.stderr


async def test_a_language_that_is_missing_is_refused_with_what_to_install(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(SandboxError, match="apt-get install nodejs"):
        await run(sandbox, "", language="nodejs")
    with pytest.raises(SandboxError, match="the language 'cobol' is not supported; use one of python, "):
        await run(sandbox, "", language="cobol")


async def test_ten_megabytes_of_output_neither_block_nor_kill(sandbox: Sandbox) -> None:
    outcome = await run(sandbox, "print('x' * (10 << 20)); print('end', file=__import__('sys').stderr)")
    assert outcome.ok and outcome.last.stderr == "end\n"
    kept, cut = len(outcome.last.stdout), outcome.last.stdout_cut
    assert kept == 1 << 20 and kept + cut == (10 << 20) + 1
    assert outcome.metrics()["output_cut_bytes"] == cut


async def test_the_deadline_keeps_what_was_printed_and_takes_the_whole_tree(sandbox: Sandbox) -> None:
    code = (
        "import os, time\nprint('early', flush=True)\n"
        "for _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\ntime.sleep(60)"
    )
    started = time.perf_counter()
    outcome = await run(sandbox, code, timeout=0.5)
    assert (outcome.last.status, outcome.last.return_code, outcome.last.reason) == (
        "TimeLimitExceeded",
        None,
        "timeout",
    )
    assert outcome.last.stdout == "early\n" and time.perf_counter() - started < 10


async def test_limits_name_themselves(sandbox: Sandbox) -> None:
    memory = "import os\nfor _ in range(4): os.fork()\nkeep = b'x' * (60 << 20)\nimport time; time.sleep(60)"
    assert (await run(sandbox, memory, memory_mb=200, timeout=30.0)).last.reason == "memory"
    caught = await run(sandbox, "try: b'x' * (1 << 40)\nexcept MemoryError: print('caught')")
    assert caught.last.stdout == "caught\n"
    tight = Sandbox(SandboxSettings(limits=Limits(cpu_seconds=0.2)))
    try:
        burning = await run(tight, "while True: pass", timeout=30.0)
        assert (burning.last.reason, burning.last.status) == ("cpu", "TimeLimitExceeded")
    finally:
        tight.close()


async def test_forks_that_share_memory_are_not_charged_for_it_many_times(sandbox: Sandbox) -> None:
    code = (
        "import os, time\nkeep = b'x' * (150 << 20)\nfor _ in range(6):\n"
        "    if os.fork() == 0:\n        time.sleep(0.5); os._exit(0)\ntime.sleep(0.3)\nprint('alive')"
    )
    assert (await run(sandbox, code, memory_mb=400)).last.stdout == "alive\n"


async def test_two_runs_share_neither_files_nor_random_numbers_nor_modules(sandbox: Sandbox) -> None:
    code = (
        "import os, random, numpy, sympy\nprint(os.path.exists('/tmp/mark'), hasattr(numpy, 'mark'))\n"
        "open('/tmp/mark', 'w').close(); numpy.mark = 1\nprint(random.random(), numpy.random.rand())"
    )
    outcomes = await asyncio.gather(*(run(sandbox, code) for _ in range(4)))
    texts = [o.last.stdout.splitlines() for o in outcomes]
    assert all(text[0] == "False False" for text in texts)
    assert len({number for text in texts for number in text[1].split()}) == 8


async def test_the_last_value_is_echoed_when_nothing_was_printed(sandbox: Sandbox) -> None:
    assert (await run(sandbox, "x = 20\nx + 1", echo=True)).echo == "21"
    assert (await run(sandbox, "print(5)\n7", echo=True)).echo is None
    assert (await run(sandbox, "None", echo=True)).echo is None
    assert (await run(sandbox, "import os\nos.system('echo loud')", echo=True)).echo is None
    assert (await run(sandbox, "7")).echo is None


@settings(max_examples=15)
@given(st.binary(max_size=300))
def test_whatever_bytes_are_printed_they_come_back_as_text(sandbox: Sandbox, data: bytes) -> None:
    outcome = asyncio.run(run(sandbox, f"import os; os.write(1, {data!r})"))
    assert outcome.last.stdout == data.decode("utf-8", "replace")


async def test_a_cancelled_run_leaves_nothing_running(sandbox: Sandbox) -> None:
    task = asyncio.create_task(
        run(sandbox, "import os; os.execv('/bin/sleep', ['rally-cancelled', '60'])", timeout=60.0)
    )
    await until(lambda: processes_named("rally-cancelled"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not processes_named("rally-cancelled"))


async def test_callers_that_give_up_at_once_do_no_harm(sandbox: Sandbox) -> None:
    fork_server = sandbox._fork_server
    for delay in (0.0, 0.001, 0.003, 0.01, 0.02):
        tasks = [asyncio.create_task(run(sandbox, "print(1)")) for _ in range(4)]
        await asyncio.sleep(delay)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (await run(sandbox, "print(1)")).last.stdout == "1\n" and sandbox._fork_server is fork_server


async def test_a_name_that_no_file_can_have_fails_the_program_not_the_sandbox(sandbox: Sandbox) -> None:
    outcome = await run(sandbox, "print(1)", files={"a\0b": b""})
    assert not outcome.ok and "could not start the program" in outcome.last.stderr


def test_everything_ends_with_the_process_that_started_it() -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, cwd=ROOT)
    assert host.stdout is not None
    fork_server = int(host.stdout.readline())
    asyncio.run(until(lambda: processes_named("rally-orphan")))
    host.kill()
    host.wait()
    host.stdout.close()
    asyncio.run(until(lambda: not processes_named("rally-orphan") and not Path(f"/proc/{fork_server}").exists()))


async def test_a_fork_server_that_was_killed_is_replaced(sandbox: Sandbox) -> None:
    own = Sandbox()
    await own.start()
    assert own._fork_server is not None
    os.killpg(own._fork_server.process.pid, signal.SIGKILL)
    own._fork_server.process.wait()
    assert (await run(own, "print(1)")).last.stdout == "1\n"
    own.close()
    own.close()


async def test_without_isolation_code_is_refused_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    with pytest.raises(SandboxError, match=r"cannot be isolated .*apt-get install bubblewrap.*isolation: unprotected"):
        await Sandbox().start()


def test_limits_and_deadlines_that_make_no_sense_are_refused() -> None:
    with pytest.raises(RallyError, match="memory_mb must be at least 1"):
        Limits(memory_mb=0)
    with pytest.raises(RallyError, match="timeout must be a number of seconds above 0"):
        Program(code="", timeout=0)


def processes_named(name: str) -> list[str]:
    return [p.name for p in Path("/proc").iterdir() if p.name.isdigit() and command(p).startswith(name)]


def command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


async def until(holds: object) -> None:
    assert callable(holds)
    deadline = time.monotonic() + 100
    while not holds():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.05)


async def test_a_program_can_talk_to_itself_and_to_nobody_else(sandbox: Sandbox, bubblewrap: None) -> None:
    code = (
        "import socket\n"
        "for name in ('127.0.0.1', 'localhost', 'sandbox'):\n"
        "    with socket.create_server(('127.0.0.1', 0)) as server:\n"
        "        with socket.create_connection((name, server.getsockname()[1]), 5) as client:\n"
        "            client.sendall(b'hello'); print(server.accept()[0].recv(5).decode())\n"
        "try: socket.create_connection(('8.8.8.8', 53), 5)\n"
        "except OSError as error: print(error)"
    )
    outcome = await run(sandbox, code)
    assert outcome.last.stdout.splitlines()[:4] == ["hello"] * 3 + ["[Errno 101] Network is unreachable"], outcome


async def test_pytest_loads_only_the_plugins_that_its_tests_mention(sandbox: Sandbox) -> None:
    plain = await run(sandbox, "def test_one(): pass", language="pytest", timeout=60.0)
    assert "1 passed" in plain.last.stdout and "plugins:" not in plain.last.stdout, plain
    mentions = "import pytest\n\n@pytest.mark.asyncio\nasync def test_one(): pass"
    asked = await run(sandbox, mentions, language="pytest", timeout=60.0)
    assert "1 passed" in asked.last.stdout and "plugins: asyncio" in asked.last.stdout, asked


async def test_node_finds_packages_that_are_installed_globally(sandbox: Sandbox) -> None:
    if "nodejs" not in installed() or not Path("/usr/lib/node_modules/npm").is_dir():
        pytest.skip("no node with a global package here")
    outcome = await run(sandbox, "console.log(require('npm/package.json').name)", language="nodejs")
    assert outcome.last.stdout == "npm\n", outcome
