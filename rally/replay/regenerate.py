"""Episodes are sampled again as they were: by the weights of their step, with their seeds, in the same company.

Company counts on a CPU, where what is computed together can change the last bits: all that were sampled in one rollout
are sampled in one again, and where prompts began when groups ended in vain, they do so again, by the recorded rewards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rally.config import Config
from rally.engines import EmbeddedEngine
from rally.loops import Job, Runner
from rally.models.load import pick_device
from rally.runs import build
from rally.runs.build.episodes import runner_of
from rally.runs.build.inputs import RunInputs
from rally.train.checkpoint.store import Checkpoint, open_checkpoint
from rally.train.rollout.dynamic_sampling import LiveGroups
from rally.types import Episode, RallyError, SamplingParams

ID = re.compile(r"(?P<kind>[tv])(?P<step>\d+)-(?P<prompt>\d+)(-(?P<suffix>[a-z]+))?-(?P<sample>\d+|greedy)")


class WeightsGone(RallyError):
    """The weights that sampled an episode are not there any more."""


class EpisodePosition(NamedTuple):
    """Where an episode was among those of its step; the greedy one of a prompt is its last."""

    prompt: int
    sample: float


def place_of(episode: Episode) -> EpisodePosition:
    parsed = _parsed(episode)
    return EpisodePosition(
        int(parsed["prompt"]), float("inf") if parsed["sample"] == "greedy" else float(parsed["sample"])
    )


def pass_of(episode: Episode) -> str:
    """The suffix of the validation pass it was held in; the main one, and training, have none."""
    return _parsed(episode)["suffix"] or ""


def _parsed(episode: Episode) -> re.Match[str]:
    parsed = ID.fullmatch(episode.id)
    assert parsed is not None, "ids are our own"
    return parsed


def weights_of(episode: Episode, config: Config, run: Path, given: Path | None) -> Checkpoint | None:
    """The checkpoint whose weights sampled an episode; None for the model that the run began with."""
    if given is not None:
        return open_checkpoint(given)
    after = episode.step if episode.validate else episode.step - 1
    own = run / "checkpoints" / f"global_step_{after}"
    for path in (own, Path(config.trainer.resume_from_path or "")):
        if path.name == own.name and path.exists():
            return open_checkpoint(path)
    if after > 0:
        raise WeightsGone(
            f"the weights after step {after}, which sampled it, are not there ({own}); name a checkpoint with "
            "--checkpoint, and keep more of them with trainer.save_freq and trainer.max_actor_ckpt_to_keep"
        )
    return None


def version_of(checkpoint: Checkpoint | None) -> int:
    return int(checkpoint.counters().get("weight_version", 0)) if checkpoint else 0


def company_of(episode: Episode, step: Sequence[Episode], config: Config) -> list[Episode]:
    """Those of its step that have to be sampled with it, in their order."""
    if pick_device(config.trainer.device).type == "cuda":
        return [episode]  # deterministic kernels: nobody's bits depend on others
    return sorted(same_rollout(episode, step, config), key=place_of)


def same_rollout(episode: Episode, step: Sequence[Episode], config: Config) -> list[Episode]:
    """Those of its step that were held in the same rollout: validation has one for each pass and part."""
    if not episode.validate:
        return list(step)
    size, own = config.data.val_batch_size, pass_of(episode)
    held = [e for e in step if pass_of(e) == own]
    if size is None:
        return held
    part = place_of(episode).prompt // size
    return [e for e in held if place_of(e).prompt // size == part]


async def sample_again(
    company: Sequence[Episode], config: Config, inputs: RunInputs, checkpoint: Checkpoint | None
) -> dict[str, Episode]:
    """The episodes as they are sampled now, by id."""
    model = build.model_of(config, str(checkpoint.actor) if checkpoint else None).eval()
    engine = EmbeddedEngine(model, build.engine_settings_of(config), decode=inputs.codec.decode)
    engine.begin_at(version_of(checkpoint))
    await engine.start()
    try:
        runner, sampling = runner_of(config, inputs, engine), _sampling(company[0], config, inputs)
        ended = await _Rollout(company, config, runner, sampling).hold()
    finally:
        await engine.close()
    return {episode.id: episode for episode in ended}


def _sampling(episode: Episode, config: Config, inputs: RunInputs) -> SamplingParams:
    sampling = build.sampling_of(config, inputs.codec)
    if not episode.validate:
        return sampling
    passes = {one.suffix: one.sampling for one in build.validation_passes(config, sampling)}
    if (own := pass_of(episode)) not in passes:
        raise RallyError(f"the configuration has no validation pass {own!r}, which sampled it; set val_kwargs as then")
    return passes[own]


@dataclass(frozen=True)
class _Rollout:
    """One rollout of the past, to be held again; episodes get the rewards that they had."""

    company: Sequence[Episode]
    config: Config
    runner: Runner
    sampling: SamplingParams

    async def hold(self) -> list[Episode]:
        groups, in_batch = self._groups(), build.reward_spec_of(self.config).batch
        jobs = self._jobs(0, len(self.company)) if groups is None else groups.begin()
        more = None if groups is None or in_batch else lambda episode: groups.after([episode])
        recorded = {episode.id: episode for episode in self.company}
        ended: list[Episode] = []

        async def finish(episode: Episode) -> Episode:
            return _rewarded_as(recorded[episode.id], episode)

        while jobs:
            batch = await self.runner.run(jobs, self.sampling, finish=finish, more=more)
            jobs = groups.after(batch) if groups is not None and in_batch else []
            ended += batch
        return ended

    def _groups(self) -> LiveGroups | None:
        chosen = build.filter_settings_of(self.config)
        if chosen is None or len(self.company) == 1 or self.company[0].validate:
            return None
        prompts = 1 + max(place_of(e).prompt for e in self.company)
        policy = build.failure_policy_of(self.config)
        return LiveGroups(chosen, self.config.data.train_batch_size, prompts, self._jobs, policy)

    def _jobs(self, first: int, count: int) -> list[Job]:
        """The episodes of `count` prompts from one on; of the whole company, its prompts need not begin at 0."""
        base = place_of(self.company[0]).prompt
        wanted = range(base + first, base + first + count)
        return [_job(episode) for episode in self.company if place_of(episode).prompt in wanted]


def _rewarded_as(recorded: Episode, episode: Episode) -> Episode:
    failed = recorded.error is not None or "reward_error" in recorded.extra  # a 0 that it may have came later
    return replace(episode, reward=None if failed else recorded.reward, reward_info=recorded.reward_info)


def _job(episode: Episode) -> Job:
    assert episode.seed is not None, "every episode of a run has a seed"
    return Job(
        task=episode.task,
        episode_id=episode.id,
        group=episode.group,
        seed=episode.seed,
        step=episode.step,
        validate=episode.validate,
        check_tokens=False,
        baseline=episode.baseline,
    )
