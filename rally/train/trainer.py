"""The training loop: rollout, advantages, update, validation and checkpoint, in that order, for every step.

A step is a pure function of the weights, the optimizer state, the sampler state and (seed, step). So a run that resumes
from a checkpoint continues as if it had not stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rally.algos.advantages import pf_ppo_weights
from rally.algos.credit_assignment import CreditSettings
from rally.chat import ChatCodec
from rally.data import RowSampler, TaskSet, draw, draw_further, learned, steps_per_epoch
from rally.engines.base import TrainingEngine
from rally.loops import Admit, Job
from rally.models.residence import on_device
from rally.rewards import reward_metrics
from rally.track import (
    RunConsole,
    RunFolder,
    Sinks,
    conversation_text,
    rollout_metrics,
    tool_warnings,
    validation_metrics,
)
from rally.track.timing import PhaseClock, Timed, memory_used, token_times, untimed
from rally.train.batch import TrainBatch, advantage_spans, build_batch, resampled, rows_of
from rally.train.checkpoint.snapshot import Part, json_part
from rally.train.checkpoint.store import COUNTERS, CheckpointStore
from rally.train.critic import Critic
from rally.train.divergence import keeping_diverged
from rally.train.health_checks import HealthSettings, findings, watched
from rally.train.interrupt_signals import Interrupt
from rally.train.loss_inputs import kl_rewards
from rally.train.policy import Policy, due, step_seed
from rally.train.reference import KlController, Reference, awake
from rally.train.rollout.dynamic_sampling import FilterSettings, LiveGroups
from rally.train.rollout.rollout import Rollout, RolloutError, RolloutResult, ValidationPass
from rally.train.startup_check import check_rollout
from rally.train.teacher import Teachers
from rally.train.update import UpdateSettings, reference_logprobs, token_energies, update_policy
from rally.types import Episode, SamplingParams
from rally.util.background_threads import BackgroundWriter


class ResamplingSettings(NamedTuple):
    """PF-PPO: the episodes of an update are drawn with weights from their rewards."""

    method: str = "pow"
    power: float = 2.0


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """The schedule of a run, and the limits of its warnings."""

    total_steps: int
    batch_size: int
    n: int
    seed: int = 0
    credit: CreditSettings = field(default_factory=CreditSettings)
    resampling: ResamplingSettings | None = None  # None: every episode is trained on once
    filter: FilterSettings | None = None  # None: every group of the batch is trained on
    reward_kl_kind: str = "kl"
    save_freq: int = -1
    test_freq: int = -1
    val_before_train: bool = True
    val_batch_size: int | None = None
    max_prompt_length: int | None = None
    mismatch_alarm: float = 0.01
    watch: HealthSettings = field(default_factory=HealthSettings)
    show_validation: int = 0  # conversations printed after a validation


class StepStart(NamedTuple):
    """When a step began, and how long the engine had been busy until then."""

    at: float
    busy_seconds: float

    def idle_share(self, engine: TrainingEngine) -> float:
        """The share of the time since then in which the engine had no work."""
        used = (engine.busy_seconds - self.busy_seconds) / max(1e-9, time.perf_counter() - self.at)
        return max(0.0, 1 - used)  # an aborted request may end only now


@dataclass(kw_only=True)
class Trainer:
    """The components of a run, and the loop over its steps."""

    settings: TrainerSettings
    update: UpdateSettings
    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    codec: ChatCodec
    engine: TrainingEngine
    rollout: Rollout
    sampling: SamplingParams
    validation: Sequence[ValidationPass]
    train_tasks: TaskSet
    sampler: RowSampler
    val_tasks: TaskSet | None
    folder: RunFolder
    checkpoints: CheckpointStore
    console: RunConsole
    sinks: Sinks
    reference: Reference | None = None
    teachers: Teachers | None = None  # None: no distillation
    reward_kl: KlController | None = None  # None: no KL in the reward
    critic: Critic | None = None
    startup_texts: Sequence[Sequence[int]] = ()  # to compare the rollout with the model's own forward; () compares not
    extra_episode_folders: dict[bool, RunFolder] = field(default_factory=dict)  # by validate: rollout_data_dir, ...
    admit: Admit | None = None  # holds training episodes back; None: all of a step start at once
    start_step: int = 0
    recorder: BackgroundWriter = field(default_factory=BackgroundWriter)
    interrupt: Interrupt = field(default_factory=Interrupt)
    done: int = field(default=0, init=False)  # the last completed step
    lost_steps: int = field(default=0, init=False)  # consecutive steps that lost all their groups
    history: list[dict[str, float]] = field(default_factory=list)  # metrics of earlier steps, for the health checks

    async def fit(self) -> dict[str, float]:
        """Train to the last step or until an interrupt. Returns the metrics of the last validation."""
        self.done = self.start_step
        last: dict[str, float] = {}
        await self.engine.start()
        if self.startup_texts:
            found = await check_rollout(self.engine, self.policy.model, self.startup_texts, self.sampling)
            self.console.note(f"start-up check: {found}")
        saving: dict[str, float] = {}  # the time of a checkpoint is logged with the next step
        if self.val_tasks and self.settings.val_before_train and self.start_step == 0:
            last = await self.validate(0)
            self._log(0, last)
        if self.interrupt.requested:
            return last
        for step in range(self.start_step + 1, self.settings.total_steps + 1):
            self.checkpoints.check()
            metrics = saving | await self.train_step(step)
            saving = {}
            final = step == self.settings.total_steps
            if self.val_tasks and (final or due(step, self.settings.test_freq)):
                last = await self.validate(step)
                metrics |= last
            self._log(step, metrics)  # before the checkpoint: a kill in between repeats the step and loses no metrics
            self.done = step
            saved = final or self.interrupt.requested or due(step, self.settings.save_freq)
            if saved:
                saving = self._save(step)
            if saved and self.interrupt.requested:
                break
        self.checkpoints.wait()
        return last

    def _save(self, step: int) -> dict[str, float]:
        clock = PhaseClock(self.folder, step)
        with clock("save_checkpoint"), self.console.phase("saving", 1) as phase:
            self.checkpoints.save(step, self.policy, self.tokenizer, learned(self.sampler), more=self._parts())
            phase.advance()
        return clock.metrics()

    async def train_step(self, step: int) -> dict[str, float]:
        clock = PhaseClock(self.folder, step)
        began = StepStart(time.perf_counter(), self.engine.busy_seconds)
        with clock("gen"):
            result = await self._collect(step, clock)
        metrics = {"engine/idle_share": began.idle_share(self.engine)}
        return metrics | await self._learn(step, result, clock, began)

    async def _learn(self, step: int, result: RolloutResult, clock: PhaseClock, began: StepStart) -> dict[str, float]:
        """Record a rollout, train on it, and return the metrics of the step."""
        metrics = rollout_metrics(result.sampled, self.settings.max_prompt_length)
        metrics |= result.metrics() | reward_metrics(result.scored)
        metrics |= self._update_sampler(step, result.scored)
        self._record(step, result.everything, validate=False)
        self._check_lost(step, result)
        metrics |= await self._apply(step, result.episodes, clock)
        metrics |= clock.metrics() | {"timing_s/step": time.perf_counter() - began.at}
        self._add_rates(metrics, step, result.everything)
        self._watch(metrics, result.everything)
        return metrics

    async def _apply(self, step: int, episodes: Sequence[Episode], clock: PhaseClock) -> dict[str, float]:
        """Update the policy, and give its weights to the engine."""
        with clock("update_weights"):
            await self.engine.rest()
        with on_device(self.policy.model):  # once for both
            with clock("update_actor"):
                metrics = self.learn_from(step, episodes, clock)
            with clock("update_weights"):
                return metrics | await self.engine.publish()

    def _check_lost(self, step: int, result: RolloutResult) -> None:
        """Stop a run whose steps lose all their groups to failures or outages: it would go on without learning."""
        lost = result.failed + result.masked
        self.lost_steps = self.lost_steps + 1 if lost and not result.scored else 0
        if self.lost_steps >= self.settings.watch.patience:
            first = lost[0].error or (lost[0].extra.get("tool_outage") or {}).get("first") or "see the episodes"
            raise RolloutError(
                f"in each of the last {self.lost_steps} steps, up to step {step}, every group was dropped because "
                f"episodes failed or a tool was unavailable; the last time: {first}; repair that, and resume the run"
            )

    async def _collect(self, step: int, timed: Timed) -> RolloutResult:
        settings, size = self.settings, self.settings.batch_size
        rows = draw(self.sampler, step, size, len(self.train_tasks))
        if settings.filter is not None:
            rows += draw_further(self.sampler, step, len(self.train_tasks))

        def jobs_at(first: int, count: int) -> list[Job]:
            tasks = [self.train_tasks[row] for row in rows[first : first + count]]
            return self.rollout.jobs(tasks, settings.n, step, first=first, baseline=settings.credit.needs_greedy)

        groups = None
        if settings.filter is not None:
            groups = LiveGroups(settings.filter, size, len(rows), jobs_at, self.rollout.policy)
        jobs = jobs_at(0, size) if groups is None else groups.begin()
        total = len(jobs) if groups is None else None  # unknown: dynamic sampling may add groups
        with self.console.phase(f"rollout {step}/{settings.total_steps}", total) as phase, self._kept(step):
            result = await self.rollout.collect(
                jobs, self.sampling, on_done=phase.advance, refill=groups, timed=self._shown(timed), admit=self.admit
            )
        if groups is not None and groups.missing:
            self.console.warn_once("missing", f"step {step}: {groups.shortage}")
        return result

    @contextmanager
    def _kept(self, step: int, validate: bool = False) -> Iterator[None]:
        """Record the episodes of a rollout that stops the run: they show why."""
        try:
            yield
        except RolloutError as stop:
            self._record(step, stop.episodes, validate=validate)
            raise

    def _shown(self, timed: Timed) -> Timed:
        """`timed`, with a progress bar for scoring a whole batch. Episodes that are scored one by one advance the
        rollout's bar."""

        @contextmanager
        def scoring(name: str) -> Iterator[None]:
            with timed(name), self.console.phase("scoring", 1) as phase:
                yield
                phase.advance()

        return scoring

    def _update_sampler(self, step: int, episodes: Sequence[Episode]) -> dict[str, float]:
        """Update the sampler with the episodes, and return its metrics."""
        return {f"curriculum/{name}": value for name, value in (self.sampler.update(step, episodes) or {}).items()}

    def learn_from(self, step: int, episodes: Sequence[Episode], timed: Timed) -> dict[str, float]:
        """Update the policy on scored episodes. A function of the state after the step before, and of the episodes."""
        if not episodes:
            self.console.warn_once("empty", f"step {step}: no group is left to train on; the policy is not updated")
            with self.engine.updating():
                return {}  # the weight version still advances, so that caches are empty as after a resume
        count = self._mini_batches(step, len({e.group for e in episodes}))
        torch.manual_seed(step_seed(self.settings.seed, step))
        with (
            self.console.phase(f"update {step}/{self.settings.total_steps}", count) as phase,
            self.engine.updating(),
            awake(self.reference),
            nullcontext() if self.teachers is None else self.teachers.resting(),
            keeping_diverged(self.folder.path, step, [_source(e) for e in self._drawn_episodes(step, episodes)]),
        ):
            penalties_M = self._reward_kl(episodes, timed)
            metrics: dict[str, float] = {}
            batch = self._batch(step, episodes, penalties_M, metrics, phase.advance, timed)
            if self.teachers is not None:
                batch = self.teachers.assigned(batch, episodes)
            rows = batch.rows
            self.recorder.write(lambda: self.folder.log_advantages(step, advantage_spans(episodes, rows)))
            if self._trains(step):
                trained = self._drawn(step, episodes, batch)
                if self.teachers is not None:
                    with timed("teacher"):
                        trained = self.teachers.answered(trained)
                metrics |= update_policy(
                    self.policy,
                    trained,
                    self.update,
                    step=step,
                    reference=self.reference if self.update.kl_coef else None,
                    teachers=self.teachers,
                    progress=phase.advance,
                    timed=timed,
                )
        advantages = batch.advantages_M
        if self.reward_kl is not None and penalties_M is not None and penalties_M.numel():
            coefficient = self.reward_kl.coefficient
            kl = -float(penalties_M.mean(dtype=torch.float64)) / coefficient
            metrics |= {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coefficient}
            self.reward_kl.update(kl, len(episodes))
        return metrics | {
            "critic/advantages/mean": float(advantages.mean()),
            "critic/advantages/max": float(advantages.max()),
            "critic/advantages/min": float(advantages.min()),
            "groups/live_share": batch.live_share,
        }

    def _mini_batches(self, step: int, groups: int) -> int:
        """The number of mini-batches of a step's update, including the critic's."""
        critic = 0 if self.critic is None else self.critic.settings.mini_batches(groups)
        return critic + (-(-groups // self.update.mini_batch_groups) * self.update.epochs if self._trains(step) else 0)

    def _trains(self, step: int) -> bool:
        """Whether the policy is updated in this step. It is not during the critic's warm-up."""
        return self.critic is None or step > self.critic.settings.warmup_steps

    def _batch(
        self,
        step: int,
        episodes: Sequence[Episode],
        penalties_M: Tensor | None,
        metrics: dict[str, float],
        progress: Callable[[], None],
        timed: Timed,
    ) -> TrainBatch:
        """The episodes with their advantages. A critic, if there is one, is updated after it has given its values."""
        if self.critic is None:
            energies_M = None
            if self.settings.credit.needs_energies:
                with timed("old_log_prob"):
                    energies_M = token_energies(self.policy, rows_of(episodes), self.update)
            return build_batch(episodes, self.settings.credit, penalties_M, energies_M)
        with timed("values"):
            judgement = self.critic.judge(episodes, self.settings.credit, penalties_M)
        with timed("update_critic"):
            drawn = self._drawn(step, episodes, judgement.critic)
            metrics |= judgement.metrics | self.critic.update(drawn, step=step, progress=progress)
        return judgement.policy

    def _drawn(self, step: int, episodes: Sequence[Episode], batch: TrainBatch) -> TrainBatch:
        """The batch of the episodes that PF-PPO draws, the same ones for critic and policy; else the batch."""
        chosen = self._chosen(step, episodes)
        return batch if chosen is None else resampled(batch, chosen, self.settings.n)

    def _drawn_episodes(self, step: int, episodes: Sequence[Episode]) -> list[Episode]:
        chosen = self._chosen(step, episodes)
        return list(episodes) if chosen is None else [episodes[number] for number in chosen]

    def _chosen(self, step: int, episodes: Sequence[Episode]) -> list[int] | None:
        """The numbers of the episodes that PF-PPO draws for the update; None without it."""
        if self.settings.resampling is None:
            return None
        rewards_N = torch.tensor([float(episode.reward or 0.0) for episode in episodes], dtype=torch.float64)
        weights_N = pf_ppo_weights(rewards_N, *self.settings.resampling)
        generator = torch.Generator().manual_seed(step_seed(self.settings.seed, step))
        chosen_N = torch.multinomial(weights_N, len(episodes), replacement=True, generator=generator)
        return [int(number) for number in chosen_N]

    def _parts(self) -> list[Part]:
        """The parts of a checkpoint beside the policy and the sampler."""
        counters = json_part(COUNTERS, {"weight_version": self.engine.weight_version})
        return [counters, *(one.part() for one in (self.critic, self.reward_kl) if one is not None)]

    def _reward_kl(self, episodes: Sequence[Episode], timed: Timed) -> Tensor | None:
        """The KL penalty on the reward of each sampled token; None if the reward has none."""
        if self.reward_kl is None:
            return None
        assert self.reference is not None
        reference, update, rows = self.reference, self.update, rows_of(episodes)
        with timed("ref"):
            logp_M = reference_logprobs(self.policy, reference, rows, update)
        return kl_rewards(rows, logp_M, self.settings.reward_kl_kind, self.reward_kl.coefficient)

    async def validate(self, step: int) -> dict[str, float]:
        """Run every validation pass over all prompts. Greedy and sampled metrics have separate names."""
        if self.val_tasks is None:
            return {}
        metrics: dict[str, float] = {}
        clock = PhaseClock(self.folder, step)
        with clock("testing"):
            passes: list[list[Episode]] = []
            for one in self.validation:
                jobs = self.rollout.jobs(self.val_tasks, one.n, step, validate=True, suffix=one.suffix)
                size = (self.settings.val_batch_size or len(self.val_tasks)) * one.n
                episodes: list[Episode] = []
                label = f"validation {one.suffix}".strip()
                with self.console.phase(label, len(jobs)) as phase, self._kept(step, validate=True):
                    for first in range(0, len(jobs), size):
                        part = jobs[first : first + size]
                        result = await self.rollout.collect(
                            part, one.sampling, on_done=phase.advance, timed=self._shown(untimed)
                        )
                        episodes += result.everything
                metrics |= validation_metrics(episodes, one.n, one.suffix)
                passes.append(episodes)
            self._record(step, [episode for episodes in passes for episode in episodes], validate=True)
        self._show(passes[0])
        return metrics | clock.metrics()

    def _show(self, episodes: Sequence[Episode]) -> None:
        for episode in [e for e in episodes if e.segments][: self.settings.show_validation]:
            self.console.show(conversation_text(episode, self.codec.decode))

    def _record(self, step: int, episodes: Sequence[Episode], *, validate: bool) -> None:
        more = [self.extra_episode_folders[validate]] if validate in self.extra_episode_folders else []
        for folder in (self.folder, *more):
            self.recorder.write(partial(folder.log_episodes, step, episodes, validate=validate))

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self.recorder.wait()
        self.sinks.log(step, metrics)

    def _add_rates(self, metrics: dict[str, float], step: int, episodes: Sequence[Episode]) -> None:
        tokens = sum(len(s.ids) for e in episodes for s in e.segments)
        seconds = metrics["timing_s/step"]
        metrics |= {
            "perf/total_num_tokens": float(tokens),
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / seconds,
            "perf/samples_per_s": len(episodes) / seconds,
            **token_times(metrics, episodes),
            **memory_used(),
            "training/global_step": float(step),
            "training/epoch": float((step - 1) // steps_per_epoch(len(self.train_tasks), self.settings.batch_size)),
            "engine/weight_version": float(self.engine.weight_version),
        }

    def _watch(self, metrics: dict[str, float], episodes: Sequence[Episode]) -> None:
        """Warn, once each, about what the metrics of this step show."""
        mismatch = metrics.get("actor/rollout_mismatch_kl", 0.0)
        if mismatch > self.settings.mismatch_alarm:
            self.console.warn_once(
                "mismatch",
                f"rollout and trainer disagree about the policy (k3 = {mismatch:.2g}, over rollout.mismatch_alarm="
                f"{self.settings.mismatch_alarm}); the episodes were sampled from another policy than the one trained",
            )
        self.history.append(watched(metrics))
        for finding in findings(self.history, self.settings.watch):
            self.console.warn_once(*finding)
        for warning in tool_warnings(episodes):
            self.console.warn_once(*warning)
        differing = [e for e in episodes if "tokenization_difference" in e.extra]
        metrics["tokenization/difference_rate"] = len(differing) / max(1, len(episodes))
        if differing:
            self.console.warn_once("tokens", str(differing[0].extra["tokenization_difference"]))


def _source(episode: Episode) -> dict[str, Any]:
    return {"id": episode.id, "group": episode.group, "task": episode.task.id, "reward": episode.reward}


def run(trainer: Trainer) -> dict[str, float]:
    """Run the loop to its end, then close everything it opened."""

    async def fit_and_close() -> dict[str, float]:
        async with trainer.rollout.opened():
            try:
                async with trainer.policy.ranks.watch():
                    return await trainer.fit()
            finally:
                trainer.recorder.close()
                await trainer.engine.close()

    with trainer.sinks:
        return asyncio.run(fit_and_close())
