"""Loop workers: processes that play and score episodes, on any node of the run.

The controller keeps the ledger: it decides which job runs when, and every job ends with exactly one episode. A worker
gets jobs and the list of rollout servers, asks the servers itself, and returns episodes. A job of a worker that dies is
played again by another, with the same seed, so no group is lost and none is favoured. At most `max_jobs` jobs are with
one worker; the others wait here. A worker that hangs is noticed by its heartbeat and ended like one that died.

Connections belong to a thread with an event loop of its own. Messages are JSON and nothing in them is executed. A
worker proves with a token of the run that it belongs to it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hmac
import itertools
import logging
import secrets
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from rally.images.loading import loaded_images
from rally.loops import Job, Runner
from rally.nodes import LOCAL, Node, NodeError, NodeProcess
from rally.track.run_folder.episode_json import Json, episode_from_json, task_to_json
from rally.track.run_folder.folder import ImageFolder
from rally.types import Episode, RallyError, SamplingParams
from rally.util.frames import FrameError, read_frame, write_frame

TOKEN_VARIABLE = "RALLY_LOOP_WORKER_TOKEN"
MODULE = "rally.distributed.loop_worker"
POLL_SECONDS = 0.25
HELLO_SECONDS = 20.0
HELLO_BYTES = 4096
MAX_ATTEMPTS = 3  # of one job, each lost with its worker
MAX_STARTS = 5  # of one worker in a row without a finished job
HEARTBEAT_KEY = "trainer.node_heartbeat_timeout"

_log = logging.getLogger(__name__)


class LoopWorkerError(RallyError):
    """The loop workers cannot play an episode."""


class ServerSource(Protocol):
    """What tells workers which servers to ask, such as a `RemoteEngine`."""

    def describe_servers(self) -> Json: ...


@dataclass(frozen=True, kw_only=True)
class LoopWorkerSettings:
    count: int
    max_jobs: int  # with one worker at a time, for `servers`; more servers may join
    servers: int = 1
    plan: Json = field(repr=False)  # what a worker builds its loops from
    run: Path  # the run folder
    start_seconds: float = 300.0
    heartbeat_seconds: float = 20.0  # without a heartbeat, after which a worker hangs
    blocked_seconds: float = 300.0  # in which nothing else could run in a worker, after which it hangs


@dataclass(eq=False)
class _Pending:
    """A job, and the future of its episode."""

    number: int
    message: Json
    ends_at: float | None
    future: concurrent.futures.Future[Json]
    attempts: int = 0


@dataclass(eq=False)
class _LoopWorker:
    number: int
    token: str
    process: NodeProcess | None = None
    connection: asyncio.StreamWriter | None = None
    writer: asyncio.StreamWriter | None = None  # its connection, once it is ready
    jobs: dict[int, _Pending] = field(default_factory=dict)
    servers: Json | None = None  # as last sent
    starts: int = 0
    started: float = 0.0
    silent: float = 0.0  # seconds since its last heartbeat
    blocked: float = 0.0  # seconds for which its event loop had been blocked at its last heartbeat
    warned: bool = False  # that it is blocked
    replacing: asyncio.Task[None] | None = None
    counts: Counter[str] = field(default_factory=Counter)
    busy_seconds: float = 0.0
    busy_before: float = 0.0  # of its earlier processes


class LoopWorkerPool:
    """The loop workers of a run. `play` may be called from any event loop."""

    def __init__(self, settings: LoopWorkerSettings, nodes: Sequence[Node], servers: ServerSource) -> None:
        self.settings, self._nodes, self._servers = settings, tuple(nodes), servers
        self.logs, self._images = settings.run / "loop_workers", ImageFolder(settings.run)
        self._numbers = itertools.count()
        self._waiting: deque[_Pending] = deque()
        self._unanswered: dict[int, _Pending] = {}
        self._connections: set[asyncio.StreamWriter] = set()
        self._workers = [_LoopWorker(i, secrets.token_urlsafe(32)) for i in range(settings.count)]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rally-loop-workers", daemon=True)
        self._closing = threading.Event()
        self._address = ""
        self._max_jobs = settings.max_jobs  # for the servers that there are now
        self._failure: LoopWorkerError | None = None
        self._finished: Counter[str] = Counter()  # counts of workers that have ended
        self._lap: Counter[str] = Counter()
        self.restarts = 0

    def start(self) -> None:
        self._thread.start()

    async def play(self, job: Job, sampling: SamplingParams, ends_at: float | None) -> Episode:
        """Have a worker play and score a job. `ends_at` is the deadline of the step, by time.perf_counter."""
        task = _task_json(job)
        if images := loaded_images(job.task.prompt):
            await asyncio.to_thread(self._images.save_images, images)
        message = {
            "job": {**vars(job), "task": task},
            "sampling": asdict(sampling),
        }
        pending = _Pending(next(self._numbers), message, ends_at, concurrent.futures.Future())
        self._unanswered[pending.number] = pending
        try:
            if not self._schedule(self._submit, pending):
                raise self._failure or LoopWorkerError("the loop workers were stopped")
            answer = await asyncio.wrap_future(pending.future)
        except asyncio.CancelledError:
            self._schedule(self._cancel, pending.number)
            raise
        finally:
            del self._unanswered[pending.number]
        return episode_from_json(self._images.restored(answer))

    def _schedule(self, work: Callable[..., None], *args: Any) -> bool:
        """Run something in the thread of the connections. False if it has ended."""
        try:
            self._loop.call_soon_threadsafe(work, *args)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def lap(self) -> dict[str, float]:
        """Counts of the workers' routers since the last call."""
        total = sum((worker.counts for worker in self._workers), Counter(self._finished))
        before, self._lap = self._lap, total
        new = total - before
        later = new["kept"] + new["moved_from_busy"] + new["moved_from_dead"]
        return {
            **{f"router/{name}": float(new[name]) for name in total},
            "router/kept_rate": new["kept"] / later if later else 1.0,
            "rollout/loop_workers": float(sum(worker.writer is not None for worker in self._workers)),
            "rollout/loop_worker_restarts": float(self.restarts),
        }

    @property
    def busy_seconds(self) -> float:
        """The most seconds in which one of the workers had a request at a server."""
        return max(worker.busy_seconds for worker in self._workers)

    def close(self) -> None:
        if self._thread.is_alive():
            self._closing.set()
            self._thread.join(30)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as problem:  # noqa: BLE001 - whatever it is, nobody may wait for an answer forever
            self._fail(LoopWorkerError(f"the loop workers failed: {type(problem).__name__}: {problem}"))
        finally:
            self._loop.close()
            for pending in list(self._unanswered.values()):  # scheduled, but too late to be submitted
                self._answer(pending, self._failure or LoopWorkerError("the loop workers were stopped"))

    async def _serve(self) -> None:
        """Accept workers and watch their processes until `close`."""
        host = self._nodes[0].address
        async with await asyncio.start_server(self._connected, host, 0) as server:
            port = server.sockets[0].getsockname()[1]
            self._address = f"{host}:{port}"
            looked = time.monotonic()
            try:
                while not self._closing.is_set():
                    before, looked = looked, time.monotonic()
                    # If this process itself was stopped for a while, that is no silence of the workers.
                    self._check_workers(min(looked - before, self.settings.heartbeat_seconds / 4))
                    self._tell_servers()
                    await asyncio.sleep(POLL_SECONDS)
            except LoopWorkerError as problem:
                self._fail(problem)
            except Exception as problem:  # noqa: BLE001 - whatever it is, nobody may wait for an answer forever
                self._fail(LoopWorkerError(f"the loop workers failed: {type(problem).__name__}: {problem}"))
            finally:
                self._closing.set()  # none is started from now on
                await asyncio.gather(*(self._stop(worker) for worker in self._workers), return_exceptions=True)
                self._fail(LoopWorkerError("the loop workers were stopped"))
                for writer in self._connections:
                    writer.transport.abort()  # closing one would wait for a node that hangs

    def _check_workers(self, seconds: float) -> None:
        """Replace workers that do not run or that hang, each in a task of its own: ending one takes a while. Raises if
        one cannot be started. `seconds`: since the last call."""
        for worker in self._workers:
            if worker.replacing is not None:
                if not worker.replacing.done():
                    continue
                worker.replacing.result()
                worker.replacing = None
            worker.silent += seconds
            if (problem := self._problem(worker)) is not None and self._failure is None:
                worker.replacing = self._loop.create_task(self._replace(worker, problem))

    def _problem(self, worker: _LoopWorker) -> str | None:
        """Why a worker must be started, again or for the first time; None if it need not."""
        settings = self.settings
        if worker.process is None or not worker.process.alive:
            return "has ended"
        if worker.writer is None:
            late = time.monotonic() - worker.started > settings.start_seconds
            return f"was not ready within {settings.start_seconds:g} s" if late else None
        if worker.silent > settings.heartbeat_seconds:
            return f"has not responded for {worker.silent:.0f} s ({HEARTBEAT_KEY}={settings.heartbeat_seconds:g})"
        if worker.blocked > settings.blocked_seconds:
            return f"was blocked for {worker.blocked:.0f} s by code that does not await"
        if worker.blocked > settings.heartbeat_seconds and not worker.warned:
            worker.warned = True
            _log.warning(
                "loop worker %d has been blocked for %.0f s by code of a loop, tool or reward that does not await; its "
                "other episodes wait; it is ended after %g s",
                *(worker.number, worker.blocked, settings.blocked_seconds),
            )
        return None

    async def _replace(self, worker: _LoopWorker, problem: str) -> None:
        """End what is left of a worker, give its jobs to others, and start it."""
        if (process := worker.process) is not None:
            self._requeue(worker)
            tail = await asyncio.to_thread(process.log_tail)
            await process.stop()
            worker.process = None
            if worker.starts >= MAX_STARTS:
                raise LoopWorkerError(
                    f"loop worker {worker.number} was started {worker.starts} times and finished no job; the last one "
                    f"{problem}; {tail}"
                )
            _log.warning("loop worker %d %s and is started again; %s", worker.number, problem, tail)
            self.restarts += 1
        if not self._closing.is_set():
            await self._launch(worker)

    async def _launch(self, worker: _LoopWorker) -> None:
        """Start the process of a worker on its node or, if that is lost, on another."""
        nodes = [node for node in self._nodes if node.loss is None]
        if not nodes:
            raise LoopWorkerError("no node is left to play episodes on")
        node = nodes[worker.number % len(nodes)]
        log = self.logs / f"loop-worker-{worker.number}.log"
        command = [sys.executable, "-m", MODULE, self._address, str(worker.number)]
        worker.starts += 1
        worker.started, worker.blocked, worker.warned = time.monotonic(), 0.0, False
        try:
            if node is LOCAL:  # in this thread: the process ends with it
                worker.process = node.launch(command, {TOKEN_VARIABLE: worker.token}, log)
            else:
                worker.process = await asyncio.to_thread(node.launch, command, {TOKEN_VARIABLE: worker.token}, log)
        except NodeError as problem:
            if worker.starts >= MAX_STARTS:
                raise LoopWorkerError(f"loop worker {worker.number} cannot be started: {problem}") from None
            _log.warning("loop worker %d cannot be started: %s", worker.number, problem)
            await asyncio.sleep(POLL_SECONDS)

    async def _stop(self, worker: _LoopWorker) -> None:
        if worker.writer is not None:
            worker.writer.close()
        if worker.replacing is not None:
            await asyncio.wait([worker.replacing])
        if worker.process is not None:
            await worker.process.stop()

    def _requeue(self, worker: _LoopWorker) -> None:
        """Queue the jobs of a worker that is gone again, first."""
        if worker.writer is not None:
            worker.writer.transport.abort()  # a node that hangs would not take the rest
        worker.writer = worker.connection = worker.servers = None
        self._finished += worker.counts
        worker.counts, worker.busy_before = Counter(), worker.busy_seconds
        for pending in reversed(worker.jobs.values()):
            if pending.attempts >= MAX_ATTEMPTS:
                self._answer(
                    pending,
                    LoopWorkerError(
                        f"episode {pending.message['job']['episode_id']} was with {pending.attempts} loop workers, and "
                        f"each of them died or hung; see {self.logs}"
                    ),
                )
            elif not pending.future.cancelled():
                self._waiting.appendleft(pending)
        worker.jobs.clear()
        self._dispatch()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker: _LoopWorker | None = None
        self._connections.add(writer)
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = await read_frame(reader, HELLO_BYTES)
            claimed = self._workers[int(hello.get("worker", -1)) % len(self._workers)]
            token = str(hello.get("token")).encode(errors="replace")
            if not hmac.compare_digest(token, claimed.token.encode()):
                return
            if "heartbeat" in hello:
                await self._listen(claimed, reader)
            if claimed.writer is not None:
                return
            worker = claimed
            worker.connection = writer
            write_frame(writer, {"plan": self.settings.plan})
            await read_frame(reader, HELLO_BYTES)  # it is ready
            worker.writer, worker.silent = writer, 0.0
            self._dispatch()
            while True:
                self._received(worker, await read_frame(reader))
        except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError, TypeError):
            pass  # the watcher finds the process dead, or ends it below
        finally:
            writer.close()
            self._connections.discard(writer)
            if worker is not None and worker.connection is writer and not self._closing.is_set():
                self._requeue(worker)
                if worker.process is not None:
                    await worker.process.stop()  # `_check` starts it again

    @staticmethod
    async def _listen(worker: _LoopWorker, reader: asyncio.StreamReader) -> NoReturn:
        """Take the heartbeats of a worker until its connection ends."""
        while True:
            worker.blocked = float((await read_frame(reader, HELLO_BYTES))["blocked"])
            worker.silent = 0.0

    def _received(self, worker: _LoopWorker, message: Json) -> None:
        worker.silent = 0.0
        if "refresh" in message:
            self._tell(worker, message["refresh"])
            return
        worker.counts = Counter({name: int(count) for name, count in message["counts"].items()})
        worker.busy_seconds = worker.busy_before + float(message["busy_seconds"])
        pending = worker.jobs.pop(message["number"], None)
        if pending is None:
            return  # it was cancelled
        worker.starts = 0
        if "error" in message:
            self._answer(pending, LoopWorkerError(message["error"]))
        else:
            self._answer(pending, message["episode"])
        self._dispatch()

    @staticmethod
    def _answer(pending: _Pending, answer: Json | LoopWorkerError) -> None:
        with suppress(concurrent.futures.InvalidStateError):  # it was cancelled
            if isinstance(answer, LoopWorkerError):
                pending.future.set_exception(answer)
            else:
                pending.future.set_result(answer)

    def _submit(self, pending: _Pending) -> None:
        if self._failure is not None:
            self._answer(pending, self._failure)
            return
        self._waiting.append(pending)
        self._dispatch()

    def _cancel(self, number: int) -> None:
        for worker in self._workers:
            if worker.jobs.pop(number, None) is not None and worker.writer is not None:
                write_frame(worker.writer, {"cancel": number})
        self._dispatch()

    def _dispatch(self) -> None:
        """Give waiting jobs to the workers with the fewest."""
        while self._waiting:
            ready = [w for w in self._workers if w.writer is not None and len(w.jobs) < self._max_jobs]
            if not ready:
                return
            pending = self._waiting.popleft()
            if pending.future.cancelled():
                continue
            worker = min(ready, key=lambda one: len(one.jobs))
            self._tell(worker)
            worker.jobs[pending.number] = pending
            pending.attempts += 1
            left = None if pending.ends_at is None else pending.ends_at - time.perf_counter()
            assert worker.writer is not None
            try:
                write_frame(worker.writer, {**pending.message, "number": pending.number, "seconds_left": left})
            except FrameError as problem:
                del worker.jobs[pending.number]
                self._answer(pending, LoopWorkerError(f"the job cannot be sent to a loop worker: {problem}"))

    def _tell_servers(self) -> None:
        settings, servers = self.settings, len(self._servers.describe_servers()["servers"])
        self._max_jobs = -(-settings.max_jobs * max(servers, settings.servers) // settings.servers)
        for worker in self._workers:
            if worker.jobs:
                self._tell(worker)
        self._dispatch()

    def _tell(self, worker: _LoopWorker, refresh: int | None = None) -> None:
        """Send the list of servers if it has changed, or if the worker asked for it with a number."""
        servers = self._servers.describe_servers()
        if worker.writer is not None and (servers != worker.servers or refresh is not None):
            worker.servers = servers
            write_frame(worker.writer, {"servers": servers} | ({} if refresh is None else {"refresh": refresh}))

    def _fail(self, problem: LoopWorkerError) -> None:
        self._failure = self._failure or problem
        jobs = [*self._waiting, *(pending for worker in self._workers for pending in worker.jobs.values())]
        self._waiting.clear()
        for pending in jobs:
            self._answer(pending, self._failure)


@dataclass(kw_only=True)
class LoopWorkerRunner(Runner):
    """A `Runner` whose episodes are played by loop workers."""

    pool: LoopWorkerPool

    async def episode(self, job: Job, sampling: SamplingParams, ends_at: float | None) -> Episode:
        return await self.pool.play(job, sampling, ends_at)

    async def __aenter__(self) -> LoopWorkerRunner:
        self.pool.start()
        return self

    async def __aexit__(self, *problem: object) -> None:
        await asyncio.to_thread(self.pool.close)


def _task_json(job: Job) -> Json:
    """The row as JSON. Images of its prompt are sent as files of the run folder."""
    task = task_to_json(job.task)
    if (name := _opaque(task, {image.hash for image in loaded_images(job.task.prompt)})) is not None:
        raise LoopWorkerError(
            f"row {job.task.id} holds a {name}, which cannot be sent to a loop worker; set "
            "rollout.agent.num_workers=1, or store it as text or numbers"
        )
    return task


def _opaque(value: Any, images: Collection[str]) -> str | None:
    """The type of a value within JSON that could not be written as such, and of an image that is not one of `images`,
    by their hashes."""
    if isinstance(value, dict):
        if "$repr" in value or ("$image" in value and value["$image"] not in images):
            return str(value.get("type", "picture"))
        return next((found for item in value.values() if (found := _opaque(item, images)) is not None), None)
    if isinstance(value, list):
        return next((found for item in value if (found := _opaque(item, images)) is not None), None)
    return None
