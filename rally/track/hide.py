"""What is written to the run folder holds no known secret in its texts, and is read back as what it was otherwise.

Only texts are redacted, before they are encoded: a secret such as 123456 is also a number, part of a token id or the
name of a field by chance, and hiding those would leave a file that nobody can read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from rally.redact import redact, redact_texts
from rally.track.lines import checked_lines
from rally.track.serialize import Json, plain

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
