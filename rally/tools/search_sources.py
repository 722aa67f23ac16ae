"""Where the search tool's passages come from: a retrieval service that may fail and come back, or an index in process.

A service is asked again, with growing pauses, after whatever may pass: a refused or broken connection, 429 and 5xx.
What will not pass (a wrong address, a missing token, another protocol) fails at once, in a sentence.
"""

from __future__ import annotations

import asyncio
import os
import random
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rally.redact import learn_environment
from rally.types import RallyError

if TYPE_CHECKING:
    import httpx

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
MAX_ATTEMPTS = 10
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0

Contents = list[list[str]]
"""The `contents` of the passages found, best first, for each query."""


class SearchError(RallyError):
    """A search that found out nothing. The text is told to the model."""


class SearchSource(Protocol):
    async def search(self, queries: Sequence[str], topk: int, problems: list[str]) -> Contents:
        """Passages for each query; what went wrong on the way is appended to `problems`."""
        ...


class Service:
    """A server that speaks Search-R1's protocol."""

    def __init__(self, url: str, connections: int, token_env: str) -> None:
        self._url = url
        self._connections = connections
        self._token_env = token_env
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            weakref.WeakKeyDictionary()
        )
        _httpx()

    async def search(self, queries: Sequence[str], topk: int, problems: list[str]) -> Contents:
        asked_for = 0.0
        for pause in _pauses():
            await asyncio.sleep(max(pause, asked_for))
            response = await self._ask({"queries": list(queries), "topk": topk, "return_scores": True}, problems)
            if response is not None and response.status_code not in PASSING:
                return self._read(response, len(queries))
            asked_for = 0.0 if response is None else _retry_after(response)
        raise SearchError(f"the search service failed {MAX_ATTEMPTS} times ({problems[-1]}); search again later")

    async def _ask(self, body: Mapping[str, Any], problems: list[str]) -> httpx.Response | None:
        try:
            response = await self._client().post(self._url, json=body)
        except _httpx().TransportError as error:
            problems.append(str(error) or type(error).__name__)
            return None
        if response.status_code in PASSING:
            problems.append(f"HTTP {response.status_code}")
        return response

    def _read(self, response: httpx.Response, count: int) -> Contents:
        if response.status_code == 401:
            raise SearchError(f"the search service wants a token; set {self._token_env} where training runs")
        if response.status_code != 200:
            raise SearchError(f"the search service at {self._url} refused the request (HTTP {response.status_code})")
        try:
            result = response.json()["result"]
            found = [[(hit.get("document") or hit)["contents"] for hit in hits] for hits in result]
        except (ValueError, KeyError, TypeError, AttributeError):
            found = []
        if len(found) != count or not all(isinstance(text, str) for texts in found for text in texts):
            raise SearchError(f"the search service at {self._url} does not answer as Search-R1's /retrieve does")
        return found

    def _client(self) -> httpx.AsyncClient:
        """One per event loop, because its connections belong to the loop; kept, so that connections are too."""
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            httpx, token = _httpx(), os.environ.get(self._token_env)
            learn_environment([self._token_env])
            client = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {token}".encode()} if token else {},
                timeout=None,  # the caller's deadline counts the waiting too
                limits=httpx.Limits(max_connections=self._connections, max_keepalive_connections=self._connections),
                verify=self._url.startswith("https:"),  # reading the certificates takes half a second
                trust_env=False,  # a proxy set for the hub must not swallow what is asked of the next machine
            )
            self._clients[loop] = client
        return client


class InProcess:
    """An index that this process has open: no server, no network."""

    def __init__(self, path: str, device: str) -> None:
        from rally.retrieval import Batcher, open_index

        self._index = open_index(path, device)
        self._batchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Batcher] = weakref.WeakKeyDictionary()

    async def search(self, queries: Sequence[str], topk: int, problems: list[str]) -> Contents:
        from rally.retrieval import Batcher

        loop = asyncio.get_running_loop()
        batcher = self._batchers.get(loop)
        if batcher is None:
            batcher = self._batchers[loop] = Batcher(self._index)
        found = await batcher.search(queries, topk)
        return [[hit.document["contents"] for hit in hits] for hits in found]


def _pauses() -> Iterator[float]:
    """None before the first attempt, then doubling, and shaken, so that who failed together comes back apart."""
    yield 0.0
    for attempt in range(MAX_ATTEMPTS - 1):
        yield min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * random.uniform(0.5, 1.0)


def _retry_after(response: httpx.Response) -> float:
    said = response.headers.get("Retry-After", "")
    return min(LONGEST_PAUSE, float(said)) if said.isdigit() else 0.0


def _httpx() -> Any:
    try:
        import httpx
    except ModuleNotFoundError:
        raise RallyError("a search service needs the package httpx; run: pip install 'rally-rl[search]'") from None
    return httpx
