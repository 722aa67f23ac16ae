"""Base classes for tools written for verl, and the tools of a run with verl's interface for agent loops.

A subclass of verl's SandboxFusionTool or SearchTool runs its own code: what it overrides, and the attributes and the
`execution_pool` that it uses, are those of verl. Two things differ. An exception in the pool is raised and not returned
as None, and a service that is down is an outage and not a result.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from rally.sandbox import Outcome, Program
from rally.tools import BaseTool, ToolResponse, ToolUnavailable, load_tools
from rally.tools.builtin.code_interpreter import CodeServer
from rally.tools.builtin.search import (
    BETWEEN_QUERIES,
    NO_RESULTS,
    Contents,
    SearchSettings,
    SearchTool,
    read_queries,
)
from rally.tools.function_tool import FunctionTool
from rally.tools.process_tool import ProcessTool
from rally.tools.results import ToolReturn, read_answer
from rally.tools.schema import ToolConfigError

ArgsT = TypeVar("ArgsT")
MAX_ATTEMPTS = 10
RETRIED = (500, 502, 503, 504)


class ToolSchemaDict(dict[str, Any]):
    """A tool schema as a mapping whose keys are attributes too, as in verl's Pydantic models."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(f"the tool schema has no {name}") from None
        return ToolSchemaDict(value) if isinstance(value, dict) else value

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """The schema as a plain mapping."""
        plain: dict[str, Any] = json.loads(json.dumps(self))
        return plain


class VerlTool(BaseTool[ArgsT]):
    """Rally's counterpart of verl's BaseTool."""

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self.tool_schema = ToolSchemaDict(self.tool_schema)

    @classmethod
    def schema_argument(cls, schema: Mapping[str, Any] | None) -> Any:
        return None if schema is None else ToolSchemaDict(schema)


class ToolHandle:
    """A tool of the run with verl's call protocol: `create`, `execute`, `release`."""

    def __init__(self, tool: BaseTool[Any]) -> None:
        self._tool = tool
        self.name, self.config = tool.name, tool.config
        self.tool_schema = ToolSchemaDict(tool.tool_schema)

    def get_openai_tool_schema(self) -> ToolSchemaDict:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Create an instance. As in a run of Rally, `create_kwargs` are passed one by one too."""
        nested = kwargs.get("create_kwargs") or {}
        created: Any = self._tool.create(instance_id, **{**nested, **kwargs})
        made: tuple[str, ToolResponse] = await created if asyncio.iscoroutine(created) else created
        return made if isinstance(made, tuple) else (made, ToolResponse())

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        if isinstance(self._tool, FunctionTool | ProcessTool):  # another process cannot have the loop's data
            kwargs.pop("agent_data", None)
        returned: Any = self._tool.execute(instance_id, parameters, **kwargs)
        answer: ToolReturn = read_answer(await returned if asyncio.iscoroutine(returned) else returned)
        return answer.response, answer.reward, answer.metrics

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return await self._tool.calc_reward(instance_id, **kwargs)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        released: Any = self._tool.release(instance_id, **kwargs)
        if asyncio.iscoroutine(released):
            await released


def initialize_tools_from_config(tools_config_file: str) -> list[ToolHandle]:
    """The tools of a tool YAML. Loops call it for every episode, so a file is read once."""
    path = Path(tools_config_file).expanduser()
    return _loaded(str(path.resolve()), path.stat().st_mtime_ns if path.exists() else 0)


@lru_cache(maxsize=8)
def _loaded(path: str, changed: int) -> list[ToolHandle]:
    tools = load_tools(path)
    for tool in tools:
        tool.prepare()
    return [ToolHandle(tool) for tool in tools]


class PoolMethod:
    """A method that is called as `method.remote(...)`, in a thread, and awaited."""

    def __init__(self, call: Callable[..., Any], threads: ThreadPoolExecutor) -> None:
        self._call, self._threads = call, threads

    async def remote(self, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(self._call, *args, **kwargs))


class ExecutionPool:
    """Threads that run functions, with the interface of verl's pool of Ray actors. As there, both numbers limit how
    many run at the same time."""

    def __init__(self, num_workers: int, rate_limit: int) -> None:
        threads = ThreadPoolExecutor(max_workers=max(1, min(num_workers, rate_limit)))
        self.execute = PoolMethod(lambda function, *args, **kwargs: function(*args, **kwargs), threads)
        self.ping = PoolMethod(lambda: True, threads)


def init_execution_pool(
    num_workers: int, enable_global_rate_limit: bool = True, rate_limit: int = 10, mode: Any = None
) -> ExecutionPool:
    return ExecutionPool(num_workers, rate_limit if enable_global_rate_limit else num_workers)


class VerlSandboxTool(VerlTool[Any]):
    """Rally's counterpart of verl's SandboxFusionTool, for subclasses."""

    timeout_counts = True

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        get = self.config.get
        self._instance_dict: dict[str, dict[str, Any]] = {}
        self.num_workers, self.rate_limit = get("num_workers", 10), get("rate_limit", 10)
        self.default_timeout, self.default_language = get("default_timeout", 30), get("default_language", "python")
        self.memory_limit_mb = get("memory_limit_mb", 1024)
        self.enable_global_rate_limit = get("enable_global_rate_limit", True)
        self.sandbox_fusion_url = get("sandbox_fusion_url", "")
        if not self.sandbox_fusion_url:
            raise ToolConfigError(
                "sandbox_fusion_url is not set; start `rally serve sandbox` and set it to http://127.0.0.1:8080/run_code"
            )
        self.execution_pool = init_execution_pool(self.num_workers, self.enable_global_rate_limit, self.rate_limit)
        self.own_timeout = float(self.default_timeout)

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": []}
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        code = str(parameters.get("code", ""))
        result = await self.execution_pool.execute.remote(self.execute_code, instance_id, code, timeout, language)
        return result if isinstance(result, ToolResponse) else ToolResponse(text=str(result)), None, None

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> ToolResponse:
        """Run the code on the sandbox server. Runs in a thread."""
        result = run_case(self.sandbox_fusion_url, code, None, timeout, self.memory_limit_mb, language)
        return ToolResponse(text=result.text if result.finished else "no stdout here")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._instance_dict.pop(instance_id, None)


class SandboxRun(NamedTuple):
    """What a program did on a sandbox server."""

    outcome: Outcome
    finished: bool
    text: str


def run_case(url: str, code: str, stdin: str | None, timeout: float, memory_mb: int, language: str) -> SandboxRun:
    """Run a program on a sandbox server and wait for it. Raises SandboxError if the server does not work."""
    program = Program(
        code=code, language=language, timeout=timeout, compile_timeout=timeout, stdin=stdin, memory_mb=memory_mb
    )
    outcome = asyncio.run(CodeServer(url).run(program))
    run = outcome.run
    if run is None or run.status != "Finished":
        return SandboxRun(outcome, False, "")
    return SandboxRun(outcome, True, run.stdout + run.stderr)


class VerlSearchTool(SearchTool):
    """Rally's counterpart of verl's SearchTool: the built-in tool, with its results as JSON text, `{"result": ...}`. A
    subclass that overrides `execute_search` has it called in a thread."""

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        keys = SearchSettings.model_fields.keys() | {"timeout"}
        own = type(self) is not VerlSearchTool
        super().__init__({k: v for k, v in (config or {}).items() if not own or k in keys}, tool_schema)
        self.config = dict(config or {})
        self.tool_schema = ToolSchemaDict(self.tool_schema)
        self._instance_dict: dict[str, dict[str, Any]] = {}
        settings = self._settings
        self.num_workers, self.rate_limit, self.topk = settings.num_workers, settings.rate_limit, settings.topk
        self.timeout, self.retrieval_service_url = settings.default_timeout, settings.retrieval_service_url
        self.enable_global_rate_limit = self.config.get("enable_global_rate_limit", True)
        self._searches_itself = type(self).execute_search is not VerlSearchTool.execute_search

    @classmethod
    def schema_argument(cls, schema: Mapping[str, Any] | None) -> Any:
        return VerlTool.schema_argument(schema)

    @cached_property
    def execution_pool(self) -> ExecutionPool:
        return init_execution_pool(self.num_workers, self.enable_global_rate_limit, self.rate_limit)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "reward": []}
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if not self._searches_itself:
            return await super().execute(instance_id, parameters, **kwargs)
        text, found = await self.execution_pool.execute.remote(
            self.execute_search,
            instance_id,
            read_queries(parameters),
            self.retrieval_service_url,
            self.topk,
            self.timeout,
        )
        if found.get("status") == "api_error":
            raise ToolUnavailable(f"the search service does not work: {found.get('api_request_error')}")
        metrics = {key: found.get(key) for key in ("query_count", "status", "total_results", "api_request_error")}
        return ToolResponse(text=text), 0.0, metrics

    def response_text(self, contents: Contents) -> str:
        found = [[{"document": {"contents": text}} for text in texts] for texts in contents]
        return _result(BETWEEN_QUERIES.join(map(passages_to_string, found)) if any(found) else NO_RESULTS)

    def execute_search(
        self, instance_id: str, query_list: list[str], retrieval_service_url: str, topk: int, timeout: float
    ) -> tuple[str, dict[str, Any]]:
        """Search. Runs in a thread."""
        return perform_single_search_batch(retrieval_service_url, query_list, topk, None, timeout)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._instance_dict.pop(instance_id, None)


def perform_single_search_batch(
    retrieval_service_url: str,
    query_list: list[str],
    topk: int = 3,
    concurrent_semaphore: threading.Semaphore | None = None,
    timeout: float = 30,
) -> tuple[str, dict[str, Any]]:
    """The passages of all queries as JSON text, and what happened."""
    with concurrent_semaphore or threading.Semaphore():
        answer, problem = call_search_api(retrieval_service_url, query_list, topk, True, timeout)
    metadata: dict[str, Any] = {
        "query_count": len(query_list),
        "queries": query_list,
        "api_request_error": problem,
        "api_response": answer,
        "status": "api_error",
        "total_results": 0,
        "formatted_result": None,
    }
    if answer is None:
        return _result(f"Search error: {problem}"), metadata
    passages: list[Any] = answer.get("result") or []
    if not passages:
        return _result(NO_RESULTS), {**metadata, "status": "no_results"}
    text = BETWEEN_QUERIES.join(map(passages_to_string, passages))
    found = {"status": "success", "total_results": sum(map(len, passages)), "formatted_result": text}
    return _result(text), metadata | found


def call_search_api(
    retrieval_service_url: str,
    query_list: list[str],
    topk: int = 3,
    return_scores: bool = True,
    timeout: float = 30,
) -> tuple[dict[str, Any] | None, str | None]:
    """The answer of a search server, or None and the reason. Errors of the server and the connection are retried."""
    import httpx

    problem = None
    for attempt in range(MAX_ATTEMPTS):
        if attempt:
            time.sleep(attempt)
        try:
            body = {"queries": query_list, "topk": topk, "return_scores": return_scores}
            response = httpx.post(retrieval_service_url, json=body, timeout=timeout, trust_env=False)
            if response.status_code in RETRIED:
                problem = f"API Call Failed: HTTP {response.status_code}"
                continue
            response.raise_for_status()
            answer: dict[str, Any] = response.json()
            return answer, None
        except httpx.TransportError as error:
            problem = f"API Call Failed: {type(error).__name__}: {error}"
        except (httpx.HTTPStatusError, ValueError) as error:
            return None, f"API Call Failed: {error}"
    return None, problem


def passages_to_string(retrieval_result: Sequence[Mapping[str, Any]]) -> str:
    """The passages of one query, numbered, with the first line of each as its title."""
    parts = (item["document"]["contents"].partition("\n") for item in retrieval_result)
    return "".join(f"Doc {i} (Title: {title})\n{text}\n\n" for i, (title, _, text) in enumerate(parts, 1)).strip()


def _result(text: str) -> str:
    return json.dumps({"result": text}, ensure_ascii=False)
