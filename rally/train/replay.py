"""`rally replay`: a recorded episode is held against today's template, reward function and weights, bit for bit.

Each part ends as the same, as different, with where it departs, or as what cannot be done, with the reason. Nothing is
written. Tools and simulated users are really asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from rally.config import Config
from rally.loops import codec_for
from rally.loops.exchange import Exchange
from rally.rewards import RewardError
from rally.rewards.shaping import ON_TURNS
from rally.track import RunFolder
from rally.track.agents import of_agent
from rally.train import model_parts, parts
from rally.train.batch import GREEDY
from rally.train.checkpoint import Checkpoint
from rally.train.compare import departure, logprob_gap
from rally.train.resample import ID, company_of, same_rollout, sample_again, version_of, weights_of
from rally.train.rollout import with_score
from rally.train.run import Inputs, scorer_of
from rally.types import Episode, RallyError, Segment


class ReplayError(RallyError):
    """What was asked for cannot be replayed."""


class Verdict(StrEnum):
    SAME = "same"
    DIFFERENT = "different"
    CANNOT = "cannot"
    SKIPPED = "skipped"  # nothing promises that it would be the same


@dataclass(frozen=True)
class Finding:
    """How one part of an episode fared; `details` are (what, recorded, now)."""

    part: str
    verdict: Verdict
    words: str
    details: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class Replayed:
    """All findings about one episode."""

    episode: Episode
    findings: tuple[Finding, ...]
    changed: tuple[str, ...] = ()  # what is of another version than when the run was made

    @property
    def title(self) -> str:
        """Which episode it is, in a line."""
        episode = self.episode
        kind = "validation" if episode.validate else "training"
        return f"{episode.id}: {kind}, step {episode.step}, task {episode.task.id}, ended with {episode.stop_reason}"

    @property
    def exit_code(self) -> int:
        verdicts = {finding.verdict for finding in self.findings}
        return 1 if Verdict.DIFFERENT in verdicts else 2 if Verdict.CANNOT in verdicts else 0


class Recorded(NamedTuple):
    """An episode, and all that were held in the same step."""

    episode: Episode
    step: list[Episode]


def replay(run: Path, episode_id: str, config: Config, checkpoint: Path | None = None) -> Replayed:
    """Render, score and, where the run was deterministic, sample an episode of `run` again."""
    record = find_episode(RunFolder(run), episode_id)
    if checkpoint is not None and (obstacle := _no_promise(config)):
        raise ReplayError(f"the weights of {checkpoint} are of no use here: {obstacle}")
    tokenizer, toolbox = model_parts.tokenizer_of(config), parts.toolbox_of(config)
    codec = parts.codec_of(config, tokenizer, toolbox)
    inputs = Inputs(tokenizer, toolbox, parts.interactions_of(config), codec, None, None)
    with closing(toolbox):
        findings = (
            rendered(record.episode, config, inputs),
            asyncio.run(rescored(record, config)),
            resampled(record, config, inputs, run, checkpoint),
        )
    return Replayed(record.episode, findings, tuple(RunFolder(run).changed_versions()))


def find_episode(folder: RunFolder, episode_id: str) -> Recorded:
    parsed = ID.fullmatch(episode_id)
    if parsed is None:
        raise ReplayError(f"{episode_id!r} is no episode id; they look like t000003-00001-2 or v000010-00004-0")
    step = int(parsed["step"])
    episodes = folder.read_episodes(step, validate=parsed["kind"] == "v")
    for episode in episodes:
        if episode.id == episode_id:
            return Recorded(episode, episodes)
    raise ReplayError(f"step {step} of {folder.path} has no episode {episode_id}; its first is {episodes[0].id}")


def rendered(episode: Episode, config: Config, inputs: Inputs) -> Finding:
    """Whether today's template and tools make the same prompt of the task."""
    if not episode.segments:
        return Finding("prompt", Verdict.CANNOT, f"it has no tokens: {episode.error}")
    if of_agent(episode):
        return Finding("prompt", Verdict.SKIPPED, "the agent wrote the prompts itself")
    codec = codec_for(episode.task, inputs.codec, inputs.toolbox)
    settings, most = parts.loop_settings_of(config), parts.engine_settings_of(config).max_model_len
    try:
        now = Exchange.start(codec, episode.task, settings, most).segment
    except RallyError as problem:
        return Finding("prompt", Verdict.CANNOT, str(problem))
    first = episode.segments[0]
    shown = tuple(span for span in first.images if span.end <= len(first.prompt_ids))
    apart = departure([Segment(prompt_ids=first.prompt_ids, images=shown)], [now])
    if apart is None:
        return Finding("prompt", Verdict.SAME, f"{len(now.prompt_ids)} tokens")
    return Finding("prompt", Verdict.DIFFERENT, apart.words(codec.decode))


async def rescored(record: Recorded, config: Config) -> Finding:
    """Whether today's reward function gives the same, in number and in what it reports."""
    episode = record.episode
    if episode.error is not None:
        return Finding("reward", Verdict.SKIPPED, f"a failed episode is not scored: {episode.error}")
    if "score" not in episode.timings:
        return Finding("reward", Verdict.SKIPPED, "the agent loop gave the reward itself")
    in_batch = parts.reward_spec_of(config).batch
    held = same_rollout(episode, record.step, config) if in_batch else [episode]
    asked = [_unscored(e) for e in held if e.error is None]
    try:
        async with scorer_of(config) as scorer:
            scores = await scorer.score_batch(asked) if in_batch else [await scorer.score(asked[0])]
    except RewardError as error:
        return Finding("reward", Verdict.CANNOT, str(error))
    [one] = [with_score(e, s) for e, s in zip(asked, scores, strict=True) if e.id == episode.id]
    now = parts.shaping_of(config).apply(one)
    if now.reward is None and episode.reward is not None:
        return Finding("reward", Verdict.CANNOT, f"it cannot be scored now: {now.extra['reward_error']}")
    return _rewards(episode, now)


def _unscored(episode: Episode) -> Episode:
    """As it was before it was scored. What shaping gave for conduct is on assistant turns, which loops leave empty."""
    turns = episode.turns
    if ON_TURNS in episode.reward_info:
        turns = tuple(replace(turn, reward=None) if turn.role == "assistant" else turn for turn in turns)
    return replace(episode, reward=None, reward_info={}, turns=turns)


def _rewards(episode: Episode, now: Episode) -> Finding:
    was = {key: value for key, value in episode.reward_info.items() if key != GREEDY}
    told = [("reward", _shown(episode.reward), _shown(now.reward))]
    told += [(key, _shown(was.get(key)), _shown(now.reward_info.get(key))) for key in {**was, **now.reward_info}]
    apart = [key for key, recorded, new in told if recorded != new]
    if not apart:
        return Finding("reward", Verdict.SAME, ", ".join(f"{key} {value}" for key, value, _ in told))
    return Finding("reward", Verdict.DIFFERENT, f"in {', '.join(apart)}", tuple(told))


def _shown(value: object) -> str:
    return "none" if value is None else repr(value)


def resampled(record: Recorded, config: Config, inputs: Inputs, run: Path, given: Path | None) -> Finding:
    """Whether the same weights sample the same tokens with the same log-probabilities."""
    if obstacle := _no_promise(config):
        return Finding("sampling", Verdict.SKIPPED, obstacle)
    company = company_of(record.episode, record.step, config)
    try:
        checkpoint = weights_of(record.episode, config, run, given)
        now = asyncio.run(sample_again(company, config, inputs, checkpoint))
    except RallyError as problem:
        return Finding("sampling", Verdict.CANNOT, str(problem))
    told = _samplings(record.episode, now.get(record.episode.id), inputs)
    return replace(told, words=told.words + _circumstances(record.episode, company, now, checkpoint))


def _no_promise(config: Config) -> str | None:
    if config.rollout.name != "embedded":
        return f"servers ({config.rollout.name}) do not promise the same bits"
    return None if config.rollout.deterministic else "the run was not made with rollout.deterministic=true"


def _samplings(episode: Episode, now: Episode | None, inputs: Inputs) -> Finding:
    if now is None:
        return Finding("sampling", Verdict.DIFFERENT, "its prompt did not begin this time")
    apart = departure(episode.segments, now.segments)
    gap = logprob_gap(episode.segments, now.segments, apart)
    if apart is not None:
        words = f"departs at {apart.words(inputs.codec.decode)}"
        if gap is not None:
            words += f"; before that {gap.words()} differ"
        return Finding("sampling", Verdict.DIFFERENT, words if now.error is None else f"{words}; {now.error}")
    if gap is not None:
        return Finding("sampling", Verdict.DIFFERENT, f"all tokens are the same, but {gap.words()} differ")
    if now.stop_reason is not episode.stop_reason:
        words = f"the tokens are the same, but it ended with {now.stop_reason} and not with {episode.stop_reason}"
        return Finding("sampling", Verdict.DIFFERENT, words)
    sampled = sum(segment.sampled for segment in episode.segments)
    return Finding("sampling", Verdict.SAME, f"{sampled} sampled tokens, ids and log-probabilities bit for bit")


def _circumstances(
    episode: Episode, company: Sequence[Episode], now: dict[str, Episode], checkpoint: Checkpoint | None
) -> str:
    """Which weights it was, and how those fared that were sampled with it."""
    words = f" (weights: {checkpoint.path.name if checkpoint else 'the start of the run'}"
    was = {span.version for segment in episode.segments for span in segment.spans}
    if was and was != {version_of(checkpoint)}:
        words += f", version {version_of(checkpoint)}, recorded under {', '.join(map(str, sorted(was)))}"
    if len(company) > 1:
        alike = sum(_alike(one, now.get(one.id)) for one in company)
        words += f"; the same in {alike} of {len(company)} episodes sampled together"
    return words + ")"


def _alike(episode: Episode, now: Episode | None) -> bool:
    if now is None or departure(episode.segments, now.segments) is not None:
        return False
    return logprob_gap(episode.segments, now.segments) is None
