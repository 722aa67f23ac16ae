"""A `rally serve engine` process as a replica: our token protocol over HTTP, answers checked before they are believed.

    POST /generate  {"prompt_ids": [int, ...], "sampling": {name: value, ...}}
      -> {"ids": [...], "logprobs": [...], "sampling_logprobs": [...], "finish": "stop" | "length" | "abort",
          "spans": [[version, start, end], ...], "cached_tokens": n, "seconds": s, "first_token_seconds": s,
          "queued_seconds": s}
    GET  /health    200 while it can sample

`sampling` has the fields of `SamplingParams`, those that are at their defaults left out. A refusal is
`{"error": {"message": ...}}`: 4xx is the caller's mistake, 429 and 503 mean "later" and carry `Retry-After`.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rally.engines.base import EngineError
from rally.engines.replica import ReplicaBusy, ReplicaGone
from rally.types import Generation, SamplingParams, WeightSpan

if TYPE_CHECKING:
    import httpx

LATER = frozenset({429, 503})
TOKEN_VARIABLE = "RALLY_ENGINE_TOKEN"


class RallyReplica:
    """The server at `url`; the token it may want is read from RALLY_ENGINE_TOKEN."""

    def __init__(self, url: str, name: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._name = name or self._url
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            weakref.WeakKeyDictionary()
        )
        _httpx()

    @property
    def name(self) -> str:
        return self._name

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        body = {"prompt_ids": list(prompt_ids), "sampling": sampling_to_wire(params)}
        try:
            response = await self._client().post("/generate", json=body)
        except _httpx().TransportError as error:
            raise ReplicaGone(f"{self._url} cannot be reached ({error or type(error).__name__})") from error
        if response.status_code != 200:
            raise self._refusal(response)
        try:
            return generation_from_wire(response.json())
        except (ValueError, KeyError, TypeError) as error:
            raise ReplicaGone(f"{self._url} does not answer as `rally serve engine` does ({error})") from error

    async def healthy(self) -> bool:
        try:
            response = await self._client().get("/health")
        except _httpx().TransportError:
            return False
        return bool(response.status_code == 200)

    async def close(self) -> None:
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    def _refusal(self, response: httpx.Response) -> EngineError:
        status, said = response.status_code, _message(response)
        if status in LATER:
            return ReplicaBusy(f"{self._url} is busy: {said}", _retry_after(response))
        if status == 401:
            return EngineError(f"{self._url} wants a token; set {TOKEN_VARIABLE} here to the one it was started with")
        if 400 <= status < 500:
            return EngineError(said)
        return ReplicaGone(f"{self._url} failed with HTTP {status}: {said}")

    def _client(self) -> httpx.AsyncClient:
        """One per event loop, because its connections belong to the loop; kept, so that connections are too."""
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            httpx, token = _httpx(), os.environ.get(TOKEN_VARIABLE)
            from rally.engines.lines import Lines

            client = self._clients[loop] = httpx.AsyncClient(
                base_url=self._url,
                headers={"Authorization": f"Bearer {token}".encode()} if token else {},
                timeout=httpx.Timeout(None, connect=10.0),  # a long turn takes long; health checks find who hangs
                transport=Lines(secure=self._url.startswith("https:")),
                trust_env=False,  # a proxy set for the hub must not swallow what is asked of the next machine
            )
        return client


def sampling_to_wire(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults."""
    return {f.name: value for f in fields(params) if (value := getattr(params, f.name)) != f.default}


def generation_to_wire(generation: Generation) -> dict[str, Any]:
    spans = [[span.version, span.start, span.end] for span in generation.spans]
    return {f.name: getattr(generation, f.name) for f in fields(generation)} | {"spans": spans}


def generation_from_wire(answer: Mapping[str, Any]) -> Generation:
    """Raises whatever it stumbles over: an answer is whole or it is none."""
    if answer["finish"] not in ("stop", "length", "abort"):
        raise ValueError(f"finish is {answer['finish']!r}")
    ids, filtered, spans = answer["ids"], answer["sampling_logprobs"], answer["spans"]
    if len(answer["logprobs"]) != len(ids) or len(filtered) not in (0, len(ids)):
        raise ValueError(f"{len(ids)} ids, {len(answer['logprobs'])} logprobs")
    if spans and spans[-1][2] != len(ids):
        raise ValueError(f"weight spans end at {spans[-1][2]} of {len(ids)}")
    return Generation(
        ids=tuple(map(int, ids)),
        logprobs=tuple(map(float, answer["logprobs"])),
        sampling_logprobs=tuple(map(float, filtered)),
        finish=answer["finish"],
        cached_tokens=int(answer["cached_tokens"]),
        spans=tuple(WeightSpan(*map(int, span)) for span in spans),
        seconds=float(answer["seconds"]),
        first_token_seconds=float(answer["first_token_seconds"]),
        queued_seconds=float(answer["queued_seconds"]),
    )


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200] or "no reason given"


def _retry_after(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("Retry-After", "0")))
    except ValueError:
        return 0.0


def _httpx() -> Any:
    try:
        import httpx
    except ModuleNotFoundError:
        raise EngineError("servers as engines need the package httpx; run: pip install 'rally-rl[services]'") from None
    return httpx
