"""The search tool formats passages as Search-R1 does, survives a restart of its server, and has its own limits."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from search_cases import Server, free_port, write_corpus

from rally.retrieval import IndexSpec, build_index
from rally.tools import CallLimits, ToolBox, load_tools
from rally.types import Task, ToolCall, ToolResult, ToolStatus

PARIS = 'Doc 1(Title: "Paris") Paris is the capital of France.\n'


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    build_index(write_corpus(folder / "corpus.jsonl"), folder / "index", IndexSpec())
    return folder / "index"


def search_tool(**config: Any) -> Any:
    (tool,) = load_tools({"tools": [{"name": "search", "config": config}]})
    return tool


async def call(tool: Any, **arguments: Any) -> ToolResult:
    task = Task(id="t", data_source="d", prompt=({"role": "user", "content": "hi"},))
    (result,) = await ToolBox([tool]).open(task, "e").run([ToolCall(name=tool.name, arguments=arguments)])
    return result


Answer = Callable[[dict[str, Any], dict[str, str]], Awaitable[tuple[int, Any]]]


@asynccontextmanager
async def service(answer: Answer) -> AsyncIterator[str]:
    """A scripted real HTTP server: (body, headers) to (status, JSON); a status of 0 closes the connection."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        status, content = await answer(body, headers)
        if status:
            text = json.dumps(content).encode()
            writer.write(
                b"HTTP/1.1 %d X\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (status, len(text)) + text
            )
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/retrieve"


@pytest.mark.parametrize(("more", "most"), [({}, 7), ({"enable_global_rate_limit": False}, 9)])
def test_both_numbers_count_requests_under_way(index: Path, more: dict[str, Any], most: int) -> None:
    tool = search_tool(index_path=str(index), num_workers=9, rate_limit=7, **more)
    assert tool.limits == CallLimits(max_concurrency=most)


async def test_in_process_one_query_or_several(index: Path) -> None:
    tool = search_tool(index_path=str(index), topk=1)
    single = await call(tool, query="capital of France")
    assert (single.status, single.response.text) == (ToolStatus.OK, PARIS)
    several = await call(tool, query_list=["capital of France", "xylophone"])
    assert several.response.text == PARIS + "\n---\nNo search results found."
    assert {"query_count": 2, "total_results": 1, "attempts": 1}.items() <= several.metrics.items()


@pytest.mark.parametrize(
    "arguments", [{}, {"query": " "}, {"query_list": []}, {"query_list": ["a", ""]}, {"query_list": ["a"] * 33}]
)
async def test_arguments_that_ask_nothing_are_said(index: Path, arguments: dict[str, Any]) -> None:
    result = await call(search_tool(index_path=str(index)), **arguments)
    assert result.status is ToolStatus.BAD_ARGUMENTS
    assert "quer" in (result.response.text or "")


async def test_a_server_killed_and_restarted_in_mid_use(index: Path) -> None:
    server = Server(index)
    server.wait_ready()
    try:
        tool = search_tool(
            retrieval_service_url=server.url, num_workers=120, rate_limit=150, default_timeout=30, topk=1
        )
        assert (await call(tool, query="paris")).response.text == PARIS
        server.kill()
        pending = [asyncio.create_task(call(tool, query="paris")) for _ in range(8)]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in pending), "they wait for the server to come back"
        server.launch()
        results = await asyncio.gather(*pending)
        assert [result.response.text for result in results] == [PARIS] * 8
        assert all(result.metrics["attempts"] > 1 for result in results)
    finally:
        server.kill()


async def test_what_may_pass_is_asked_again_and_what_will_not_fails_at_once(caplog: pytest.LogCaptureFixture) -> None:
    answers = [(503, {}), (0, {}), (200, {"result": [[{"contents": "T\nx"}]]}), (404, {}), (200, {"result": []})]
    seen = []

    async def answer(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, Any]:
        seen.append(body)
        return answers[len(seen) - 1]

    async with service(answer) as url:
        tool = search_tool(retrieval_service_url=url, topk=7)
        recovered = await call(tool, query="q")
        assert recovered.response.text == "Doc 1(Title: T) x\n", "bare documents are read too"
        assert recovered.metrics["attempts"] == 3
        assert seen[0] == {"queries": ["q"], "topk": 7, "return_scores": True}
        refused, foreign = await call(tool, query="q"), await call(tool, query="q")
        assert refused.status is foreign.status is ToolStatus.UNAVAILABLE
        assert "refused the request (HTTP 404)" in (refused.response.text or "")
        assert "does not answer as Search-R1's /retrieve does" in (foreign.response.text or "")
        assert len(seen) == 5
        assert [record.message.count("HTTP 404") for record in caplog.records].count(1) == 1, "the log is told, once"


async def test_a_service_that_is_not_there_is_told_within_the_deadline() -> None:
    tool = search_tool(retrieval_service_url=f"http://127.0.0.1:{free_port()}/retrieve", default_timeout=0.6)
    started = time.perf_counter()
    result = await call(tool, query="q")
    assert time.perf_counter() - started < 10
    assert result.status is ToolStatus.UNAVAILABLE
    text = result.response.text or ""
    assert text.startswith("Error: the search failed (All connection attempts failed; no answer within 0.6 seconds)")


async def test_the_token_comes_from_the_environment_and_is_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, Any]:
        return (200, {"result": [[]]}) if headers.get("authorization") == "Bearer s3cret" else (401, {})

    async with service(answer) as url:
        unknown = await call(search_tool(retrieval_service_url=url, token_env="MY_TOKEN"), query="q")
        assert "needs a token; set MY_TOKEN" in (unknown.response.text or "")
        monkeypatch.setenv("MY_TOKEN", "s3cret")
        tool = search_tool(retrieval_service_url=url, token_env="MY_TOKEN")
        known = await call(tool, query="q")
        assert known.response.text == "No search results found."
        assert "s3cret" not in repr((tool.config, known))


async def test_limits_hold_and_belong_to_one_tool() -> None:
    under_way, most = 0, 0

    async def answer(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, Any]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.1)
        under_way -= 1
        return 200, {"result": [[]]}

    async with service(answer) as url:
        tools = [search_tool(retrieval_service_url=url, num_workers=2) for _ in range(2)]
        await asyncio.gather(*(call(tools[0], query="q") for _ in range(6)))
        assert most == 2
        most = 0
        await asyncio.gather(*(call(tool, query="q") for tool in tools for _ in range(4)))
        assert most == 4, "two tools of the same configuration have two limits"


def test_a_tool_serves_one_event_loop_after_another(index: Path) -> None:
    tool = search_tool(index_path=str(index), topk=1, num_workers=1)
    for _ in range(2):
        results = asyncio.run(_several(tool))
        assert [result.response.text for result in results] == [PARIS] * 3


async def _several(tool: Any) -> list[ToolResult]:
    return list(await asyncio.gather(*(call(tool, query="paris") for _ in range(3))))
