"""Asynchronous training: batches are sampled ahead of the update that trains on them, on the trainer's device or by
servers on others.

Batches are trained in the order of their prompts, and every group that starts is trained on. So the time that an
episode takes has no influence on whether or when it is trained, and nothing is dropped for being old. A group starts
at most `ahead` batches before the update that trains on it, so no token is older than that many versions.

There are two schedules. `free running`: episodes go on while the policy is updated, and their later tokens are of a
newer version. What an update consumes is on disk before the update begins. `fixed lag`: batch n + 1 is sampled as a
whole by version n - 1, while the policy trains on batch n. A checkpoint holds the batch that was sampled ahead, so in
deterministic mode a resumed run is bit-identical.

All tokens that are sampled after a version was published are of that version or a later one, whichever server samples
them. So the bound also holds when servers die, join, or fail to load weights: they then get no requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rally.loops import Job
from rally.track import episode_from_json, off_policy_metrics
from rally.track.run_folder.episode_json import episodes_to_json
from rally.track.run_folder.folder import ImageFolder, redacted_lines
from rally.track.timing import PhaseClock, Timed
from rally.train.batch import TrainBatch, with_stale_tokens
from rally.train.checkpoint.snapshot import Part
from rally.train.checkpoint.store import Checkpoint
from rally.train.rollout.rollout import RolloutResult
from rally.train.trainer import StepStart, Trainer
from rally.types import Episode

WORST = "training/off_policy/trajectory_staleness_worst/max"


@dataclass(frozen=True, kw_only=True)
class AsyncSettings:
    """`ahead`: batches that start before the update of the version they begin with; a fraction is that share of the
    next batch. `partial_rollout`: episodes go on across an update; otherwise the update waits until none is running."""

    ahead: float = 1.0
    partial_rollout: bool = True
    fixed_lag: bool = False

    @property
    def max_staleness(self) -> int:
        """The most versions that a trained token can be old."""
        return 1 if self.fixed_lag else math.ceil(self.ahead)


class GroupAdmission:
    """Decides when an episode may start. The group at place p of step s is number g = (s - 1) * batch_size + p. It
    waits until `trained` updates are done, so that g < (trained + 1 + ahead) * batch_size."""

    def __init__(self, batch_size: int, ahead: float, trained: int) -> None:
        self.batch_size, self.ahead, self.trained = batch_size, ahead, trained
        self.running = 0
        self._paused = False
        self._changed = asyncio.Condition()

    def updates_before(self, job: Job) -> int:
        """How many updates must be done before the job starts. Groups that dynamic sampling adds to a step wait as long
        as its last one."""
        place = min(job.place, self.batch_size - 1)
        return math.floor(job.step - 1 + place / self.batch_size - self.ahead)

    @asynccontextmanager
    async def __call__(self, job: Job) -> AsyncIterator[None]:
        needed = self.updates_before(job)
        async with self._changed:
            await self._changed.wait_for(lambda: self.trained >= needed and not self._paused)
            self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            if self._paused and self.running == 0:  # only `drain` waits for this; all others wait for `advance`
                async with self._changed:
                    self._changed.notify_all()

    async def drain(self) -> None:
        """Let no further episode start, and wait until none is running."""
        async with self._changed:
            self._paused = True
            await self._changed.wait_for(lambda: self.running == 0)

    async def advance(self, trained: int) -> None:
        """Another update is done."""
        async with self._changed:
            self.trained, self._paused = trained, False
            self._changed.notify_all()


@dataclass(kw_only=True)
class AsyncTrainer(Trainer):
    """A trainer whose batches are sampled ahead."""

    schedule: AsyncSettings = field(default_factory=AsyncSettings)
    sampled_ahead: RolloutResult | None = None  # with a fixed lag: the batch of the next step
    overlap: bool = True  # with a fixed lag: sample during the update; the engine must have its own weights
    _batches: dict[int, asyncio.Task[RolloutResult]] = field(default_factory=dict, init=False)
    _admission: GroupAdmission = field(init=False)

    async def fit(self) -> dict[str, float]:
        if not self.schedule.fixed_lag:
            self._admission = GroupAdmission(self.settings.batch_size, self.schedule.ahead, self.start_step)
            self.admit = self._admission
        try:
            return await super().fit()
        finally:  # after an interrupt or an error, batches are still being sampled
            for batch in self._batches.values():
                batch.cancel()
            await asyncio.gather(*self._batches.values(), return_exceptions=True)

    async def train_step(self, step: int) -> dict[str, float]:
        clock = PhaseClock(self.folder, step)
        began = StepStart(time.perf_counter(), self.engine.busy_seconds)
        with clock("gen"):
            result = await self._next_batch(step)
        metrics = off_policy_metrics(result.episodes, self.engine.weight_version)
        self._check_staleness(step, metrics)
        metrics |= await self._learn(step, result, clock, began)
        return metrics | {"engine/idle_share": began.idle_share(self.engine)}

    def _check_staleness(self, step: int, metrics: Mapping[str, float]) -> None:
        """Admission ensures the bound, unless what sampled reports wrong versions."""
        worst, bound = metrics.get(WORST, 0.0), self.schedule.max_staleness
        if worst > bound:
            self.console.warn_once(
                "staleness",
                f"step {step} trains on a token that is {worst:g} weight versions old by what its server reported, and "
                f"the schedule allows {bound}; the server may report other versions than those that it was sent",
            )

    async def _next_batch(self, step: int) -> RolloutResult:
        if not self.schedule.fixed_lag:
            for ahead in range(step, step + math.ceil(self.schedule.ahead) + 1):
                self._begin(ahead)
        elif self.sampled_ahead is not None:
            result, self.sampled_ahead = self.sampled_ahead, None
            return result
        self._begin(step)
        return await self._batches.pop(step)

    def _begin(self, step: int) -> None:
        """Begin to sample the batch of a step, unless that has begun or the run ends before."""
        if step <= self.settings.total_steps and step not in self._batches:
            clock = PhaseClock(self.folder, step)
            self._batches[step] = asyncio.create_task(self._collect(step, clock), name=f"rollout {step}")

    async def _apply(self, step: int, episodes: Sequence[Episode], clock: PhaseClock) -> dict[str, float]:
        if self.schedule.fixed_lag:
            return await self._apply_with_lag(step, episodes, clock)
        if not self.schedule.partial_rollout:
            with clock("gen"):
                await self._admission.drain()
        self._consume(step, episodes)
        metrics = await self._update_aside(step, episodes, clock)
        with clock("update_weights"):
            metrics |= await self.engine.publish()
        await self._admission.advance(step)
        return metrics

    async def _apply_with_lag(self, step: int, episodes: Sequence[Episode], clock: PhaseClock) -> dict[str, float]:
        self._begin(step + 1)
        ahead = self._batches.get(step + 1)
        if not self.overlap and ahead is not None:
            with clock("gen"):
                await asyncio.wait([ahead])
        metrics = await self._update_aside(step, episodes, clock)
        if ahead is not None:
            with clock("gen"):
                self.sampled_ahead = await self._batches.pop(step + 1)
        with clock("update_weights"):
            return metrics | await self.engine.publish()

    async def _update_aside(self, step: int, episodes: Sequence[Episode], clock: PhaseClock) -> dict[str, float]:
        """Update in a thread, so that tools, users, rewards and servers go on. Meanwhile servers are checked."""
        check = asyncio.create_task(self.engine.verify())
        try:
            with clock("update_actor"):
                metrics = await self._in_thread(step, episodes, clock)
            with clock("update_weights"):
                await check
            return metrics
        finally:
            check.cancel()
            await asyncio.gather(check, return_exceptions=True)

    async def _in_thread(self, step: int, episodes: Sequence[Episode], clock: PhaseClock) -> dict[str, float]:
        update = asyncio.ensure_future(asyncio.to_thread(self.learn_from, step, episodes, clock))
        try:
            return await asyncio.shield(update)
        except asyncio.CancelledError:  # a thread cannot be cancelled, and must not outlive what it changes
            with contextlib.suppress(Exception):
                await update
            raise

    def _batch(
        self,
        step: int,
        episodes: Sequence[Episode],
        penalties_M: Tensor | None,
        metrics: dict[str, float],
        progress: Callable[[], None],
        timed: Timed,
    ) -> TrainBatch:
        batch = super()._batch(step, episodes, penalties_M, metrics, progress, timed)
        return with_stale_tokens(batch, episodes, self.engine.weight_version)

    def _consume(self, step: int, episodes: Sequence[Episode]) -> None:
        """Record what the update trains on, in its order, and wait until that and the episodes are on disk."""
        groups = list(dict.fromkeys(episode.group for episode in episodes))
        self.recorder.write(lambda: self.folder.log_consumed(step, self.engine.weight_version, groups))
        self.recorder.wait()

    def _parts(self) -> list[Part]:
        ahead = [] if self.sampled_ahead is None else [_batch_part(self.sampled_ahead)]
        return [*super()._parts(), *ahead]


AHEAD = "sampled_ahead"
_LISTS = ("episodes", "failed", "set_aside", "masked", "filtered", "baselines")


def _batch_part(batch: RolloutResult) -> Part:
    """A batch as a part of a checkpoint: a folder with a file of episodes for each list."""

    def write(folder: Path) -> None:
        target = folder / AHEAD
        target.mkdir()
        ImageFolder(target).save(batch.everything)
        for name in _LISTS:
            lines = redacted_lines(episodes_to_json(getattr(batch, name)))
            (target / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")
        numbers = {"filtering": batch.filtering, "dropped_groups": batch.dropped_groups}
        (target / "numbers.json").write_text(json.dumps(numbers), encoding="utf-8")

    return write


def read_sampled_ahead(checkpoint: Checkpoint) -> RolloutResult | None:
    """The batch that was sampled ahead when the checkpoint was written; None if there was none."""
    if not checkpoint.holds(AHEAD):
        return None
    folder = checkpoint.path / AHEAD
    images = ImageFolder(folder)

    def episodes(name: str) -> list[Episode]:
        with (folder / f"{name}.jsonl").open(encoding="utf-8", newline="\n") as file:
            return [episode_from_json(json.loads(line, object_hook=images.hook)) for line in file]

    with checkpoint.restoring(AHEAD):
        numbers = json.loads((folder / "numbers.json").read_text(encoding="utf-8"))
        lists: dict[str, Any] = {name: episodes(name) for name in _LISTS}
        return RolloutResult(**lists, **numbers)
