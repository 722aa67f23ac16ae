"""Samples recorded episodes again, with the weights of their step, their seeds and the same batch.

On a CPU, batch composition can change the last bits. So all episodes of a rollout are sampled together again, and with
dynamic sampling further prompts start again as they did, by the recorded rewards.
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
from rally.models.token_masks import Grammars
from rally.platforms import has_kernels
from rally.runs import build
from rally.runs.build.rollout import runner_of
from rally.runs.build.run_inputs import RunInputs
from rally.train.checkpoint.store import Checkpoint, open_checkpoint
from rally.train.rollout.dynamic_sampling import LiveGroups
from rally.types import Episode, RallyError, SamplingParams

ID = re.compile(r"(?P<kind>[tv])(?P<step>\d+)-(?P<prompt>\d+)(-(?P<suffix>[a-z]+\d*))?-(?P<sample>\d+|greedy)")


class WeightsGone(RallyError):
    """The weights that sampled an episode no longer exist."""


class EpisodePosition(NamedTuple):
    """The position of an episode within its step. The greedy episode of a prompt is its last."""

    prompt: int
    sample: float


def place_of(episode: Episode) -> EpisodePosition:
    parsed = _parsed(episode)
    return EpisodePosition(
        int(parsed["prompt"]), float("inf") if parsed["sample"] == "greedy" else float(parsed["sample"])
    )


def pass_of(episode: Episode) -> str:
    """The suffix of the validation pass of an episode; empty for the main pass and for training."""
    return _parsed(episode)["suffix"] or ""


def _parsed(episode: Episode) -> re.Match[str]:
    parsed = ID.fullmatch(episode.id)
    assert parsed is not None, "a recorded id has our format"
    return parsed


def weights_of(episode: Episode, config: Config, run: Path, chosen: Path | None) -> Checkpoint | None:
    """The checkpoint whose weights sampled an episode; None for the initial model of the run."""
    if chosen is not None:
        return open_checkpoint(chosen)
    lag = 1 + config.fixed_lag
    after = episode.step if episode.validate else max(0, episode.step - lag)
    own = run / "checkpoints" / f"global_step_{after}"
    for path in (own, Path(config.trainer.resume_from_path or "")):
        if path.name == own.name and path.exists():
            return open_checkpoint(path)
    if after > 0:
        raise WeightsGone(
            f"the weights after step {after}, which sampled it, no longer exist ({own}); name a checkpoint with "
            "--checkpoint, or keep more of them with trainer.save_freq and trainer.max_actor_ckpt_to_keep"
        )
    return None


def version_of(checkpoint: Checkpoint | None) -> int:
    return int(checkpoint.counters().get("weight_version", 0)) if checkpoint else 0


def batch_of_episode(episode: Episode, step: Sequence[Episode], config: Config) -> list[Episode]:
    """The episodes of its step that have to be sampled with it, in order."""
    if has_kernels(pick_device(config.trainer.device)):
        mates = [e for e in step if "match" in e.task.row and e.task.row["match"] == episode.task.row.get("match")]
        return mates or [episode]  # the kernels are batch-invariant, but the seats of a match need each other
    return sorted(same_rollout(episode, step, config), key=place_of)


def same_rollout(episode: Episode, step: Sequence[Episode], config: Config) -> list[Episode]:
    """The episodes of its step from the same rollout. Validation has one rollout per pass and batch."""
    if not episode.validate:
        return list(step)
    size, own = config.data.val_batch_size, pass_of(episode)
    same_pass = [e for e in step if pass_of(e) == own]
    if size is None:
        return same_pass
    part = place_of(episode).prompt // size
    return [e for e in same_pass if place_of(e).prompt // size == part]


async def sample_again(
    episodes: Sequence[Episode], config: Config, inputs: RunInputs, checkpoint: Checkpoint | None
) -> dict[str, Episode]:
    """Sample the episodes again. Returns them by id."""
    model = build.model_of(config, str(checkpoint.actor) if checkpoint else None).eval()
    grammars = Grammars(inputs.tokenizer, model.config.get_text_config().vocab_size, inputs.codec.stop_ids)
    settings = build.engine_settings_of(config)
    engine = EmbeddedEngine(model, settings, decode=inputs.codec.decode, grammars=grammars)
    engine.begin_at(version_of(checkpoint))
    await engine.start()
    try:
        runner, sampling = runner_of(config, inputs, engine), _sampling(episodes[0], config, inputs)
        ended = await _Rollout(episodes, config, runner, sampling).run()
    finally:
        await engine.close()
    return {episode.id: episode for episode in ended}


def _sampling(episode: Episode, config: Config, inputs: RunInputs) -> SamplingParams:
    sampling = build.sampling_of(config, inputs.codec)
    if not episode.validate:
        return sampling
    passes = {one.suffix: one.sampling for one in build.validation_passes(config, sampling)}
    if (own := pass_of(episode)) not in passes:
        raise RallyError(f"the configuration has no validation pass {own!r}, which sampled it; restore its val_kwargs")
    return passes[own]


@dataclass(frozen=True)
class _Rollout:
    """A recorded rollout to be run again. Episodes get their recorded rewards."""

    episodes: Sequence[Episode]
    config: Config
    runner: Runner
    sampling: SamplingParams

    async def run(self) -> list[Episode]:
        groups, in_batch = self._groups(), build.scores_in_batch(self.config)
        jobs = self._jobs(0, len(self.episodes)) if groups is None else groups.begin()
        more = None if groups is None or in_batch else lambda episode: groups.after([episode])
        recorded = {episode.id: episode for episode in self.episodes}
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
        if chosen is None or len(self.episodes) == 1 or self.episodes[0].validate:
            return None
        prompts = 1 + max(place_of(e).prompt for e in self.episodes)
        policy = build.failure_policy_of(self.config)
        return LiveGroups(chosen, self.config.data.train_batch_size, prompts, self._jobs, policy)

    def _jobs(self, first: int, count: int) -> list[Job]:
        """The jobs of `count` prompts from `first` on. The recorded prompts need not begin at 0."""
        base = place_of(self.episodes[0]).prompt
        wanted = range(base + first, base + first + count)
        return [_job(episode) for episode in self.episodes if place_of(episode).prompt in wanted]


def _rewarded_as(recorded: Episode, episode: Episode) -> Episode:
    failed = recorded.error is not None or "reward_error" in recorded.extra  # a reward of 0 was set after the failure
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
