"""The code interpreter runs the model's code and returns output or error as text that the model can use."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rally.sandbox import SandboxSettings, shared_sandbox
from rally.services.sandbox import create_app
from rally.tools import ToolBox, ToolConfigError, ToolLimits, ToolSession, load_tools
from rally.tools.builtin.code_interpreter import CodeInterpreter, CodeServer, with_echo
from rally.types import Task, ToolCall, ToolResult, ToolStatus


@pytest.fixture(scope="module", autouse=True)
def end_sandboxes() -> Iterator[None]:
    yield
    shared_sandbox(SandboxSettings()).close()


def session(**config: Any) -> ToolSession:
    (tool,) = load_tools({"tools": [{"name": "code_interpreter", "config": config}]})
    task = Task(id="t", data_source="test", prompt=({"role": "user", "content": "hi"},))
    return ToolBox([tool], ToolLimits(timeout=60.0, max_response_chars=4000)).open(task, "episode")


async def ask(opened: ToolSession, code: str, **more: Any) -> ToolResult:
    call = ToolCall(name="code_interpreter", arguments={"code": code, **more})
    return (await opened.run([call]))[0]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print(6 * 7)", "42"),
        ("x = 6\nx * 7", "42"),
        ("```python\n6 * 7\n```", "42"),
        ("import sympy\nx = sympy.Symbol('x')\nsympy.integrate(2 * x, x)", "x**2"),
        ("import sys\nprint(1)\nprint('a warning', file=sys.stderr)", "1"),
        ("x = 1", "The code ran and printed nothing. Print what you want to see."),
        ("print(1)\n[][2]", "1\nTraceback (most recent call last):"),
        ("[][2]", "IndexError: list index out of range"),
        ("while True: pass", "Error: the code ran longer than 1 seconds and was stopped."),
        ("import os; os._exit(9)", "Error: the code ended with exit code 9."),
        ("print('x' * (2 << 20))", "more bytes of output cut]"),
    ],
)
async def test_what_came_of_the_code_is_told(code: str, told: str) -> None:
    result = await ask(session(default_timeout=1.0), code)
    assert result.status is ToolStatus.OK
    assert told in (result.response.text or ""), result.response.text
    assert result.metrics["isolation"] in ("bubblewrap", "landlock")
    assert result.metrics["code_failed"] == any(word in told for word in ("Error", "Traceback"))


async def test_a_limit_is_named() -> None:
    code = "import os\nfor _ in range(3): os.fork()\nkeep = b'x' * (60 << 20)\nimport time; time.sleep(30)"
    result = await ask(session(memory_limit_mb=128, default_timeout=20), code)
    assert result.response.text == "Error: the code used more than 128 MB of memory and was stopped."


async def test_variables_live_as_long_as_the_episode_when_it_is_stateful() -> None:
    opened = session(stateful=True, default_timeout=5)
    assert (await ask(opened, "x = 41")).metrics["code_failed"] is False
    assert (await ask(opened, "x + 1")).response.text == "42"
    lost = await ask(opened, "import os; os._exit(1)")
    assert lost.response.text == "Error: the code ended with exit code 1. All variables are lost."
    assert "NameError" in ((await ask(opened, "x")).response.text or "")
    assert "NameError" in ((await ask(session(stateful=True), "x")).response.text or "")
    await opened.close()
    assert opened.counters.get("release_errors", 0) == 0


async def test_without_state_every_call_starts_anew() -> None:
    opened = session()
    await ask(opened, "x = 1")
    assert "NameError" in ((await ask(opened, "x")).response.text or "")


async def test_no_more_run_at_once_than_the_tool_may() -> None:
    opened = session(num_workers=8, rate_limit=1)
    results = await asyncio.gather(*(ask(opened, "import time; time.sleep(0.3)") for _ in range(3)))
    assert max(r.queued for r in results) > 0.55
    together = session(num_workers=8, rate_limit=1, enable_global_rate_limit=False)
    results = await asyncio.gather(*(ask(together, "1") for _ in range(3)))
    assert max(r.queued for r in results) < 0.1


async def test_empty_code_is_a_bad_argument_and_a_language_that_is_missing_an_error() -> None:
    assert (await ask(session(), " ")).status is ToolStatus.BAD_ARGUMENTS
    result = await ask(session(default_language="cobol"), "x")
    assert result.status is ToolStatus.ERROR and "'cobol' is not supported" in (result.response.text or "")


async def test_a_server_gives_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app()
    real = httpx.AsyncClient

    def connected(**options: Any) -> httpx.AsyncClient:
        return real(transport=httpx.ASGITransport(app), **options)

    monkeypatch.setattr(httpx, "AsyncClient", connected)
    async with app.router.lifespan_context(app):
        opened = session(sandbox_fusion_url="http://sandbox/run_code", default_timeout=1.0)
        assert (await ask(opened, "x = 6\nx * 7")).response.text == "42"
        late = await ask(opened, "while True: pass")
        assert late.response.text == "Error: the code ran longer than 1 seconds and was stopped."
        assert late.metrics["isolation"] in ("bubblewrap", "landlock")


async def test_a_server_that_is_busy_is_asked_again_and_one_that_refuses_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [503, 429, 200, 401]
    good = {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "1\n"}}
    real = httpx.AsyncClient

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(answers.pop(0), json=good)

    monkeypatch.setattr(httpx, "AsyncClient", lambda **o: real(transport=httpx.MockTransport(answer), **o))
    monkeypatch.setattr("rally.tools.builtin.code_interpreter._PAUSE_SECONDS", 0.01)
    opened = session(sandbox_url="http://sandbox")
    assert (await ask(opened, "print(1)")).response.text == "1"
    refused = await ask(opened, "print(1)")
    assert refused.status is ToolStatus.UNAVAILABLE and "HTTP 401" in (refused.response.text or "")
    assert not answers


@pytest.mark.parametrize("url", ["http://a:1", "http://a:1/", "http://a:1/run_code", "http://a:1/run_code/"])
def test_a_url_may_name_the_server_or_its_method(url: str) -> None:
    assert CodeServer(url).url.rstrip("/") == "http://a:1/run_code"


@pytest.mark.parametrize("code", ["x = 1", "print(1)\n2", "def (", "", "for i in []:\n    i"])
def test_code_that_needs_no_echo_stays_as_it_is(code: str) -> None:
    assert with_echo(code) == code


@pytest.mark.parametrize("code", ["6 * 7", "x = 6; x * 7", "x = 6\nx * 7  # a comment\n\n", "(6 *\n 7)"])
def test_echo_for_a_server_keeps_what_stands_before_it(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(with_echo(code), {})
    assert capsys.readouterr().out == "42\n"


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"colour": 1}, "config has no key 'colour'; its keys are num_workers, rate_limit"),
        ({"num_workers": 0}, "config key 'num_workers'"),
        ({"stateful": True, "sandbox_url": "http://a"}, "stateful needs the local sandbox"),
    ],
)
def test_a_wrong_configuration_is_one_sentence(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ToolConfigError, match=sentence):
        load_tools({"tools": [{"name": "code_interpreter", "config": config}]})


def test_the_names_and_keys_others_use_are_understood() -> None:
    (tool,) = load_tools(
        {
            "tools": [
                {
                    "class_name": "verl.tools.sandbox_fusion_tools.SandboxFusionTool",
                    "config": {
                        "type": "native",
                        "sandbox_fusion_url": "https://sandbox.example.com/run_code",
                        "num_workers": 128,
                        "enable_global_rate_limit": True,
                        "rate_limit": 64,
                        "default_timeout": 30,
                        "default_language": "python",
                        "memory_limit_mb": 1024,
                    },
                    "tool_schema": {
                        "type": "function",
                        "function": {"name": "code_interpreter", "description": "Runs code.", "parameters": {}},
                    },
                }
            ]
        }
    )
    assert isinstance(tool, CodeInterpreter) and tool.settings.max_concurrency == 64
