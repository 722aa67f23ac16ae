"""Everything that happens in a run is written to its folder once, as it happens, and survives a kill at any moment.

    config.yaml  versions.json  metrics.jsonl  episodes/train_000001.jsonl  episodes/val_000010.jsonl  rewound-1/

Metrics are appended line by line; every other file is written beside its name and renamed into place. When a step
is written again (validation after a resume) the last writing counts.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from rally.redact import redact
from rally.track.serialize import episode_from_json, episodes_to_json
from rally.types import Episode, RallyError

NONFINITE = "track/nonfinite"
"""How many values of a metrics line were nan or infinite; such values are written as null and read as nan."""

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
_log = logging.getLogger(__name__)


class MetricsRow(NamedTuple):
    """All metrics of one step."""

    step: int
    metrics: dict[str, float]


def write_atomic(path: Path, text: str | Iterable[str]) -> None:
    """The file has all of its old content or all of its new content, never a part."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines([text] if isinstance(text, str) else text)
    os.replace(part, path)


class RunFolder:
    """One run on disk. Reading needs nothing but the path; call `create` before writing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics_path = self.path / "metrics.jsonl"
        self.episodes_path = self.path / "episodes"

    def create(self) -> RunFolder:
        """Make the folder, or reopen it after a crash: a torn last line and half-written files are removed."""
        self.episodes_path.mkdir(parents=True, exist_ok=True)
        for part in (*self.path.glob(".*.part"), *self.episodes_path.glob(".*.part")):
            part.unlink()
        self._repair_metrics()
        return self

    def save_config(self, text: str) -> None:
        write_atomic(self.path / "config.yaml", redact(text))

    def save_versions(self) -> None:
        """Which Python and packages ran, read from package metadata so that nothing heavy is imported."""
        versions = {"python": platform.python_version(), "platform": platform.platform()}
        versions["rally"] = sys.modules["rally"].__version__
        versions |= {name: _version(name) for name in _PACKAGES}
        write_atomic(self.path / "versions.json", json.dumps(versions, indent=2) + "\n")

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line. Lines of the same step are merged when read, the later value winning."""
        assert "step" not in metrics, "the step is given apart"
        values = {name: float(value) for name, value in metrics.items()}
        line: dict[str, float | None] = {"step": step}
        line |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        if bad := sum(not math.isfinite(value) for value in values.values()):
            line[NONFINITE] = bad
        with self.metrics_path.open("a", encoding="utf-8", newline="\n") as file:
            file.writelines(_lines([line]))

    def read_metrics(self) -> list[MetricsRow]:
        """One row per step, in order. A line still being written is left out; a running folder can be read."""
        if not self.path.is_dir():
            raise RallyError(f"there is no run folder at {self.path}; give the folder that the run was started with")
        steps: dict[int, dict[str, float]] = {}
        for row in self._metric_rows():
            step = row.pop("step")
            steps.setdefault(step, {}).update({k: math.nan if v is None else v for k, v in row.items()})
        return [MetricsRow(step, steps[step]) for step in sorted(steps)]

    def log_episodes(self, step: int, episodes: Sequence[Episode], validate: bool = False) -> None:
        """All episodes of a step, one JSON object a line, without the secrets of the configuration."""
        write_atomic(self._episode_file(step, validate), map(redact, _lines(episodes_to_json(episodes))))

    def read_episodes(self, step: int, validate: bool = False) -> list[Episode]:
        """Exactly what `log_episodes` was given, known secrets aside."""
        path = self._episode_file(step, validate)
        if not path.exists():
            known = ", ".join(map(str, self.episode_steps(validate))) or "none"
            kind = "validation" if validate else "training"
            raise RallyError(f"{self.path} has no {kind} episodes of step {step}; the steps it has are: {known}")
        with path.open(encoding="utf-8", newline="\n") as file:
            return [episode_from_json(json.loads(line)) for line in file]

    def episode_steps(self, validate: bool = False) -> list[int]:
        """The steps whose episodes are stored."""
        kind = "val" if validate else "train"
        return sorted(int(p.stem.rpartition("_")[2]) for p in self.episodes_path.glob(f"{kind}_*.jsonl"))

    def rewind(self, step: int) -> Path | None:
        """Set everything after `step` aside, so that a run resumed from there counts nothing twice.

        Returns the folder `rewound-<n>` that now holds it, or None when there was nothing later. The main metrics
        file changes last: a kill in between leaves a copy too many aside and loses nothing.
        """
        rows = self._metric_rows()
        later = [row for row in rows if row["step"] > step]
        files = [self._episode_file(s, v) for v in (False, True) for s in self.episode_steps(v) if s > step]
        if not later and not files:
            return None
        aside = self._new_aside()
        write_atomic(aside / "metrics.jsonl", _lines(later))
        for file in files:
            os.replace(file, aside / "episodes" / file.name)
        write_atomic(self.metrics_path, _lines(row for row in rows if row["step"] <= step))
        return aside

    def _new_aside(self) -> Path:
        n = 1 + max((int(p.name.partition("-")[2]) for p in self.path.glob("rewound-*")), default=0)
        aside = self.path / f"rewound-{n}"
        (aside / "episodes").mkdir(parents=True)
        return aside

    def _episode_file(self, step: int, validate: bool) -> Path:
        return self.episodes_path / f"{'val' if validate else 'train'}_{step:06d}.jsonl"

    def _metric_rows(self) -> list[dict[str, Any]]:
        """The finished lines: what follows the last newline is not one yet."""
        if not self.metrics_path.exists():
            return []
        rows = []
        for n, line in enumerate(self.metrics_path.read_bytes().split(b"\n")[:-1], start=1):
            row = _parse_row(line)
            if row is None:
                raise RallyError(f"line {n} of {self.metrics_path} is not a metrics line; remove that line to go on")
            rows.append(row)
        return rows

    def _repair_metrics(self) -> None:
        if not self.metrics_path.exists():
            return
        content = self.metrics_path.read_bytes()
        whole, _, torn = content.rpartition(b"\n")
        if not torn:
            return
        if _parse_row(torn) is not None:  # only the newline was lost
            keep = content + b"\n"
        else:
            keep = whole + b"\n" if whole else b""
            _log.warning("dropped the torn last line of %s (%d bytes)", self.metrics_path, len(torn))
        write_atomic(self.metrics_path, keep.decode())


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """One JSON object a line; a nan that slipped through is our bug and raises."""
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
    return (encoder.encode(row) + "\n" for row in rows)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
