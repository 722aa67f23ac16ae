"""Settings of the export, which are passed to the export process as JSON, and the packages that trackers need."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from rally.types import RallyError

_USER = re.compile(r"//[^/@\s]+@")


@dataclass(frozen=True)
class TrackerRun:
    """The run as trackers know it."""

    folder: Path
    project: str
    name: str
    after: int

    def config(self) -> dict[str, Any]:
        saved = self.folder / "config.yaml"
        return dict(yaml.safe_load(saved.read_text("utf-8")) or {}) if saved.exists() else {}

    def config_text(self) -> str:
        saved = self.folder / "config.yaml"
        return saved.read_text("utf-8") if saved.exists() else ""


def without_password(text: str) -> str:
    """The text without user names and passwords in URLs."""
    return _USER.sub("//***@", text)


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every leaf under its dotted key, as text."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


TRACKERS = ("tensorboard", "mlflow", "wandb")
"""The loggers of the export process."""

_PACKAGES = {  # the imported module, and the extra that installs it
    "tensorboard": ("tensorboard", "tensorboard"),
    "mlflow": ("mlflow", "mlflow"),
    "wandb": ("wandb", "wandb"),
    "otel": ("opentelemetry.exporter.otlp.proto.http", "otel"),
}


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """Settings of traces. `tokenizer` is a tokenizer.json, for token ids as text."""

    backend: str
    project: str
    experiment: str
    tokenizer: str | None = None
    max_samples: int | None = None  # prompts of a step, each with all of its episodes; None: all


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """A run folder and its trackers. The run continues after step `after`; -1 for a new run."""

    folder: str
    project: str
    name: str
    after: int = -1
    trackers: tuple[str, ...] = ()
    trace: TraceSettings | None = None

    @property
    def state(self) -> Path:
        """The folder that records what each tracker has received."""
        return Path(self.folder) / "tracking"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ExportSettings:
        values = json.loads(text)
        trace = values.pop("trace")
        values["trackers"] = tuple(values["trackers"])
        return cls(**values, trace=None if trace is None else TraceSettings(**trace))


def require_packages(names: Iterable[str]) -> None:
    """Raise if a package has to be installed."""
    for name in names:
        package, extra = _PACKAGES[name]
        if not _installed(package):
            raise RallyError(f"{name} needs the package {package}; run: pip install 'rally-rl[{extra}]'")


def _installed(package: str) -> bool:
    """Whether a package can be imported. It is not imported here, because that takes seconds."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # a parent of it is missing
        return False
