"""Checkpoints: written aside, synced, renamed; a whole one can be resumed from, a torn one is ignored.

`global_step_N/actor/` is a Hugging Face model folder with its tokenizer; beside it lie the optimizer, the schedule, the
step, counters, what the sampler learned and what further parts write; random numbers follow from (seed, step) and need
no state. `manifest.json` lists every file with its size and is written last. The state is copied at once; by default it
is written beside the training thread.
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
from rally.train.messages import GatherState
from rally.train.policy import Policy
from rally.types import RallyError
from rally.util.threads import BackgroundJobs, side_by_side

_STEP = re.compile(r"global_step_(\d+)")
MANIFEST = "manifest.json"
SAMPLER = "sampler.json"
COUNTERS = "counters.json"
LATEST = "latest_checkpointed_iteration.txt"


class CheckpointError(RallyError):
    """A checkpoint that was asked for and cannot be used."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    step: int

    @property
    def actor(self) -> Path:
        return self.path / "actor"

    def state(self) -> dict[str, Any]:
        """What training goes on from, mapped: it is read when it is copied, and several processes hold it once. What is
        to be kept of it must be copied."""
        state = torch.load(self.path / "trainer.pt", map_location="cpu", weights_only=True, mmap=True)
        assert isinstance(state, dict)
        return state

    def holds(self, folder: str) -> bool:
        """Whether a folder is part of it; one that is there but not listed was about to be removed."""
        return any(name.startswith(f"{folder}/") for name in _listed(self.path))

    def sampler_state(self) -> dict[str, Any]:
        """What the sampler had learned; nothing, where it learns nothing."""
        return self._plain(SAMPLER)

    def counters(self) -> dict[str, Any]:
        """What the run had counted up to here."""
        return self._plain(COUNTERS)

    def _plain(self, name: str) -> dict[str, Any]:
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
        self.merged = merged  # beside adapters also the whole model
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
        """Write the checkpoint of `step` with `more` parts; only when every byte is on disk does it get its name.

        In the background, everything has been copied when this returns, and the checkpoint before this one is whole.
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
        """Return when no checkpoint is being written any more."""
        if self._background:
            self._background.wait()

    def _saved(self) -> list[Path]:
        """What bears the name of a checkpoint, oldest first; a user's copy under another name is not ours to touch."""
        return sorted((p for p in self.folder.glob("global_step_*") if _STEP.fullmatch(p.name)), key=_step_of)

    def _place(self, step: int) -> Path:
        return self.folder / f"global_step_{step}"

    def _write(self, step: int, parts: Sequence[Part]) -> None:
        try:
            self._write_parts(self._place(step), parts)
            self._point_at(step)
            self._drop_old(step)
        except (OSError, SafetensorError) as problem:  # the latter says what the disk refused for the weights
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self.folder} ({problem}); make room or mend it, "
                "then start the same command again"
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
        """The newest whole checkpoint; torn ones are passed over with a warning."""
        for torn in self.folder.glob(".writing_*"):
            self.warn(f"{torn} is a checkpoint whose writing was cut off; it is ignored and removed")
            shutil.rmtree(torn)
        for old in self.folder.glob(".dropping_*"):
            shutil.rmtree(old)
        for path in reversed(self._saved()):
            problem = damage(path)
            if problem is None:
                return Checkpoint(path, _step_of(path))
            self.warn(f"the checkpoint {path} is not whole ({problem}); it is ignored")
        return None

    def supersede_after(self, step: int) -> list[Path]:
        """Rename whole checkpoints of later steps, so that no later `latest` finds them; returns their new places."""
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
        """Let the file that other programs read name the newest checkpoint; without one there is no such file."""
        if step is None:
            (self.folder / LATEST).unlink(missing_ok=True)
        else:
            _write_synced(self.folder / LATEST, str(step))

    def _drop_old(self, newest: int) -> None:
        """Keep the last `keep` up to `newest`. A later one, torn or of a run that was set back, counts for nothing."""
        paths = self._saved()
        whole = [Checkpoint(p, _step_of(p)) for p in paths if _step_of(p) <= newest and damage(p) is None]
        if self.keep is not None:
            for old in whole[: -self.keep]:  # renamed first: a kill in between must not leave half of one
                shutil.rmtree(old.path.rename(old.path.with_name(f".dropping_{old.path.name}")))
            whole = whole[-self.keep :]
        if self.keep_critics is not None:
            for old in [one for one in whole if one.holds("critic")][: -self.keep_critics]:
                _forget(old.path, "critic")
            for old in [one for one in whole if not one.holds("critic")]:
                shutil.rmtree(old.path / "critic", ignore_errors=True)  # also what a kill left of it


def policy_parts(policy: Policy, tokenizer: PreTrainedTokenizerBase, step: int, *, merged: bool) -> list[Part]:
    """The policy's weights and all that training it goes on from."""
    model = model_part("actor", policy.model, tokenizer, merged=merged)
    return [model, state_part("trainer.pt", {"step": step, **policy.state()})]


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint a user named; one sentence if it cannot be used."""
    if not _STEP.search(path.name):
        raise CheckpointError(f"{path} is not a checkpoint folder; its name must contain global_step_N")
    problem = damage(path)
    if problem:
        raise CheckpointError(f"the checkpoint {path} cannot be used: {problem}")
    return Checkpoint(path, _step_of(path))


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None."""
    try:
        manifest = _listed(path)
    except (OSError, ValueError):
        return f"it has no readable {MANIFEST}"
    for name, size in manifest.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def _listed(path: Path) -> dict[str, int]:
    """The files of a checkpoint with their sizes."""
    listed = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    assert isinstance(listed, dict)
    return listed


def _forget(path: Path, folder: str) -> None:
    """Take a folder off the list of a whole checkpoint, which then is whole without it."""
    kept = {name: size for name, size in _listed(path).items() if not name.startswith(f"{folder}/")}
    _write_synced(path / MANIFEST, json.dumps(kept, indent=1))


def _sampler_part(state: Mapping[str, Any]) -> Part:
    """A user's class may return anything, and resuming must be exact."""
    try:
        return json_part(SAMPLER, state)
    except (TypeError, ValueError) as error:
        told = f"the sampler's state cannot be saved ({error})"
        raise CheckpointError(f"{told}; return what JSON can hold: names as keys, lists, no NaN") from error


def _step_of(path: Path) -> int:
    found = _STEP.search(path.name)
    return int(found.group(1)) if found else -1


def _seal(folder: Path) -> None:
    """Sync every file, list them, sync the list."""
    paths = list(folder.rglob("*"))
    for path in paths:
        _sync(path)
    manifest = {str(p.relative_to(folder)): p.stat().st_size for p in paths if p.is_file()}
    _write_synced(folder / MANIFEST, json.dumps(manifest, indent=1))
    _sync(folder)


def _write_synced(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    _sync(aside)
    aside.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
