"""Exports the viewer as one HTML file with its data, which needs no server and no network.

The page says what was left out.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import closing
from pathlib import Path, PurePath
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from rally.redact import redacted_json
from rally.types import RallyError
from rally.util.atomic_files import write_atomic
from rally.view.episode_query import Query
from rally.view.page import INDEX, page_files
from rally.view.run_data import RunData

Json = dict[str, Any]
START = "app.js"
PAGE = 500  # rows per query
NO_TOKENIZER = (
    "Where this was exported there was no tokenizer; tokens are shown as numbers beside the text of their turn. "
    "To export it with one, give --tokenizer."
)
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:function|const) (\w+)", re.MULTILINE)
_LINKS = re.compile(r"<link .*?>\n<script .*?</script>\n", re.DOTALL)


class ExportedPage(NamedTuple):
    """The exported file."""

    path: Path
    episodes: int
    left_out: int


def write_export(runs: Sequence[RunData], out: Path, asked: str = "", limit: int = 512) -> ExportedPage:
    """Write the page over these runs to `out`: every metric, and at most `limit` episodes of each run. `asked` is a
    filter as in the page's links; by default the last training and the last validation step are exported."""
    answers: Json = {}
    notes, inside = [], 0
    for number, run in enumerate(runs):
        run.indexer.catch_up()
        rows = list(_chosen(run, asked, limit))
        answers |= {f"runs/{number}/{path}": answer for path, answer in _answers(run, rows)}
        notes.append(_note(run, rows, asked))
        inside += len(rows)
    answers["state"] = {"runs": [run.state() for run in runs]}
    write_atomic(out, bundle({"answers": answers, "notes": notes}))
    return ExportedPage(out, inside, sum(run.state()["episodes"] for run in runs) - inside)


def bundle(data: Mapping[str, Any]) -> str:
    """The page as HTML. Its content security policy allows only our script, by its hash, and no loading."""
    files = page_files()
    script, style = "".join(_modules(files, START, set())), files["style.css"]
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    # Every < is escaped, so that no recorded text can close the script element.
    inside = redacted_json(data).replace("<", "\\u003c")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    tail = f'<script type="application/json" id="data">{inside}</script>\n<script type="module">{script}</script>\n'
    page = _LINKS.sub(lambda _: head, files[INDEX])
    return page.replace("</body>", tail + "</body>")


def _modules(files: Mapping[str, str], name: str, done: set[str]) -> Iterator[str]:
    """The JavaScript modules in dependency order, each in its own scope."""
    done.add(name)
    for _, other in _IMPORT.findall(files[name]):
        if other not in done:
            yield from _modules(files, other, done)
    body = _IMPORT.sub(
        lambda found: f"const {{{found[1].replace(' as ', ': ')}}} = {_variable(found[2])};\n", files[name]
    )
    names = ", ".join(found[1] for found in _EXPORT.finditer(body))
    body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
    yield f"const {_variable(name)} = (() => {{\n{body}return {{ {names} }};\n}})();\n"


def _variable(name: str) -> str:
    return "module_" + name.removesuffix(".js")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _chosen(run: RunData, asked: str, limit: int) -> Iterator[Json]:
    left = limit
    with closing(run.index.connect()) as db:
        for query in [_parsed(asked)] if asked else list(_last_steps(run)):
            after = None
            while left > 0:
                page = query.page(db, after, limit=min(PAGE, left))
                left -= len(page.rows)
                yield from page.rows
                after = page.next
                if after is None:
                    break


def _parsed(asked: str) -> Query:
    try:
        pairs = dict(parse_qsl(asked, strict_parsing=True))
    except ValueError:
        raise RallyError(
            f"the filter {asked!r} is not of the form step=10..20&kind=val; write it as in the page's links"
        ) from None
    return Query.parse(pairs)


def _last_steps(run: RunData) -> Iterator[Query]:
    steps = run.facets()["steps"]
    for validate, kind in ((1, "val"), (0, "train")):
        own = [row[0] for row in steps if row[1] == validate]
        if own:
            yield Query.parse({"kind": kind, "step": str(max(own)), "sort": "id", "desc": "0"})


def _answers(run: RunData, rows: Sequence[Json]) -> Iterator[tuple[str, Any]]:
    yield "metrics", run.metrics()
    yield "rows", rows
    yield "facets", _facets(rows)
    yield "config", _config(run.config())
    for kind in ("train", "val"):
        yield "rewards?" + urlencode({"kind": kind}), run.rewards(kind)
        yield "tasks?" + urlencode({"kind": kind}), _tasks(run.tasks(kind), {row["task"] for row in rows})
    inside = {row["id"] for row in rows}
    for step in sorted({row["step"] for row in rows}):
        yield f"timeline/{step}", _timeline(run.timeline(step), inside)
    shown: set[str] = set()
    for row in rows:
        full = run.episode(row["id"])
        yield "episode?" + urlencode({"id": row["id"]}), _episode(full)
        shown |= {span["hash"] for segment in full["segments"] for span in segment["images"]}
    for name in sorted(shown):
        data, mime = run.image(name)
        yield f"images/{name}", f"data:{mime};base64,{base64.b64encode(data).decode()}"


def _timeline(full: Json, inside: Set[str]) -> Json:
    """The timeline with all lanes, so that the engine does not look idle. Lanes of episodes that are left out have no
    link."""
    return {**full, "episodes": [{**lane, "inside": lane["id"] in inside} for lane in full["episodes"]]}


def _episode(full: Json) -> Json:
    """The episode without the paths at which a tokenizer was searched."""
    return {**full, "note": NO_TOKENIZER if full["note"] else ""}


def _tasks(full: Json, inside: Set[str]) -> Json:
    """The pass rates of all tasks, with the questions of those that were exported."""
    return {**full, "tasks": [one if one["task"] in inside else {**one, "question": ""} for one in full["tasks"]]}


def _config(full: Json) -> Json:
    """The configuration with the names of files and without their folders, which are those of this machine."""
    return {**full, "keys": [[key, _without_folders(value)] for key, value in full["keys"]]}


def _without_folders(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    return f"…/{PurePath(value).name}" if isinstance(value, str) and PurePath(value).is_absolute() else value


def _facets(rows: Sequence[Json]) -> Json:
    """The facets of the exported rows."""
    steps = sorted({(row["step"], row["validate"]) for row in rows})
    own = {key: [row["reward"] for row in rows if (row["step"], row["validate"]) == key] for key in steps}
    scored = {key: [reward for reward in own[key] if reward is not None] for key in steps}
    return {
        "steps": [[*key, len(own[key]), sum(scored[key]) / len(scored[key]) if scored[key] else None] for key in steps],
        "stops": Counter(row["stop"] for row in rows).most_common(),
        "sources": Counter(row["source"] for row in rows).most_common(),
    }


def _note(run: RunData, rows: Sequence[Json], asked: str) -> str:
    count = run.state()["episodes"]
    kinds = sorted({(row["validate"], row["step"]) for row in rows})
    what = asked or ", ".join(f"{'validation' if validate else 'training'} step {step}" for validate, step in kinds)
    left = f"; {count - len(rows):,} were left out" if count > len(rows) else ""
    return (
        f"{run.name}, exported {time.strftime('%Y-%m-%d %H:%M')}: all metrics and rewards, the configuration without "
        f"folders of this machine, and {len(rows):,} of {count:,} episodes "
        f"({what or 'none'}){left}."
    )
