"""`rally replay`: renders, scores and samples a recorded episode again and compares the results bit for bit.

Each part is the same, different (with the first difference), skipped, or cannot be done (with the reason). Nothing is
written. Tools and simulated users are really called again.
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
from rally.replay.regenerate import ID, batch_of_episode, same_rollout, sample_again, version_of, weights_of
from rally.rewards import RewardError
from rally.rewards.shaping import ON_TURNS
from rally.runs import build
from rally.runs.build.data import environments_of
from rally.runs.build.rollout import scorer_of
from rally.runs.build.run_inputs import RunInputs
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
    """The first token that differs. `writer` is its author: prompt, policy, or tool or user."""

    segment: int
    place: int  # in the prompt, or in the response
    writer: str
    recorded: tuple[int, ...]  # the tokens around it
    now: tuple[int, ...]

    def describe(self, decode: Decode) -> str:
        of = "the prompt" if self.writer == "prompt" else "the response"
        where = f"token {self.place} of {of}" + (f" of segment {self.segment}" if self.segment else "")
        by = "" if self.writer == "prompt" else f", which the {self.writer} wrote"
        return f"{where}{by}: recorded {decode(self.recorded)!r}, now {decode(self.now)!r}"


@dataclass(frozen=True)
class LogprobGap:
    """Differences between log-probabilities of equal tokens: how many, the first, and the largest."""

    count: int
    of: int
    segment: int
    place: int
    largest: float

    def describe(self) -> str:
        where = f"token {self.place} of the response" + (f" of segment {self.segment}" if self.segment else "")
        return f"{self.count} of {self.of} log-probabilities, from {where} on, by {self.largest:.3g} at most"


def first_difference(recorded: Sequence[Segment], now: Sequence[Segment]) -> TokenDifference | None:
    """The first token that differs in content or author; None if there is none."""
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
    """The differences between log-probabilities of sampled tokens before `until`; None if all bits are equal."""
    pairs = [
        (number, place, a.response_logprobs[place], b.response_logprobs[place])
        for number, (a, b) in enumerate(zip(recorded, now, strict=False))
        for place in range(min(len(a.response_ids), len(b.response_ids)))
        if a.response_mask[place] and _before(number, place, until)
    ]
    different = [pair for pair in pairs if pair[2] != pair[3]]
    if not different:
        return None
    largest = max(abs(was - is_now) for _, _, was, is_now in different)
    return LogprobGap(len(different), len(pairs), different[0][0], different[0][1], largest)


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
    """The image of each token, so that equal placeholders of two images differ."""
    names = [""] * len(segment.ids)
    for span in segment.images:
        names[span.start : span.end] = [span.image.hash] * (span.end - span.start)
    return names


def _first(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """The first index at which two sequences differ; the end of the shorter if it is a prefix of the other."""
    for place, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def _at(segment: int, place: int, writer: str, recorded: tuple[int, ...], now: tuple[int, ...]) -> TokenDifference:
    around = slice(max(0, place - SHOWN), place + SHOWN)
    return TokenDifference(segment, place, writer, recorded[around], now[around])


class ReplayError(RallyError):
    """The episode cannot be replayed."""


class Verdict(StrEnum):
    SAME = "same"
    DIFFERENT = "different"
    CANNOT = "cannot"
    SKIPPED = "skipped"  # nothing guarantees equality


@dataclass(frozen=True)
class ReplayFinding:
    """The result of one part of the replay; `details` are (name, recorded, now)."""

    part: str
    verdict: Verdict
    text: str
    details: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class Replayed:
    """All results for one episode."""

    episode: Episode
    findings: tuple[ReplayFinding, ...]
    changed: tuple[str, ...] = ()  # packages whose version has changed since the run

    @property
    def title(self) -> str:
        """The episode in one line."""
        episode = self.episode
        kind = "validation" if episode.validate else "training"
        return f"{episode.id}: {kind}, step {episode.step}, task {episode.task.id}, ended with {episode.stop_reason}"

    @property
    def exit_code(self) -> int:
        verdicts = {finding.verdict for finding in self.findings}
        return 1 if Verdict.DIFFERENT in verdicts else 2 if Verdict.CANNOT in verdicts else 0


class Recorded(NamedTuple):
    """An episode, and all episodes of its step."""

    episode: Episode
    step: list[Episode]


def replay(run: Path, episode_id: str, config: Config, checkpoint: Path | None = None) -> Replayed:
    """Render and score an episode of `run` again and, if the run was deterministic, sample it."""
    record = find_episode(RunFolder(run), episode_id)
    if checkpoint is not None and (obstacle := _not_reproducible(config)):
        raise ReplayError(f"the episode cannot be sampled with {checkpoint}: {obstacle}")
    tokenizer, toolbox = build.tokenizer_of(config), build.toolbox_of(config)
    codec = build.codec_of(config, tokenizer, toolbox)
    inputs = RunInputs(tokenizer, toolbox, build.interactions_of(config), codec, None, None, environments_of(config))
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
        raise ReplayError(f"{episode_id!r} is not an episode id; ids look like t000003-00001-2 or v000010-00004-0")
    step = int(parsed["step"])
    episodes = folder.read_episodes(step, validate=parsed["kind"] == "v")
    for episode in episodes:
        if episode.id == episode_id:
            if not all(isinstance(message.get("role"), str) for message in episode.task.prompt):
                raise ReplayError(f"a message of the prompt of {episode_id} has no role, so the record is damaged")
            return Recorded(episode, episodes)
    known = f"its first is {episodes[0].id}" if episodes else "its file is empty"
    raise ReplayError(f"step {step} of {folder.path} has no episode {episode_id}; {known}")


def rendered(episode: Episode, config: Config, inputs: RunInputs) -> ReplayFinding:
    """Whether the current template and tools render the same prompt."""
    if not episode.segments:
        return ReplayFinding("prompt", Verdict.CANNOT, f"it has no tokens: {episode.error}")
    if of_agent(episode):
        return ReplayFinding("prompt", Verdict.SKIPPED, "the agent wrote the prompts itself")
    if "env" in episode.task.row:
        return ReplayFinding("prompt", Verdict.SKIPPED, "the environment wrote the prompt")
    codec = codec_for(episode.task, inputs.codec, inputs.toolbox)
    settings, most = build.loop_settings_of(config), config.max_model_len
    try:
        now = EpisodeBuilder.start(codec, episode.task, settings, most).segment
    except RallyError as problem:
        return ReplayFinding("prompt", Verdict.CANNOT, str(problem))
    first = episode.segments[0]
    shown = tuple(span for span in first.images if span.end <= len(first.prompt_ids))
    difference = first_difference([Segment(prompt_ids=first.prompt_ids, images=shown)], [now])
    if difference is None:
        return ReplayFinding("prompt", Verdict.SAME, f"{len(now.prompt_ids)} tokens")
    return ReplayFinding("prompt", Verdict.DIFFERENT, difference.describe(codec.decode))


async def rescored(record: Recorded, config: Config) -> ReplayFinding:
    """Whether the current reward function returns the same reward and details."""
    episode = record.episode
    if episode.error is not None:
        return ReplayFinding("reward", Verdict.SKIPPED, f"a failed episode is not scored: {episode.error}")
    if "score" not in episode.timings:
        return ReplayFinding("reward", Verdict.SKIPPED, "the agent loop gave the reward itself")
    in_batch = build.scores_in_batch(config)
    scored_together = same_rollout(episode, record.step, config) if in_batch else [episode]
    unscored = [_unscored(e) for e in scored_together if e.error is None]
    try:
        async with scorer_of(config) as scorer:
            scores = await scorer.score_batch(unscored) if in_batch else [await scorer.score(unscored[0])]
    except RewardError as error:
        return ReplayFinding("reward", Verdict.CANNOT, str(error))
    [one] = [with_score(e, s) for e, s in zip(unscored, scores, strict=True) if e.id == episode.id]
    now = build.shaping_of(config).apply(one)
    if now.reward is None and episode.reward is not None:
        return ReplayFinding("reward", Verdict.CANNOT, f"it cannot be scored now: {now.extra['reward_error']}")
    return _rewards(episode, now)


def _unscored(episode: Episode) -> Episode:
    """The episode before scoring. Rewards of assistant turns come from shaping, because loops leave them empty."""
    turns = episode.turns
    if ON_TURNS in episode.reward_info:
        turns = tuple(replace(turn, reward=None) if turn.role == "assistant" else turn for turn in turns)
    return replace(episode, reward=None, reward_info={}, turns=turns)


def _rewards(episode: Episode, now: Episode) -> ReplayFinding:
    was = {key: value for key, value in episode.reward_info.items() if key != GREEDY}
    values = [("reward", _shown(episode.reward), _shown(now.reward))]
    values += [(key, _shown(was.get(key)), _shown(now.reward_info.get(key))) for key in {**was, **now.reward_info}]
    changed = [key for key, recorded, new in values if recorded != new]
    if not changed:
        return ReplayFinding("reward", Verdict.SAME, ", ".join(f"{key} {value}" for key, value, _ in values))
    return ReplayFinding("reward", Verdict.DIFFERENT, f"in {', '.join(changed)}", tuple(values))


def _shown(value: object) -> str:
    return "none" if value is None else repr(value)


def resampled(record: Recorded, config: Config, inputs: RunInputs, run: Path, chosen: Path | None) -> ReplayFinding:
    """Whether the same weights sample the same tokens with the same log-probabilities."""
    if obstacle := _not_reproducible(config):
        return ReplayFinding("sampling", Verdict.SKIPPED, obstacle)
    batch = batch_of_episode(record.episode, record.step, config)
    try:
        checkpoint = weights_of(record.episode, config, run, chosen)
        now = asyncio.run(sample_again(batch, config, inputs, checkpoint))
    except RallyError as problem:
        return ReplayFinding("sampling", Verdict.CANNOT, str(problem))
    finding = _compare_samples(record.episode, now.get(record.episode.id), inputs)
    return replace(finding, text=finding.text + _circumstances(record.episode, batch, now, checkpoint))


def _not_reproducible(config: Config) -> str | None:
    if config.rollout.name != "embedded":
        return f"servers ({config.rollout.name}) do not guarantee the same bits"
    return None if config.rollout.deterministic else "the run was not made with rollout.deterministic=true"


def _compare_samples(episode: Episode, now: Episode | None, inputs: RunInputs) -> ReplayFinding:
    if now is None:
        return ReplayFinding("sampling", Verdict.DIFFERENT, "its prompt was not started this time")
    difference = first_difference(episode.segments, now.segments)
    gap = logprob_gap(episode.segments, now.segments, difference)
    if difference is not None:
        text = f"differs at {difference.describe(inputs.codec.decode)}"
        if gap is not None:
            text += f"; before that {gap.describe()} differ"
        return ReplayFinding("sampling", Verdict.DIFFERENT, text if now.error is None else f"{text}; {now.error}")
    if gap is not None:
        return ReplayFinding("sampling", Verdict.DIFFERENT, f"all tokens are the same, but {gap.describe()} differ")
    if now.stop_reason is not episode.stop_reason:
        text = f"the tokens are the same, but it ended with {now.stop_reason} and not with {episode.stop_reason}"
        return ReplayFinding("sampling", Verdict.DIFFERENT, text)
    sampled = sum(segment.sampled for segment in episode.segments)
    return ReplayFinding("sampling", Verdict.SAME, f"{sampled} sampled tokens, ids and log-probabilities bit for bit")


def _circumstances(
    episode: Episode, batch: Sequence[Episode], now: dict[str, Episode], checkpoint: Checkpoint | None
) -> str:
    """The weights that were used, and how many of the episodes sampled together are the same."""
    text = f" (weights: {checkpoint.path.name if checkpoint else 'the start of the run'}"
    was = {span.version for segment in episode.segments for span in segment.spans}
    if was and was != {version_of(checkpoint)}:
        text += f", version {version_of(checkpoint)}, recorded under {', '.join(map(str, sorted(was)))}"
    if len(batch) > 1:
        alike = sum(_alike(one, now.get(one.id)) for one in batch)
        text += f"; the same in {alike} of {len(batch)} episodes sampled together"
    return text + ")"


def _alike(episode: Episode, now: Episode | None) -> bool:
    if now is None or first_difference(episode.segments, now.segments) is not None:
        return False
    return logprob_gap(episode.segments, now.segments) is None
