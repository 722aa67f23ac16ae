"""Real third-party MCP servers: mcp-server-time over stdio, server-everything over HTTP, SSE and stdio."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from search_cases import free_port

from rally.tools import ToolBox, load_tools
from rally.types import Task, ToolCall, ToolResult, ToolStatus

ROOT = Path(__file__).resolve().parents[2]
EVERYTHING = ROOT / ".node/node_modules/@modelcontextprotocol/server-everything/dist/index.js"
TASK = Task(id="t", data_source="d", prompt=({"role": "user", "content": "hi"},))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def everything() -> str:
    if EVERYTHING.is_file() and shutil.which("node"):
        return str(EVERYTHING)
    reason = "@modelcontextprotocol/server-everything is not installed; with npm there, `make test` does it"
    if os.environ.get("RALLY_REQUIRE_SHARED"):
        pytest.fail(reason)
    pytest.skip(reason)


class Web:
    """server-everything as a process that can be killed and started again at the same port."""

    def __init__(self, script: str, kind: str) -> None:
        self._command = ["node", script, kind]
        self.port = free_port()
        self.launch()

    def launch(self) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(self._command, env=os.environ | {"PORT": str(self.port)}, **quiet)
        until = time.monotonic() + 280
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("server-everything does not listen")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def web(everything: str) -> Iterator[Web]:
    server = Web(everything, "streamableHttp")
    yield server
    server.kill()


def toolbox(server: dict[str, object], **entry: object) -> ToolBox:
    Path("servers.json").write_text(json.dumps({"mcpServers": {"real": server}}))
    return ToolBox(load_tools({"tools": [{"type": "mcp", "mcp_servers_config_path": "servers.json", **entry}]}))


async def ask(box: ToolBox, name: str, **arguments: object) -> ToolResult:
    (result,) = await box.open(TASK, "e").run([ToolCall(name=name, arguments=arguments)])
    return result


def test_the_time_server_over_stdio() -> None:
    server = {"command": sys.executable, "args": ["-m", "mcp_server_time", "--local-timezone", "UTC"]}
    with closing(toolbox(server)) as box:
        assert box.names == ["get_current_time", "convert_time"]
        (schema,) = box.schemas(["get_current_time"])
        assert schema["function"]["parameters"]["required"] == ["timezone"]
        now = asyncio.run(ask(box, "get_current_time", timezone="Asia/Tokyo"))
        assert json.loads(now.response.text or "")["datetime"].endswith("+09:00")
        wrong = asyncio.run(ask(box, "get_current_time", timezone="Mars/Base"))
        assert wrong.status is ToolStatus.ERROR
        assert "Mars/Base" in (wrong.response.text or "")


def test_everything_over_http_its_images_and_its_restart(web: Web) -> None:
    async def use() -> None:
        sums = await asyncio.gather(*(ask(box, "get-sum", a=n, b=1) for n in range(50)))
        assert [result.response.text for result in sums] == [f"The sum of {n} and 1 is {n + 1}." for n in range(50)]
        shown = await ask(box, "get-tiny-image")
        (image,) = shown.response.image or ()
        assert f"[image 1: {image.width}x{image.height}]" in (shown.response.text or "")
        weather = await ask(box, "get-structured-content", location="New York")
        assert json.loads(weather.response.text or "")["conditions"] == "Cloudy"
        refused = await ask(box, "get-structured-content", location="Paris")
        assert refused.status is ToolStatus.BAD_ARGUMENTS, "the enum of the server's schema holds"
        long = asyncio.create_task(ask(box, "trigger-long-running-operation", duration=60, steps=2))
        await asyncio.sleep(0.2)
        web.kill()
        waiting = asyncio.create_task(ask(box, "get-sum", a=20, b=22))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(web.launch)
        assert (await waiting).response.text == "The sum of 20 and 22 is 42."
        assert (await long).status is ToolStatus.UNAVAILABLE

    with closing(toolbox({"url": f"http://127.0.0.1:{web.port}/mcp"})) as box:
        asyncio.run(use())


def test_everything_over_sse(everything: str) -> None:
    web = Web(everything, "sse")
    try:
        with closing(toolbox({"type": "sse", "url": f"http://127.0.0.1:{web.port}/sse"})) as box:
            assert asyncio.run(ask(box, "echo", message="hello")).response.text == "Echo: hello"
    finally:
        web.kill()


def test_everything_over_stdio_one_session_for_each_episode(everything: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret-key")
    server = {"command": "node", "args": [everything, "stdio"], "env": {"KEY": "${MY_KEY}"}}

    async def episode() -> ToolResult:
        session = box.open(TASK, "e")
        (result,) = await session.run([ToolCall(name="get-env")])
        await session.close()
        return result

    with closing(toolbox(server, session="episode", tool_selected_list=["get-env"])) as box:
        environment = json.loads(asyncio.run(episode()).response.text or "")
        assert environment["KEY"] == "${oc.env:MY_KEY}"
        assert "PYTHONPATH" not in environment, "a server inherits no more than it needs"
