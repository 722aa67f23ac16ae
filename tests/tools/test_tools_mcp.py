"""Tools of MCP servers: complete schemas, a named status for every failure of the server, no process left behind."""

import asyncio
import base64
import contextlib
import gc
import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import mcp_server as drill
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp_types import CallToolResult
from PIL import Image as PILImage

from rally.tools import ToolBox, ToolConfigError, ToolLimits, load_tools
from rally.tools.mcp import client as line_module
from rally.tools.mcp import connection as connection_module
from rally.tools.mcp.connection import McpConnection
from rally.tools.mcp.tools import read_content
from rally.types import Task, ToolCall, ToolResult, ToolStatus

SCRIPT = Path(drill.__file__)
TASK = Task(id="t", data_source="d", prompt=({"role": "user", "content": "hi"},))

Open = Callable[..., ToolBox]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(line_module, "FIRST_PAUSE", 0.01)
    line_module._warn_once.cache_clear()
    return tmp_path


@pytest.fixture
def opened() -> Iterator[Open]:
    boxes = []

    def open_box(limits: ToolLimits | None = None, **entry: Any) -> ToolBox:
        boxes.append(ToolBox(load_tools({"tools": [{"type": "mcp", **entry}]}), limits))
        return boxes[-1]

    yield open_box
    for box in boxes:
        box.close()


def servers(**named: Any) -> str:
    """A servers file; an entry that is a dict of environment variables is the drill server."""
    written = {
        name: server if {"url", "command"} & set(server) else drill_server(**server) for name, server in named.items()
    }
    Path("servers.json").write_text(json.dumps({"mcpServers": written}))
    return "servers.json"


def drill_server(*args: str, **env: str) -> dict[str, Any]:
    return {"command": sys.executable, "args": ["-S", str(SCRIPT), *args], "env": env}


async def ask(box: ToolBox, tool: str, value: str = "", episode: str = "e") -> ToolResult:
    session = box.open(TASK, episode)
    (result,) = await session.run([ToolCall(name=tool, arguments={"value": value})])
    await session.close()
    return result


def children() -> set[int]:
    """The running drill servers, whatever their parent is."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may exit meanwhile
            command = (process / "cmdline").read_bytes().split(b"\0")
            if command[1:3] == [b"-S", str(SCRIPT).encode()]:
                found.add(int(process.name))
    return found


def wait_for(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def test_all_pages_are_listed_and_schemas_are_kept_whole(opened: Open) -> None:
    box = opened(mcp_servers_config_path=servers(drill={}))
    assert box.names == [name for page in drill.PAGES for name in page]
    order = box.schemas(["order"])[0]["function"]
    assert order == {"name": "order", "description": "Does order.", "parameters": drill.NESTED}


def test_a_server_that_bears_only_the_old_handshake_gets_it(opened: Open) -> None:
    box = opened(mcp_servers_config_path=servers(drill={"STRICT": "1"}), session="episode")
    assert box.names[:2] == ["order", "echo"]
    assert asyncio.run(ask(box, "echo", "1")).response.text == "echo 1"


def test_both_spellings_and_the_selection(project: Path) -> None:
    (project / "conf").mkdir()
    (project / "conf/mcp_server.json").write_text(json.dumps({"mcpServers": {"drill": drill_server()}}))
    (project / "conf/tools.yaml").write_text("""
tools:
  - class_name: verl.tools.mcp_search_tool.MCPSearchTool
    config: {rate_limit: 120, timeout: 120, type: mcp}
    mcp: {mcp_servers_config_path: ./mcp_server.json, tool_selected_list: [echo, fail]}
""")
    tools = load_tools("conf/tools.yaml")  # the servers file is beside the YAML
    assert [tool.name for tool in tools] == ["echo", "fail"]
    assert tools[0].config["rate_limit"] == 120
    ToolBox(tools).close()


async def test_every_kind_of_failure_has_its_status_and_its_words(opened: Open) -> None:
    box = opened(ToolLimits(timeout=0.5), mcp_servers_config_path=servers(drill={}))
    expected = {
        "fail": (ToolStatus.ERROR, "Error: no such city"),
        "refuse": (ToolStatus.ERROR, "Error: the MCP server 'drill' refused the call: out of order 7 (code -32603)"),
        "reject": (
            ToolStatus.BAD_ARGUMENTS,
            "Error: bad arguments for reject: value must be even. The arguments are: value (string, optional).",
        ),
        "hang": (ToolStatus.TIMEOUT, "Error: hang did not answer within 0.5 seconds."),
        "echo": (ToolStatus.OK, "echo 7"),
    }
    for tool, (status, words) in expected.items():
        result = await ask(box, tool, "7")
        assert (result.status, result.response.text) == (status, words)


async def test_a_deadline_of_the_entry_is_a_time_out_and_reaches_the_server(opened: Open) -> None:
    box = opened(mcp_servers_config_path=servers(drill={}), config={"timeout": 0.3})
    result = await ask(box, "hang", "1")
    assert (result.status, result.response.text) == (
        ToolStatus.TIMEOUT,
        "Error: hang did not answer within 0.3 seconds.",
    )
    assert (await ask(box, "hang", "2")).response.text == "hang 2", "the server was told of the cancellation"


async def test_a_server_that_dies_in_a_call_is_started_again_and_the_call_is_not_repeated(
    opened: Open, project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = project / "calls"
    box = opened(mcp_servers_config_path=servers(drill={"CALLS": str(calls)}))
    first = (await ask(box, "remember", "a")).response.text or ""
    died = await ask(box, "die")
    assert died.status is ToolStatus.UNAVAILABLE and died.outage
    assert died.response.text == ("Error: the MCP server 'drill' ended during this call, which may have had its effect")
    again = await ask(box, "remember", "b")
    assert (again.response.text or "").partition(":")[2] == "b", "a new process, which remembers nothing"
    assert (again.response.text or "").partition(":")[0] != first.partition(":")[0]
    assert calls.read_text().splitlines() == ["remember a", "die ", "remember b"]
    assert any("is gone (it ended" in record.message for record in caplog.records)


async def test_a_call_that_a_dead_server_never_saw_is_sent_once_to_the_next(opened: Open, project: Path) -> None:
    calls = project / "calls"
    box = opened(mcp_servers_config_path=servers(drill={"CALLS": str(calls)}))
    pid = int(((await ask(box, "remember", "a")).response.text or "").partition(":")[0])
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(wait_for, lambda: pid not in children(), "it was not killed")
    await asyncio.sleep(0.2)  # until its pipe was read to the end
    results = await asyncio.gather(*(ask(box, "echo", str(n)) for n in range(20)))
    assert [r.response.text for r in results] == [f"echo {n}" for n in range(20)]
    assert len(calls.read_text().splitlines()) == 21
    assert len(children()) == 1, "one new server for all who waited"


async def test_whenever_a_server_is_killed_no_call_has_its_effect_twice(opened: Open, project: Path) -> None:
    calls = project / "calls"
    box = opened(mcp_servers_config_path=servers(drill={"CALLS": str(calls)}))
    answered: list[str | None] = []
    statuses: set[ToolStatus] = set()
    over = asyncio.Event()

    async def worker(name: int) -> None:
        count = 0
        while not over.is_set():
            count += 1
            result = await ask(box, "echo", f"{name}-{count}", episode=str(name))
            statuses.add(result.status)
            if result.ok:
                answered.append(result.response.text)

    async def killer() -> None:
        for _ in range(4):
            before = len(answered)
            async with asyncio.timeout(60):
                while len(answered) == before:
                    await asyncio.sleep(0.05)
            for pid in children():
                os.kill(pid, signal.SIGKILL)
        over.set()

    await asyncio.gather(killer(), *(worker(name) for name in range(16)))
    seen = calls.read_text().splitlines()
    assert len(seen) == len(set(seen)), "a call that may have been seen is never sent again"
    assert answered and set(answered) <= set(seen)
    assert statuses <= {ToolStatus.OK, ToolStatus.UNAVAILABLE}


async def test_a_server_that_cannot_start_again_is_left_alone_and_comes_back(
    opened: Open, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_module, "LEFT_ALONE", 1.0)
    broken = project / "broken"
    box = opened(mcp_servers_config_path=servers(drill={"BROKEN": str(broken)}))
    broken.touch()
    await ask(box, "die")
    started = time.perf_counter()
    result = await ask(box, "echo")
    tried = time.perf_counter() - started
    assert result.status is ToolStatus.UNAVAILABLE
    assert "stderr ends with: cannot start today)" in (result.response.text or "")
    started = time.perf_counter()
    assert "the next attempt is in" in ((await ask(box, "echo")).response.text or "")
    assert time.perf_counter() - started < tried / 2, "no start is tried meanwhile"
    broken.unlink()
    await asyncio.sleep(1.0)
    assert (await ask(box, "echo", "9")).response.text == "echo 9"


async def test_lines_that_are_no_messages_are_skipped_and_told_once(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    box = opened(mcp_servers_config_path=servers(drill={}))
    for n in ("1", "2"):
        assert (await ask(box, "noise", n)).response.text == f"noise {n}"
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "the MCP server 'drill' writes lines to stdout that are not messages; skipped"
    ]


async def test_images_are_kept_and_what_cannot_be_shown_is_named_and_counted(opened: Open) -> None:
    box = opened(mcp_servers_config_path=servers(drill={}))
    shown = await ask(box, "show")
    assert (shown.response.text or "").splitlines() == [
        "here:",
        "[image 1: 1x1]",
        "[image of type image/png, which cannot be shown]",
        "[audio of type audio/wav, which cannot be shown]",
        "[map: file:///map]",
        "inside",
        "[image 2: 1x1]",
    ]
    assert [(image.width, image.height) for image in shown.response.image or ()] == [(1, 1), (1, 1)]
    assert {"images": 2, "not_shown": 2}.items() <= shown.metrics.items()
    structured = await ask(box, "structured")
    assert (structured.response.text, structured.response.image) == ('{"degrees": 21}', None)


async def test_an_episode_has_a_session_of_its_own_which_ends_with_it(opened: Open) -> None:
    box = opened(mcp_servers_config_path=servers(drill={}), session="episode")
    assert not children(), "none is needed before an episode calls"

    async def episode(name: str) -> list[str]:
        session = box.open(TASK, name)
        for value in ("1", "2"):
            results = await session.run(
                [ToolCall(name="remember", arguments={"value": name + value}), ToolCall(name="echo", arguments={})]
            )
        texts = [(result.response.text or "").partition(":")[2] for result in results]
        await session.close()
        return texts

    assert await asyncio.gather(episode("a"), episode("b")) == [["a1,a2", ""], ["b1,b2", ""]]
    assert not children()


async def test_an_episode_is_told_that_its_state_is_lost(opened: Open) -> None:
    box = opened(mcp_servers_config_path=servers(drill={}), session="episode")
    session = box.open(TASK, "e")

    async def call(tool: str) -> str:
        (result,) = await session.run([ToolCall(name=tool, arguments={"value": "x"})])
        return f"{result.status.value}: {result.response.text}"

    pid = int((await call("remember")).removeprefix("ok: ").partition(":")[0])
    os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(0.2)
    assert (await call("remember")).endswith("is lost, and the next call finds it restarted")
    assert (await call("remember")).startswith("ok: ")
    assert (await call("die")).endswith("is lost, and the next call finds it restarted")
    await session.close()


async def test_secrets_are_told_to_nobody(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret-key")
    monkeypatch.setenv("MY_PLACE", "Paris")
    box = opened(mcp_servers_config_path=servers(drill={"KEY": "${MY_KEY}", "PLACE": "${MY_PLACE}"}))
    told = [(await ask(box, tool, "s3cret-key")).response.text for tool in ("echo", "refuse", "die", "echo")]
    assert told[0] == "echo ${oc.env:MY_KEY} ${oc.env:MY_KEY}", "the server has the key, and says it"
    assert (await ask(box, "echo", "Paris")).response.text == "echo Paris ${oc.env:MY_KEY}", (
        "not all that is set is secret"
    )
    tools = [box._callers[name].tool for name in box.names]
    assert "s3cret" not in repr((told, [vars(tool) for tool in tools], [vars(tool._clients) for tool in tools]))
    assert "disk full ${oc.env:MY_KEY}" in caplog.text
    assert "s3cret" not in caplog.text


def test_nothing_is_left_behind_by_tools_that_are_closed_or_dropped(opened: Open) -> None:
    """The tools outlive event loops: they are made before the first and used by two."""
    box = opened(mcp_servers_config_path=servers(drill={}, stubborn={"STUBBORN": "1"}), prefix=True)
    pids = [asyncio.run(ask(box, "drill_remember")).response.text for _ in range(2)]
    assert pids[0].partition(":")[0] == pids[1].partition(":")[0], "one server for both"
    assert len(children()) == 2
    box.close()
    assert not children()
    assert asyncio.run(ask(box, "drill_echo")).response.text == "Error: the MCP server 'drill' was closed with its run"
    tools: Any = load_tools({"tools": [{"type": "mcp", "mcp_servers_config_path": servers(drill={})}]})
    assert len(children()) == 1
    del tools
    gc.collect()
    wait_for(lambda: not children(), "dropped tools keep their server")


def test_servers_end_when_the_run_is_killed() -> None:
    servers(drill={})
    source = (
        "from rally.tools import load_tools; import sys, time\n"
        "load = load_tools({'tools': [{'type': 'mcp', 'mcp_servers_config_path': 'servers.json'}]})\n"
        "print('ready', flush=True); time.sleep(60 if sys.argv[1] == 'stay' else 0)"
    )
    stays, leaves = (
        subprocess.Popen([sys.executable, "-c", source, how], stdout=subprocess.PIPE, text=True)
        for how in ("stay", "leave")
    )
    assert stays.stdout is not None and stays.stdout.readline() == "ready\n"
    assert leaves.wait(60) == 0
    wait_for(lambda: len(children()) == 1, "the server outlived a run that came to its end")
    stays.kill()
    stays.wait()
    wait_for(lambda: not children(), "the server outlived a run that was killed")


@asynccontextmanager
async def web(state: dict[str, Any], port: int = 0) -> AsyncIterator[int]:
    """The drill server over real HTTP with sessions and a token; `state["drop"]` closes connections after reading."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if "hang" in state:
            await state["hang"].wait()
            writer.close()
            return
        status, content, extra = respond(head[0].partition(" ")[0], headers, json.loads(body or b"{}"))
        if status:
            text = json.dumps(content).encode()
            writer.write(
                b"HTTP/1.1 %d X\r\nConnection: close\r\nContent-Type: application/json\r\n%s" % (status, extra)
                + b"Content-Length: %d\r\n\r\n%s" % (len(text), text)
            )
        writer.close()

    def respond(verb: str, headers: dict[str, str], message: dict[str, Any]) -> tuple[int, Any, bytes]:
        state.setdefault("seen", []).append(message.get("method"))
        if headers.get("authorization") != "Bearer t0ken-value":
            return 401, {}, b""
        if verb != "POST":
            return 405, {}, b""
        if message["method"] == "initialize":
            return 200, drill.answer(message), b"Mcp-Session-Id: %s\r\n" % state["session"]
        if "mcp-session-id" in headers and headers["mcp-session-id"].encode() != state["session"]:
            return 404, {}, b""
        if message["method"] == "tools/call" and state.pop("drop", False):
            return 0, None, b""
        reply = drill.answer(message)
        return (200, reply, b"") if reply is not None else (202, None, b"")

    server = await asyncio.start_server(talk, "127.0.0.1", port)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_http_with_a_token_survives_a_cut_a_new_session_and_a_server_that_is_away(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state: dict[str, Any] = {"session": b"one"}
    async with web(state) as port:
        remote = {"url": f"http://127.0.0.1:{port}/mcp", "auth_token_env": "WEB_TOKEN"}
        monkeypatch.setenv("WEB_TOKEN", "wrong-value")
        with pytest.raises(ToolConfigError, match=r"'web' is gone \(HTTP 401, so its token or headers are wrong\)"):
            await asyncio.to_thread(opened, mcp_servers_config_path=servers(web=remote))
        monkeypatch.setenv("WEB_TOKEN", "t0ken-value")
        box = await asyncio.to_thread(opened, mcp_servers_config_path=servers(web=remote))
        assert (await ask(box, "echo", "1")).response.text == "echo 1"
        state["drop"] = True
        cut = await ask(box, "echo", "2")
        assert (cut.status, cut.response.text) == (
            ToolStatus.UNAVAILABLE,
            "Error: the MCP server 'web' ended during this call, which may have had its effect",
        )
        assert (await ask(box, "echo", "3")).response.text == "echo 3", "the session went on"
        assert state["seen"].count("initialize") == 1 + 1, "once for the wrong token, once for the right one"
        state["session"] = b"two"
        assert (await ask(box, "echo", "4")).response.text == "echo 4"
        assert state["seen"].count("initialize") == 3
    monkeypatch.setattr(line_module, "FIRST_PAUSE", 0.2)
    waiting = asyncio.create_task(ask(box, "echo", "5"))
    await asyncio.sleep(0.1)
    async with web(state, port):
        assert (await waiting).response.text == "echo 5", "a call that was never sent waits for the server"
    assert "t0ken" not in caplog.text


@pytest.mark.parametrize(
    ("entry", "file", "sentence"),
    [
        ({}, {}, "an MCP entry: 'mcp_servers_config_path': Field required"),
        ({"mcp_servers_config_path": "none.json"}, {}, "none.json does not exist, neither here nor below"),
        ({"mcp_servers_config_path": "s.json", "colour": 1}, {}, "'colour': Extra inputs are not permitted"),
        ({"class_name": "my.Tool", "mcp_servers_config_path": "s.json"}, {}, "of type mcp takes no class_name"),
        ({"timeout": 3, "config": {"timeout": 4}}, {}, "'timeout' is written twice"),
        ({"mcp_servers_config_path": "s.json"}, {}, 'must have servers under the key "mcpServers"'),
        ({"mcp_servers_config_path": "s.json"}, {"a": {}}, "server 'a' needs one of command"),
        ({"mcp_servers_config_path": "s.json"}, {"a": {"url": "x", "type": "stdio"}}, "type 'stdio' does not fit"),
        ({"mcp_servers_config_path": "s.json"}, {"a": {"url": "x", "verify": 1}}, "server 'a': 'verify': Extra inputs"),
        ({"mcp_servers_config_path": "s.json"}, {"a": {"command": "x", "auth_token": "y"}}, "secrets in env"),
        ({"mcp_servers_config_path": "s.json"}, {"a": {"command": "x", "disabled": True}}, "s.json is disabled"),
        (
            {"mcp_servers_config_path": "s.json"},
            {"a": {"url": "http://h/${NO_SUCH}"}},
            "needs the environment variable NO_SUCH, which is not set",
        ),
        (
            {"mcp_servers_config_path": "s.json"},
            {"a": {"command": "no-such-program"}},
            r"the MCP server 'a' is gone \(No such file or directory\)",
        ),
        (
            {"mcp_servers_config_path": "s.json", "startup_timeout": 2.0},
            {"a": {"command": "sh", "args": ["-c", "cat > /dev/null"]}},
            r"'a' is gone \(no answer within 2 seconds of its start\)",
        ),
        (
            {"mcp_servers_config_path": "s.json", "tool_selected_list": ["ech"]},
            {"a": drill_server("echo")},
            "no server offers 'ech'; they offer echo",
        ),
        (
            {"mcp_servers_config_path": "s.json"},
            {"a": drill_server("echo"), "b": drill_server("echo")},
            "servers 'a' and 'b' both offer 'echo'; write `prefix: true`",
        ),
    ],
)
def test_every_mistake_has_its_sentence(entry: dict[str, Any], file: dict[str, Any], sentence: str) -> None:
    Path("s.json").write_text(json.dumps({"mcpServers": file}))
    with pytest.raises(ToolConfigError, match=sentence) as caught:
        load_tools({"tools": [{"type": "mcp", **entry}]})
    assert str(caught.value).startswith("the tool config, tool 1: ")
    assert "\n" not in str(caught.value)
    assert not children()


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rally.tools.mcp.tools")
    monkeypatch.setitem(sys.modules, "mcp_types", None)
    with pytest.raises(ToolConfigError, match=r"need the package mcp_types; run: pip install 'rally-rl\[mcp\]'"):
        load_tools({"tools": [{"type": "mcp"}]})


PART = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, st.text()),
    st.builds(
        lambda data, kind: {"type": "image", "data": data, "mimeType": kind},
        st.sampled_from([drill.PIXEL, drill.PIXEL[:40], "", "%%"]) | st.text(),
        st.sampled_from(["image/png", "image/svg+xml", "x/y"]),
    ),
)


@settings(max_examples=50)
@given(st.lists(PART, max_size=6), st.none() | st.dictionaries(st.text(), st.integers()))
def test_any_content_is_read_and_every_part_is_text_an_image_or_counted(
    parts: list[dict[str, Any]], structured: dict[str, int] | None
) -> None:
    content = read_content(CallToolResult.model_validate({"content": parts, "structuredContent": structured}))
    images = sum(part["type"] == "image" for part in parts)
    assert len(content.response.image or ()) + content.not_shown == images
    if not parts and structured is not None:
        assert json.loads(content.response.text or "") == structured


@pytest.mark.parametrize(("size", "kind"), [((9_000, 9_000), "PNG"), ((4, 4), "EPS"), ((4, 4), "TIFF")])
def test_a_server_cannot_send_a_bomb_or_a_program(size: tuple[int, int], kind: str) -> None:
    buffer = io.BytesIO()
    PILImage.new("L" if kind == "EPS" else "1", size).save(buffer, kind)
    part = {"type": "image", "data": base64.b64encode(buffer.getvalue()).decode(), "mimeType": "image/png"}
    content = read_content(CallToolResult.model_validate({"content": [part]}))
    assert content.response.image is None and content.not_shown == 1


@pytest.mark.drill(
    "reliability", "An MCP server hangs", "It is killed and restarted; running calls fail, later ones work"
)
@pytest.mark.parametrize("session", ["shared", "episode"])
async def test_a_server_that_hangs_is_killed_and_started_again(
    opened: Open, monkeypatch: pytest.MonkeyPatch, session: str
) -> None:
    monkeypatch.setattr(line_module, "CHECK_SECONDS", 1.0)
    box = opened(ToolLimits(timeout=1.0), mcp_servers_config_path=servers(drill={}), session=session)
    episode = box.open(TASK, "e")

    async def call(value: str) -> ToolResult:
        (result,) = await episode.run([ToolCall(name="remember", arguments={"value": value})])
        return result

    first = await call("a")
    stuck = children()
    for pid in stuck:
        os.kill(pid, signal.SIGSTOP)
    late = await asyncio.gather(*(call(f"b{n}") for n in range(3)))
    assert {result.status for result in late} <= {ToolStatus.TIMEOUT, ToolStatus.ERROR}
    later = []
    until = asyncio.get_running_loop().time() + 60
    while not later or not later[-1].ok:
        assert asyncio.get_running_loop().time() < until, [result.response.text for result in later]
        later.append(await call("c"))
    assert len(later) <= 4, "at most the calls during the check and the restart are lost"
    assert (later[-1].response.text or "").partition(":")[0] != (first.response.text or "").partition(":")[0]
    await episode.close()
    wait_for(lambda: not (children() & stuck), "the server that hangs was not killed")


async def test_a_session_whose_stream_is_closed_does_not_answer() -> None:
    """The check after a late call must not end with an exception, or the dead session would be kept."""

    class Broken:
        session = property(lambda self: self)

        async def list_tools(self) -> None:
            raise anyio.ClosedResourceError

    connection = McpConnection.__new__(McpConnection)
    connection._client = asyncio.get_running_loop().create_future()
    connection._client.set_result(Broken())  # type: ignore[arg-type]
    assert not await connection.answers(5.0)
    assert connection._reason == "ClosedResourceError"


async def test_a_slow_call_does_not_restart_a_server_that_answers(opened: Open) -> None:
    box = opened(ToolLimits(timeout=0.3), mcp_servers_config_path=servers(drill={}))
    before = children()
    for n in range(3):
        assert (await ask(box, "hang", str(n))).status in (ToolStatus.TIMEOUT, ToolStatus.OK)
    assert (await ask(box, "echo", "1")).response.text == "echo 1"
    assert children() == before


async def test_a_server_that_hangs_in_every_call_is_left_alone(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CHECK_SECONDS", 0.2), ("ATTEMPTS", 2), ("FIRST_PAUSE", 0.01)):
        monkeypatch.setattr(line_module, name, value)
    box = opened(ToolLimits(timeout=0.3), mcp_servers_config_path=servers(drill={}))
    texts = []
    for _ in range(20):
        texts.append((await ask(box, "freeze")).response.text or "")
        if "the next attempt is in" in texts[-1]:
            break
    assert "it did not answer within 0.2 seconds" in texts[-1], texts


@pytest.mark.drill("reliability", "An MCP server over HTTP stops answering for a while", "A new session is opened")
async def test_a_web_server_that_hangs_gets_a_new_session(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "CHECK_SECONDS", 0.5)
    monkeypatch.setenv("WEB_TOKEN", "t0ken-value")
    state: dict[str, Any] = {"session": b"one"}
    async with web(state) as port:
        remote = {"url": f"http://127.0.0.1:{port}/mcp", "auth_token_env": "WEB_TOKEN"}
        entry = {"mcp_servers_config_path": servers(web=remote), "startup_timeout": 2.0}
        box = await asyncio.to_thread(lambda: opened(ToolLimits(timeout=0.5), **entry))
        assert (await ask(box, "echo", "1")).response.text == "echo 1"
        state["hang"] = asyncio.Event()
        assert (await ask(box, "echo", "2")).status is ToolStatus.TIMEOUT
        await asyncio.sleep(1.0)
        opened_before = state["seen"].count("initialize") + state["seen"].count("server/discover")
        state.pop("hang").set()
        until = asyncio.get_running_loop().time() + 60
        while not (answer := await ask(box, "echo", "3")).ok:
            assert asyncio.get_running_loop().time() < until, answer.response.text
        assert answer.response.text == "echo 3"
        assert state["seen"].count("initialize") + state["seen"].count("server/discover") > opened_before


def test_a_start_that_does_not_end_when_it_is_cancelled_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A race in the SDK may swallow the cancellation at `startup_timeout`; nobody may wait for it then."""

    @asynccontextmanager
    async def stuck(self: McpConnection) -> AsyncIterator[Any]:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            await asyncio.sleep(1000)
        yield None

    monkeypatch.setattr(McpConnection, "_process", stuck)
    monkeypatch.setattr(connection_module, "CLOSING_SECONDS", 0.3)
    entry = {"mcp_servers_config_path": servers(a={"command": "sh"}), "startup_timeout": 0.2}
    with pytest.raises(ToolConfigError, match=r"'a' is gone \(no answer within 0.2 seconds of its start\)"):
        load_tools({"tools": [{"type": "mcp", **entry}]})
