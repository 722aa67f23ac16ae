"""Sends the episodes of a run folder as traces to a backend, and counts those sent and left out."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rally.track.export.delivery import EpisodeFile
from rally.track.export.episode_spans import Decode, Trace, trace_of
from rally.track.run_folder.folder import RunFolder
from rally.types import Episode


class SampledEpisode(NamedTuple):
    """An episode and its number among those of its group."""

    episode: Episode
    sample: int


def chosen(episodes: Sequence[Episode], most: int | None) -> Iterator[SampledEpisode]:
    """The episodes of at most `most` groups, chosen by a hash so that no part of the data is favoured."""
    kept = _drawn({e.group for e in episodes}, most)
    count: Counter[str] = Counter()
    for episode in episodes:
        if episode.group in kept:
            yield SampledEpisode(episode, count[episode.group])
        count[episode.group] += 1


def _drawn(groups: Iterable[str], most: int | None) -> set[str]:
    ordered = sorted(groups, key=lambda group: hashlib.blake2b(group.encode("utf-8", "surrogatepass")).digest())
    return set(ordered[:most])


TOGETHER = 16  # traces per request: episodes may be long


class TraceBackend(Protocol):
    """Stores traces. A trace that is sent again under the same id is stored once."""

    @property
    def where(self) -> str: ...

    def add(self, traces: Sequence[Trace]) -> None: ...

    def close(self) -> None: ...


@dataclass
class Traces:
    """Reads the episode files of a run folder and sends them as traces."""

    folder: RunFolder
    backend: TraceBackend
    run: str
    max_samples: int | None
    decode: Decode | None
    traced: int = 0
    left_out: int = 0

    @property
    def where(self) -> str:
        left = f", {self.left_out} left out by max_samples_per_step_per_worker" if self.left_out else ""
        return f"{self.traced} episodes traced{left}: {self.backend.where}"

    def send(self, item: EpisodeFile) -> None:
        episodes = self.folder.read_episodes(item.step, validate=item.validate)
        traces = (
            trace_of(one.episode, run=self.run, sample=one.sample, decode=self.decode)
            for one in chosen(episodes, self.max_samples)
        )
        traced = sum(map(self._add, _together(traces)))
        self.traced += traced
        self.left_out += len(episodes) - traced

    def close(self, ok: bool) -> None:
        self.backend.close()

    def _add(self, traces: Sequence[Trace]) -> int:
        self.backend.add(traces)
        return len(traces)


def _together(traces: Iterable[Trace]) -> Iterable[list[Trace]]:
    traces = iter(traces)
    while some := list(itertools.islice(traces, TOGETHER)):
        yield some
