"""Admission of requests to the engine: rejects those beyond `max_requests`, counts all for metrics, and cancels
requests whose client disconnects."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from transformers import PreTrainedTokenizerBase

from rally.engines.base import OnTokens, PromptLogprobs, SampledTokens
from rally.engines.embedded.engine import EmbeddedEngine, WeightsLost
from rally.engines.embedded.sampler import NonFiniteLogits
from rally.engines.prometheus import Metric, labelled
from rally.types import Generation, ImageSpan, RallyError, SamplingParams

T = TypeVar("T")


class Refused(RallyError):
    """A rejected request: the HTTP status, the message, and OpenAI's further error fields."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after


class ClientGone(Exception):
    """The client has disconnected."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is served: an engine, its tokenizer, and the model name for clients."""

    engine: EmbeddedEngine
    tokenizer: PreTrainedTokenizerBase
    name: str
    tool_format: str = "auto"
    eos_ids: tuple[int, ...] = ()
    max_requests: int = 1024  # running and waiting together
    hidden_tools: bool = False  # the model was trained with a chat template that does not show its tools


class SamplingAsk(NamedTuple):
    """One request to the engine."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    images: Sequence[ImageSpan] = ()


class RequestEvent(NamedTuple):
    """New tokens or the end of a request; `choice` is its number among those of one client request."""

    choice: int
    update: SampledTokens | Generation


class Admission:
    """`generate` runs one request, `follow` several of one client request."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._held = 0
        self._ends: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()

    async def generate(self, ask: SamplingAsk, on_tokens: OnTokens | None = None) -> Generation:
        generation = await self._held_while(
            self.served.engine.generate(ask.prompt_ids, ask.params, images=ask.images, on_tokens=on_tokens)
        )
        self._ends[generation.finish] += 1
        if generation.finish == "abort":
            reason = "the request was aborted, because the engine loads new weights or is being stopped; try again"
            raise Refused(503, reason, code="aborted", retry_after=1)
        self._count(ask, generation)
        return generation

    async def prompt_logprobs(
        self, ids: Sequence[int], start: int, top: int, temperature: float = 1.0
    ) -> PromptLogprobs:
        found = await self._held_while(self.served.engine.prompt_logprobs(ids, start, top, temperature))
        self._ends["scored"] += 1
        return found

    async def _held_while(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work of the engine as one of its `max_requests`, and count how it fails."""
        engine = self.served.engine
        if self._held >= self.served.max_requests:
            work.close()
            self._ends["busy"] += 1
            raise Refused(429, f"{self._held} requests are already running or waiting; try again later", retry_after=1)
        self._held += 1
        try:
            return await work
        except asyncio.CancelledError:
            self._ends["cancelled"] += 1
            raise
        except (NonFiniteLogits, WeightsLost) as error:
            self._ends["failed"] += 1
            raise Refused(500, f"{error}; load other weights", code="bad_weights") from error
        except RallyError as error:
            self._ends["refused"] += 1
            if engine.stopped:
                raise Refused(500, str(error), code="engine_stopped") from error
            raise
        except Exception:
            self._ends["failed"] += 1
            raise
        finally:
            self._held -= 1

    async def follow(self, asks: Sequence[SamplingAsk], *, as_sampled: bool) -> AsyncGenerator[RequestEvent, None]:
        """The ends of requests as they happen and, with `as_sampled`, their new tokens. Closing the generator cancels
        those that still run, and so does the failure of one."""
        if len(asks) > self.served.max_requests:
            most = self.served.max_requests
            raise Refused(400, f"this asks for {len(asks)} generations, and the server holds {most}; ask for fewer")
        updates: asyncio.Queue[tuple[int, SampledTokens | None]] = asyncio.Queue()

        def start(index: int, ask: SamplingAsk) -> asyncio.Task[Generation]:
            listener = (lambda tokens: updates.put_nowait((index, tokens))) if as_sampled else None
            task = asyncio.create_task(self.generate(ask, listener))
            task.add_done_callback(lambda _: updates.put_nowait((index, None)))
            return task

        tasks = [start(index, ask) for index, ask in enumerate(asks)]
        try:
            left = len(tasks)
            while left:
                index, tokens = await updates.get()
                left -= tokens is None
                yield RequestEvent(index, tasks[index].result() if tokens is None else tokens)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def metrics(self) -> list[Metric]:
        """Gauges and counters of the engine and its requests."""
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
        counters["drafted_tokens"] = ("Tokens that speculative decoding drafted", core.drafted_tokens)
        counters["accepted_tokens"] = ("Drafted tokens that were right", core.accepted_tokens)
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
    """Await the work, and cancel it if the client disconnects first. The request's body must have been read."""

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
