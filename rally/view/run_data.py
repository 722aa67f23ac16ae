"""The data of one run for the page, read from the files of its folder and the index over them."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rally.redact import redact_tree
from rally.track.display_text import one_line
from rally.track.run_folder.folder import ImageFolder
from rally.types import RallyError
from rally.util.checksums import UNREADABLE, reason
from rally.util.jsonl import StepLinesTail
from rally.view.episode_index import Index, Indexer
from rally.view.episode_query import PAGE, Query, QueryError
from rally.view.episode_rows import shown
from rally.view.reward_tables import pass_rates, reward_histograms
from rally.view.segment_tree import continued_segments
from rally.view.token_text import TokenizerLookup, find_tokenizer, given_tokenizer, pieces

Json = dict[str, Any]
CONFIG = "config.yaml"
PAGING = ("after", "skip", "limit", "count")


class NotRecorded(RallyError):
    """The requested item is not in the run."""


class ImageFile(NamedTuple):
    data: bytes
    mime: str


class RunData:
    """A run folder in the viewer."""

    def __init__(self, path: Path, name: str, tokenizer: TokenizerLookup | None = None) -> None:
        self.path, self.name = path, name
        self._tokenizer = tokenizer
        self.index = Index(path)
        self.indexer = Indexer(self.index)
        self._metrics = StepLinesTail(path / "metrics.jsonl")
        self._phases = StepLinesTail(path / "timeline.jsonl")
        self._images = ImageFolder(path)
        self._lock = threading.Lock()
        self._advantages: tuple[tuple[str, int], dict[str, Any]] = (("", 0), {})

    @cached_property
    def tokenizer(self) -> TokenizerLookup:
        return self._tokenizer or find_tokenizer(self.path)

    def state(self) -> Json:
        """What changes during a run; the page polls it every second."""
        with self._lock:
            self._metrics.read()
            self._phases.read()
            steps = self._metrics.rows[-1]["step"] if self._metrics.rows else None
            metrics, phases = [len(self._metrics.rows), self._metrics.bad], len(self._phases.rows)
        progress = {"name": self.name, "step": steps, "metrics": metrics, "phases": phases}
        return {**progress, "config": _stamp(self.path / CONFIG), **self.indexer.progress()}

    def metrics(self, wanted: Collection[str] | None = None) -> Json:
        """The steps, all names, and the values of the `wanted` names (by default all), null where missing."""
        with self._lock:
            self._metrics.read()
            merged: dict[int, Json] = {}
            for row in self._metrics.rows:
                merged.setdefault(row["step"], {}).update(row)
        steps = sorted(merged)
        names = sorted({name for row in merged.values() for name in row} - {"step"})
        chosen = names if wanted is None else [name for name in names if name in wanted]
        values = {name: [merged[step].get(name) for step in steps] for name in chosen}
        return {"steps": steps, "names": names, "values": values}

    def facets(self) -> Json:
        """The values to filter by: steps, stop reasons and data sources, with their episode counts."""
        with self.index.opened() as db:
            steps = db.execute("SELECT step, validate, count(*), avg(reward) FROM episodes GROUP BY step, validate")
            return {
                "steps": [list(row) for row in steps],
                "stops": db.execute("SELECT stop, count(*) FROM episodes GROUP BY stop ORDER BY 2 DESC").fetchall(),
                "sources": db.execute(
                    "SELECT source, count(*) FROM episodes GROUP BY source ORDER BY 2 DESC"
                ).fetchall(),
            }

    def rewards(self, kind: str) -> Json:
        """The distribution of the rewards of each step, of training or validation."""
        with self.index.opened() as db:
            return reward_histograms(db, kind)

    def tasks(self, kind: str, threshold: str = "") -> Json:
        """How often each task was passed at each step, of training or validation."""
        with self.index.opened() as db:
            return pass_rates(db, kind, threshold)

    def config(self) -> Json:
        """The resolved configuration and the versions of the run as [key, value] with dotted keys, without secrets;
        `note` says what is missing."""
        keys, notes = dict[str, Any](), list[str]()
        for name, prefix in ((CONFIG, ""), ("versions.json", "versions")):
            try:
                tree = yaml.safe_load((self.path / name).read_text(encoding="utf-8"))  # JSON is YAML
                keys |= dict(_leaves(redact_tree(tree), prefix))
            except FileNotFoundError:
                notes.append(f"{self.name} has no {name}.")
            except (*UNREADABLE, yaml.YAMLError) as problem:
                notes.append(f"{name} of {self.name} cannot be read ({type(problem).__name__}).")
        return {"keys": [[key, shown(value)] for key, value in keys.items()], "note": " ".join(notes)}

    def rows(self, params: Mapping[str, str]) -> Json:
        """A page of the table; with `count`, also the number of rows."""
        query = Query.parse({k: v for k, v in params.items() if k not in PAGING})
        try:
            skip, limit = int(params.get("skip", 0)), int(params.get("limit", PAGE))
        except ValueError:
            raise QueryError("skip and limit must be whole numbers") from None
        with self.index.opened() as db:
            page = query.page(db, params.get("after"), max(0, skip), max(1, limit))
            count = query.count(db) if params.get("count") else None
        return {"rows": page.rows, "next": page.next, "count": count}

    def beside(self, params: Mapping[str, str]) -> Json:
        """The position of the episode `id` in a table, and its neighbours."""
        query = Query.parse({k: v for k, v in params.items() if k != "id"})
        with self.index.opened() as db:
            return query.beside(db, params.get("id", ""))._asdict()

    def timeline(self, step: int) -> Json:
        """The phases of a step and the activities of its episodes over time."""
        with self._lock:
            self._phases.read()
            phases = [
                [p["phase"], p["start"], p["end"]]
                for p in self._phases.rows
                if p["step"] == step and {"phase", "start", "end"} <= p.keys()
            ]
        with self.index.opened() as db:
            found = db.execute(
                "SELECT id, validate, reward, stop, started, lanes FROM episodes JOIN lanes USING (n) "
                "WHERE step = ? AND started IS NOT NULL ORDER BY started, n",
                (step,),
            ).fetchall()
        names = ("id", "validate", "reward", "stop", "started")
        lanes = [{**dict(zip(names, row, strict=False)), "lanes": json.loads(row[-1])} for row in found]
        return {"step": step, "phases": phases, "episodes": lanes}

    def episode(self, name: str) -> Json:
        """One episode, read from its line, with the text and the advantage of every token."""
        with self.index.opened() as db:
            place = db.execute("SELECT file, offset, length FROM episodes WHERE id = ?", (name,)).fetchone()
        if place is None:
            raise NotRecorded(f"{self.name} has no episode {name}; it may not be indexed yet")
        file, offset, length = place
        try:
            with (self.index.episodes / file).open("rb") as lines:
                lines.seek(offset)
                recorded = json.loads(lines.read(length))
        except (FileNotFoundError, ValueError):
            raise NotRecorded(f"{file} was just rewritten or moved aside; try again in a second") from None
        note = self.tokenizer.note
        try:
            advantages = self._advantages_of(file).get(name, [])
        except UNREADABLE as problem:
            advantages = []
            note = f"{note} The advantages in advantages/{file} are damaged ({reason(problem)}).".strip()
        try:
            segments = [self._segment(segment, advantages[n : n + 1]) for n, segment in enumerate(recorded["segments"])]
            for segment, parent in zip(segments, _parents(segments), strict=True):
                segment["continues"] = parent
            rest = {key: shown(value) for key, value in recorded.items() if key != "segments"}
        except UNREADABLE as problem:
            raise NotRecorded(f"the episode {name} in {file} is damaged ({type(problem).__name__})") from problem
        return {**rest, "segments": segments, "note": note}

    def _segment(self, segment: Json, advantages: Sequence[Any]) -> Json:
        decode = self.tokenizer.decode
        return {
            **{key: value for key, value in segment.items() if key not in ("response_logprobs", "images")},
            "images": [_span(*span) for span in segment.get("images", ())],
            "response_logprobs": shown(segment["response_logprobs"]),
            "prompt_text": pieces(decode, segment["prompt_ids"]) if decode else None,
            "response_text": pieces(decode, segment["response_ids"]) if decode else None,
            "advantages": advantages[0] if advantages else None,
        }

    def image(self, name: str) -> ImageFile:
        """The image with this hash."""
        place = self._images.find(name)
        if place is None:
            raise NotRecorded(f"{self.name} has no such image")
        return ImageFile(place.read_bytes(), f"image/{place.suffix[1:]}")

    def _advantages_of(self, file: str) -> dict[str, Any]:
        """The advantages by episode, for the step of an episode file; the last step is cached."""
        path = self.path / "advantages" / file
        try:
            key = (file, path.stat().st_mtime_ns)
        except FileNotFoundError:
            return {}
        if self._advantages[0] != key:
            with path.open(encoding="utf-8") as lines:
                found = [json.loads(line) for line in lines]
            self._advantages = key, {one["id"]: one["segments"] for one in found}
        return self._advantages[1]


def _parents(segments: Sequence[Json]) -> list[Json | None]:
    found = continued_segments([(segment["prompt_ids"], segment["response_ids"]) for segment in segments])
    return [None if one is None else one._asdict() for one in found]


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """The values of a tree by dotted keys. Lists and empty mappings are values."""
    if isinstance(value, dict) and (value or not key):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _stamp(path: Path) -> int | None:
    """The time of the last change of a file; None if there is none."""
    try:
        return path.stat().st_mtime_ns // 1000  # exact as a JavaScript number
    except OSError:
        return None


def _span(start: int, rows: int, columns: int, image: Json) -> Json:
    named = {"hash": image["$image"], "width": image["width"], "height": image["height"]}
    return {"start": start, "rows": rows, "columns": columns, **named}


def open_runs(paths: Sequence[Path], tokenizer: str | None = None) -> list[RunData]:
    """Open the runs, each with a unique name: the last part of its path, or more if these are equal. `tokenizer`
    overrides the runs' own tokenizers."""
    for path in paths:
        if not path.is_dir():
            raise RallyError(f"there is no run folder at {path}; name the folder of a run")
        if not any((path / name).exists() for name in ("metrics.jsonl", "episodes")):
            raise RallyError(
                f"{path} is not a run folder: it has neither metrics.jsonl nor episodes/{_runs_inside(path)}"
            )
    whole = [path.resolve() for path in paths]
    found = given_tokenizer(tokenizer) if tokenizer else None
    return [RunData(path, _short_name(path, whole), found) for path in whole]


def _runs_inside(path: Path) -> str:
    """Which run folders are one or two levels below: the folder that holds the runs is a common mistake."""
    below = islice((file.parent for level in ("*", "*/*") for file in path.glob(f"{level}/metrics.jsonl")), 4)
    names = ", ".join(sorted(str(run) for run in below))
    return f"; name runs inside it, such as {names}" if names else "; name the folder of a run"


def _short_name(path: Path, all_paths: Sequence[Path]) -> str:
    for parts in range(1, len(path.parts)):
        name = "/".join(path.parts[-parts:])
        if sum("/".join(other.parts[-parts:]) == name for other in all_paths) == 1:
            return one_line(name)
    return one_line(str(path))
