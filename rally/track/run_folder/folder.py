"""Everything that happens in a run is written to its folder once, as it happens, and survives a kill at any moment.

    config.yaml  versions.json  metrics.jsonl  timeline.jsonl  episodes/train_000001.jsonl  episodes/val_000010.jsonl
    advantages/train_000001.jsonl  images/<hash>.png  rewound-1/

Metrics and the timeline are appended line by line; every other file is written beside its name and renamed into place.
When a step is written again (validation after a resume) the last writing counts.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rally.images.loading import FORMATS, loaded_images
from rally.redact import redact, redact_texts
from rally.track.run_folder.episode_json import Json, episode_from_json, episodes_to_json, image_from_json, plain
from rally.types import Episode, Image, RallyError
from rally.util.atomic import write_atomic
from rally.util.jsonl import StepLines, checked_lines

# What we chose ourselves among a few words, or count: a reader depends on it.
_EPISODE = ("id", "group", "stop_reason", "segments")
_TURN = ("role", "finish")
_RESULT = ("status",)


def hidden_lines(episodes: Iterable[Json]) -> Iterator[str]:
    """Episodes as `episodes_to_json` gives them, one JSON object a line."""
    for episode in episodes:
        [line] = checked_lines([episode])
        if redact(line) != line or '"$str"' in line:  # the walk is slow, and nearly always there is nothing to hide
            [line] = checked_lines([_episode(episode)])
        yield line


def hidden_yaml(text: str) -> str:
    """The same for a configuration, which nearly always comes without secrets."""
    if redact(text) == text:
        return text
    return yaml.safe_dump(redact_texts(yaml.safe_load(text)), sort_keys=False, allow_unicode=True)


def _episode(value: Json) -> Json:
    return _hidden(value, but=_EPISODE) | {"turns": [_turn(turn) for turn in value["turns"]]}


def _turn(value: Json) -> Json:
    results = [_hidden(result, but=_RESULT) for result in value["tool_results"]]
    return _hidden(value, but=_TURN) | {"tool_results": results}


def _hidden(fields: Json, but: tuple[str, ...]) -> Json:
    return {name: value if name in but else _texts(value) for name, value in fields.items()}


def _texts(value: Any) -> Any:
    """An open value as `plain` wrote it."""
    match value:
        case str():
            return redact(value)
        case {"$str": codes}:
            return plain(redact("".join(map(chr, codes))))
        case {"$float": _} | {"$int": _}:
            return value
        case {"$repr": text, "type": name}:
            return {"$repr": _texts(text), "type": name}
        case dict():
            return {key: _texts(item) for key, item in value.items()}
        case list() | tuple():
            return [_texts(item) for item in value]
    return value


_NAME = re.compile(r"[0-9a-f]{32}")


class ImageFolder:
    """`images/<hash>.<format>` of a run."""

    def __init__(self, run: Path) -> None:
        self.path = run / "images"

    def save(self, episodes: Iterable[Episode]) -> None:
        """Write those that are not there yet. Each gets its name when all of it is on disk."""
        for image in {image for episode in episodes for image in images_of(episode)}:
            place = self.path / f"{image.hash}.{image.format}"
            if not place.exists():
                self.path.mkdir(exist_ok=True)
                write_atomic(place, image.read())

    def find(self, name: str) -> Path | None:
        """The file of the image with this hash; a name that is no hash has none, whatever it looks like."""
        if not _NAME.fullmatch(name):
            return None
        return next((place for kind in FORMATS if (place := self.path / f"{name}.{kind}").is_file()), None)

    def hook(self, value: dict[str, Any]) -> Any:
        """For `json.loads`: what stands for an image becomes the image, whose bytes are read when somebody looks."""
        return image_from_json(value, self.path) if "$image" in value else value


def images_of(episode: Episode) -> Iterator[Image]:
    """Every image that was shown, or was to be."""
    yield from loaded_images(episode.task.prompt)
    for segment in episode.segments:
        yield from (span.image for span in segment.images)
    for result in episode.tool_results:
        yield from (image for image in result.response.image or () if isinstance(image, Image))


NONFINITE = "track/nonfinite"
"""How many values of a metrics line were nan or infinite; such values are written as null and read as nan."""

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
_SETS = ("episodes", "advantages")  # folders with a file per step
_OF_A_STEP = re.compile(r"(train|val)_\d+")


class MetricsRow(NamedTuple):
    """All metrics of one step."""

    step: int
    metrics: dict[str, float]


class PhaseRow(NamedTuple):
    """A stretch of a step, in Unix seconds. A phase that another interrupted has a row for each of its parts."""

    step: int
    phase: str
    start: float
    end: float


class AdvantageSpan(NamedTuple):
    """The response tokens [start, end) of a segment, all sampled, and the advantage that each of them was given."""

    value: float
    start: int
    end: int


Advantages = Mapping[str, Sequence[Sequence[AdvantageSpan]]]
"""By episode id, the spans of each segment."""


class RunFolder:
    """One run on disk. Reading needs nothing but the path; call `create` before writing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.versions_path = self.path / "versions.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.timeline_path = self.path / "timeline.jsonl"
        self.episodes_path = self.path / "episodes"
        self.images = ImageFolder(self.path)
        self._metrics, self._timeline = StepLines(self.metrics_path), StepLines(self.timeline_path)

    def create(self) -> RunFolder:
        """Make the folder, or reopen it after a crash: a torn last line and half-written files are removed."""
        self.episodes_path.mkdir(parents=True, exist_ok=True)
        for part in (
            *self.path.glob(".*.part"),
            *(p for name in (*_SETS, "images") for p in self.path.glob(f"{name}/.*.part")),
        ):
            part.unlink()
        self._metrics.repair()
        self._timeline.repair()
        return self

    def share(self) -> RunFolder:
        """Make the folder for episodes alone, where others may keep and write things too: all that is there stays."""
        self.episodes_path.mkdir(parents=True, exist_ok=True)
        return self

    def save_config(self, text: str) -> None:
        write_atomic(self.config_path, hidden_yaml(text))

    def save_versions(self) -> None:
        """Which Python and packages ran."""
        write_atomic(self.versions_path, json.dumps(_versions(), indent=2) + "\n")

    def changed_versions(self) -> list[str]:
        """What is not what it was when the run was made, such as `torch 2.12.0 -> 2.13.0`."""
        if not self.versions_path.exists():
            return []
        was, now = json.loads(self.versions_path.read_text(encoding="utf-8")), _versions()
        return [f"{name} {was.get(name)} -> {version}" for name, version in now.items() if was.get(name) != version]

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line. Lines of the same step are merged when read, the later value winning."""
        assert "step" not in metrics, "the step is given apart"
        values = {name: float(value) for name, value in metrics.items()}
        line: dict[str, float | None] = {"step": step}
        line |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        if bad := sum(not math.isfinite(value) for value in values.values()):
            line[NONFINITE] = bad
        self._metrics.append(line)

    def read_metrics(self) -> list[MetricsRow]:
        """One row per step, in order. A line still being written is left out; a running folder can be read."""
        if not self.path.is_dir():
            raise RallyError(f"there is no run folder at {self.path}; give the folder that the run was started with")
        steps: dict[int, dict[str, float]] = {}
        for row in self._metrics.rows():
            step = row.pop("step")
            steps.setdefault(step, {}).update({k: math.nan if v is None else v for k, v in row.items()})
        return [MetricsRow(step, steps[step]) for step in sorted(steps)]

    def log_phase(self, step: int, phase: str, start: float, end: float) -> None:
        """Say when a phase of a step began and ended, in Unix seconds."""
        self._timeline.append({"step": step, "phase": phase, "start": start, "end": end})

    def read_timeline(self) -> list[PhaseRow]:
        """Every phase in the order in which they ended; a running folder can be read."""
        return [PhaseRow(row["step"], row["phase"], row["start"], row["end"]) for row in self._timeline.rows()]

    def log_episodes(self, step: int, episodes: Sequence[Episode], validate: bool = False) -> None:
        """All episodes of a step, one JSON object a line, without the secrets of the configuration."""
        self.images.save(episodes)  # first: an episode never names an image that is not there
        write_atomic(self._episode_file(step, validate), hidden_lines(episodes_to_json(episodes)))

    def read_episodes(self, step: int, validate: bool = False) -> list[Episode]:
        """Exactly what `log_episodes` was given, known secrets aside."""
        path = self._episode_file(step, validate)
        if not path.exists():
            known = ", ".join(map(str, self.episode_steps(validate))) or "none"
            kind = "validation" if validate else "training"
            raise RallyError(f"{self.path} has no {kind} episodes of step {step}; the steps it has are: {known}")
        with path.open(encoding="utf-8", newline="\n") as file:
            return [episode_from_json(json.loads(line, object_hook=self.images.hook)) for line in file]

    def episode_steps(self, validate: bool = False) -> list[int]:
        """The steps whose episodes are stored."""
        kind = "val" if validate else "train"
        return sorted(_step_of(p) for p in self.episodes_path.glob(f"{kind}_*.jsonl"))

    def log_advantages(self, step: int, advantages: Advantages) -> None:
        """What each sampled token of the episodes trained on was given; what is not finite is written as null."""
        path = self._advantage_file(step)
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, checked_lines(_advantages_to_json(id, spans) for id, spans in advantages.items()))

    def read_advantages(self, step: int) -> dict[str, tuple[tuple[AdvantageSpan, ...], ...]]:
        """By episode id, the spans of each segment; nothing where nothing was trained on, or not recorded."""
        path = self._advantage_file(step)
        if not path.exists():
            return {}
        with path.open(encoding="utf-8", newline="\n") as file:
            return {row["id"]: _advantages_from_json(row["segments"]) for row in map(json.loads, file)}

    def rewind(self, step: int) -> Path | None:
        """Set everything after `step` aside, so that a run resumed from there counts nothing twice.

        Returns the folder `rewound-<n>` that now holds it, or None when there was nothing later. The main metrics
        file changes last: a kill in between leaves a copy too many aside and loses nothing.
        """
        own = (p for name in _SETS for p in self.path.glob(f"{name}/*.jsonl") if _OF_A_STEP.fullmatch(p.stem))
        files = [path for path in own if _step_of(path) > step]
        written = {lines: lines.rows() for lines in (self._timeline, self._metrics)}
        if not files and not any(row["step"] > step for rows in written.values() for row in rows):
            return None
        aside = self._new_aside()
        for file in files:
            place = aside / file.parent.name
            place.mkdir(exist_ok=True)
            os.replace(file, place / file.name)
        for lines, rows in written.items():
            if not rows:
                continue
            StepLines(aside / lines.path.name).replace(row for row in rows if row["step"] > step)
            lines.replace(row for row in rows if row["step"] <= step)
        return aside

    def _new_aside(self) -> Path:
        n = 1 + max((int(p.name.partition("-")[2]) for p in self.path.glob("rewound-*")), default=0)
        aside = self.path / f"rewound-{n}"
        (aside / "episodes").mkdir(parents=True)
        return aside

    def _episode_file(self, step: int, validate: bool) -> Path:
        return self.episodes_path / f"{'val' if validate else 'train'}_{step:06d}.jsonl"

    def _advantage_file(self, step: int) -> Path:
        return self.path / "advantages" / f"train_{step:06d}.jsonl"


def _step_of(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def _advantages_to_json(id: str, segments: Sequence[Sequence[AdvantageSpan]]) -> dict[str, Any]:
    spans = [[[s.value if math.isfinite(s.value) else None, s.start, s.end] for s in spans] for spans in segments]
    return {"id": id, "segments": spans}


def _advantages_from_json(segments: Sequence[Sequence[Any]]) -> tuple[tuple[AdvantageSpan, ...], ...]:
    return tuple(
        tuple(AdvantageSpan(math.nan if value is None else value, start, end) for value, start, end in spans)
        for spans in segments
    )


def _versions() -> dict[str, str]:
    """Read from package metadata, so that nothing heavy is imported."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    versions["rally"] = sys.modules["rally"].__version__
    return versions | {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
