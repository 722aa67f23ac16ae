"""The checkpoints of a run: written to a temporary folder, synced, then renamed, so that each is complete or ignored.

`global_step_N/actor/` is a Hugging Face model folder with its tokenizer. Beside it are the optimizer, the schedule, the
step, counters, the sampler state and further parts; random numbers follow from (seed, step) and need no state.
`manifest.json` lists every file with its size and checksums and is written last; a run that resumes compares them. The
state is copied at once and by default written in the background.
"""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from rally.models.residence import on_device
from rally.train.checkpoint.snapshot import Part, json_part, model_part
from rally.train.checkpoint.state_shards import SHARDED, state_parts, wait_for_files, wait_part, with_stored_tensors
from rally.train.policy import Policy
from rally.train.rank_messages import GatherState
from rally.types import RallyError
from rally.util.atomic_files import write_atomic
from rally.util.background_threads import BackgroundJobs, side_by_side
from rally.util.checksums import UNREADABLE, damage, has_checksums, read_manifest, reason, seal, write_manifest

_STEP = re.compile(r"global_step_(\d+)")
STATE = "trainer.pt"
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
        return read_state(self.path / STATE)

    def holds(self, folder: str) -> bool:
        """Whether the manifest lists a folder. A folder on disk that is not listed was being removed."""
        return any(name.startswith(f"{folder}/") for name in read_manifest(self.path))

    @contextmanager
    def restoring(self, name: str) -> Iterator[None]:
        """A block that restores the contents of the file `name`. CheckpointError if they do not fit."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as problem:
            if isinstance(problem, RallyError):
                raise
            raise CheckpointError(
                f"{self.path / name} does not fit this run ({reason(problem)}); resume with the model and the settings "
                f"that wrote it, or start a new run with the model in {self.actor}"
            ) from problem

    def sampler_state(self) -> dict[str, Any]:
        """The sampler's state; empty for a sampler without one."""
        return self.read_json(SAMPLER)

    def counters(self) -> dict[str, Any]:
        """The run's counters at this step."""
        return self.read_json(COUNTERS)

    def read_json(self, name: str) -> dict[str, Any]:
        """A file of `json_part`; empty if the checkpoint has none."""
        path = self.path / name
        try:
            state = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except (OSError, ValueError, RecursionError) as problem:
            raise unreadable(path, problem) from problem
        if not isinstance(state, dict):
            raise unreadable(path, ValueError(f"it holds a {type(state).__name__} instead of an object"))
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
        others = [*([_sampler_part(sampler_state)] if sampler_state else []), *more]
        with self._reported(step):
            self._clear_work(step)
        parts = [*policy_parts(policy, tokenizer, step, self._gather(step)), *others]
        if self._background:
            self._background.start(lambda: self._write(step, parts))
        else:
            self._write(step, parts)
        return self._place(step)

    def _gather(self, step: int) -> GatherState:
        background = self._background is not None
        return GatherState(self._work(step).absolute(), secrets.token_hex(8), self.merged, background)

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

    def _work(self, step: int) -> Path:
        """The folder in which the checkpoint is written. All ranks write there; rank 0 makes and renames it."""
        return self.folder / f".writing_{self._place(step).name}_{os.getpid()}"

    def _clear_work(self, step: int) -> None:
        shutil.rmtree(self._work(step), ignore_errors=True)
        self._work(step).mkdir(parents=True)

    def _write(self, step: int, parts: Sequence[Part]) -> None:
        with self._reported(step):
            self._write_parts(self._place(step), parts)
            self._point_at(step)
            self._drop_old(step)

    @contextmanager
    def _reported(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as problem:  # safetensors raises its own error for a full disk
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self.folder} ({problem}); free space or fix the "
                "problem, then start the same command again"
            ) from problem

    def _write_parts(self, target: Path, parts: Sequence[Part]) -> None:
        work = self._work(_step_of(target))
        side_by_side([functools.partial(part, work) for part in parts], "rally-part")
        wait_for_files(work)
        seal(work)
        if target.exists():
            shutil.rmtree(target)
        work.rename(target)

    def latest(self, *, clear: bool = True) -> Checkpoint | None:
        """The newest complete checkpoint, or None if there is no checkpoint. Damaged ones are skipped with a warning;
        CheckpointError if all are. `clear`: remove what an interrupted run left half written; for the writer of the
        folder alone, since nobody else can tell it from what a run is writing now."""
        if clear:
            self._clear_interrupted()
        problems: list[str] = []
        for path in reversed(self._saved()):
            problem = _flaw(path)
            if problem is None:
                for newer in problems:
                    self.warn(f"the checkpoint {newer}; {path.name} is used instead")
                if not has_checksums(path):
                    self.warn(f"the checkpoint {path} was written without checksums; only the sizes were compared")
                return Checkpoint(path, _step_of(path))
            problems.append(f"{path} is damaged ({problem})")
        if problems:
            others = "" if len(problems) == 1 else f", nor can the {len(problems) - 1} before it"
            raise CheckpointError(
                f"the checkpoint {problems[0]} and cannot be used{others}; copy a good one there, or move "
                f"{self.folder} away to start from the beginning"
            )
        return None

    def _clear_interrupted(self) -> None:
        for torn in self.folder.glob(".writing_*"):
            self.warn(f"{torn} is a checkpoint whose writing was interrupted; it is removed")
            shutil.rmtree(torn)
        for old in self.folder.glob(".dropping_*"):
            shutil.rmtree(old)

    def supersede_after(self, step: int) -> list[Path]:
        """Rename complete checkpoints of later steps, so that `latest` no longer finds them. Returns their new
        paths."""
        later = [p for p in self._saved() if _step_of(p) > step and damage(p, contents=False) is None]
        places = []
        for path in later:
            place = path.with_name(f"superseded_{path.name}")
            shutil.rmtree(place, ignore_errors=True)
            places.append(path.rename(place))
        if places:
            self._point_at(max((_step_of(p) for p in self._saved() if damage(p, contents=False) is None), default=None))
        return places

    def _point_at(self, step: int | None) -> None:
        """Update the file that names the newest checkpoint for other programs; None removes it."""
        if step is None:
            (self.folder / LATEST).unlink(missing_ok=True)
        else:
            write_atomic(self.folder / LATEST, str(step), synced=True)

    def _drop_old(self, newest: int) -> None:
        """Keep the last `keep` up to step `newest`. Later ones, incomplete or of a rewound run, are not counted."""
        paths = [path for path in self._saved() if _step_of(path) <= newest]
        complete = [Checkpoint(p, _step_of(p)) for p in paths if damage(p, contents=False) is None]
        if self.keep is not None:
            for old in complete[: -self.keep]:  # renamed first: a kill must not leave a partial one
                shutil.rmtree(old.path.rename(old.path.with_name(f".dropping_{old.path.name}")))
            complete = complete[-self.keep :]
        if self.keep_critics is not None:
            for old in [one for one in complete if one.holds("critic")][: -self.keep_critics]:
                _unlist(old.path, "critic")
            for old in [one for one in complete if not one.holds("critic")]:
                shutil.rmtree(old.path / "critic", ignore_errors=True)  # including what a kill left behind


def policy_parts(policy: Policy, tokenizer: PreTrainedTokenizerBase, step: int, message: GatherState) -> list[Part]:
    """The policy's weights and its training state, and a part that waits for the shards of other ranks."""
    with policy.ranks.broadcast(message), on_device(policy.model):
        model = model_part("actor", policy.model, tokenizer, merged=message.merged)
        states = state_parts(STATE, policy, in_place=not message.background, step=step)
    return [model, *states, wait_part(message, policy.ranks)]


def open_checkpoint(path: Path, *, contents: bool = True) -> Checkpoint:
    """The checkpoint at a path that the user named. Raises `CheckpointError` if it cannot be used. `contents`: also
    compare the checksums."""
    if not _STEP.search(path.name):
        raise CheckpointError(f"{path} is not a checkpoint folder; its name must contain global_step_N")
    if problem := _flaw(path, contents=contents):
        raise CheckpointError(f"the checkpoint {path} cannot be used: {problem}; choose or copy another one")
    return Checkpoint(path, _step_of(path))


def _flaw(path: Path, *, contents: bool = True) -> str | None:
    """What is wrong with a checkpoint folder, or None."""
    if problem := damage(path, contents=contents):
        return problem
    listed = read_manifest(path)
    if STATE not in listed or not any(name.startswith("actor/") for name in listed):
        return f"its manifest does not list {STATE} and a model in actor/"
    return None


def read_state(path: Path) -> dict[str, Any]:
    """A file of `state_parts`, with the shards beside it, memory-mapped. CheckpointError if it is not one."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UNREADABLE as problem:
        raise unreadable(path, problem) from problem
    if not isinstance(state, dict):
        raise unreadable(path, ValueError(f"it holds a {type(state).__name__} instead of a training state"))
    if SHARDED not in state:
        return state
    try:
        return with_stored_tensors(state, path)
    except (*UNREADABLE, SafetensorError) as problem:
        raise unreadable(path, problem) from problem


def unreadable(path: Path, problem: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read ({reason(problem)}); resume from another checkpoint with trainer.resume_from_path, or "
        "copy this one again"
    )


def _unlist(path: Path, folder: str) -> None:
    """Remove a folder from the manifest, so that the checkpoint is complete without it."""
    listed = read_manifest(path).items()
    write_manifest(path, {name: record for name, record in listed if not name.startswith(f"{folder}/")})


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
