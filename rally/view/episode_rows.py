"""Converts a recorded episode into a table row, its searchable text, and its lanes in the timeline of its step.

Lines are read as JSON, not as `Episode` objects, so that records of older and newer versions of Rally can be shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rally.track.run_folder.episode_json import Opaque, restore
from rally.types import Image

Json = dict[str, Any]
EXCERPT_LENGTH = 160  # characters of question and answer in a row

Lane = tuple[str, float, float]
"""An activity of an episode with its start and end in seconds."""


class Summary(NamedTuple):
    """The columns of the table. `score` decides whether the episode passed: `acc` where the reward function reports it,
    as in the core metric of a validation, else the reward. `started` is the start of the first lane in Unix seconds, or
    None if the record has no times; `lanes` are relative to it."""

    id: str
    step: int
    validate: int
    baseline: int
    grp: str
    task: str
    source: str
    reward: float | None
    score: float | None
    stop: str
    turns: int
    calls: int
    errors: int
    sampled: int
    tokens: int
    seconds: float
    question: str
    answer: str
    started: float | None
    lanes: str


COLUMNS = Summary._fields[:-1]
"""The columns of the table. Lanes are stored separately, because they would slow down searches."""


def shown(value: Any) -> Any:
    """A recorded value as readable JSON: the markers of values that JSON cannot hold are resolved."""
    return _readable(restore(value))


def _readable(value: Any) -> Any:
    if isinstance(value, dict):
        return {k if isinstance(k, str) else repr(k): _readable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_readable(v) for v in value]
    if isinstance(value, Image):
        return f"<image {value.hash}: {value.width} x {value.height}>"
    if isinstance(value, Opaque):
        return f"<{value.type}: {value.text}>"
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if isinstance(value, int) and value.bit_length() > 53:
        return str(value)  # a seed has 63 bits, a JavaScript number 53
    return value


def summarize(episode: Json) -> Summary:
    """The table row of a recorded episode."""
    turns, segments = episode["turns"], episode["segments"]
    results = [result for turn in turns for result in turn["tool_results"]]
    lanes = list(_lanes(episode))
    begin = min((lane[1] for lane in lanes), default=0.0)
    return Summary(
        id=text_of(episode["id"]),
        step=episode["step"],
        validate=int(episode["validate"]),
        baseline=int(episode.get("baseline", False)),
        grp=text_of(episode["group"]),
        task=text_of(episode["task"]["id"]),
        source=text_of(episode["task"]["data_source"]),
        reward=_finite(episode["reward"]),
        score=_score(episode),
        stop=episode["stop_reason"],
        turns=len(turns) + 1,
        calls=len(results),
        errors=sum(result["status"] != "ok" for result in results),
        sampled=sum(sum(segment["response_mask"]) for segment in segments),
        tokens=sum(len(segment["response_ids"]) for segment in segments),
        seconds=_seconds(episode["timings"], "total"),
        question=_excerpt(_question(episode["task"])),
        answer=_excerpt(next((text_of(t["text"]) for t in reversed(turns) if t["role"] == "assistant"), "")),
        started=begin if lanes else None,
        lanes=json.dumps([[kind, round(start - begin, 4), round(end - begin, 4)] for kind, start, end in lanes]),
    )


def searched(episode: Json) -> str:
    """The searchable text of an episode: prompt, replies, calls, tool results, ground truth and errors."""
    task = episode["task"]
    parts = [episode["id"], task["id"], task["data_source"], task["ground_truth"], episode["error"]]
    parts += [message.get("content") for message in task["prompt"] if isinstance(message, dict)]
    for turn in episode["turns"]:
        parts.append(turn["text"])
        parts += [result["response"]["text"] for result in turn["tool_results"]]
    return "\n".join(text for part in parts if part is not None and (text := text_of(part)))


def text_of(value: Any) -> str:
    """The text of a recorded value: a string as it is, the texts of content parts, anything else as JSON."""
    if isinstance(value, str) and value.isascii():
        return value
    return _words(shown(value))


def _words(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(_words, value))
    if isinstance(value, dict) and value.get("type") == "image":
        return "[image]"
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        value = value["text"]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()  # SQLite rejects lone surrogates


def _question(task: Json) -> str:
    messages = [m for m in task["prompt"] if isinstance(m, dict)]
    asked = [m for m in messages if m.get("role") == "user"] or messages
    return text_of(asked[-1].get("content") or "") if asked else ""


def _excerpt(text: str) -> str:
    short = " ".join(text[: 8 * EXCERPT_LENGTH].split())
    return short if len(short) <= EXCERPT_LENGTH else short[: EXCERPT_LENGTH - 1] + "…"


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _score(episode: Json) -> float | None:
    reward, info = _finite(episode["reward"]), episode["reward_info"]
    reported = _finite(info.get("acc")) if isinstance(info, dict) and reward is not None else None
    return reward if reported is None else reported


def _seconds(times: Mapping[str, Any], name: str) -> float:
    """A time, 0 if an older record lacks it."""
    return _finite(times.get(name)) or 0.0


def _lanes(episode: Json) -> Iterator[Lane]:
    """The lanes of all turns, and of scoring at the end. What an agent behind the gateway does between its requests is
    `agent`; what an environment does to begin and to answer is `env`."""
    extra, times = episode.get("extra"), episode["timings"]
    own = extra if isinstance(extra, dict) else {}
    began = _seconds(times, "started")
    spans = [(turn, began + _seconds(turn, "started"), _seconds(turn, "seconds")) for turn in episode["turns"]]
    spans = [(turn, start, start + took) for turn, start, took in spans if took > 0]
    engine = [lane for turn, start, end in spans if turn["role"] == "assistant" for lane in _sampling(turn, start, end)]
    end = max((end for _, _, end in spans), default=began)
    yield from engine
    if isinstance(own.get("agent"), dict):
        end = max(end, began + _seconds(times, "total"))
        yield from (("agent", since, until) for since, until in _gaps(engine, began, end))
    else:
        other = "env" if isinstance(own.get("environment"), dict) else None
        if other and spans:
            yield other, began, min(start for _, start, _ in spans)  # it writes the prompt
        yield from ((other or turn["role"], start, end) for turn, start, end in spans if turn["role"] != "assistant")
    if (score := _seconds(times, "score")) > 0 and episode["turns"]:
        yield "score", end, end + score


def _gaps(lanes: Sequence[Lane], start: float, end: float) -> Iterator[tuple[float, float]]:
    """The times between `start` and `end` that no lane covers; requests of an agent may overlap."""
    at = start
    for _, since, until in sorted(lanes, key=lambda lane: lane[1]):
        if since > at:
            yield at, since
        at = max(at, until)
    if end > at:
        yield at, end


def _sampling(turn: Mapping[str, Any], start: float, end: float) -> Iterator[Lane]:
    begun = min(end, start + _seconds(turn, "queued"))
    first = min(end, max(begun, start + _seconds(turn, "first_token")))
    for kind, since, until in (("queue", start, begun), ("prefill", begun, first), ("decode", first, end)):
        if until > since:
            yield kind, since, until
