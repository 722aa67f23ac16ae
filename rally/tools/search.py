"""The built-in `search`: one query or several become passages, told as Search-R1 tells them, or a line on why not.

    tools:
      - name: search                                   # or class_name: verl.tools.search_tool.SearchTool
        config:
          retrieval_service_url: http://127.0.0.1:8000/retrieve    # or index_path: a folder, searched in process
          topk: 3                # passages per query
          num_workers: 120       # requests under way at a time ...
          rate_limit: 120        # ... of which, as verl means it, the smaller number holds
          default_timeout: 30    # seconds for a call, retries included (also spelled timeout)

The limits are this tool's own: another `search` tool, to the same service or not, has its own. A service that bears
only so many requests a second is spared with `limits: {rate_limit: N}` beside `config`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import AliasChoices, Field, ValidationError

from rally.redact import redact
from rally.tools.arguments import BadArguments, from_pydantic
from rally.tools.base import BaseTool
from rally.tools.calling import ToolTimeout
from rally.tools.limits import CallLimits, WorkerSettings
from rally.tools.schema import ToolConfigError
from rally.tools.search_sources import InProcess, SearchError, SearchSource, Service
from rally.types import ToolResponse

MAX_QUERIES = 32
NOTHING = "No search results found."
BETWEEN_QUERIES = "\n---\n"

_log = logging.getLogger(__name__)


class SearchSettings(WorkerSettings):
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
                "the search tool needs one of retrieval_service_url (as http://127.0.0.1:8000/retrieve) and index_path"
            )
        return settings

    def source(self) -> SearchSource:
        if self.index_path is not None:
            return InProcess(self.index_path, self.device)
        assert self.retrieval_service_url is not None
        return Service(self.retrieval_service_url, self.at_once, self.token_env)


class SearchTool(BaseTool[Any]):
    """Without a config, its schema alone."""

    example: ClassVar[Mapping[str, Any] | None] = {"query": "the capital of France"}

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, tool_schema)
        if config is None:
            return
        self._settings = SearchSettings.read(config)
        self._source = self._settings.source()
        self.own_timeout = self._settings.default_timeout if {"default_timeout", "timeout"} & config.keys() else None
        self.limits = CallLimits(max_concurrency=self._settings.at_once)
        self._told: set[str] = set()

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
                found = await self._source.search(queries, self._settings.topk, problems)
        except TimeoutError:
            kind = SearchError if problems else ToolTimeout
            problems.append(f"no answer within {self._settings.default_timeout:g} seconds")
            raise kind(f"the search failed ({'; '.join(dict.fromkeys(problems))}); search again later") from None
        except SearchError as error:
            problems.append(str(error))
            raise
        finally:
            self._tell(problems)
        metrics = {
            "query_count": len(queries),
            "total_results": sum(map(len, found)),
            "attempts": len(problems) + 1,
        }
        return ToolResponse(text=BETWEEN_QUERIES.join(map(told, found))), None, metrics

    def _tell(self, problems: Sequence[str]) -> None:
        """Each kind of trouble once: a run makes thousands of calls."""
        for problem in set(problems) - self._told:
            self._told.add(problem)
            _log.warning("tool %s: %s", self.name, redact(problem))


def told(passages: Sequence[str]) -> str:
    """The passages of one query, numbered; the first line of each is its title."""
    parts = (passage.partition("\n") for passage in passages)
    lines = (f"Doc {i}(Title: {title}) {text}\n" for i, (title, _, text) in enumerate(parts, start=1))
    return "".join(lines) or NOTHING


def read_queries(parameters: Mapping[str, Any]) -> list[str]:
    """`query`, or `query_list`, or both, as the model wrote them."""
    single, several = parameters.get("query"), parameters.get("query_list")
    queries = [*([] if single is None else [single]), *(several or [])]
    if not queries or not all(isinstance(query, str) and query.strip() for query in queries):
        raise BadArguments("give a query that is not empty, or a query_list of such")
    if len(queries) > MAX_QUERIES:
        raise BadArguments(f"a call takes at most {MAX_QUERIES} queries, not {len(queries)}")
    return queries
