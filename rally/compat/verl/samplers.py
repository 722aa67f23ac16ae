"""Runs samplers written for verl: classes over `AbstractSampler` and `AbstractCurriculumSampler`.

As with verl's loader, an epoch is one `iter(sampler)`, a step draws its rows when it begins, and rows that do not fill
a batch at the end of an epoch are dropped. `update` of a curriculum gets the scored episodes of each step.

The order is the same after a resume. Random numbers of torch, numpy and Python are seeded for every step while the
sampler runs, and are those of the run again afterwards. A sampler with `state_dict` and `load_state_dict` is restored
by them, which a comparison at the start checks. Any other one draws all rows of the run again, and must draw the same.
One that `update` changed cannot do that, so the run says at once that it cannot be resumed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
import random
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler

from rally.compat.verl.message_loops import DataProto
from rally.data import RowSampler, SamplerSettings, TaskSet, episode_seed
from rally.data.row_files import DataError
from rally.types import Episode, RallyError


class AbstractSampler(Sampler[int]):
    """verl's interface of a sampler."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any) -> None: ...


class AbstractCurriculumSampler(AbstractSampler):
    """verl's interface of a sampler that learns from the batches."""

    @abstractmethod
    def update(self, batch: DataProto) -> None: ...


class DatasetView:
    """The data set as a sampler sees it: `len()`, `[number]` and `dataframe` give the rows of the run as mappings."""

    def __init__(self, tasks: TaskSet | None = None) -> None:
        self._tasks = tasks

    def __len__(self) -> int:
        return 0 if self._tasks is None else len(self._tasks)

    def __getitem__(self, key: int | str) -> Any:
        assert self._tasks is not None
        if isinstance(key, str):
            return [task.row[key] for task in self._tasks]
        return dict(self._tasks[key].row)

    @property
    def dataframe(self) -> DatasetView:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return DatasetView, ()  # the rows are no part of what a sampler has learned


Make = Callable[[DatasetView], AbstractSampler]


class VerlSampler(RowSampler):
    """A sampler of verl as a sampler of the run. `make` builds the user's object."""

    def __init__(self, make: Make, tasks: TaskSet, settings: SamplerSettings) -> None:
        super().__init__(tasks, settings)
        self._make, self._view = make, DatasetView(tasks)
        self._rows: dict[int, list[int]] = {}  # of the steps that were drawn
        self._epoch, self._next, self._updated, self._learned = 0, 1, 0, False
        self._iterator: Iterator[int] | None = None
        self.sampler = self._built()
        self.name = type(self.sampler).__name__
        if self._stateful:
            self._compare_restored()

    @property
    def _stateful(self) -> bool:
        return hasattr(self.sampler, "state_dict") and hasattr(self.sampler, "load_state_dict")

    def batch(self, step: int) -> Sequence[int]:
        while self._next <= step:
            with self._running(self._next):
                self._rows[self._next] = self._draw()
            self._next += 1
        if step not in self._rows:
            raise DataError(f"the rows of step {step} were drawn before the run was resumed; they are not known")
        return self._rows[step]

    def further(self, step: int) -> Sequence[int]:
        raise DataError(
            f"{self.name} draws the rows of whole steps, and algorithm.filter_groups needs further ones within a step; "
            "derive the sampler from rally.data.RowSampler, or set algorithm.filter_groups.enable=false"
        )

    def update(self, step: int, episodes: Sequence[Episode]) -> Mapping[str, float] | None:
        self._updated = max(self._updated, step)
        if not isinstance(self.sampler, AbstractCurriculumSampler) or not episodes:
            return None
        before = None if self._stateful else _fingerprint(self.sampler)
        with self._running(step, update=True):
            self.sampler.update(batch=batch_of(episodes))
        if not self._stateful and not self._learned and (before is None or _fingerprint(self.sampler) != before):
            self._learned = True
            warnings.warn(
                f"{self.name}.update changes the sampler, which has no state_dict and load_state_dict; a resumed run "
                "could not repeat its order, so this run cannot be resumed. Add these two methods",
                stacklevel=2,
            )
        return None

    def state(self) -> dict[str, Any]:
        ahead = {str(step): rows for step, rows in self._rows.items() if step > self._updated}
        state = {
            "name": self.name,
            "next": self._next,
            "epoch": self._epoch,
            "learned": self._learned,
            "drawn": self._digest(),
        }
        if self._stateful:
            with self._running(self._next):
                state |= {"sampler": self.sampler.state_dict(), "ahead": ahead}  # type: ignore[attr-defined]
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        if state["name"] != self.name:
            raise DataError(
                f"the checkpoint has the state of the sampler {state['name']} and not {self.name}; use that"
            )
        if state["learned"]:
            raise DataError(
                f"{self.name} learned from its updates and has no state_dict and load_state_dict, so its order cannot "
                "be repeated; add these two methods and start again, or start a new run from the checkpoint's model"
            )
        if self._stateful:
            with self._running(state["next"]):
                self.sampler.load_state_dict(state["sampler"])  # type: ignore[attr-defined]
            self._next, self._epoch, self._iterator = state["next"], state["epoch"], None
            self._rows = {int(step): rows for step, rows in state["ahead"].items()}
            return
        self.batch(state["next"] - 1)
        if self._digest() != state["drawn"]:
            raise DataError(
                f"{self.name} drew other rows than before the run was resumed; seed its generator, or add state_dict "
                "and load_state_dict"
            )

    def _digest(self) -> str:
        """A digest of all rows drawn so far; of a sampler with a state those since it was restored."""
        text = ",".join(str(row) for step in sorted(self._rows) for row in self._rows[step])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _draw(self) -> list[int]:
        """The rows of the next step. The rest of an epoch is dropped, as by verl's loader."""
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self.sampler)
                self._epoch += 1
            rows = [int(row) for row in itertools.islice(self._iterator, self.settings.batch_size)]
            if len(rows) == self.settings.batch_size:
                return rows
            self._iterator = None
        raise DataError(
            f"an epoch of {self.name} has fewer rows than data.train_batch_size={self.settings.batch_size}; lower it"
        )

    def _built(self) -> AbstractSampler:
        with self._running(0):
            return self._make(self._view)

    def _compare_restored(self) -> None:
        """Draw two steps with two new objects, the second one restored from the first after its first step."""
        one, other = (object.__new__(VerlSampler) for _ in range(2))
        for copy in (one, other):
            copy.__dict__ |= self.__dict__ | {"_rows": {}, "sampler": self._built()}
        one.batch(1)
        try:
            state = json.loads(json.dumps(one.state()))
        except (TypeError, ValueError) as problem:
            raise DataError(
                f"{self.name}.state_dict() is no JSON value ({problem}); return text, numbers, lists and mappings"
            ) from problem
        other.load_state(state)
        same = one.batch(2) == other.batch(2)
        if not same:
            raise DataError(
                f"after {self.name}.load_state_dict(state_dict()) the next rows are others than without it; its state "
                "must hold where it is in the epoch, and iter() must go on from there"
            )

    @contextmanager
    def _running(self, step: int, update: bool = False) -> Iterator[None]:
        """A context for the user's code. Global random numbers depend on seed and step alone, and those of the run are
        as before afterwards. What the code raises becomes a DataError."""
        seed = episode_seed(self.settings.seed, step, int(update), 0)
        python, arrays = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed % 2**32)
                yield
        except RallyError:
            raise
        except Exception as problem:  # a user's class may fail in any way
            name = getattr(self, "name", "the sampler")
            raise DataError(f"{name} fails at step {step} ({type(problem).__name__}: {problem}); fix it") from problem
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


def _fingerprint(sampler: AbstractSampler) -> bytes | None:
    """The attributes of a sampler as bytes, to notice a change; None if they cannot be written."""
    try:
        return pickle.dumps(vars(sampler))
    except Exception:  # noqa: BLE001 - a user's attributes may refuse in any way; the caller then assumes a change
        return None


class Columns(dict[str, Any]):
    """The columns of a batch; a missing one is named with those that exist."""

    def __missing__(self, key: str) -> Any:
        raise DataError(f"the batch for a sampler's update has no {key!r}; it has {', '.join(sorted(self))}")


def batch_of(episodes: Sequence[Episode]) -> DataProto:
    """Scored episodes as verl's batch. Of an episode with several segments the last one is shown."""
    parts = [episode.segments[-1] for episode in episodes]
    prompts = _padded([list(part.prompt_ids) for part in parts], left=True)
    responses = _padded([list(part.response_ids) for part in parts])
    mask = _padded([list(part.response_mask) for part in parts])
    shown = [
        _padded([[1] * len(part.prompt_ids) for part in parts], left=True),
        _padded([[1] * len(part.response_ids) for part in parts]),
    ]
    scores = torch.zeros(responses.shape)
    for row, (part, episode) in enumerate(zip(parts, episodes, strict=True)):
        if part.response_ids:
            scores[row, len(part.response_ids) - 1] = float(episode.reward or 0.0)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": torch.cat(shown, 1),
        "response_mask": mask,
        "token_level_scores": scores,
        "token_level_rewards": scores.clone(),
    }
    names = dict.fromkeys(name for episode in episodes for name in episode.task.row)
    columns: dict[str, list[Any]] = {name: [episode.task.row.get(name) for episode in episodes] for name in names}
    columns |= {
        "uid": [episode.group for episode in episodes],
        "data_source": [episode.task.data_source for episode in episodes],
        "extra_info": [episode.task.extra_info for episode in episodes],
        "index": [episode.task.extra_info.get("index", 0) for episode in episodes],
        "acc": [episode.reward_info.get("acc", episode.reward) for episode in episodes],
        "score": [episode.reward for episode in episodes],
    }
    return DataProto(Columns(tensors), Columns({name: _objects(values) for name, values in columns.items()}), {})


def _padded(rows: list[list[int]], left: bool = False) -> torch.Tensor:
    tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_side="left" if left else "right")


def _objects(values: list[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
