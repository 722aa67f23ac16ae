"""User and password of a server's address are sent with every request, and appear in no message."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from rally.doctor.rollout_logprobs import check_server
from rally.engines import EngineError
from rally.engines.remote import RallyReplica, ServerReplica, Vllm
from rally.engines.remote.client import Address
from rally.engines.remote.server_api import HttpCall

WHO, HEADER = "ada:s%40fe%2Fword", "Basic YWRhOnNAZmUvd29yZA=="


class Gate:
    """A proxy that accepts only the user ada."""

    def __init__(self) -> None:
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status = "200 OK" if f"authorization: {HEADER}".lower() in head.lower() else "401 Unauthorized"
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode())
        await writer.drain()
        writer.close()


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    gate = Gate()
    server = await asyncio.start_server(gate.serve, "127.0.0.1", 0)
    gate.port = server.sockets[0].getsockname()[1]
    yield gate
    server.close()


async def health(url: str) -> None:
    replica = ServerReplica(url, Vllm())
    try:
        await replica.call(HttpCall("/health"), 5)
    finally:
        await replica.close()


async def test_they_open_the_gate(gate: Gate) -> None:
    await health(f"http://{WHO}@127.0.0.1:{gate.port}/")
    with pytest.raises(EngineError, match="user and password of its proxy"):
        await health(f"http://127.0.0.1:{gate.port}")


async def test_no_sentence_tells_them(gate: Gate) -> None:
    wrong = f"http://ada:mistaken@127.0.0.1:{gate.port}"
    for url in (wrong, "http://ada:mistaken@127.0.0.1:9"):
        with pytest.raises(EngineError) as caught:
            await health(url)
        assert "http://127.0.0.1:" in str(caught.value) and "mistaken" not in str(caught.value)
    found = await asyncio.to_thread(check_server, wrong)
    assert found.status == "error" and "401" in found.text and "mistaken" not in found.text


async def test_the_doctor_goes_through_the_gate_too(gate: Gate) -> None:
    found = await asyncio.to_thread(check_server, f"http://{WHO}@127.0.0.1:{gate.port}")
    assert (found.status, found.text) == ("ok", f"the rollout server http://127.0.0.1:{gate.port} answers")


def test_beside_a_token_they_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLY_ENGINE_TOKEN", "token-of-the-engine")
    with pytest.raises(EngineError) as caught:
        RallyReplica(f"http://{WHO}@10.0.0.1:8000")
    told = str(caught.value)
    assert "RALLY_ENGINE_TOKEN" in told and "remove one" in told and "http://10.0.0.1:8000 " in told
    assert "ada" not in told and "token-of-the-engine" not in told
    ServerReplica(f"http://{WHO}@10.0.0.1:8000", Vllm())  # the token is not sent to it


@pytest.mark.parametrize(
    ("written", "url", "header"),
    [
        ("http://[::1]:8000/", "http://[::1]:8000", None),
        ("https://proxy/engines/1/", "https://proxy/engines/1", None),
        ("http://key@proxy", "http://proxy", "Basic a2V5Og=="),
        ("http://ada:a@b@proxy:1", "http://proxy:1", "Basic YWRhOmFAYg=="),
    ],
)
def test_an_address_without_who_asks(written: str, url: str, header: str | None) -> None:
    assert Address.of(written) == (url, {"Authorization": header} if header else {})
