"""The run folder: writes and reads configuration, metrics, timeline, episodes, advantages and images of a run.

Records are written as they happen and survive a kill at any moment.

    config.yaml  versions.json  metrics.jsonl  timeline.jsonl  consumed.jsonl  rewound-1/
    episodes/train_000001.jsonl  episodes/val_000010.jsonl  advantages/train_000001.jsonl  images/<hash>.png

Metrics and the timeline are appended line by line; every other file is written atomically. If a step is written again
(validation after a resume), the last version counts.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rally.images.loading import FORMATS, loaded_images
from rally.redact import redact, redact_texts
from rally.track.run_folder.episode_json import Json, episode_from_json, episodes_to_json, image_from_json, plain
from rally.types import Episode, Image, RallyError
from rally.util.atomic_files import names_file, write_atomic
from rally.util.checksums import UNREADABLE, reason
from rally.util.jsonl import StepLines, checked_lines
from rally.util.locks import LockFile
from rally.util.private_files import permissions_of, private_folder

# Fields that a reader depends on and that hold no free text; they are not redacted.
_EPISODE = ("id", "group", "stop_reason", "segments")
_TURN = ("role", "finish")
_RESULT = ("status",)


def redacted_lines(episodes: Iterable[Json]) -> Iterator[str]:
    """Episodes from `episodes_to_json` as JSON lines, without known secrets."""
    for episode in episodes:
        [line] = checked_lines([episode])
        if redact(line) != line or '"$str"' in line:  # the recursive redaction is slow and rarely needed
            [line] = checked_lines([_episode(episode)])
        yield line


def redacted_yaml(text: str) -> str:
    """A configuration without known secrets."""
    if redact(text) == text:
        return text
    return yaml.safe_dump(redact_texts(yaml.safe_load(text)), sort_keys=False, allow_unicode=True)


def _episode(value: Json) -> Json:
    return _redacted(value, but=_EPISODE) | {"turns": [_turn(turn) for turn in value["turns"]]}


def _turn(value: Json) -> Json:
    results = [_redacted(result, but=_RESULT) for result in value["tool_results"]]
    return _redacted(value, but=_TURN) | {"tool_results": results}


def _redacted(fields: Json, but: tuple[str, ...]) -> Json:
    return {name: value if name in but else _texts(value) for name, value in fields.items()}


def _texts(value: Any) -> Any:
    """An open value, as `plain` encoded it, without known secrets."""
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
        """Write the images of episodes that do not exist yet."""
        self.save_images(image for episode in episodes for image in images_of(episode))

    def save_images(self, images: Iterable[Image]) -> None:
        """Write those that do not exist yet, atomically. Several threads and processes may write the same one."""
        for image in set(images):
            place = self.path / f"{image.hash}.{image.format}"
            if not place.exists():
                self.path.mkdir(exist_ok=True)
                part = place.with_name(f".{place.name}.{uuid.uuid4().hex}.part")
                with names_file(place):
                    part.write_bytes(image.read())
                os.replace(part, place)

    def find(self, name: str) -> Path | None:
        """The file of the image with this hash. A name that is not a hash never matches a file."""
        if not _NAME.fullmatch(name):
            return None
        return next((place for kind in FORMATS if (place := self.path / f"{name}.{kind}").is_file()), None)

    def hook(self, value: dict[str, Any]) -> Any:
        """An `object_hook` for `json.loads` that restores images. Their bytes are read on use."""
        return image_from_json(value, self.path) if "$image" in value else value

    def restored(self, value: Any) -> Any:
        """Parsed JSON, with its images."""
        if isinstance(value, list):
            return [self.restored(one) for one in value]
        if isinstance(value, dict):
            return self.hook({key: self.restored(one) for key, one in value.items()})
        return value


def images_of(episode: Episode) -> Iterator[Image]:
    """Every image of the prompt, the segments and the tool results."""
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
    """A phase of a step, in Unix seconds. A phase that another interrupts has a row for each of its parts."""

    step: int
    phase: str
    start: float
    end: float


class ConsumedRow(NamedTuple):
    """The groups that an update trained on, in order, and the weight version that it began with."""

    step: int
    version: int
    groups: tuple[str, ...]


class AdvantageSpan(NamedTuple):
    """The response tokens [start, end) of a segment, all sampled, and their advantage."""

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
        self._consumed = StepLines(self.path / "consumed.jsonl")

    def create(self) -> RunFolder:
        """Create the folder, or reopen it after a crash: torn last lines and partial files are removed."""
        self.episodes_path.mkdir(parents=True, exist_ok=True)
        for part in (
            *self.path.glob(".*.part"),
            *(p for name in (*_SETS, "images") for p in self.path.glob(f"{name}/.*.part")),
        ):
            part.unlink()
        self._metrics.repair()
        self._timeline.repair()
        self._consumed.repair()
        return self

    def share(self) -> RunFolder:
        """Create the folder for episodes only. Other content, which may not be ours, is left alone."""
        self.episodes_path.mkdir(parents=True, exist_ok=True)
        return self

    def save_config(self, text: str) -> None:
        write_atomic(self.config_path, redacted_yaml(text))

    def save_versions(self) -> None:
        """Write the versions of Python and of the main packages."""
        write_atomic(self.versions_path, json.dumps(_versions(), indent=2) + "\n")

    def changed_versions(self) -> list[str]:
        """The versions that have changed since the run was made, such as `torch 2.12.0 -> 2.13.0`."""
        if not self.versions_path.exists():
            return []
        now = _versions()
        try:
            was = json.loads(self.versions_path.read_text(encoding="utf-8"))
        except UNREADABLE as problem:
            return [f"{self.versions_path.name} cannot be read ({reason(problem)}), so versions are not compared"]
        if not isinstance(was, dict):
            return [f"{self.versions_path.name} is damaged, so versions are not compared"]
        return [f"{name} {was.get(name)} -> {version}" for name, version in now.items() if was.get(name) != version]

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line. Lines of the same step are merged when read, the later value winning."""
        assert "step" not in metrics, "the step is a separate argument"
        values = {name: float(value) for name, value in metrics.items()}
        line: dict[str, float | None] = {"step": step}
        line |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        if bad := sum(not math.isfinite(value) for value in values.values()):
            line[NONFINITE] = bad
        self._metrics.append(line)

    def read_metrics(self) -> list[MetricsRow]:
        """One row per step, in order. A line still being written is left out; a running folder can be read."""
        if not self.path.is_dir():
            raise RallyError(f"there is no run folder at {self.path}; name the folder of a run")
        steps: dict[int, dict[str, float]] = {}
        for row in self._metrics.rows():
            step = row.pop("step")
            with self._reading(self.metrics_path):
                steps.setdefault(step, {}).update({k: math.nan if v is None else float(v) for k, v in row.items()})
        return [MetricsRow(step, steps[step]) for step in sorted(steps)]

    def log_phase(self, step: int, phase: str, start: float, end: float) -> None:
        """Record the start and end of a phase of a step, in Unix seconds."""
        self._timeline.append({"step": step, "phase": phase, "start": start, "end": end})

    def read_timeline(self) -> list[PhaseRow]:
        """Every phase, in the order in which they ended. The folder of a running run can be read."""
        with self._reading(self.timeline_path):
            return [PhaseRow(row["step"], row["phase"], row["start"], row["end"]) for row in self._timeline.rows()]

    def log_consumed(self, step: int, version: int, groups: Sequence[str]) -> None:
        """Record that an update trains on `groups`, in this order, and begins with weights of `version`."""
        self._consumed.append({"step": step, "version": version, "groups": list(groups)})

    def read_consumed(self) -> list[ConsumedRow]:
        """What each update of an asynchronous run trained on."""
        with self._reading(self._consumed.path):
            return [ConsumedRow(row["step"], row["version"], tuple(row["groups"])) for row in self._consumed.rows()]

    def log_episodes(self, step: int, episodes: Sequence[Episode], validate: bool = False) -> None:
        """Write all episodes of a step as JSON lines, without known secrets."""
        self.images.save(episodes)  # first, so that an episode never names a missing image
        write_atomic(self._episode_file(step, validate), redacted_lines(episodes_to_json(episodes)))

    def read_episodes(self, step: int, validate: bool = False) -> list[Episode]:
        """The episodes that `log_episodes` wrote, equal except for known secrets."""
        path = self._episode_file(step, validate)
        if not path.exists():
            known = ", ".join(map(str, self.episode_steps(validate))) or "none"
            kind = "validation" if validate else "training"
            raise RallyError(f"{self.path} has no {kind} episodes of step {step}; the steps it has are: {known}")
        with self._reading(path), path.open(encoding="utf-8", newline="\n") as file:
            return [episode_from_json(json.loads(line, object_hook=self.images.hook)) for line in file]

    def episode_steps(self, validate: bool = False) -> list[int]:
        """The steps whose episodes are stored."""
        kind = "val" if validate else "train"
        files = (p for p in self.episodes_path.glob(f"{kind}_*.jsonl") if _OF_A_STEP.fullmatch(p.stem))
        return sorted(map(_step_of, files))

    def log_advantages(self, step: int, advantages: Advantages) -> None:
        """Write the advantages of the trained episodes; non-finite values become null."""
        path = self._advantage_file(step)
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, checked_lines(_advantages_to_json(id, spans) for id, spans in advantages.items()))

    def read_advantages(self, step: int) -> dict[str, tuple[tuple[AdvantageSpan, ...], ...]]:
        """The spans of each segment by episode id; empty if none were recorded."""
        path = self._advantage_file(step)
        if not path.exists():
            return {}
        with self._reading(path), path.open(encoding="utf-8", newline="\n") as file:
            return {row["id"]: _advantages_from_json(row["segments"]) for row in map(json.loads, file)}

    def rewind(self, step: int) -> Path | None:
        """Move the records after `step` aside, so that a run that resumes there records nothing twice.

        Returns the folder `rewound-<n>` that holds them, or None if there were none. The metrics file changes last: a
        kill in between leaves an extra copy and loses nothing.
        """
        own = (p for name in _SETS for p in self.path.glob(f"{name}/*.jsonl") if _OF_A_STEP.fullmatch(p.stem))
        files = [path for path in own if _step_of(path) > step]
        written = {lines: lines.rows() for lines in (self._timeline, self._consumed, self._metrics)}
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

    @contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        """A block that reads a file of records. RallyError if it is damaged."""
        try:
            yield
        except RallyError:
            raise
        except UNREADABLE as problem:
            why = f"{type(problem).__name__}: {reason(problem)}"
            raise RallyError(f"{path} is damaged ({why}); move it away, or copy it again") from problem

    def _new_aside(self) -> Path:
        earlier = (p.name.partition("-")[2] for p in self.path.glob("rewound-*"))
        n = 1 + max((int(number) for number in earlier if number.isdecimal()), default=0)
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
    """The versions from package metadata, without importing the packages."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    versions["rally"] = sys.modules["rally"].__version__
    return versions | {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


LOCK = ".lock"


class FolderInUse(RallyError):
    """Another process writes to the run folder."""


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Lock `folder` for this process while the block lasts; FolderInUse if another process writes to it.

    The lock belongs to the process: children do not inherit it, and a killed run can be resumed at once. A new folder
    and everything written in the block can be read by this user alone; in an existing folder, by those who can read
    that.
    """
    private_folder(folder)
    with permissions_of(folder), LockFile(folder / LOCK, per_process=True) as lock:
        try:
            acquired = lock.acquire()
        except OSError:  # the file system has no locks, so nobody can tell
            acquired = True
        if not acquired:
            raise FolderInUse(
                f"{folder} is being written by another run (process {lock.read() or 'unknown'}); wait for its end or "
                "stop it, or choose another trainer.experiment_name"
            )
        lock.write(f"{os.getpid()} on {os.uname().nodename}")
        yield
