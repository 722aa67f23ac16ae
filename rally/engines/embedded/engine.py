"""The embedded engine: any number of agent loops `await generate(...)`, and one thread steps the core.

The thread runs only while there is work. If a step fails, the requests in it are run one by one: those that fail alone
get the error, the others go on. If the thread itself fails, all requests fail with the reason. The weights are the
trainer's own tensors. Change them inside `with engine.updating():`, which waits for the running step and begins a new
weight version.

In deterministic mode without batch-invariant kernels (on a CPU) the engine runs in lockstep. A step waits until every
session that takes part has a request waiting or has ended, and requests are admitted in the order of their sessions.
The composition of a batch then depends neither on timing nor on what the engine did before. An `isolated` engine
computes one request at a time, each as the first of a new engine; so no session need be known.
"""

from __future__ import annotations

import asyncio
import copy
import math
import operator
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rally.engines.base import EngineError, OnTokens, PromptLogprobs, UtilizationClock
from rally.engines.embedded.core import EngineCore
from rally.engines.embedded.prompt_logprobs import check_prompt, prompt_logprobs
from rally.engines.embedded.request_slots import Request
from rally.engines.embedded.sampler import NonFiniteLogits
from rally.engines.embedded.settings import EngineSettings
from rally.models.fp8 import forward_in_fp8
from rally.models.token_masks import Grammars, GrammarState
from rally.platforms import on_accelerator, platform_of
from rally.types import Generation, ImageSpan, RallyError, SamplingParams

SHORT_STEP = 0.03  # seconds; a shorter step competes with the agent loops for the interpreter
LOOP_TURNS = 16  # an event loop takes about 8 from a result to the next request, including tools that answer at once
MAX_YIELD = 0.25  # seconds to wait for the callers' event loops
SWITCH_INTERVAL = 1e-4
"""Seconds until a thread that runs Python code hands the interpreter lock to a waiting one. A step is hundreds of torch
operations, each of which releases the lock. With Python's default of 5 ms each of them, and the GPU, would wait that
long beside a busy agent loop."""

SELF_TEST = SamplingParams(temperature=0.0, max_tokens=1)

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Generation]"]
_Outcome = tuple["asyncio.Future[Generation]", Generation | BaseException]


class WeightsLost(EngineError):
    """An update replaced some of the weights and failed. Raised inside `EmbeddedEngine.updating`, it ends all requests;
    later ones fail with it too, until an update succeeds."""


class _Arrival(NamedTuple):
    prompt_ids: Sequence[int]
    params: SamplingParams
    waiter: _Waiter
    on_tokens: OnTokens | None
    at: float
    images: Sequence[ImageSpan] = ()
    state: GrammarState | None = None


class EmbeddedEngine:
    """An `Engine` over a module in this process."""

    reports_tokens = True

    def __init__(
        self,
        model: PreTrainedModel,
        settings: EngineSettings | None = None,
        *,
        num_pages: int | None = None,
        eos_ids: Sequence[int] = (),
        decode: Callable[[Sequence[int]], str] | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.core = EngineCore(model, settings, num_pages=num_pages, eos_ids=eos_ids, decode=decode, grammars=grammars)
        self._waiters: dict[Request, _Waiter] = {}
        self._listeners: dict[Request, tuple[OnTokens, int]] = {}  # and the number of tokens reported to them
        self._lock = threading.Lock()  # guards the core; held for one step at a time
        self._arrivals: list[_Arrival] = []
        self._entering: list[_Arrival] = []  # taken from `_arrivals`, and not all of them in `_waiters` yet
        self._isolated = self.core.settings.isolated
        self._lockstep = self.core.settings.deterministic and not self.core.runner.ahead and not self._isolated
        self._sessions: set[str] = set()  # those that take part, in lockstep
        self._session_of: dict[asyncio.Future[Generation], str] = {}  # the sessions of unanswered requests
        self._departures: list[asyncio.Future[Generation]] = []
        self._wake = threading.Condition()  # guards arrivals, departures, sessions and `_closed`
        self._closed = False
        self._notified: set[asyncio.AbstractEventLoop] = set()  # event loops that may still be handling results
        self._failure: BaseException | None = None  # it has stopped
        self._problem: Exception | None = None  # of the last step
        self._lost: WeightsLost | None = None  # the weights are those of no version
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
        """Why the engine cannot sample: what stopped it, that its weights are lost, or what the last step failed with.
        New weights clear the second, and these or a step that works the last."""
        return self._failure or self._lost or self._problem

    @property
    def stopped(self) -> bool:
        """Whether it has failed for good; a new engine is needed."""
        return self._failure is not None

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
        state = await self._grammar_state(params.grammar) if params.grammar else None
        future: asyncio.Future[Generation] = loop.create_future()
        with self._wake:
            if self._failure is not None:
                raise _stopped(self._failure)
            if self._closed:
                raise EngineError("the engine is closed; build a new one")
            if self._lost is not None:
                raise self._lost
            ids = list(map(operator.index, prompt_ids))
            self._arrivals.append(_Arrival(ids, params, (loop, future), on_tokens, time.perf_counter(), images, state))
            self._session_of[future] = session or ""
            self._wake.notify()
        try:
            return await future
        except asyncio.CancelledError:
            with self._wake:
                self._session_of.pop(future, None)
                self._departures.append(future)
                self._wake.notify()
            raise

    async def prompt_logprobs(
        self, ids: Sequence[int], start: int, top: int = 0, temperature: float = 1.0
    ) -> PromptLogprobs:
        """The log-probabilities of `ids[start:]`, and the `top` likeliest tokens there. The forward runs between two
        steps of the engine. Cancelling the awaiting task cancels a request that has not begun."""
        vocabulary = self.core.model.config.get_text_config().vocab_size
        check_prompt(ids, start, top, vocabulary=vocabulary, max_model_len=self.max_model_len)
        if self._closed:
            raise EngineError("the engine is closed; build a new one")
        gone = threading.Event()

        def work() -> PromptLogprobs | None:
            with self._lock, self._steps.working(), forward_in_fp8(self.core.fp8):
                if self._lost is not None:
                    raise self._lost
                return None if gone.is_set() else prompt_logprobs(self.core.model, ids, start, top, temperature)

        try:
            found = await asyncio.to_thread(work)
        finally:
            gone.set()
        assert found is not None
        if not all(map(math.isfinite, found.logprobs)):
            raise NonFiniteLogits(everywhere=True)
        return found

    async def check_grammar(self, grammar: str) -> None:
        await self._grammar_state(grammar)

    async def _grammar_state(self, grammar: str) -> GrammarState:
        """Compile a grammar outside of the engine's thread."""
        if self.core.grammars is None:
            raise EngineError("this engine has no grammars, so it cannot constrain what it samples")
        return await asyncio.to_thread(self.core.grammars.state, grammar)

    def expect(self, session: str) -> None:
        if self._lockstep and not self._sessions:
            self._reset_if_idle()
        with self._wake:
            self._sessions.add(session)

    def dismiss(self, session: str) -> None:
        with self._wake:
            self._sessions.discard(session)
            self._wake.notify()

    def _reset_if_idle(self) -> None:
        """Sessions that begin while no others run must find the engine as new: results must not depend on what this
        process did before, because a resumed run did not do it."""
        with self._lock, self._wake:
            if not (self._arrivals or self.core.busy):
                self.core.reset()

    @contextmanager
    def updating(self, version: int | None = None) -> Iterator[None]:
        """A context in which the weights may be changed; leaving it starts version `version`, by default the next
        one."""
        with self._lock:
            self._drain()
            try:
                with self.core.memory_lent():
                    yield
                self._lost = None
            except WeightsLost as lost:
                self._lost = lost
                raise
            finally:  # an update that failed may have changed weights too
                self._problem = None
                self._deliver(self.core.commit_weights(version))
                if self._lost is not None:
                    self._end_all(self._lost)

    def _end_all(self, error: EngineError) -> None:
        """Every request that runs or waits in the core ends with this error."""
        requests = list(self._waiters)
        for request in requests:
            request.error = error
        self.core.abort(requests)
        self._deliver(requests)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which no step runs, for other work on the device. Requests go on after it, with the same
        weights."""
        with self._lock:
            self._drain()
            with self.core.memory_lent():
                yield

    @contextmanager
    def unquantized(self) -> Iterator[None]:
        """A context in which requests are computed with the weights themselves, not in FP8; for comparisons. No request
        may be unanswered at its ends."""
        self._multiply(in_fp8=False)
        try:
            yield
        finally:
            self._multiply(in_fp8=True)

    def _multiply(self, *, in_fp8: bool) -> None:
        with self._lock:
            self._drain()
            assert self.core.fp8 is not None and not self.core.busy, "only between requests of an engine in FP8"
            self.core.fp8.active = in_fp8
            self.core.index.forget()  # what the other weights computed

    def _drain(self) -> None:
        try:
            try:
                self._deliver(self.core.drain())
            except Exception as problem:  # noqa: BLE001 - it belongs to requests, not to who waits for the device
                self._isolate(problem)
        except BaseException as failure:  # the requests wait for the engine's thread, which does not know of it
            self._fail(failure)
            raise

    async def start(self) -> None:
        """Prepare the graphs of steps on a GPU. The weights are the trainer's own."""

        def prepare() -> None:
            with self._lock:
                self._drain()
                self.core.prepare()

        await asyncio.to_thread(prepare)

    async def rest(self) -> None:
        """Nothing to do: `updating` releases the memory."""

    async def verify(self) -> None:
        """Nothing to do: nobody else can change the weights."""

    async def publish(self) -> dict[str, float]:
        """Nothing to do: the weights are the trainer's own."""
        return {}

    def begin_at(self, version: int) -> None:
        """Set the weight version of a resumed run, before the first request."""
        with self._lock:
            assert self.core.steps == 0 and not self.core.busy, "the engine has already been used"
            self.core.scheduler.version = version

    async def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        if platform := platform_of(self.core.model.device):
            platform.module.set_device(self.core.model.device)  # a new thread begins with the first one
        if self.core.runner.ahead:
            sys.setswitchinterval(min(SWITCH_INTERVAL, sys.getswitchinterval()))
        try:
            self._serve()
        except BaseException as failure:  # noqa: BLE001 - the thread must pass any failure to its callers
            self._fail(failure)

    def _serve(self) -> None:
        """Make steps until the engine is closed, and then end the requests that are left."""
        seconds = 0.0
        while self._wait_for_work():
            if seconds < SHORT_STEP and not self.core.runner.ahead:
                self._yield_to_callers()
            with self._lock:
                self._take_arrivals()
                if not self._all_sessions_wait():
                    continue
                before = self._steps.seconds
                with self._steps.working():
                    self._step()
                seconds = self._steps.seconds - before
        with self._lock:
            self._take_arrivals()
            left = list(self._waiters)
            self.core.abort(left)
            self._deliver(left)

    def _step(self) -> None:
        try:
            finished = self.core.step()
        except Exception as problem:
            if self._is_fatal(problem):
                raise
            self._isolate(problem)
            return
        self._problem = None
        self._report()
        self._deliver(finished)

    def _is_fatal(self, problem: Exception) -> bool:
        """After most errors on a GPU, such as an illegal access, the process cannot use it any more."""
        on_gpu = on_accelerator(self.core.model.device)
        return on_gpu and not isinstance(problem, (RallyError, torch.OutOfMemoryError))

    def _isolate(self, problem: Exception) -> None:
        """A step failed. Run its requests one by one, so that only those that fail alone get the error. Bad weights
        are no request's fault; all of them get the error at once. If none is left, the engine tests itself."""
        self._problem = problem
        suspects = self.core.recover()
        self._deliver([request for request in self._waiters if request.finish is not None])
        untouched, self.core.scheduler.waiting = self.core.scheduler.waiting, deque()
        hopeless = isinstance(problem, NonFiniteLogits) and problem.everywhere
        for request in [r for r in suspects if r in self._waiters]:
            try:
                if hopeless:
                    raise problem
                self.core.attempt(request)
            except Exception as own:
                if self._is_fatal(own):
                    raise
                self.core.recover()
                request.error, request.finish = own, "abort"
            if request.finish is not None:
                self._deliver([request])
        if not self.core.scheduler.waiting:
            self._test_itself(problem)
        self.core.scheduler.waiting.extend(untouched)

    def _test_itself(self, problem: Exception) -> None:
        """Sample one token of a trivial request. If that works, only requests were at fault. If the logits are not
        finite, other weights can help. Otherwise the engine is broken, and `problem` is raised."""
        try:
            self.core.attempt(Request.new([0], SELF_TEST, 0, time.perf_counter()))
            self._problem = None
        except NonFiniteLogits:
            self.core.recover()
        except Exception as own:
            raise problem from own

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._closed or self._has_work()):
                self._wake.wait()
            return not self._closed

    def _has_work(self) -> bool:
        return bool(self._departures) or (bool(self._arrivals or self.core.busy) and self._all_sessions_wait())

    def _all_sessions_wait(self) -> bool:
        """In lockstep: whether every session that takes part has a request waiting."""
        return not self._lockstep or self._sessions <= set(self._session_of.values())

    def _yield_to_callers(self) -> None:
        """Wait until the event loops that just got results or sent requests have handled them.

        A short step is mostly Python, as is an agent loop. Running at once, they compete for the interpreter lock and
        are slower than one after the other. Waiting also lets more requests share the next step. A long step spends its
        time in torch, outside the lock, and does not wait.
        """
        with self._wake:
            loops = self._notified | {arrival.waiter[0] for arrival in self._arrivals}
        self._notified = set()
        for loop in loops:
            handled = threading.Event()
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_count_turns, loop, handled, LOOP_TURNS)
                handled.wait(MAX_YIELD)

    def _take_arrivals(self) -> None:
        with self._wake:
            arrivals, self._arrivals = self._arrivals, []
            self._entering = arrivals
            departures, self._departures = self._departures, []
            if self._isolated:
                arrivals, self._arrivals = self._next_alone(arrivals, departures)
            if self._lockstep:
                arrivals.sort(key=lambda arrival: self._session_of.get(arrival.waiter[1], ""))
        for prompt_ids, params, (loop, future), on_tokens, at, images, state in arrivals:
            try:
                if self._lost is not None:
                    raise self._lost
                request = self.core.add(prompt_ids, params, at, images, state)
                self._waiters[request] = (loop, future)
                if on_tokens is not None:
                    self._listeners[request] = (on_tokens, 0)
            except Exception as refusal:  # noqa: BLE001 - a bad request must fail for its own caller only
                self._forget([future])
                _post(loop, [(future, refusal)])
        gone = [r for r, (_, future) in self._waiters.items() if future in departures] if departures else []
        self.core.abort(gone)
        for request in gone:
            del self._waiters[request]
            self._listeners.pop(request, None)
        self._entering = []

    def _next_alone(
        self, arrivals: list[_Arrival], departures: Sequence[asyncio.Future[Generation]]
    ) -> tuple[list[_Arrival], list[_Arrival]]:
        """The request to admit now, if any, and those that wait for its end. It finds the engine as new."""
        wanted = [arrival for arrival in arrivals if arrival.waiter[1] not in departures]
        if self.core.busy:
            return [], wanted
        self.core.reset()
        return wanted[:1], wanted[1:]

    def _report(self) -> None:
        for request, (on_tokens, reported) in self._listeners.items():
            if request.slot >= 0 and (new := self.core.slots.sampled(request, reported)).ids:
                self._listeners[request] = (on_tokens, reported + len(new.ids))
                with suppress(RuntimeError):  # the event loop is closed
                    self._waiters[request][0].call_soon_threadsafe(on_tokens, new)

    def _deliver(self, requests: Sequence[Request]) -> None:
        """Deliver results, with one wake-up per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
        outcomes = [request.error or request.result() for request in requests]  # all or none: nobody may be forgotten
        for request, outcome in zip(requests, outcomes, strict=True):
            loop, future = self._waiters.pop(request)
            self._listeners.pop(request, None)
            by_loop.setdefault(loop, []).append((future, outcome))
        for loop, results in by_loop.items():
            self._forget([future for future, _ in results])
            _post(loop, results)
        self._notified |= by_loop.keys()

    def _forget(self, futures: Sequence[asyncio.Future[Generation]]) -> None:
        with self._wake:
            for future in futures:
                self._session_of.pop(future, None)

    def _fail(self, failure: BaseException) -> None:
        """The engine has stopped: fail everyone who waits, and from now on everyone who asks."""
        with self._wake:
            self._closed, self._failure = True, failure
            self._session_of.clear()
            waiting = [arrival.waiter for arrival in (*self._arrivals, *self._entering)]
            waiting += self._waiters.values()
            self._arrivals, self._entering = [], []
            self._waiters.clear()
            self._listeners.clear()
            self._wake.notify()
        for loop, future in waiting:
            _post(loop, [(future, _stopped(failure))])


class MirroredEngine(EmbeddedEngine):
    """An embedded engine with its own copy of the weights, so that it can sample while the policy is being updated. It
    samples from the weights that `model` had at the last `publish`. Parameters that are not trained are shared."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: EngineSettings | None = None,
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._source = model
        shared = {id(p): p for p in model.parameters() if not p.requires_grad}
        super().__init__(copy.deepcopy(model, shared), settings, decode=decode, grammars=grammars)

    @contextmanager
    def updating(self, version: int | None = None) -> Iterator[None]:
        """The policy may change; `publish` begins the new version."""
        yield

    async def publish(self) -> dict[str, float]:
        await asyncio.to_thread(self._copy_weights)
        return {}

    @torch.no_grad()
    def _copy_weights(self) -> None:
        with super().updating():
            for mine, new in zip(_tensors(self.core.model), _tensors(self._source), strict=True):
                if mine is not new:
                    mine.copy_(new)


def _stopped(failure: BaseException) -> EngineError:
    error = EngineError(f"the engine has stopped because a step failed: {type(failure).__name__}: {failure}")
    error.__cause__ = failure
    return error


def _tensors(model: PreTrainedModel) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _count_turns(loop: asyncio.AbstractEventLoop, done: threading.Event, turns: int) -> None:
    """Set `done` after `turns` turns of the event loop; ready callbacks run in each of them."""
    if turns:
        loop.call_soon(_count_turns, loop, done, turns - 1)
    else:
        done.set()


def _post(loop: asyncio.AbstractEventLoop, results: Sequence[_Outcome]) -> None:
    with suppress(RuntimeError):  # the event loop is closed
        loop.call_soon_threadsafe(_settle, results)


def _settle(results: Sequence[_Outcome]) -> None:
    for future, result in results:
        if future.done():
            continue
        if isinstance(result, StopIteration):  # the one exception that a future does not take
            future.set_exception(EngineError(f"the request failed: StopIteration: {result}"))
        elif isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
