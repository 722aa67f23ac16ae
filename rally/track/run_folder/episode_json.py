"""Episodes as JSON. The JSON is always valid, and an episode that is read back equals the one written.

Fields of the data model are plain JSON. Open values (arguments, extra_info, metrics, ...) are plain JSON where
possible. A value that JSON cannot hold is an object with one key that starts with `$`: `$tuple`, `$float` (nan, inf),
`$int` (too long for a JSON reader), `$str` (lone surrogates), `$dict` (keys that are not strings or start with `$`),
`$image` (by its hash; its bytes are in a separate file) and `$repr`, which comes back as an `Opaque`.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rally.types import (
    ConstrainedSpan,
    Episode,
    Image,
    ImageSpan,
    Routes,
    Segment,
    StopReason,
    Task,
    ToolAnswer,
    ToolCall,
    ToolResponse,
    ToolResult,
    ToolStatus,
    Turn,
    WeightSpan,
)

Json = dict[str, Any]

MAX_DEPTH = 64  # arguments may be nested deeper than the recursion limit, and a dict can contain itself
MAX_INT_BITS = 10_000  # Python parses no integer of more than 4300 digits
MAX_REPR = 1_000  # the repr of an image or a tensor must not fill the disk

_FIELD_AS_IT_IS = frozenset({int, bool, type(None)})  # integers in fields of the data model are small
_SURROGATE = re.compile(r"[\ud800-\udfff]")  # a lone one has no UTF-8


@dataclass(frozen=True)
class Opaque:
    """A value that JSON cannot hold: its type and its repr, truncated to `MAX_REPR` characters."""

    type: str
    text: str


def plain(value: Any, depth: int = 0) -> Any:
    """Any Python value as valid JSON; `restore` gives back an equal one."""
    kind = type(value)  # common types first: an episode has about a hundred values
    if kind is str and value.isascii():
        return value
    if value is None or kind is bool or (kind is float and value - value == 0) or (kind is int and abs(value) < 2**63):
        return value
    return _plain_unusual(value, depth)


def _plain_unusual(value: Any, depth: int) -> Any:
    """Values that `plain` does not return unchanged: other types, subclasses and large numbers."""
    if isinstance(value, str):
        return _plain_str(value[:])
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, int):
        return int(value) if value.bit_length() <= MAX_INT_BITS else {"$int": hex(value)}
    if depth < MAX_DEPTH and isinstance(value, (list, tuple, dict)):
        return _plain_container(value, depth + 1)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a numpy scalar or a 0-d tensor
        return plain(value.item(), MAX_DEPTH)
    return _plain_opaque(value)


def _plain_str(value: str) -> Any:
    if _SURROGATE.search(value):
        return {"$str": [ord(c) for c in value]}
    return value


def _plain_container(value: list[Any] | tuple[Any, ...] | dict[Any, Any], depth: int) -> Any:
    if isinstance(value, dict):
        if all(map(_is_plain_key, value)):
            return {k: plain(v, depth) for k, v in value.items()}
        return {"$dict": [[plain(k, depth), plain(v, depth)] for k, v in value.items()]}
    items = [plain(v, depth) for v in value]
    return items if isinstance(value, list) else {"$tuple": items}


def _is_plain_key(key: Any) -> bool:
    return isinstance(key, str) and key[:1] != "$" and (key.isascii() or not _SURROGATE.search(key))


def _plain_opaque(value: Any) -> Json:
    if isinstance(value, Image):
        return image_to_json(value)
    if isinstance(value, Opaque):
        return {"$repr": plain(value.text), "type": value.type}
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - repr is foreign code; whatever it raises must not lose the episode
        text = f"<no repr: {type(error).__name__}>"
    return {"$repr": plain(text[:MAX_REPR]), "type": f"{type(value).__module__}.{type(value).__qualname__}"}


def image_to_json(image: Image) -> Json:
    return {"$image": image.hash, "format": image.format, "width": image.width, "height": image.height}


def image_from_json(value: Json, folder: Path = Path("images")) -> Image:
    """The image, whose bytes are in `folder`."""
    name, kind = value["$image"], value["format"]
    size = {"width": value["width"], "height": value["height"]}
    return Image(hash=name, format=kind, path=str(folder / f"{name}.{kind}"), **size)


def restore(value: Any) -> Any:
    """The inverse of `plain`."""
    if isinstance(value, list):
        return [restore(v) for v in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tuple": items}:
            return tuple(restore(v) for v in items)
        case {"$float": text}:
            return float(text)
        case {"$int": text}:
            return int(text, 16)
        case {"$str": codes}:
            return "".join(map(chr, codes))
        case {"$dict": pairs}:
            return {restore(k): restore(v) for k, v in pairs}
        case {"$image": _}:
            return image_from_json(value)
        case {"$repr": text, "type": name}:
            return Opaque(name, restore(text))
    return {k: restore(v) for k, v in value.items()}


def episodes_to_json(episodes: Iterable[Episode]) -> Iterator[Json]:
    """`episode_to_json` of each. Neighbouring episodes of a group share their task, which is converted once."""
    task: Task | None = None
    written: Json = {}
    for episode in episodes:
        if episode.task is not task:
            task, written = episode.task, task_to_json(episode.task)
        yield _episode_to_json(episode, written)


def episode_to_json(episode: Episode) -> Json:
    """The episode as a JSON object."""
    return _episode_to_json(episode, task_to_json(episode.task))


def _episode_to_json(episode: Episode, task: Json) -> Json:
    return _fields(
        episode,
        task=task,
        stop_reason=episode.stop_reason.value,
        segments=[_segment_to_json(s) for s in episode.segments],
        turns=[_turn_to_json(t) for t in episode.turns],
    )


def episode_from_json(value: Json) -> Episode:
    """The inverse of `episode_to_json`. What the readers raise for other JSON is in `UNREADABLE`."""
    built = {
        "task": task_from_json(value["task"]),
        "stop_reason": StopReason(value["stop_reason"]),
        "segments": tuple(_segment_from_json(s) for s in value["segments"]),
        "turns": tuple(_turn_from_json(t) for t in value["turns"]),
    }
    episode = Episode(**_restored(value, built))
    _check_mappings(episode, ("timings", "reward_info", "extra"))
    return episode


def _check_mappings(item: Any, names: Sequence[str]) -> None:
    """TypeError if one of these fields is no mapping. An opaque value is one that could not be written as one."""
    for name in names:
        if not isinstance(getattr(item, name), (dict, Opaque)):
            raise TypeError(f"{name} is not a mapping")


def _ids(value: Any) -> tuple[int, ...]:
    """Token ids, or a mask of them."""
    if not isinstance(value, (list, tuple)) or not all(type(one) is int and 0 <= one < 2**31 for one in value):
        raise TypeError("token ids are not a list of whole numbers")
    return tuple(value)


def _fields(item: Any, **written: Any) -> Json:
    """The fields of a dataclass in order: those given in `written` as they are, the others as open values."""
    fields: Json = vars(item) | written
    for name, value in fields.items():
        if type(value) not in _FIELD_AS_IT_IS and name not in written:
            fields[name] = plain(value)
    return fields


def _restored(value: Json, built: Json | None = None) -> Json:
    built = built or {}
    return {k: restore(v) for k, v in value.items() if k not in built} | built


def task_to_json(task: Task) -> Json:
    return _fields(task, prompt=[plain(m) for m in task.prompt])


def task_from_json(value: Json) -> Task:
    prompt = tuple(restore(m) for m in value["prompt"])
    if not all(isinstance(message, dict) for message in prompt):
        raise TypeError("the prompt is not a list of messages")
    task = Task(**_restored(value, {"prompt": prompt}))
    _check_mappings(task, ("tools_kwargs", "interaction_kwargs", "extra_info", "row"))
    return task


def _segment_to_json(segment: Segment) -> Json:
    images = [[s.start, s.rows, s.columns, image_to_json(s.image)] for s in segment.images]
    return {
        "prompt_ids": segment.prompt_ids,
        "response_ids": segment.response_ids,
        "response_mask": segment.response_mask,
        "response_logprobs": _numbers(segment.response_logprobs),
        "spans": [[s.version, s.start, s.end] for s in segment.spans],
        **({"images": images} if images else {}),
        **({"routes": routes_to_json(segment.routes)} if segment.routes is not None else {}),
        **({"constrained": [_span_to_json(span) for span in segment.constrained]} if segment.constrained else {}),
    }


def _span_to_json(span: ConstrainedSpan) -> Json:
    """The grammar as text, and the masks for the trainer."""
    masks = base64.b64encode(span.masks).decode()
    return {"start": span.start, "end": span.end, "grammar": span.grammar, "masks": masks}


def _span_from_json(value: Json) -> ConstrainedSpan:
    return ConstrainedSpan(value["start"], value["end"], value["grammar"], base64.b64decode(value["masks"]))


def routes_to_json(routes: Routes) -> Json:
    return {"int16": base64.b64encode(routes.data).decode(), "layers": routes.layers, "experts": routes.experts}


def _routes_from_json(value: Json | None) -> Routes | None:
    if value is None:
        return None
    return Routes(base64.b64decode(value["int16"]), value["layers"], value["experts"])


def _numbers(values: Sequence[float]) -> Sequence[Any]:
    # Most of a file is tokens, so the common case passes the tuple to the encoder unchanged.
    return values if all(map(math.isfinite, values)) else [plain(v) for v in values]


def _segment_from_json(value: Json) -> Segment:
    return Segment(
        prompt_ids=_ids(value["prompt_ids"]),
        response_ids=_ids(value["response_ids"]),
        response_mask=_ids(value["response_mask"]),
        response_logprobs=tuple(v if isinstance(v, float) else restore(v) for v in value["response_logprobs"]),
        spans=tuple(WeightSpan(*s) for s in value["spans"]),
        images=tuple(ImageSpan(at, rows, columns, restore(i)) for at, rows, columns, i in value.get("images", ())),
        routes=_routes_from_json(value.get("routes")),
        constrained=tuple(map(_span_from_json, value.get("constrained", ()))),
    )


def _turn_to_json(turn: Turn) -> Json:
    return _fields(
        turn,
        tool_calls=[_fields(c) for c in turn.tool_calls],
        tool_results=[_result_to_json(r) for r in turn.tool_results],
        tool_answers=[_answer_to_json(a) for a in turn.tool_answers],
    )


def _turn_from_json(value: Json) -> Turn:
    built = {
        "tool_calls": tuple(ToolCall(**_restored(c)) for c in value["tool_calls"]),
        "tool_results": tuple(_result_from_json(r) for r in value["tool_results"]),
        "tool_answers": tuple(_answer_from_json(a) for a in value.get("tool_answers", ())),
    }
    turn = Turn(**_restored(value, built))
    if not isinstance(turn.role, str) or not isinstance(turn.text, str):
        raise TypeError("a turn has no role or no text")
    return turn


def _answer_to_json(answer: ToolAnswer) -> Json:
    return _fields(answer, call=None if answer.call is None else _fields(answer.call))


def _answer_from_json(value: Json) -> ToolAnswer:
    call = value["call"]
    return ToolAnswer(**_restored(value, {"call": None if call is None else ToolCall(**_restored(call))}))


def _result_to_json(result: ToolResult) -> Json:
    return _fields(result, call=_fields(result.call), status=result.status.value, response=_fields(result.response))


def _result_from_json(value: Json) -> ToolResult:
    built = {
        "call": ToolCall(**_restored(value["call"])),
        "status": ToolStatus(value["status"]),
        "response": ToolResponse(**_restored(value["response"])),
    }
    return ToolResult(**_restored(value, built))
