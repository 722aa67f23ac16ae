"""`rally replay`: a recorded episode is held against today's template, reward function and weights, bit for bit.

Each part ends as the same, as different, with where it departs, or as what cannot be done, with the reason. Nothing is
written. Tools and simulated users are really asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from rally.config import Config
from rally.loops import codec_for
from rally.loops.episode_builder import EpisodeBuilder
from rally.replay.regenerate import ID, company_of, same_rollout, sample_again, version_of, weights_of
from rally.rewards import RewardError
from rally.rewards.shaping import ON_TURNS
from rally.runs import build
from rally.runs.build.episodes import scorer_of
from rally.runs.build.inputs import RunInputs
from rally.track import RunFolder
from rally.track.metrics.episode_metrics import of_agent
from rally.train.batch import GREEDY
from rally.train.checkpoint.store import Checkpoint
from rally.train.rollout.rollout import with_score
from rally.types import Episode, RallyError, Segment

SHOWN = 8  # tokens of context on either side
_EMPTY = Segment(prompt_ids=())

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class TokenDifference:
    """The first token that is not the same in both. `writer` is who wrote it: prompt, policy, or tool or user."""

    segment: int
    place: int  # in the prompt, or in the response
    writer: str
    recorded: tuple[int, ...]  # the tokens around it
    now: tuple[int, ...]

    def words(self, decode: Decode) -> str:
        of = "the prompt" if self.writer == "prompt" else "the response"
        where = f"token {self.place} of {of}" + (f" of segment {self.segment}" if self.segment else "")
        by = "" if self.writer == "prompt" else f", which the {self.writer} wrote"
        return f"{where}{by}: recorded {decode(self.recorded)!r}, now {decode(self.now)!r}"


@dataclass(frozen=True)
class LogprobGap:
    """How far the log-probabilities of equal tokens are apart: how many are, the first of them, and the most."""

    count: int
    of: int
    segment: int
    place: int
    largest: float

    def words(self) -> str:
        where = f"token {self.place} of the response" + (f" of segment {self.segment}" if self.segment else "")
        return f"{self.count} of {self.of} log-probabilities, from {where} on, by {self.largest:.3g} at most"


def departure(recorded: Sequence[Segment], now: Sequence[Segment]) -> TokenDifference | None:
    """The first token in which they differ, in content or in who wrote it; None if they are the same to the end."""
    for number, (a, b) in enumerate(zip_longest(recorded, now, fillvalue=_EMPTY)):
        if (at := _first(_prompt(a), _prompt(b))) is not None:
            return _at(number, at, "prompt", a.prompt_ids, b.prompt_ids)
        at = _first(_tokens(a), _tokens(b))
        if at is not None:
            sampled = (*a.response_mask[at : at + 1], *b.response_mask[at : at + 1])[0]
            return _at(number, at, "policy" if sampled else "tool or user", a.response_ids, b.response_ids)
    return None


def logprob_gap(
    recorded: Sequence[Segment], now: Sequence[Segment], until: TokenDifference | None = None
) -> LogprobGap | None:
    """How the log-probabilities of sampled tokens differ, as far as the tokens are the same; None if to no bit."""
    pairs = [
        (number, place, a.response_logprobs[place], b.response_logprobs[place])
        for number, (a, b) in enumerate(zip(recorded, now, strict=False))
        for place in range(min(len(a.response_ids), len(b.response_ids)))
        if a.response_mask[place] and _before(number, place, until)
    ]
    apart = [pair for pair in pairs if pair[2] != pair[3]]
    if not apart:
        return None
    largest = max(abs(was - is_now) for _, _, was, is_now in apart)
    return LogprobGap(len(apart), len(pairs), apart[0][0], apart[0][1], largest)


def _before(segment: int, place: int, until: TokenDifference | None) -> bool:
    if until is None:
        return True
    end = 0 if until.writer == "prompt" else until.place
    return (segment, place) < (until.segment, end)


def _prompt(segment: Segment) -> list[tuple[int, str]]:
    return list(zip(segment.prompt_ids, _shown_tokens(segment), strict=False))


def _tokens(segment: Segment) -> list[tuple[int, int, str]]:
    shown = _shown_tokens(segment)[len(segment.prompt_ids) :]
    return list(zip(segment.response_ids, segment.response_mask, shown, strict=True))


def _shown_tokens(segment: Segment) -> list[str]:
    """The image that each token of the history is part of: equal placeholders of two images are not the same."""
    names = [""] * len(segment.ids)
    for span in segment.images:
        names[span.start : span.end] = [span.image.hash] * (span.end - span.start)
    return names


def _first(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """The first place in which two sequences differ; where one ends, if it is the beginning of the other."""
    for place, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def _at(segment: int, place: int, writer: str, recorded: tuple[int, ...], now: tuple[int, ...]) -> TokenDifference:
    around = slice(max(0, place - SHOWN), place + SHOWN)
    return TokenDifference(segment, place, writer, recorded[around], now[around])


class ReplayError(RallyError):
    """What was asked for cannot be replayed."""


class Verdict(StrEnum):
    SAME = "same"
    DIFFERENT = "different"
    CANNOT = "cannot"
    SKIPPED = "skipped"  # nothing promises that it would be the same


@dataclass(frozen=True)
class ReplayFinding:
    """How one part of an episode fared; `details` are (what, recorded, now)."""

    part: str
    verdict: Verdict
    words: str
    details: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class Replayed:
    """All findings about one episode."""

    episode: Episode
    findings: tuple[ReplayFinding, ...]
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
    tokenizer, toolbox = build.tokenizer_of(config), build.toolbox_of(config)
    codec = build.codec_of(config, tokenizer, toolbox)
    inputs = RunInputs(tokenizer, toolbox, build.interactions_of(config), codec, None, None)
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


def rendered(episode: Episode, config: Config, inputs: RunInputs) -> ReplayFinding:
    """Whether today's template and tools make the same prompt of the task."""
    if not episode.segments:
        return ReplayFinding("prompt", Verdict.CANNOT, f"it has no tokens: {episode.error}")
    if of_agent(episode):
        return ReplayFinding("prompt", Verdict.SKIPPED, "the agent wrote the prompts itself")
    codec = codec_for(episode.task, inputs.codec, inputs.toolbox)
    settings, most = build.loop_settings_of(config), config.max_model_len
    try:
        now = EpisodeBuilder.start(codec, episode.task, settings, most).segment
    except RallyError as problem:
        return ReplayFinding("prompt", Verdict.CANNOT, str(problem))
    first = episode.segments[0]
    shown = tuple(span for span in first.images if span.end <= len(first.prompt_ids))
    apart = departure([Segment(prompt_ids=first.prompt_ids, images=shown)], [now])
    if apart is None:
        return ReplayFinding("prompt", Verdict.SAME, f"{len(now.prompt_ids)} tokens")
    return ReplayFinding("prompt", Verdict.DIFFERENT, apart.words(codec.decode))


async def rescored(record: Recorded, config: Config) -> ReplayFinding:
    """Whether today's reward function gives the same, in number and in what it reports."""
    episode = record.episode
    if episode.error is not None:
        return ReplayFinding("reward", Verdict.SKIPPED, f"a failed episode is not scored: {episode.error}")
    if "score" not in episode.timings:
        return ReplayFinding("reward", Verdict.SKIPPED, "the agent loop gave the reward itself")
    in_batch = build.reward_spec_of(config).batch
    held = same_rollout(episode, record.step, config) if in_batch else [episode]
    asked = [_unscored(e) for e in held if e.error is None]
    try:
        async with scorer_of(config) as scorer:
            scores = await scorer.score_batch(asked) if in_batch else [await scorer.score(asked[0])]
    except RewardError as error:
        return ReplayFinding("reward", Verdict.CANNOT, str(error))
    [one] = [with_score(e, s) for e, s in zip(asked, scores, strict=True) if e.id == episode.id]
    now = build.shaping_of(config).apply(one)
    if now.reward is None and episode.reward is not None:
        return ReplayFinding("reward", Verdict.CANNOT, f"it cannot be scored now: {now.extra['reward_error']}")
    return _rewards(episode, now)


def _unscored(episode: Episode) -> Episode:
    """As it was before it was scored. What shaping gave for conduct is on assistant turns, which loops leave empty."""
    turns = episode.turns
    if ON_TURNS in episode.reward_info:
        turns = tuple(replace(turn, reward=None) if turn.role == "assistant" else turn for turn in turns)
    return replace(episode, reward=None, reward_info={}, turns=turns)


def _rewards(episode: Episode, now: Episode) -> ReplayFinding:
    was = {key: value for key, value in episode.reward_info.items() if key != GREEDY}
    told = [("reward", _shown(episode.reward), _shown(now.reward))]
    told += [(key, _shown(was.get(key)), _shown(now.reward_info.get(key))) for key in {**was, **now.reward_info}]
    apart = [key for key, recorded, new in told if recorded != new]
    if not apart:
        return ReplayFinding("reward", Verdict.SAME, ", ".join(f"{key} {value}" for key, value, _ in told))
    return ReplayFinding("reward", Verdict.DIFFERENT, f"in {', '.join(apart)}", tuple(told))


def _shown(value: object) -> str:
    return "none" if value is None else repr(value)


def resampled(record: Recorded, config: Config, inputs: RunInputs, run: Path, given: Path | None) -> ReplayFinding:
    """Whether the same weights sample the same tokens with the same log-probabilities."""
    if obstacle := _no_promise(config):
        return ReplayFinding("sampling", Verdict.SKIPPED, obstacle)
    company = company_of(record.episode, record.step, config)
    try:
        checkpoint = weights_of(record.episode, config, run, given)
        now = asyncio.run(sample_again(company, config, inputs, checkpoint))
    except RallyError as problem:
        return ReplayFinding("sampling", Verdict.CANNOT, str(problem))
    told = _samplings(record.episode, now.get(record.episode.id), inputs)
    return replace(told, words=told.words + _circumstances(record.episode, company, now, checkpoint))


def _no_promise(config: Config) -> str | None:
    if config.rollout.name != "embedded":
        return f"servers ({config.rollout.name}) do not promise the same bits"
    return None if config.rollout.deterministic else "the run was not made with rollout.deterministic=true"


def _samplings(episode: Episode, now: Episode | None, inputs: RunInputs) -> ReplayFinding:
    if now is None:
        return ReplayFinding("sampling", Verdict.DIFFERENT, "its prompt did not begin this time")
    apart = departure(episode.segments, now.segments)
    gap = logprob_gap(episode.segments, now.segments, apart)
    if apart is not None:
        words = f"departs at {apart.words(inputs.codec.decode)}"
        if gap is not None:
            words += f"; before that {gap.words()} differ"
        return ReplayFinding("sampling", Verdict.DIFFERENT, words if now.error is None else f"{words}; {now.error}")
    if gap is not None:
        return ReplayFinding("sampling", Verdict.DIFFERENT, f"all tokens are the same, but {gap.words()} differ")
    if now.stop_reason is not episode.stop_reason:
        words = f"the tokens are the same, but it ended with {now.stop_reason} and not with {episode.stop_reason}"
        return ReplayFinding("sampling", Verdict.DIFFERENT, words)
    sampled = sum(segment.sampled for segment in episode.segments)
    return ReplayFinding("sampling", Verdict.SAME, f"{sampled} sampled tokens, ids and log-probabilities bit for bit")


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
