"""Two small worlds with state, whose functions dialogues call: a depot of bins with items, and a notebook.

A call returns JSON. A call that the world refuses changes nothing and returns `{"error": ...}`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any


class WorldRefusal(Exception):
    """A call cannot be done; its text is the answer."""


def described(name: str, about: str, **params: tuple[str, str]) -> dict[str, Any]:
    """A tool whose parameters are (type, description), all required."""
    properties = {key: {"type": kind, "description": text} for key, (kind, text) in params.items()}
    schema = {"type": "object", "properties": properties, "required": list(params)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


class World:
    """State and the functions over it. Subclasses have a method for each tool."""

    tools: Sequence[dict[str, Any]] = ()
    reads: frozenset[str] = frozenset()
    """The functions that change nothing."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = copy.deepcopy(state)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result as JSON."""
        (schema,) = [t["function"]["parameters"] for t in self.tools if t["function"]["name"] == name]
        kinds = {"string": str, "integer": int}
        wrong = [
            key
            for key, about in schema["properties"].items()
            if not isinstance(arguments.get(key), kinds[about["type"]]) or isinstance(arguments.get(key), bool)
        ]
        if wrong or arguments.keys() - schema["properties"].keys():
            return json.dumps({"error": f"the arguments must be {', '.join(schema['properties'])}, as described"})
        try:
            return json.dumps(getattr(self, name)(**arguments))
        except WorldRefusal as refusal:
            return json.dumps({"error": str(refusal)})


_BIN, _ITEM, _COUNT = (
    ("string", "The name of the bin."),
    ("string", "The item, in the plural."),
    ("integer", "How many."),
)


class Depot(World):
    """Bins that hold items: {bin: {item: count}}."""

    tools = (
        described("list_bin", "Lists the items of a bin with their numbers.", bin=_BIN),
        described("count_items", "Says how many of an item are in a bin.", bin=_BIN, item=_ITEM),
        described("add_items", "Puts items into a bin.", bin=_BIN, item=_ITEM, count=_COUNT),
        described("remove_items", "Takes items out of a bin.", bin=_BIN, item=_ITEM, count=_COUNT),
        described(
            "move_items",
            "Moves items from one bin to another.",
            item=_ITEM,
            source=("string", "The bin to take them from."),
            target=("string", "The bin to put them into."),
            count=_COUNT,
        ),
    )
    reads = frozenset({"list_bin", "count_items"})

    def list_bin(self, bin: str) -> dict[str, int]:
        return dict(self._bin(bin))

    def count_items(self, bin: str, item: str) -> dict[str, int]:
        return {"count": self._bin(bin).get(item, 0)}

    def add_items(self, bin: str, item: str, count: int) -> dict[str, int]:
        if count < 1:
            raise WorldRefusal("count must be at least 1")
        self._bin(bin)[item] = self._bin(bin).get(item, 0) + count
        return {"count": self._bin(bin)[item]}

    def remove_items(self, bin: str, item: str, count: int) -> dict[str, int]:
        held = self._bin(bin).get(item, 0)
        if not 1 <= count <= held:
            raise WorldRefusal(f"{bin} holds {held} {item}")
        self._bin(bin)[item] = held - count
        if held == count:
            del self._bin(bin)[item]
        return {"count": held - count}

    def move_items(self, item: str, source: str, target: str, count: int) -> dict[str, int]:
        self._bin(target)
        self.remove_items(source, item, count)
        return self.add_items(target, item, count)

    def _bin(self, name: str) -> dict[str, int]:
        if name not in self.state:
            raise WorldRefusal(f"there is no bin {name}; the bins are {', '.join(self.state)}")
        found: dict[str, int] = self.state[name]
        return found


_TITLE = ("string", "The title of the note.")


class Notebook(World):
    """Notes with a text and tags: {title: {"text": ..., "tags": [...]}}."""

    tools = (
        described("list_notes", "Lists the titles of all notes."),
        described("read_note", "Returns the text and the tags of a note.", title=_TITLE),
        described("create_note", "Creates a note.", title=_TITLE, text=("string", "The text.")),
        described("append_text", "Adds a line to a note.", title=_TITLE, text=("string", "The line.")),
        described("add_tag", "Adds a tag to a note.", title=_TITLE, tag=("string", "The tag.")),
        described("delete_note", "Deletes a note.", title=_TITLE),
    )
    reads = frozenset({"list_notes", "read_note"})

    def list_notes(self) -> list[str]:
        return list(self.state)

    def read_note(self, title: str) -> dict[str, Any]:
        return dict(self._note(title))

    def create_note(self, title: str, text: str) -> dict[str, str]:
        if title in self.state:
            raise WorldRefusal(f"there is a note {title} already")
        self.state[title] = {"text": text, "tags": []}
        return {"created": title}

    def append_text(self, title: str, text: str) -> dict[str, str]:
        note = self._note(title)
        note["text"] = f"{note['text']}\n{text}"
        return {"text": note["text"]}

    def add_tag(self, title: str, tag: str) -> dict[str, list[str]]:
        note = self._note(title)
        note["tags"] = sorted({*note["tags"], tag})
        return {"tags": note["tags"]}

    def delete_note(self, title: str) -> dict[str, str]:
        self._note(title)
        del self.state[title]
        return {"deleted": title}

    def _note(self, title: str) -> dict[str, Any]:
        if title not in self.state:
            raise WorldRefusal(f"there is no note {title}; the notes are {', '.join(self.state)}")
        found: dict[str, Any] = self.state[title]
        return found
