"""Runs episodes concurrently. Every job becomes exactly one Episode with exactly one stop reason.

A loop that raises is retried up to `max_retries` times, then becomes an Episode with stop reason `error`, the error as
text, whose fault it was (`extra["fault"]`), and what was sampled. The trainer decides what happens to its group.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from rally.chat import ChatCodec
from rally.engines import Engine, LockstepEngine
from rally.envs import Environments
from rally.images.loading import loaded_images
from rally.interactions import Interactions
from rally.loops.base import (
    AgentLoopOutput,
    EpisodeFailed,
    EpisodeServer,
    LoopContext,
    LoopError,
    LoopSettings,
    fault_of,
)
from rally.loops.registry import LoopSpec, find_loop
from rally.tools import ToolBox
from rally.tools.invoke import is_keyboard
from rally.types import Episode, SamplingParams, Segment, StopReason, Task, Turn, brief, finite_number

STUCK_SECONDS = 60.0  # after an agent loop was cancelled
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One episode to be played."""

    task: Task
    episode_id: str
    group: str
    seed: int
    step: int = 0
    validate: bool = False
    check_tokens: bool = True
    baseline: bool = False  # sampled greedily, whatever the run's sampling parameters
    place: int = 0  # of its prompt within the step


Finish = Callable[[Episode], Awaitable[Episode]]
More = Callable[[Episode], Sequence[Job]]
Admit = Callable[[Job], AbstractAsyncContextManager[None]]
"""A context in which the episode of a job runs; entering it waits until the job may start."""


@dataclass(kw_only=True)
class Runner:
    """Builds a loop for each job and runs it."""

    engine: Engine
    codec: ChatCodec
    toolbox: ToolBox
    interactions: Interactions = field(default_factory=Interactions)
    environments: Environments = field(default_factory=Environments)
    settings: LoopSettings = field(default_factory=LoopSettings)
    default_loop: str = "single_turn_agent"
    override_rows: bool = False  # use the default loop even if a row names another
    loops: Mapping[str, LoopSpec] = field(default_factory=dict)
    max_retries: int = 0
    run_config: Callable[[], Any] = lambda: None  # the configuration of the run, for loops written for verl

    async def run(
        self,
        jobs: Sequence[Job],
        sampling: SamplingParams,
        *,
        finish: Finish | None = None,
        more: More | None = None,
        timeout: float | None = None,
        admit: Admit | None = None,
    ) -> list[Episode]:
        """Run all jobs concurrently and return their episodes in order. `finish` (scoring, progress) is awaited for
        each episode as soon as it ends; then the jobs that `more` returns for it start. After `timeout` seconds, the
        episodes still running end as `deadline` with the turns they have. `admit` may hold jobs back."""

        engine = self.engine if isinstance(self.engine, LockstepEngine) else None
        ends_at = None if timeout is None else time.perf_counter() + timeout
        tasks: list[asyncio.Task[Episode]] = []

        def begin(jobs: Sequence[Job]) -> None:
            if engine:
                for job in jobs:
                    engine.expect(job.episode_id)
            tasks.extend(group.create_task(one(job)) for job in jobs)

        async def one(job: Job) -> Episode:
            try:
                async with nullcontext() if admit is None else admit(job):
                    episode = await self.episode(job, sampling, ends_at)
                if engine and more is None:
                    engine.dismiss(job.episode_id)  # the engine need not wait for the score: no job depends on it
                episode = await finish(episode) if finish else episode
                if more is not None:
                    begin(more(episode))
                return episode
            finally:
                if engine:
                    engine.dismiss(job.episode_id)

        async with asyncio.TaskGroup() as group:
            begin(jobs)
        return [task.result() for task in tasks]

    async def episode(self, job: Job, sampling: SamplingParams, ends_at: float | None) -> Episode:
        """Run one job. `ends_at` is the deadline of the step, by time.perf_counter."""
        if job.baseline:
            sampling = sampling.greedy()
        lost: list[Episode] = []
        for attempt in range(self.max_retries + 1):
            started, began = time.time(), time.perf_counter()
            server = EpisodeServer(self.engine, defaults=sampling, seed=job.seed, session=job.episode_id)
            self.toolbox.take_outage(job.episode_id)  # of an earlier attempt
            try:
                output = await self._attempt(job, sampling, server, began, ends_at)
                timings = {"started": started, "total": time.perf_counter() - began}
                return _with_lost(self._finished(job, output, server, timings, attempt), lost)
            except BaseException as failure:  # user code; the failure becomes a counted, named episode
                if is_keyboard(failure) or _is_cancelled(failure):
                    raise
                timings = {"started": started, "total": time.perf_counter() - began}
                failed = _with_lost(self._failed(job, failure, server, timings, attempt), lost)
                lost.append(failed)
            if ends_at is not None and time.perf_counter() >= ends_at:  # no time is left for a retry
                break
        return failed

    def _failed(
        self, job: Job, failure: BaseException, server: EpisodeServer, timings: dict[str, float], attempt: int
    ) -> Episode:
        """The episode of a loop that raised, with what it returned until then or else with what was sampled."""
        output = failure.output if isinstance(failure, EpisodeFailed) else None
        raised = failure.failure if isinstance(failure, EpisodeFailed) else failure
        segments = output.segments if output is not None and output.segments else tuple(server.segments)
        fields = {} if output is None else {k: v for k, v in output.extra_fields.items() if k != "timings"}
        fault = fault_of(failure, any(segment.sampled for segment in segments))
        return Episode(
            id=job.episode_id,
            task=_played(job.task, output),
            group=job.group,
            stop_reason=StopReason.ERROR,
            segments=segments,
            turns=output.turns if output is not None and output.turns else turns_of(segments, self.codec),
            error=_named(raised),
            step=job.step,
            validate=job.validate,
            seed=job.seed,
            baseline=job.baseline,
            timings={"generate": server.seconds, **timings},
            extra={**fields, **self._outage(job), "attempts": attempt + 1, "fault": fault},
        )

    def _outage(self, job: Job) -> dict[str, Any]:
        outage = self.toolbox.take_outage(job.episode_id)
        return {} if outage is None else {"tool_outage": outage.record()}

    async def _attempt(
        self, job: Job, sampling: SamplingParams, server: EpisodeServer, began: float, ends_at: float | None
    ) -> AgentLoopOutput:
        named = None if self.override_rows else job.task.agent_name
        spec = find_loop(named or self.default_loop, self.loops)
        if self.codec.patches is not None:
            await self.codec.patches.prepare(loaded_images(job.task.prompt))
        context = LoopContext(
            task=job.task,
            episode_id=job.episode_id,
            server=server,
            codec=codec_for(job.task, self.codec, self.toolbox),
            toolbox=self.toolbox,
            interactions=self.interactions,
            environments=self.environments,
            settings=self.settings,
            check_tokens=job.check_tokens,
            began=began,
            ends_at=ends_at,
            run_config=self.run_config,
        )
        loop = spec.cls.build(context, spec.options)
        params = {k: v for k, v in sampling.__dict__.items() if k not in ("seed", "max_tokens")}
        seconds = self._hard_limit(ends_at)
        try:
            with _reported(job, spec.cls.__name__, seconds):
                async with asyncio.timeout(seconds) as limit:
                    return await loop.run(params, **job.task.row)
        except TimeoutError:
            if not limit.expired():
                raise
            raise LoopError(
                f"{spec.cls.__name__} ran far past rollout.episode_timeout={self.settings.episode_timeout} or "
                "rollout.step_timeout seconds and was stopped; let it return earlier, or raise the limit"
            ) from None

    def _hard_limit(self, ends_at: float | None) -> float | None:
        """The timeout enforced here. It is longer than the limits that a loop has to keep itself."""
        limits = [self.settings.episode_timeout, None if ends_at is None else max(0.0, ends_at - time.perf_counter())]
        soonest = min((seconds for seconds in limits if seconds is not None), default=None)
        return None if soonest is None else soonest * 1.5 + 1.0

    def _finished(
        self, job: Job, output: AgentLoopOutput, server: EpisodeServer, timings: dict[str, float], attempt: int
    ) -> Episode:
        if not isinstance(output, AgentLoopOutput):
            raise LoopError(f"the agent loop returned a {type(output).__name__}; it must return one AgentLoopOutput")
        extra = {**output.extra_fields, **self._outage(job)}
        timings = {"generate": server.seconds, **output.seconds(), **extra.pop("timings", {}), **timings}
        if attempt:
            extra["attempts"] = attempt + 1
        if output.turn_rewards is not None:
            extra["turn_rewards"] = list(output.turn_rewards)
        rewards = [] if output.turn_rewards is None else list(output.turn_rewards)
        for reward in rewards if output.reward_score is None else [*rewards, output.reward_score]:
            if finite_number(reward.item() if hasattr(reward, "item") else reward) is None:
                raise LoopError(f"the agent loop returned the reward {brief(reward)}; return a finite number")
        segments = output.as_segments(self.codec, server.generations)
        if output.num_turns and not output.turns:
            extra["num_turns"] = output.num_turns
        return Episode(
            id=job.episode_id,
            task=_played(job.task, output),
            group=job.group,
            stop_reason=output.stop_reason,
            segments=segments,
            turns=output.turns or turns_of(segments, self.codec),
            reward=output.reward_score,
            reward_info={} if output.reward_score is None else dict(output.reward_info),
            step=job.step,
            validate=job.validate,
            seed=job.seed,
            baseline=job.baseline,
            timings=timings,
            extra=extra,
        )


@contextmanager
def _reported(job: Job, loop: str, seconds: float | None) -> Iterator[None]:
    """A block that is reported if it has not ended long after it was cancelled: code that catches CancelledError cannot
    be ended, and the step waits for it."""
    if seconds is None:
        yield
        return
    problem = (
        f"the agent loop {loop} of episode {job.episode_id} has not ended {STUCK_SECONDS:g} s after it was cancelled, "
        "and its step waits for it; let it pass CancelledError on, and clean up faster"
    )
    timer = asyncio.get_running_loop().call_later(seconds + STUCK_SECONDS, _log.warning, problem)
    try:
        yield
    finally:
        timer.cancel()


def _played(task: Task, output: AgentLoopOutput | None) -> Task:
    """The task with the prompt that was played, if the loop wrote it."""
    return replace(task, prompt=tuple(output.prompt_messages)) if output and output.prompt_messages else task


def _with_lost(episode: Episode, lost: Sequence[Episode]) -> Episode:
    """The episode with the errors and transcripts of the attempts before it."""
    attempts = [{"error": e.error, "turns": [{"role": t.role, "text": t.text} for t in e.turns]} for e in lost]
    return replace(episode, extra={**episode.extra, "failed_attempts": attempts}) if attempts else episode


def _is_cancelled(failure: BaseException) -> bool:
    """Whether this task was cancelled; a loop may also raise CancelledError by itself."""
    task = asyncio.current_task()
    return isinstance(failure, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _named(failure: BaseException) -> str:
    try:
        return f"{type(failure).__name__}: {failure}"
    except Exception as second:  # noqa: BLE001 - a user's exception may have a __str__ that fails
        return f"{type(failure).__name__}, whose text cannot be read ({type(second).__name__})"


def codec_for(task: Task, codec: ChatCodec, toolbox: ToolBox) -> ChatCodec:
    """The codec, with the row's `tool_selection` if it has one."""
    selection = task.extra_info.get("tool_selection")
    return codec if selection is None else codec.with_tools(toolbox.schemas(selection))


def turns_of(segments: Sequence[Segment], codec: ChatCodec) -> tuple[Turn, ...]:
    """Turns for a loop that returned none: runs of sampled tokens are the assistant's, the others a tool's."""
    turns = []
    for number, segment in enumerate(segments):
        at = 0
        for sampled, run in itertools.groupby(segment.response_mask):
            end = at + len(list(run))
            ids = segment.response_ids[at:end]
            text = codec.parse(ids).text if sampled else codec.decode(ids)
            turns.append(Turn(role="assistant" if sampled else "tool", text=text, segment=number, start=at, end=end))
            at = end
    return tuple(turns)
