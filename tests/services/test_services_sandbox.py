"""The server speaks SandboxFusion's protocol to its published client, and rejects unauthorized requests."""

import asyncio
import base64
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sandbox_fusion as client

from rally.services.sandbox import create_app

ROOT = Path(__file__).parents[2]
RESPONSE_FIELDS = {"status", "message", "compile_result", "run_result", "executor_pod_name", "files", "metrics"}
RESULT_FIELDS = {"status", "execution_time", "return_code", "stdout", "stderr"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def started(port: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "rally.cli", "serve", "sandbox", "--port", str(port)]
    server = subprocess.Popen(command, env=environment)
    deadline = time.monotonic() + 120
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


async def test_a_token_keeps_strangers_out() -> None:
    app = create_app(token="open sesame")
    request = {"code": "print(1)", "language": "python"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sandbox") as client:
        for headers in ({}, {"Authorization": "Bearer guess"}, {"Authorization": "Bearer "}):
            assert (await client.post("/run_code", json=request, headers=headers)).status_code == 401
        known = {"Authorization": "Bearer open sesame"}
        assert (await client.get("/v1/ping", headers=known)).json() == "pong"
