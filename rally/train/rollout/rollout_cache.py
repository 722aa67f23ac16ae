"""`rollout.skip_rollout`: a cache of sampled training episodes, for work on rewards and updates without sampling again.

Episodes are stored unscored under `rollout.skip_dump_dir`, in a folder per configuration of everything that determines
their tokens. A later run with the same prompts, counts, lengths and model reads them from there and samples only what
is missing. The recorded log-probabilities are then those of other weights: the run warns about it at its start,
`episodes/skipped` counts such episodes, and `actor/rollout_mismatch_kl` measures the difference.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from rally.loops import Job, Runner
from rally.track.run_folder.episode_json import episode_from_json, episode_to_json
from rally.track.run_folder.folder import ImageFolder
from rally.types import Episode, SamplingParams

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
        if episode.error is None:
            cached[job.episode_id] = episode
            ImageFolder(self.dump).save([episode])
            with self._file(job.step).open("a", encoding="utf-8") as file:
                file.write(json.dumps(episode_to_json(episode)) + "\n")
        return episode

    def _cached(self, step: int) -> CachedEpisodes:
        if step not in self._steps:
            self.dump.mkdir(parents=True, exist_ok=True)
            images = ImageFolder(self.dump).hook
            lines = (json.loads(line, object_hook=images) for line in _whole_lines(self._file(step)))
            episodes = map(episode_from_json, lines)
            self._steps = {step: {episode.id: episode for episode in episodes}}
        return self._steps[step]

    def _file(self, step: int) -> Path:
        return self.dump / f"{step}.jsonl"


def _whole_lines(file: Path) -> list[str]:
    """The complete lines. A torn last line, which a killed run left, is removed from the file."""
    if not file.is_file():
        return []
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, encoding="utf-8")
    return whole.splitlines()
