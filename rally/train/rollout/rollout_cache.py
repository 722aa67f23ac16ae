"""`rollout.skip_rollout`: training episodes that were sampled once are not sampled again, for work on what follows.

Each is kept under `rollout.skip_dump_dir` as it ended, before it is scored, in a folder for everything that decides its
tokens. A later run with the same prompts, numbers, lengths and model takes them from there; what is not there is
sampled and kept. The recorded log-probs are then those of other weights: the run says so when it begins,
`episodes/skipped` counts them, and `actor/rollout_mismatch_kl` tells how far off they are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from rally.loops import Job, Runner
from rally.track.run_folder.episode_json import episode_from_json, episode_to_json
from rally.track.run_folder.folder import ImageFolder
from rally.types import Episode, SamplingParams

Kept = dict[str, Episode]


@dataclass(kw_only=True)
class CachedRolloutRunner(Runner):
    """Holds an exchange only if it was not held before."""

    dump: Path
    _steps: dict[int, Kept] = field(default_factory=dict)

    async def episode(self, job: Job, sampling: SamplingParams, ends_at: float | None) -> Episode:
        if job.validate:
            return await super().episode(job, sampling, ends_at)
        kept = self._kept(job.step)
        known = kept.get(job.episode_id)
        if known is not None and (known.task.prompt, known.seed) == (job.task.prompt, job.seed):
            return replace(known, task=job.task, extra={**known.extra, "rollout_skipped": True})
        episode = await super().episode(job, sampling, ends_at)
        if episode.error is None:
            kept[job.episode_id] = episode
            ImageFolder(self.dump).save([episode])
            with self._file(job.step).open("a", encoding="utf-8") as file:
                file.write(json.dumps(episode_to_json(episode)) + "\n")
        return episode

    def _kept(self, step: int) -> Kept:
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
    """The lines that were written to their end; one that a killed run left torn is cut off the file."""
    if not file.is_file():
        return []
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, encoding="utf-8")
    return whole.splitlines()
