"""The state that the doctor's checks share: lazily built parts of the run, and findings.

A part that cannot be built is reported by the first check that needs it. Later checks that need it are skipped with a
warning.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rally.chat import ChatCodec
from rally.config import Config
from rally.config.checks.multi_gpu import sends_images, with_rollout_servers
from rally.data import TaskSet
from rally.interactions import Interactions
from rally.models.load import load_model_config
from rally.runs import build
from rally.runs.build.data import env_tasks_of, environments_of
from rally.runs.env_checks import opening_of
from rally.runs.planned_models import ParameterCounts, size_from
from rally.tools import ToolBox
from rally.types import Task

T = TypeVar("T")
Status = Literal["ok", "warning", "error"]
MAX_ROWS = 512
TRAINING, VALIDATION = "the training rows", "the validation rows"
STAND_IN = Task(id="stand-in", data_source="none", prompt=({"role": "user", "content": "What is 6*7?"},))


class ReportText(NamedTuple):
    """Text below a finding: a note, or tokens of one kind."""

    kind: Literal["note", "prompt", "sampled", "observed"]
    text: str


class Finding(NamedTuple):
    """One line of the report: what is the case, and what to do about it."""

    check: str
    status: Status
    text: str
    shown: tuple[ReportText, ...] = ()


class MissingPart(Exception):
    """A part that could not be built, which an earlier finding reports."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of `rally doctor`: check the real model, and an answer that the reward function must reward."""

    model_check: bool = False
    answer: str | None = None


class DoctorCase:
    """One configuration to check, with its parts."""

    def __init__(self, config: Config, options: DoctorOptions | None = None) -> None:
        self.config = with_rollout_servers(config)
        self.options = options or DoctorOptions()
        self._parts: dict[str, Any] = {}
        self._failed: set[str] = set()

    def _part(self, name: str, make: Callable[[], T]) -> T:
        if name in self._failed:
            raise MissingPart(name)
        if name not in self._parts:
            self._failed.add(name)  # until it is built: an exception leaves it marked
            self._parts[name] = make()
            self._failed.discard(name)
        part: T = self._parts[name]
        return part

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._part("the tokenizer", lambda: build.tokenizer_of(self.config))

    @property
    def toolbox(self) -> ToolBox:
        return self._part("the tools", lambda: build.toolbox_of(self.config))

    @property
    def users(self) -> Interactions:
        return self._part("the simulated users", lambda: build.interactions_of(self.config))

    @property
    def codec(self) -> ChatCodec:
        tokenizer, toolbox = self.tokenizer, self.toolbox
        return self._part("the chat template", lambda: build.codec_of(self.config, tokenizer, toolbox))

    @property
    def train_rows(self) -> TaskSet | None:
        return self._part(TRAINING, lambda: self._rows(self.config.data.train_files, False))

    @property
    def val_rows(self) -> TaskSet | None:
        return self._part(VALIDATION, lambda: self._rows(self.config.data.val_files, True))

    def _rows(self, files: Sequence[str], validate: bool) -> TaskSet | None:
        if self.config.env.entries:
            environments = environments_of(self.config)

            def complete(task: Task) -> Task:
                return replace(task, prompt=tuple(opening_of(environments, task).messages))

            return env_tasks_of(self.config, environments, validate=validate, complete=complete)
        return build.tasks_of(self.config, files, validate=validate) if files else None

    @property
    def model_config(self) -> PreTrainedConfig:
        model = self.config.model
        return self._part(
            "the model's configuration",
            lambda: load_model_config(
                str(model.path), trust_remote_code=model.trust_remote_code, overrides=dict(model.override_config)
            ),
        )

    @property
    def size(self) -> ParameterCounts:
        """The parameter counts of the model, with the adapters that would be trained."""
        model, described = self.config.model, self.model_config
        return self._part(
            "the model's size",
            lambda: size_from(
                described,
                build.lora_of(model, 0),
                trust=model.trust_remote_code,
                tower_frozen=self.config.actor.freeze_vision_tower,
                text_only=not sends_images(self.config),
            ),
        )

    @property
    def tasks(self) -> list[Task]:
        """Some rows, spread over the files, for checks that need real ones; empty if they cannot be read."""
        return self._part("some rows", lambda: some(self._any_rows()))

    def _any_rows(self) -> Sequence[Task]:
        if TRAINING not in self._failed and self.train_rows:
            return self.train_rows
        return [] if VALIDATION in self._failed else self.val_rows or []

    @property
    def first_task(self) -> Task:
        return next(iter(self.tasks), STAND_IN)

    def close(self) -> None:
        if "the tools" in self._parts:
            self.toolbox.close()


def some(rows: Sequence[T], most: int = MAX_ROWS) -> list[T]:
    """At most `most` rows, evenly spread."""
    return [rows[i] for i in spread_indices(len(rows), most)]


def spread_indices(count: int, most: int) -> list[int]:
    return list(range(count)) if count <= most else [i * count // most for i in range(most)]


def listed(values: Sequence[str], most: int = 5) -> str:
    """The distinct values as text, in order, at most `most` of them."""
    different = list(dict.fromkeys(values))
    more = f" and {len(different) - most} more" if len(different) > most else ""
    return ", ".join(itertools.islice(different, most)) + more
