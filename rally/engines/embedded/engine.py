"""The embedded engine: `await generate(...)` from any number of agent loops, one thread stepping the core.

The thread runs only while there is work. Weights are the trainer's own tensors: change them inside
`with engine.updating():`, which waits for the running step and begins a new weight version.

In deterministic mode without batch-invariant kernels (on a CPU) a step waits until every exchange that takes part has
asked for something or ended, and requests are taken in the order of their sessions: what is computed together then
depends on nothing that has to do with time, nor on what the engine did before.
"""

from __future__ import annotations

import asyncio
import operator
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from transformers import PreTrainedModel

from rally.engines.base import EngineError, UtilizationClock
from rally.engines.embedded.core import EngineCore
from rally.engines.embedded.request_slots import Request, SampledTokens
from rally.engines.embedded.settings import EngineSettings
from rally.types import Generation, ImageSpan, SamplingParams

SHORT_STEP = 0.03  # seconds; below this a step competes with the agent loops for the interpreter
LOOP_TURNS = 16  # from a result to the next request, tools that answer at once included, an event loop takes about 8
MOST_REST = 0.25  # seconds; callers busy for longer are not waited for
SOON = 1e-4
"""Seconds until a thread that computes in Python hands the interpreter on to one that asks for it. A step is hundreds
of torch's operations, and each of them lets go of the interpreter: with Python's own 5 ms every one of them would wait
so long beside an agent loop at work, and the GPU with it."""

OnTokens = Callable[[SampledTokens], None]
"""Is told, in the caller's event loop, what was sampled since it was last told; the rest is in the Generation."""

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Generation]"]
_Outcome = tuple["asyncio.Future[Generation]", Generation | BaseException]


class _Arrival(NamedTuple):
    prompt_ids: Sequence[int]
    params: SamplingParams
    waiter: _Waiter
    on_tokens: OnTokens | None
    at: float
    images: Sequence[ImageSpan] = ()


class EmbeddedEngine:
    """An `Engine` over a module in this process."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: EngineSettings | None = None,
        *,
        num_pages: int | None = None,
        eos_ids: Sequence[int] = (),
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.core = EngineCore(model, settings, num_pages=num_pages, eos_ids=eos_ids, decode=decode)
        self._waiters: dict[Request, _Waiter] = {}
        self._listeners: dict[Request, tuple[OnTokens, int]] = {}  # and how many tokens they were told
        self._lock = threading.Lock()  # guards the core; held for one step at a time
        self._arrivals: list[_Arrival] = []
        self._lockstep = self.core.settings.deterministic and not self.core.runner.ahead
        self._expected: set[str] = set()  # sessions that take part
        self._asking: dict[asyncio.Future[Generation], str] = {}  # who waits for a reply
        self._departures: list[asyncio.Future[Generation]] = []
        self._wake = threading.Condition()  # guards the two lists above and `_closed`
        self._closed = False
        self._told: set[asyncio.AbstractEventLoop] = set()  # event loops with results they may not have gone through
        self._failure: BaseException | None = None
        self._steps = UtilizationClock()
        self._thread = threading.Thread(target=self._run, name="rally-engine", daemon=True)
        self._thread.start()

    @property
    def weight_version(self) -> int:
        return self.core.version

    @property
    def max_model_len(self) -> int:
        return self.core.settings.max_model_len

    @property
    def busy_seconds(self) -> float:
        return self._steps.seconds

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine, if something did."""
        return self._failure

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        images: Sequence[ImageSpan] = (),
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Generation] = loop.create_future()
        with self._wake:
            if self._failure is not None:
                raise EngineError(f"the engine has stopped because a step failed: {self._failure}") from self._failure
            if self._closed:
                raise EngineError("the engine is closed; build a new one")
            ids = list(map(operator.index, prompt_ids))
            self._arrivals.append(_Arrival(ids, params, (loop, future), on_tokens, time.perf_counter(), images))
            self._asking[future] = session or ""
            self._wake.notify()
        try:
            return await future
        except asyncio.CancelledError:
            with self._wake:
                self._asking.pop(future, None)
                self._departures.append(future)
                self._wake.notify()
            raise

    def expect(self, session: str) -> None:
        if self._lockstep and not self._expected:
            self._begin_together()
        with self._wake:
            self._expected.add(session)

    def dismiss(self, session: str) -> None:
        with self._wake:
            self._expected.discard(session)
            self._wake.notify()

    def _begin_together(self) -> None:
        """Exchanges that begin while no others run find the engine as new: what they compute must not depend on what
        this process did before, since a resumed run did not do it."""
        with self._lock, self._wake:
            if not (self._arrivals or self.core.busy):
                self.core.start_afresh()

    @contextmanager
    def updating(self, version: int | None = None) -> Iterator[None]:
        """Change the weights inside; at the end they are a new version, the next one if none is named."""
        with self._lock:
            self._deliver(self.core.drain())
            try:
                with self.core.memory_lent():
                    yield
            finally:  # an update that failed half way has changed weights too
                self._deliver(self.core.commit_weights(version))

    async def start(self) -> None:
        """Nothing to wait for: the weights are the trainer's own."""

    async def rest(self) -> None:
        """Nothing to do yet: `updating` lends the memory."""

    async def publish(self) -> dict[str, float]:
        """Nothing to send: the weights are the trainer's own."""
        return {}

    def begin_at(self, version: int) -> None:
        """The weights are version `version` of a run that goes on here; nothing has been asked for yet."""
        with self._lock:
            assert self.core.steps == 0 and not self.core.busy, "the engine is already at work"
            self.core.scheduler.version = version

    async def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        if self.core.runner.ahead:
            sys.setswitchinterval(min(SOON, sys.getswitchinterval()))
        seconds = 0.0
        while self._wait_for_work():
            try:
                if seconds < SHORT_STEP and not self.core.runner.ahead:
                    self._let_callers_rest()
                with self._lock:
                    self._take_arrivals()
                    if not self._everyone_asks():
                        continue
                    before = self._steps.seconds
                    with self._steps.working():
                        finished = self.core.step()
                    seconds = self._steps.seconds - before
                    self._report()
                    self._deliver(finished)
            except BaseException as failure:  # noqa: BLE001 - the thread must hand any failure to those who wait
                self._fail(failure)
                return
        with self._lock:
            self._take_arrivals()
            left = list(self._waiters)
            self.core.abort(left)
            self._deliver(left)

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._closed or self._has_work()):
                self._wake.wait()
            return not self._closed

    def _has_work(self) -> bool:
        return bool(self._departures) or (bool(self._arrivals or self.core.busy) and self._everyone_asks())

    def _everyone_asks(self) -> bool:
        """Whether nobody who takes part is busy elsewhere; it matters in lockstep only."""
        return not self._lockstep or self._expected <= set(self._asking.values())

    def _let_callers_rest(self) -> None:
        """Wait until the event loops that were just told something, or just asked for something, have gone through it.

        A short step is mostly Python, and so is an agent loop; run at once they fight over the interpreter lock and
        both get slower than one after the other. Waiting also lets all that ask now share the next step. A long step
        spends its time in torch, outside the lock, and does not wait.
        """
        with self._wake:
            loops = self._told | {arrival.waiter[0] for arrival in self._arrivals}
        self._told = set()
        for loop in loops:
            at_rest = threading.Event()
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_pass, loop, at_rest, LOOP_TURNS)
                at_rest.wait(MOST_REST)

    def _take_arrivals(self) -> None:
        with self._wake:
            arrivals, self._arrivals = self._arrivals, []
            departures, self._departures = self._departures, []
            if self._lockstep:
                arrivals.sort(key=lambda arrival: self._asking.get(arrival.waiter[1], ""))
        for prompt_ids, params, (loop, future), on_tokens, at, images in arrivals:
            try:
                request = self.core.add(prompt_ids, params, at, images)
                self._waiters[request] = (loop, future)
                if on_tokens is not None:
                    self._listeners[request] = (on_tokens, 0)
            except Exception as refusal:  # noqa: BLE001 - whatever a request holds, its own caller alone is told
                self._answered([future])
                _tell(loop, [(future, refusal)])
        gone = [r for r, (_, future) in self._waiters.items() if future in departures] if departures else []
        self.core.abort(gone)
        for request in gone:
            del self._waiters[request]
            self._listeners.pop(request, None)

    def _report(self) -> None:
        for request, (on_tokens, told) in self._listeners.items():
            if request.slot >= 0 and (new := self.core.slots.sampled(request, told)).ids:
                self._listeners[request] = (on_tokens, told + len(new.ids))
                with suppress(RuntimeError):  # an event loop that has been closed listens no more
                    self._waiters[request][0].call_soon_threadsafe(on_tokens, new)

    def _deliver(self, requests: Sequence[Request]) -> None:
        """Hand results over, one wake-up per event loop however many finished."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
        for request in requests:
            loop, future = self._waiters.pop(request)
            self._listeners.pop(request, None)
            by_loop.setdefault(loop, []).append((future, request.result()))
        for loop, results in by_loop.items():
            self._answered([future for future, _ in results])
            _tell(loop, results)
        self._told |= by_loop.keys()

    def _answered(self, futures: Sequence[asyncio.Future[Generation]]) -> None:
        with self._wake:
            for future in futures:
                self._asking.pop(future, None)

    def _fail(self, failure: BaseException) -> None:
        with self._wake:
            self._closed, self._failure = True, failure
            self._asking.clear()
            waiting = [arrival.waiter for arrival in self._arrivals] + list(self._waiters.values())
        for loop, future in waiting:
            _tell(loop, [(future, failure)])


def _pass(loop: asyncio.AbstractEventLoop, at_rest: threading.Event, turns: int) -> None:
    """Let `turns` turns of the event loop go by; callbacks that are ready run in each of them."""
    if turns:
        loop.call_soon(_pass, loop, at_rest, turns - 1)
    else:
        at_rest.set()


def _tell(loop: asyncio.AbstractEventLoop, results: Sequence[_Outcome]) -> None:
    with suppress(RuntimeError):  # an event loop that has been closed waits for nothing, and others still do
        loop.call_soon_threadsafe(_settle, results)


def _settle(results: Sequence[_Outcome]) -> None:
    for future, result in results:
        if future.done():
            continue
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
