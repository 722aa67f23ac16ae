"""The server speaks SandboxFusion's protocol to its published client, and rejects unauthorized requests."""

import asyncio
import base64
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import sandbox_fusion as client

from rally.sandbox import Limits
from rally.services.sandbox import Ceilings, RequestTooLarge, RunCodeRequest, create_app

ROOT = Path(__file__).parents[2]
RESPONSE_FIELDS = {"status", "message", "compile_result", "run_result", "executor_pod_name", "files", "metrics"}
RESULT_FIELDS = {"status", "execution_time", "return_code", "stdout", "stderr"}


def free_port() -> int:
    """A port for a server that starts later. It is below those that the kernel gives to outgoing connections, one of
    which could have it by then."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def started(port: int, *options: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "rally.cli", "serve", "sandbox", "--port", str(port), *options]
    server = subprocess.Popen(command, env=environment)
    deadline = time.monotonic() + 280
    while time.monotonic() < deadline and server.poll() is None:
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}/v1/ping")
        except httpx.TransportError:
            time.sleep(0.1)
            continue
        assert answer.json() == "pong"
        return server
    server.kill()
    pytest.fail("the server did not start")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    server = started(port)
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    assert server.wait(timeout=30) is not None


def post(url: str, **request: Any) -> dict[str, Any]:
    response = httpx.post(f"{url}/run_code", json=request, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_the_published_client_works_unchanged(url: str) -> None:
    files = {"in.txt": base64.b64encode(b"from a file").decode()}
    code = "print(open('in.txt').read(), input()); open('out', 'w').write('left behind')"
    asked = client.RunCodeRequest(code=code, language="python", files=files, stdin="and stdin", fetch_files=["out"])
    answer = client.run_code(asked, endpoint=url)
    assert answer.status == client.RunStatus.Success and answer.run_result is not None
    assert answer.run_result.stdout == "from a file and stdin\n"
    assert base64.b64decode(answer.files["out"]) == b"left behind"
    late = client.run_code(
        client.RunCodeRequest(code="while True: pass", language="python", run_timeout=0.3), endpoint=url
    )
    mapping = client.SummaryMapping(Success="yes", Failed="no", RunTimeout="late")
    assert client.summary_run_code_result(late, mapping) == "late"


async def test_the_published_client_works_in_many_at_once(url: str) -> None:
    requests = [client.RunCodeRequest(code=f"print({n} ** 2)", language="python") for n in range(12)]
    answers = await asyncio.gather(*(client.run_code_async(r, endpoint=url) for r in requests))
    assert [a.run_result.stdout for a in answers] == [f"{n**2}\n" for n in range(12)]


def test_answers_have_the_protocol_s_fields_and_meanings(url: str) -> None:
    good = post(url, code="print(1)", language="python")
    assert set(good) == RESPONSE_FIELDS and set(good["run_result"]) == RESULT_FIELDS
    assert (good["status"], good["message"], good["compile_result"], good["files"]) == ("Success", "", None, {})
    assert good["metrics"]["isolation"] in ("bubblewrap", "landlock")
    failed = post(url, code="print('a'); 1 / 0", language="python")
    assert failed["status"] == "Failed" and failed["run_result"]["return_code"] == 1
    late = post(url, code="print('early', flush=True)\nwhile True: pass", language="python", run_timeout=0.3)
    assert late["status"] == "Failed" and late["run_result"]["status"] == "TimeLimitExceeded"
    assert late["run_result"]["return_code"] is None and late["run_result"]["stdout"] == "early\n"
    hungry = post(url, code="keep = b'x' * (500 << 20)", language="python", memory_limit_MB=100)
    assert hungry["status"] == "Failed" and "MemoryError" in hungry["run_result"]["stderr"]
    climbing = post(url, code="", language="python", files={"../../x": "eA==", "skipped": None})
    assert climbing["status"] == "Failed" and "could not start the program" in climbing["run_result"]["stderr"]


def test_what_the_server_cannot_do_is_told_apart_from_what_the_client_did_wrong(url: str) -> None:
    missing = post(url, code="fn main() {}", language="rust")
    assert missing["status"] == "SandboxError" and "use one of python" in missing["message"]
    for wrong in ({"code": "1"}, {"code": "1", "language": "python", "run_timeout": -1}):
        assert httpx.post(f"{url}/run_code", json=wrong).status_code == 422
    spoiled = {"code": "1", "language": "python", "files": {"a": "no base64"}}
    response = httpx.post(f"{url}/run_code", json=spoiled)
    assert response.status_code == 422 and "'a' must be base64" in response.json()["detail"]


@pytest.mark.drill("security", "A request asks for a time that is no number", "HTTP 422 with one sentence")
@pytest.mark.parametrize("field", ["run_timeout", "compile_timeout", "memory_limit_MB"])
@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e309", "-5", '"soon"', "null", "[]", "{}", '"NaN"']
)
def test_times_that_are_no_numbers_are_refused(url: str, field: str, value: str) -> None:
    body = f'{{"code": "print(1)", "language": "python", "{field}": {value}}}'
    response = httpx.post(f"{url}/run_code", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 422, response.text
    assert field in response.json()["detail"] and response.json()["detail"].startswith("the request is invalid: ")


@pytest.mark.parametrize(
    "body",
    ["", "[]", "null", "NaN", "{" * 100_000, "\xff", '{"code": "\\ud800", "language": "\\ud800"}', '{"\\ud800": 1}'],
)
def test_no_body_is_an_internal_error(url: str, body: str) -> None:
    content = body.encode("latin-1")
    response = httpx.post(f"{url}/run_code", content=content, headers={"Content-Type": "application/json"}, timeout=60)
    assert response.status_code in (200, 400, 422), response.text


@pytest.mark.drill("security", "A client asks for 900 GB and a week", "HTTP 400 with the most that the server allows")
@pytest.mark.parametrize(
    ("field", "value", "most"),
    [
        ("memory_limit_MB", 900_000, "4,096"),
        ("memory_limit_MB", 10**30, "4,096"),
        ("run_timeout", 600_000, "600.0"),
        ("compile_timeout", 1e300, "600.0"),
        ("fetch_files", ["x"] * 10_001, "10,000"),
        ("files", {str(n): "" for n in range(10_001)}, "10,000"),
    ],
    ids=["memory", "far too much memory", "time", "compile time", "fetched", "files"],
)
def test_requests_over_the_ceilings_are_refused(url: str, field: str, value: Any, most: str) -> None:
    asked = {"code": "print(1)", "language": "python", field: value}
    response = httpx.post(f"{url}/run_code", json=asked, timeout=120)
    assert response.status_code == 400, response.text[:300]
    assert f"at most {most}; ask for less" in response.json()["detail"]


def test_files_and_input_must_fit_on_the_disk_of_the_sandbox() -> None:
    limits = Limits(disk_mb=1)
    for field, value in (("files", {"a": "A" * 800_000, "b": "A" * 800_000}), ("stdin", "x" * 1_100_000)):
        request = RunCodeRequest.model_validate({"code": "", "language": "python", field: value})
        with pytest.raises(RequestTooLarge, match="allows at most 1,048,576; ask for less"):
            Ceilings().check(request, limits)


@pytest.mark.drill(
    "reliability", "A client disconnects while its program runs", "The program is killed, its slot is free"
)
async def test_a_client_that_leaves_takes_its_program_along() -> None:
    port = free_port()
    server = started(port, "--max-concurrent", "1")
    try:
        asked = {"code": "import time; time.sleep(300)", "language": "python", "run_timeout": 300}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=1.0) as client:
            leaving = [client.post("/run_code", json=asked) for _ in range(3)]  # one runs, two wait
            for result in await asyncio.gather(*leaving, return_exceptions=True):
                assert isinstance(result, httpx.ReadTimeout)
            answer = await client.post("/run_code", json={"code": "print(1)", "language": "python"}, timeout=120)
        assert answer.json()["run_result"]["stdout"] == "1\n"
    finally:
        server.terminate()
        server.wait()


async def test_a_token_keeps_strangers_out() -> None:
    app = create_app(token="open sesame")
    request = {"code": "print(1)", "language": "python"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sandbox") as client:
        for headers in ({}, {"Authorization": "Bearer guess"}, {"Authorization": "Bearer "}):
            assert (await client.post("/run_code", json=request, headers=headers)).status_code == 401
        known = {"Authorization": "Bearer open sesame"}
        assert (await client.get("/v1/ping", headers=known)).json() == "pong"
