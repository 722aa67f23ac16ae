"""Requests reach the engine through one desk: more than it may hold are sent away, all are counted, and one whose
client has gone is cancelled."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from starlette.requests import Request
from transformers import PreTrainedTokenizerBase

from rally.engines.embedded.engine import EmbeddedEngine, OnTokens
from rally.engines.embedded.request_slots import SampledTokens
from rally.engines.prometheus import Metric, labelled
from rally.types import Generation, RallyError, SamplingParams

T = TypeVar("T")


class Refused(RallyError):
    """A request that is not answered: the HTTP status, and what OpenAI's clients read beside the sentence."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after


class ClientGone(Exception):
    """Nobody is left to be answered."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is served: an engine, its tokenizer, and the name that clients call it by."""

    engine: EmbeddedEngine
    tokenizer: PreTrainedTokenizerBase
    name: str
    tool_format: str = "hermes"
    eos_ids: tuple[int, ...] = ()
    max_requests: int = 1024  # running and waiting together


class SamplingAsk(NamedTuple):
    prompt_ids: Sequence[int]
    params: SamplingParams


class RequestEvent(NamedTuple):
    """A request, known by its place among those that belong together, sampled something or has ended."""

    place: int
    said: SampledTokens | Generation


class Admission:
    """`generate` for one request, `follow` for several that belong together."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._held = 0
        self._ends: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()

    async def generate(self, ask: SamplingAsk, on_tokens: OnTokens | None = None) -> Generation:
        engine = self.served.engine
        if self._held >= self.served.max_requests:
            self._ends["busy"] += 1
            raise Refused(429, f"{self._held} requests are here already; ask again later", retry_after=1)
        self._held += 1
        try:
            generation = await engine.generate(ask.prompt_ids, ask.params, on_tokens=on_tokens)
        except asyncio.CancelledError:
            self._ends["cancelled"] += 1
            raise
        except RallyError as error:
            self._ends["refused"] += 1
            if engine.failure is not None:
                raise Refused(500, str(error), code="engine_stopped") from error
            raise
        finally:
            self._held -= 1
        self._ends[generation.finish] += 1
        if generation.finish == "abort":
            told = "the engine has given this request up, because it gets new weights or is being stopped; ask again"
            raise Refused(503, told, code="aborted", retry_after=1)
        self._count(ask, generation)
        return generation

    async def follow(self, asks: Sequence[SamplingAsk], *, as_sampled: bool) -> AsyncGenerator[RequestEvent, None]:
        """What is sampled for each, with `as_sampled`, and each one's end, as it happens. Closing it cancels what still
        runs, and so does the failure of one."""
        news: asyncio.Queue[tuple[int, SampledTokens | None]] = asyncio.Queue()

        def begin(index: int, ask: SamplingAsk) -> asyncio.Task[Generation]:
            listener = (lambda said: news.put_nowait((index, said))) if as_sampled else None
            task = asyncio.create_task(self.generate(ask, listener))
            task.add_done_callback(lambda _: news.put_nowait((index, None)))
            return task

        tasks = [begin(index, ask) for index, ask in enumerate(asks)]
        try:
            left = len(tasks)
            while left:
                index, said = await news.get()
                left -= said is None
                yield RequestEvent(index, tasks[index].result() if said is None else said)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def metrics(self) -> list[Metric]:
        core = self.served.engine.core
        gauges = {
            "requests": ("Requests that run or wait", self._held),
            "running": ("Requests that run", len(core.scheduler.running)),
            "weight_version": ("Version of the weights", core.version),
            "kv_pages": ("Pages of KV memory", core.pool.num_pages),
            "kv_pages_free": ("Pages of KV memory that hold nothing", core.pool.num_free),
        }
        counters = {name: (text, float(self._sums[name])) for name, text in SUMS.items()}
        counters["steps"] = ("Forward passes", core.steps)
        counters["preemptions"] = ("Times a request gave its pages back", core.scheduler.preemptions)
        ends = labelled("end", self._ends)
        return [
            Metric("rally_engine_ended_requests_total", "Requests by how they ended", "counter", by=ends),
            *(Metric(f"rally_engine_{name}", text, "gauge", value) for name, (text, value) in gauges.items()),
            *(Metric(f"rally_engine_{name}_total", text, "counter", value) for name, (text, value) in counters.items()),
        ]

    def _count(self, ask: SamplingAsk, generation: Generation) -> None:
        self._sums["prompt_tokens"] += len(ask.prompt_ids)
        self._sums["cached_tokens"] += generation.cached_tokens
        self._sums["sampled_tokens"] += len(generation.ids)
        self._sums["seconds"] += generation.seconds  # type: ignore[assignment]
        self._sums["first_token_seconds"] += generation.first_token_seconds  # type: ignore[assignment]


SUMS = {
    "prompt_tokens": "Prompt tokens of answered requests",
    "cached_tokens": "Of these, found in the prefix cache",
    "sampled_tokens": "Tokens sampled for answered requests",
    "seconds": "Time from a request to its end, summed",
    "first_token_seconds": "Time from a request to its first token, summed",
}


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of the work, which is cancelled when the client disconnects first. The body must have been read."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
