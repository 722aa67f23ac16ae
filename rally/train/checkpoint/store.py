"""The checkpoints of a run: written to a temporary folder, synced, then renamed, so that each is complete or ignored.

`global_step_N/actor/` is a Hugging Face model folder with its tokenizer. Beside it are the optimizer, the schedule, the
step, counters, the sampler state and further parts; random numbers follow from (seed, step) and need no state.
`manifest.json` lists every file with its size and is written last. The state is copied at once and by default written
in the background.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from rally.train.checkpoint.snapshot import Part, json_part, model_part, state_part
from rally.train.policy import Policy
from rally.train.rank_messages import GatherState
from rally.types import RallyError
from rally.util.atomic_files import sync, write_atomic
from rally.util.background_threads import BackgroundJobs, side_by_side

_STEP = re.compile(r"global_step_(\d+)")
MANIFEST = "manifest.json"
SAMPLER = "sampler.json"
COUNTERS = "counters.json"
LATEST = "latest_checkpointed_iteration.txt"


class CheckpointError(RallyError):
    """A checkpoint that cannot be used or written."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    @property
    def actor(self) -> Path:
        return self.path / "actor"

    def state(self) -> dict[str, Any]:
        """The training state, memory-mapped: pages are read on use and shared between processes. Copy what is to be
        kept."""
        state = torch.load(self.path / "trainer.pt", map_location="cpu", weights_only=True, mmap=True)
        assert isinstance(state, dict)
        return state

    def holds(self, folder: str) -> bool:
        """Whether the manifest lists a folder. A folder on disk that is not listed was being removed."""
        return any(name.startswith(f"{folder}/") for name in _manifest(self.path))

    def sampler_state(self) -> dict[str, Any]:
        """The sampler's state; empty for a sampler without one."""
        return self._read_json(SAMPLER)

    def counters(self) -> dict[str, Any]:
        """The run's counters at this step."""
        return self._read_json(COUNTERS)

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        state = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        assert isinstance(state, dict)
        return state


class CheckpointStore:
    """The checkpoints of one run folder."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int | None = None,
        keep_critics: int | None = None,
        background: bool = False,
        merged: bool = False,
        warn: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.keep_critics = keep_critics
        self.merged = merged  # beside adapters, also write the merged model
        self.warn = warn
        self._background = BackgroundJobs("rally-checkpoint") if background else None

    def save(
        self,
        step: int,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        sampler_state: Mapping[str, Any] | None = None,
        *,
        more: Sequence[Part] = (),
    ) -> Path:
        """Write the checkpoint of `step` with `more` parts. It gets its name once every byte is on disk.

        In the background, everything has been copied when this returns, and the previous checkpoint is complete.
        """
        self.wait()
        with policy.ranks.broadcast(GatherState(self.merged)):
            own = policy_parts(policy, tokenizer, step, merged=self.merged)
        parts = [
            *own,
            *([_sampler_part(sampler_state)] if sampler_state else []),
            *more,
        ]
        if self._background:
            self._background.start(lambda: self._write(step, parts))
        else:
            self._write(step, parts)
        return self._place(step)

    def check(self) -> None:
        """Raise if the checkpoint that is being written has failed."""
        if self._background:
            self._background.check()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._background:
            self._background.wait()

    def _saved(self) -> list[Path]:
        """Folders with the exact name of a checkpoint, oldest first. Copies under other names are left alone."""
        return sorted((p for p in self.folder.glob("global_step_*") if _STEP.fullmatch(p.name)), key=_step_of)

    def _place(self, step: int) -> Path:
        return self.folder / f"global_step_{step}"

    def _write(self, step: int, parts: Sequence[Part]) -> None:
        try:
            self._write_parts(self._place(step), parts)
            self._point_at(step)
            self._drop_old(step)
        except (OSError, SafetensorError) as problem:  # safetensors raises its own error for a full disk
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self.folder} ({problem}); free space or fix the "
                "problem, then start the same command again"
            ) from problem

    def _write_parts(self, target: Path, parts: Sequence[Part]) -> None:
        work = self.folder / f".writing_{target.name}_{os.getpid()}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        side_by_side([functools.partial(part, work) for part in parts], "rally-part")
        _seal(work)
        if target.exists():
            shutil.rmtree(target)
        work.rename(target)

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint. Incomplete ones are skipped with a warning."""
        for torn in self.folder.glob(".writing_*"):
            self.warn(f"{torn} is a checkpoint whose writing was interrupted; it is removed")
            shutil.rmtree(torn)
        for old in self.folder.glob(".dropping_*"):
            shutil.rmtree(old)
        for path in reversed(self._saved()):
            problem = damage(path)
            if problem is None:
                return Checkpoint(path, _step_of(path))
            self.warn(f"the checkpoint {path} is incomplete ({problem}); it is ignored")
        return None

    def supersede_after(self, step: int) -> list[Path]:
        """Rename complete checkpoints of later steps, so that `latest` no longer finds them. Returns their new
        paths."""
        later = [p for p in self._saved() if _step_of(p) > step and damage(p) is None]
        places = []
        for path in later:
            place = path.with_name(f"superseded_{path.name}")
            shutil.rmtree(place, ignore_errors=True)
            places.append(path.rename(place))
        if places:
            self._point_at(max((_step_of(p) for p in self._saved() if damage(p) is None), default=None))
        return places

    def _point_at(self, step: int | None) -> None:
        """Update the file that names the newest checkpoint for other programs; None removes it."""
        if step is None:
            (self.folder / LATEST).unlink(missing_ok=True)
        else:
            write_atomic(self.folder / LATEST, str(step), synced=True)

    def _drop_old(self, newest: int) -> None:
        """Keep the last `keep` up to step `newest`. Later ones, incomplete or of a rewound run, are not counted."""
        paths = self._saved()
        complete = [Checkpoint(p, _step_of(p)) for p in paths if _step_of(p) <= newest and damage(p) is None]
        if self.keep is not None:
            for old in complete[: -self.keep]:  # renamed first: a kill must not leave a partial one
                shutil.rmtree(old.path.rename(old.path.with_name(f".dropping_{old.path.name}")))
            complete = complete[-self.keep :]
        if self.keep_critics is not None:
            for old in [one for one in complete if one.holds("critic")][: -self.keep_critics]:
                _unlist(old.path, "critic")
            for old in [one for one in complete if not one.holds("critic")]:
                shutil.rmtree(old.path / "critic", ignore_errors=True)  # including what a kill left behind


def policy_parts(policy: Policy, tokenizer: PreTrainedTokenizerBase, step: int, *, merged: bool) -> list[Part]:
    """The policy's weights and its training state."""
    model = model_part("actor", policy.model, tokenizer, merged=merged)
    return [model, state_part("trainer.pt", {"step": step, **policy.state()})]


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at a path that the user named. Raises `CheckpointError` if it cannot be used."""
    if not _STEP.search(path.name):
        raise CheckpointError(f"{path} is not a checkpoint folder; its name must contain global_step_N")
    problem = damage(path)
    if problem:
        raise CheckpointError(f"the checkpoint {path} cannot be used: {problem}")
    return Checkpoint(path, _step_of(path))


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None."""
    try:
        manifest = _manifest(path)
    except (OSError, ValueError):
        return f"it has no readable {MANIFEST}"
    for name, size in manifest.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def _manifest(path: Path) -> dict[str, int]:
    """The files of a checkpoint with their sizes."""
    listed = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    assert isinstance(listed, dict)
    return listed


def _unlist(path: Path, folder: str) -> None:
    """Remove a folder from the manifest, so that the checkpoint is complete without it."""
    listed = {name: size for name, size in _manifest(path).items() if not name.startswith(f"{folder}/")}
    write_atomic(path / MANIFEST, json.dumps(listed, indent=1), synced=True)


def _sampler_part(state: Mapping[str, Any]) -> Part:
    """The state of a sampler, which may be a user's class, as JSON: resuming must be exact."""
    try:
        return json_part(SAMPLER, state)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the sampler's state cannot be saved ({error}); return JSON values: text keys, lists, no NaN"
        ) from error


def _step_of(path: Path) -> int:
    match = _STEP.search(path.name)
    return int(match.group(1)) if match else -1


def _seal(folder: Path) -> None:
    """Sync every file, then write the manifest and sync it."""
    paths = list(folder.rglob("*"))
    for path in paths:
        sync(path)
    manifest = {str(p.relative_to(folder)): p.stat().st_size for p in paths if p.is_file()}
    write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1), synced=True)
    sync(folder)
