"""Guarantees: an identical call of a tool is answered as it was answered before, and only where that is the same thing.

Only tools that keep nothing per episode can be cached. Answers that succeeded are kept, up to `LONGEST` characters;
those used least recently are forgotten first.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from rally.tools.results import Answer

LONGEST = 1_000_000  # the memory of a run is not for what a tool blurts out once


class AnswerCache:
    """The last `size` answers of one tool."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._answers: OrderedDict[str, Answer] = OrderedDict()

    def find(self, key: str) -> Answer | None:
        if key not in self._answers:
            return None
        self._answers.move_to_end(key)
        return self._answers[key]

    def keep(self, key: str, answer: Answer) -> None:
        if len(answer.response.text or "") > LONGEST:
            return
        self._answers[key] = answer
        self._answers.move_to_end(key)
        if len(self._answers) > self._size:
            self._answers.popitem(last=False)


def call_key(arguments: Mapping[str, Any], row: Mapping[str, Any]) -> str | None:
    """Two calls with the same key get the same: the arguments, in any order, and what the row adds to them.

    None for arguments nested too deeply to be compared: such a call is not cached.
    """
    try:
        return json.dumps([arguments, row], sort_keys=True, default=repr)
    except RecursionError:
        return None
