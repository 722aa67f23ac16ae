"""Scores episodes with a user's reward function in worker processes. Every episode gets a Score.

A function that raises, hangs, crashes or kills its process costs one episode an error; the worker is replaced, and the
other episodes keep their scores. Threads wait for the workers, so a busy event loop does not delay a deadline, and one
Scorer may serve several event loops, one after the other. The built-in functions run without workers, except those that
may hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rally.rewards import registry
from rally.rewards.custom_functions import JudgeAddress
from rally.rewards.score import RewardError, Score, decode, encode
from rally.rewards.score_inputs import BuiltIn, batch_request_of, request_of
from rally.types import Episode, RallyError
from rally.util.rate_limit import TokenBucket
from rally.util.subprocesses import kill_group, start_tied

if TYPE_CHECKING:  # a worker imports this package, and must not import torch
    from rally.rewards.judge_server import JudgeServer

LOAD_SECONDS = 120.0  # a user's module may import something large
GRACE_SECONDS = 2.0  # the worker exits by itself at the deadline; after this much longer it is killed
PRINTED_BYTES = 16_384
ERROR_LINES = 5

# The worker gets this process's sys.path. A PYTHONPATH would also be inherited by the user's own subprocesses.
BOOT = "import sys; sys.path[:] = sys.argv[1:]; from rally.rewards.worker_process import main; main()"


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """The reward function of a run, in a form that can be sent to a worker. Without a `path`: the registered ones."""

    path: str | None = None
    name: str = "compute_score"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch: bool = False  # the function takes lists with the episodes of a whole rollout
    judge: JudgeAddress | None = None  # a served reward model that the function may ask


class RewardWorker:
    """The handle of one worker process. Not thread-safe: the thread that took it from the idle queue owns it."""

    def __init__(self, spec: RewardSpec, timeout: float) -> None:
        self.timeout = timeout
        self._source = spec.path
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process does
        self.process = start_tied(
            [sys.executable, "-c", BOOT, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            start_new_session=True,  # Ctrl-C does not reach it, and one kill also ends what the function started
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._requests, self._answers = self.process.stdin, self.process.stdout
        self._poll = select.poll()
        self._poll.register(self._answers, select.POLLIN)
        self._ready = False
        self.needs_ids = False  # whether the function reads the ids of completions
        os.set_blocking(self._requests.fileno(), False)
        with contextlib.suppress(BrokenPipeError):  # wait_ready reports a process that is dead already
            self._send(encode({"spec": asdict(spec), "timeout": timeout, "load_timeout": LOAD_SECONDS}), LOAD_SECONDS)

    @property
    def ended(self) -> bool:
        """Whether the process is known to have ended. A death while idle is noticed at the next request."""
        return self.process.returncode is not None

    def wait_ready(self) -> None:
        """Wait until the worker has loaded the function. Raises RewardError if it could not."""
        if self._ready:
            return
        line = self._read_line(LOAD_SECONDS + GRACE_SECONDS)
        answer = decode(line) if line else {}
        error, self.needs_ids = answer.get("error"), bool(answer.get("needs_ids"))
        self._ready = bool(line) and error is None
        if not self._ready:
            self.kill()
            raise RewardError(error or f"the reward worker could not load {self._source}: it {self._how_it_ended()}")

    def ask(self, request: bytes) -> Score | None:
        """Score one request. None: the process had died while idle, so nothing ran and it may be sent again."""
        self.wait_ready()
        start = time.monotonic()
        limit = self.timeout + GRACE_SECONDS
        try:
            sent = self._send(request, limit)
        except BrokenPipeError:
            self.kill()
            return None
        line = self._read_line(limit - (time.monotonic() - start)) if sent else b""
        if line:
            return Score(**decode(line) | {"printed": self._printed()})
        self.kill()
        return self._failure(time.monotonic() - start)

    def kill(self) -> None:
        """Kill the process and all it started. The group is killed before the wait, which frees its number."""
        if self.process.returncode is None:
            kill_group(self.process.pid)
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for file in (self._requests, self._answers, self._stderr):
            file.close()

    def _send(self, line: bytes, seconds: float) -> bool:
        """Whether all of it was sent in time: a process that is stopped, or that code which it left running keeps busy,
        reads no more than its pipe holds."""
        ready = select.poll()
        ready.register(self._requests, select.POLLOUT)
        deadline = time.monotonic() + seconds
        left = memoryview(line)
        while left:
            if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
            left = left[os.write(self._requests.fileno(), left) :]
        return True

    def _read_line(self, seconds: float) -> bytes:
        """The next answer; empty if the process ended or the time is up."""
        deadline = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            if not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return b""
            piece = os.read(self._answers.fileno(), 1 << 16)
            if not piece:
                return b""
            line += piece
        return line

    def _printed(self) -> str:
        size = os.fstat(self._stderr.fileno()).st_size
        if not size:
            return ""
        tail = os.pread(self._stderr.fileno(), PRINTED_BYTES, max(0, size - PRINTED_BYTES))
        return tail.decode("utf-8", errors="replace").strip()

    def _failure(self, seconds: float) -> Score:
        if seconds >= self.timeout:
            error = f"timed out after {self.timeout:g}s{self._where_it_hung()}"
        else:
            error = f"the reward worker {self._how_it_ended()}"
        return Score(error=error, seconds=seconds, printed=self._printed())

    def _how_it_ended(self) -> str:
        code = self.process.returncode
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name} (exit code {code})"
        last = " | ".join(line.strip() for line in self._printed().splitlines()[-ERROR_LINES:])
        return f"{how}; its last output: {last}" if last else how

    def _where_it_hung(self) -> str:
        """The innermost frame of the main thread, the last thread in the worker's traceback dump."""
        frame = re.search(r'File "(.+)", line (\d+) in', self._printed().rpartition("Thread 0x")[2])
        return f" at {frame[1]}, line {frame[2]}" if frame else ""


class Scorer:
    """Scores episodes in `num_workers` processes. `timeout` is in seconds for one call of the function.

    An async function also runs one call at a time in a worker, so one that mostly waits (a judge over HTTP) needs more
    workers. The function may ask a reward model behind `server`, which lives as long as this scorer; while it is down,
    every score is an error. The function is called at most `per_minute` times a minute, evenly spaced.
    """

    def __init__(
        self,
        spec: RewardSpec,
        num_workers: int,
        timeout: float,
        per_minute: float | None = None,
        server: JudgeServer | None = None,
    ) -> None:
        if num_workers < 1:
            raise RewardError(f"reward.num_workers must be at least 1, not {num_workers}")
        if timeout <= 0:
            raise RewardError(f"reward.timeout must be more than 0 seconds, not {timeout}")
        self._spec, self._timeout, self._server = spec, timeout, server
        self._closed = False
        self._pace = TokenBucket(per_minute / 60 if per_minute else None, burst_seconds=0.0)
        in_process = spec.path is None and not spec.batch and not registry.may_hang(spec.kwargs)
        self._built_in = BuiltIn(spec.kwargs) if in_process else None
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        self._workers = {RewardWorker(spec, timeout) for _ in range(0 if self._built_in else num_workers)}
        self._idle: SimpleQueue[RewardWorker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    async def start(self) -> None:
        """Start the judge's server, if there is one, and wait until every worker has loaded the function, so that a
        mistake is found before training."""
        try:
            if self._server is not None:
                await self._server.start()
            await asyncio.get_running_loop().run_in_executor(self._pool, self._load)
        except RallyError:
            await self.close()
            raise

    async def score(self, episode: Episode) -> Score:
        """The score of an episode. Raises RewardError only if no episode could be scored at all."""
        if self._closed:
            raise RewardError("this Scorer is closed; make a new one to score more episodes")
        if episode.error is not None:
            return Score(error=f"the episode failed before it could be scored: {episode.error}")
        if self._built_in:
            return self._built_in.score(episode)
        return await self._ask(request_of(episode))

    async def score_batch(self, episodes: Sequence[Episode]) -> list[Score]:
        """The scores of all episodes, in one call of a batch function. If it fails, all of them have the error."""
        assert self._spec.batch, "this function takes one episode at a time"
        if not episodes:
            return []
        whole = await self._ask(batch_request_of(episodes, with_ids=any(w.needs_ids for w in self._workers)))
        if whole.error is not None:
            return [whole] * len(episodes)
        return [Score.of(value, whole.seconds / len(episodes)) for value in whole.info["scores"]]

    async def _ask(self, request: Mapping[str, Any]) -> Score:
        await self._pace.acquire()
        score = await asyncio.get_running_loop().run_in_executor(self._pool, self._score, encode(request))
        if self._server is not None and (problem := self._server.problem()):
            return replace(score, reward=None, info={}, error=problem)  # whatever the function made of it
        return score

    async def close(self) -> None:
        """Kill the workers."""
        self._closed = True
        for worker in tuple(self._workers):
            worker.kill()
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)
        if self._server is not None:
            await self._server.close()
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _load(self) -> None:
        taken = [self._idle.get() for _ in self._workers]
        try:
            for worker in taken:
                worker.wait_ready()
        finally:
            for worker in taken:
                self._idle.put(worker)

    def _score(self, request: bytes) -> Score:
        worker = self._idle.get()
        try:
            worker = self._living(worker)
            score = worker.ask(request)
            if score is None:
                worker = self._living(worker)
                score = worker.ask(request)
            return score or Score(error="the reward worker ended twice in a row before it could start")
        finally:
            with contextlib.suppress(OSError):  # no process can be started now, as without file descriptors
                worker = self._living(worker)
            self._idle.put(worker)  # a dead one too: without it a later call would wait for ever

    def _living(self, worker: RewardWorker) -> RewardWorker:
        """The worker, or a new one in place of a dead one. It does not wait for the new one to load."""
        if self._closed or not worker.ended:
            return worker
        self._workers.discard(worker)
        worker.close()
        fresh = RewardWorker(self._spec, self._timeout)
        self._workers.add(fresh)
        return fresh
