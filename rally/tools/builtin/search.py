"""The built-in `search`: returns passages for one or several queries, in Search-R1's text format.

    tools:
      - name: search             # class_name: verl.tools.search_tool.SearchTool is the same with verl's text format
        config:
          retrieval_service_url: http://127.0.0.1:8000/retrieve    # or index_path: a folder, searched in process
          topk: 3                # passages per query
          num_workers: 120       # concurrent requests ...
          rate_limit: 120        # ... and, as in verl, the same; the smaller number applies
          default_timeout: 30    # seconds for a call, retries included (also spelled timeout)

The passages come from a server with Search-R1's protocol or from an index in this process. The limits are per tool,
even if two `search` tools use the same service. To limit the requests a second, write `limits: {rate_limit: N}` next to
`config`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import AliasChoices, Field, ValidationError

from rally.redact import learn_environment, redact
from rally.tools.base import BaseTool
from rally.tools.invoke import ToolTimeout
from rally.tools.limits import CallLimits, WorkerSettings
from rally.tools.schema import BadArguments, ToolConfigError, from_pydantic
from rally.types import RallyError, ToolResponse

if TYPE_CHECKING:
    import httpx

ABOUT_THE_QUERY = frozenset({400, 413, 414, 422})
RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
MAX_ATTEMPTS = 10
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0

Contents = list[list[str]]
"""The `contents` of the passages for each query, best first."""


class SearchError(RallyError):
    """The search service does not work. The text goes to the model."""

    outage = True


class SearchRefused(SearchError):
    """The service works and refused this query."""

    outage = False


class SearchSource(Protocol):
    """Where passages come from."""

    async def search(self, queries: Sequence[str], topk: int, problems: list[str]) -> Contents:
        """The passages for each query. Problems such as failed attempts are appended to `problems`."""
        ...


class Service:
    """A server with Search-R1's protocol."""

    def __init__(self, url: str, connections: int, token_env: str) -> None:
        self._url = url
        self._connections = connections
        self._token_env = token_env
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            weakref.WeakKeyDictionary()
        )
        _httpx()

    async def search(self, queries: Sequence[str], topk: int, problems: list[str]) -> Contents:
        retry_after = 0.0
        for pause in _pauses():
            await asyncio.sleep(max(pause, retry_after))
            response = await self._ask({"queries": list(queries), "topk": topk, "return_scores": True}, problems)
            if response is not None and response.status_code not in RETRIED_STATUS:
                return self._read(response, len(queries))
            retry_after = 0.0 if response is None else _retry_after(response)
        raise SearchError(f"the search service failed {MAX_ATTEMPTS} times ({problems[-1]}); search again later")

    async def _ask(self, body: Mapping[str, Any], problems: list[str]) -> httpx.Response | None:
        try:
            response = await self._client().post(self._url, json=body)
        except _httpx().TransportError as error:
            problems.append(str(error) or type(error).__name__)
            return None
        if response.status_code in RETRIED_STATUS:
            problems.append(f"HTTP {response.status_code}")
        return response

    def _read(self, response: httpx.Response, count: int) -> Contents:
        if response.status_code == 401:
            raise SearchError(f"the search service needs a token; set {self._token_env} where training runs")
        if response.status_code != 200:
            kind = SearchRefused if response.status_code in ABOUT_THE_QUERY else SearchError
            raise kind(f"the search service at {self._url} refused the request (HTTP {response.status_code})")
        try:
            result = response.json()["result"]
            contents = [[(hit.get("document") or hit)["contents"] for hit in hits] for hits in result]
        except (ValueError, KeyError, TypeError, AttributeError):
            contents = []
        if len(contents) != count or not all(isinstance(text, str) for texts in contents for text in texts):
            raise SearchError(f"the search service at {self._url} does not answer as Search-R1's /retrieve does")
        return contents

    def _client(self) -> httpx.AsyncClient:
        """The client of this event loop, which its connections belong to. It is kept, to reuse connections."""
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            httpx, token = _httpx(), os.environ.get(self._token_env)
            learn_environment([self._token_env])
            client = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {token}".encode()} if token else {},
                timeout=None,  # SearchTool.execute has the deadline
                limits=httpx.Limits(max_connections=self._connections, max_keepalive_connections=self._connections),
                verify=self._url.startswith("https:"),  # reading the certificates takes half a second
                trust_env=False,  # a proxy set for the hub must not get requests to the local network
            )
            self._clients[loop] = client
        return client


class InProcess:
    """An index opened in this process, without a server."""

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
        hits_of_queries = await batcher.search(queries, topk)
        return [[hit.document["contents"] for hit in hits] for hits in hits_of_queries]


def _pauses() -> Iterator[float]:
    """No pause before the first attempt, then exponential backoff with jitter."""
    yield 0.0
    for attempt in range(MAX_ATTEMPTS - 1):
        yield min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * random.uniform(0.5, 1.0)


def _retry_after(response: httpx.Response) -> float:
    value = response.headers.get("Retry-After", "")
    return min(LONGEST_PAUSE, float(value)) if value.isdigit() else 0.0


def _httpx() -> Any:
    try:
        import httpx
    except ModuleNotFoundError:
        raise RallyError("a search service needs the package httpx; run: pip install 'rally-rl[search]'") from None
    return httpx


MAX_QUERIES = 32
NO_RESULTS = "No search results found."
BETWEEN_QUERIES = "\n---\n"

_log = logging.getLogger(__name__)


class SearchSettings(WorkerSettings):
    """The `config` of the tool."""

    type: Literal["native"] = "native"
    retrieval_service_url: str | None = None
    index_path: str | None = None
    device: str = "cpu"
    topk: int = Field(default=3, ge=1)
    num_workers: int = Field(default=120, ge=1)
    rate_limit: int = Field(default=120, ge=1)
    default_timeout: float = Field(default=30, gt=0, validation_alias=AliasChoices("default_timeout", "timeout"))
    token_env: str = "RALLY_RETRIEVAL_TOKEN"

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> SearchSettings:
        try:
            settings = cls.model_validate(dict(config))
        except ValidationError as error:
            raise ToolConfigError(f"config of the search tool: {from_pydantic(error)}") from None
        if (settings.retrieval_service_url is None) == (settings.index_path is None):
            raise ToolConfigError(
                "the search tool needs one of retrieval_service_url (such as http://127.0.0.1:8000/retrieve) and "
                "index_path"
            )
        return settings

    def source(self) -> SearchSource:
        if self.index_path is not None:
            return InProcess(self.index_path, self.device)
        assert self.retrieval_service_url is not None
        return Service(self.retrieval_service_url, self.max_concurrency, self.token_env)


class SearchTool(BaseTool[Any]):
    """The tool. Without a config it has a schema but cannot search."""

    example: ClassVar[Mapping[str, Any] | None] = {"query": "the capital of France"}

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, tool_schema)
        if config is None:
            return
        self._settings = SearchSettings.read(config)
        self._source = self._settings.source()
        self.own_timeout = self._settings.default_timeout if {"default_timeout", "timeout"} & config.keys() else None
        self.limits = CallLimits(max_concurrency=self._settings.max_concurrency)
        self._reported: set[str] = set()

    def get_openai_tool_schema(self) -> dict[str, Any]:
        return {
            "name": "search",
            "description": "Searches for passages that help to answer a question.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to search for"},
                    "query_list": {
                        "type": "array",
                        "items": {"type": "string"},
                        "description": "Several things to search for at once, instead of query",
                    },
                },
            },
        }

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, None, dict[str, Any]]:
        queries = read_queries(parameters)
        problems: list[str] = []
        try:
            async with asyncio.timeout(self._settings.default_timeout):
                contents = await self._source.search(queries, self._settings.topk, problems)
        except TimeoutError:
            kind = SearchError if problems else ToolTimeout
            problems.append(f"no answer within {self._settings.default_timeout:g} seconds")
            raise kind(f"the search failed ({'; '.join(dict.fromkeys(problems))}); search again later") from None
        except SearchError as error:
            problems.append(str(error))
            raise
        finally:
            self._report(problems)
        metrics = {
            "query_count": len(queries),
            "total_results": sum(map(len, contents)),
            "attempts": len(problems) + 1,
        }
        return ToolResponse(text=self.response_text(contents)), None, metrics

    def response_text(self, contents: Contents) -> str:
        """The passages of all queries for the model."""
        return BETWEEN_QUERIES.join(map(format_passages, contents))

    def _report(self, problems: Sequence[str]) -> None:
        """Log each problem once: a run makes thousands of calls."""
        for problem in set(problems) - self._reported:
            self._reported.add(problem)
            _log.warning("tool %s: %s", self.name, redact(problem))


def format_passages(passages: Sequence[str]) -> str:
    """The passages of one query, numbered. The first line of a passage is its title."""
    parts = (passage.partition("\n") for passage in passages)
    lines = (f"Doc {i}(Title: {title}) {text}\n" for i, (title, _, text) in enumerate(parts, start=1))
    return "".join(lines) or NO_RESULTS


def read_queries(parameters: Mapping[str, Any]) -> list[str]:
    """The queries in `query` and `query_list`."""
    single, several = parameters.get("query"), parameters.get("query_list")
    queries = [*([] if single is None else [single]), *(several or [])]
    if not queries or not all(isinstance(query, str) and query.strip() for query in queries):
        raise BadArguments("give a query that is not empty, or a query_list of such")
    if len(queries) > MAX_QUERIES:
        raise BadArguments(f"a call takes at most {MAX_QUERIES} queries, not {len(queries)}")
    return queries


told = format_passages  # the name that earlier documentation used
