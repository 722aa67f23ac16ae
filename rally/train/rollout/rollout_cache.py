"""`rollout.skip_rollout`: a cache of sampled training episodes, for work on rewards and updates without sampling again.

Episodes are stored unscored, each with a checksum, under `rollout.skip_dump_dir`, in a folder per configuration of
everything that determines their tokens. A later run with the same prompts, counts, lengths and model reads them from
there and samples only what is missing or damaged. The recorded log-probabilities are then those of other weights: the
run warns about it at its start, `episodes/skipped` counts such episodes, and `actor/rollout_mismatch_kl` measures the
difference.
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path

from rally.loops import Job, Runner
from rally.track.run_folder.episode_json import episode_from_json, episode_to_json
from rally.track.run_folder.folder import ImageFolder
from rally.types import Episode, SamplingParams
from rally.util.atomic_files import write_atomic
from rally.util.checksums import UNREADABLE

_log = logging.getLogger(__name__)

CachedEpisodes = dict[str, Episode]


@dataclass(kw_only=True)
class CachedRolloutRunner(Runner):
    """Runs an episode only if the cache does not have it."""

    dump: Path
    _steps: dict[int, CachedEpisodes] = field(default_factory=dict)

    async def episode(self, job: Job, sampling: SamplingParams, ends_at: float | None) -> Episode:
        if job.validate:
            return await super().episode(job, sampling, ends_at)
        cached = self._cached(job.step)
        known = cached.get(job.episode_id)
        if known is not None and (known.task.prompt, known.seed) == (job.task.prompt, job.seed):
            return replace(known, task=job.task, extra={**known.extra, "rollout_skipped": True})
        episode = await super().episode(job, sampling, ends_at)
        if episode.error is None and "tool_outage" not in episode.extra:  # the tool may work again in the next run
            cached[job.episode_id] = episode
            ImageFolder(self.dump).save([episode])
            with self._file(job.step).open("ab") as file:
                file.write(_line(json.dumps(episode_to_json(episode)).encode()))
        return episode

    def _cached(self, step: int) -> CachedEpisodes:
        if step not in self._steps:
            self.dump.mkdir(parents=True, exist_ok=True)
            self._steps = {step: {episode.id: episode for episode in self._read(self._file(step))}}
        return self._steps[step]

    def _read(self, file: Path) -> list[Episode]:
        """The episodes of a file. Damaged lines, and a torn last one, are removed from it: they are sampled again."""
        if not file.exists():
            return []
        lines = file.read_bytes().splitlines(keepends=True)
        read = [(line, self._episode(line)) for line in lines]
        if damaged := sum(episode is None for _, episode in read):
            _log.warning("%d of %d cached episodes in %s are damaged and are sampled again", damaged, len(lines), file)
            write_atomic(file, b"".join(line for line, episode in read if episode is not None))
        return [episode for _, episode in read if episode is not None]

    def _episode(self, line: bytes) -> Episode | None:
        """The episode of a line; None if the line is damaged. Older versions of Rally wrote no checksum."""
        match = _LINE.fullmatch(line)
        if match and f"{zlib.crc32(match['episode']):08x}".encode() != match["crc32"]:
            return None
        try:
            row = json.loads(match["episode"] if match else line, object_hook=ImageFolder(self.dump).hook)
            return episode_from_json(row) if line.endswith(b"\n") else None
        except UNREADABLE:
            return None

    def _file(self, step: int) -> Path:
        return self.dump / f"{step}.jsonl"


_LINE = re.compile(rb'\{"crc32": "(?P<crc32>[0-9a-f]{8})", "episode": (?P<episode>.*)\}\n')


def _line(episode: bytes) -> bytes:
    """A line of the cache: an episode as JSON, and its checksum."""
    return b'{"crc32": "%08x", "episode": %s}\n' % (zlib.crc32(episode), episode)
