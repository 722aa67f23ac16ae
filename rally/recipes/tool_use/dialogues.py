"""Dialogues over a world: user turns, each with the calls that do it. A later call may need an earlier result.

With `gaps`, the first turn cannot be done: a value is missing, or the function is. No call is right then. The next user
turn brings what was missing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rally.recipes.tool_use.worlds import Depot, Notebook, World

Call = tuple[str, dict[str, Any]]
ITEMS = ("bolts", "hinges", "washers", "lamps", "cables", "gears")
BINS = ("A1", "A2", "B1", "B2", "C1")
TITLES = ("Packing", "Budget", "Recipes", "Repairs", "Birthdays", "Reading")
LINES = ("buy new batteries", "ask for the second key", "the blue folder", "twelve eggs", "call on Friday")
GAP = " | "  # between a request and the value that it lacks at first
TAGS = ("home", "work", "urgent", "later")


@dataclass(frozen=True)
class UserTurn:
    """What the user says and the calls that do it; `adds` is a function that the agent has only from now on."""

    text: str
    calls: tuple[Call, ...] = ()
    adds: str | None = None


@dataclass(frozen=True)
class Dialogue:
    world: type[World]
    state: dict[str, Any]
    turns: tuple[UserTurn, ...]

    @property
    def withheld(self) -> frozenset[str]:
        return frozenset(turn.adds for turn in self.turns if turn.adds is not None)


def dialogue(seed: int, gaps: bool) -> Dialogue:
    """The dialogue of a seed, with two to four user turns and, with `gaps`, one more."""
    rng = random.Random(f"tool_use/dialogue/{gaps}/{seed}")
    world, state, draw = rng.choice((_depot, _notebook))(rng)
    played = world(state)
    turns: list[UserTurn] = []
    for number in range(rng.randint(2, 4)):
        gap = gaps and number == 0
        turn = draw(played, gap)
        for name, arguments in turn.calls:
            assert "error" not in json.loads(played.call(name, arguments)), (name, arguments)
        turns += _with_gap(turn, rng) if gap else [turn]
    return Dialogue(world, state, tuple(turns))


def _with_gap(turn: UserTurn, rng: random.Random) -> Iterator[UserTurn]:
    """The turn in two: without a value, which comes after; or without the function."""
    asked, _, value = turn.text.partition(GAP)
    if rng.random() < 0.5:
        yield UserTurn(f"{asked}.")
        yield UserTurn(f"Sorry, I forgot to say: {value}.", turn.calls)
        return
    yield UserTurn(f"{asked} {value}.")
    yield UserTurn("Now you have a function for that. Please do it.", turn.calls, adds=turn.calls[0][0])


Drawn = tuple[type[World], dict[str, Any], Callable[[World, bool], UserTurn]]


def _depot(rng: random.Random) -> Drawn:
    state = {name: {item: rng.randint(3, 40) for item in rng.sample(ITEMS, 3)} for name in rng.sample(BINS, 3)}

    def draw(world: World, gap: bool) -> UserTurn:
        source, target = rng.sample(sorted(world.state), 2)
        held = world.state[source]
        item, count = rng.choice(ITEMS), rng.randint(2, 30)
        add: Call = ("add_items", {"bin": target, "item": item, "count": count})
        if gap:
            return UserTurn(f"Please store {count} {item}{GAP}in {target}", (add,))
        options = [
            UserTurn(f"Put {count} {item} into {target}.", (add,)),
            UserTurn(f"How many {item} are in {source}?", (("count_items", {"bin": source, "item": item}),)),
            UserTurn(f"What does {source} hold?", (("list_bin", {"bin": source}),)),
        ]
        if held:
            some = rng.choice(sorted(held))
            part = rng.randint(1, held[some])
            move = {"item": some, "source": source, "target": target}
            counted: Call = ("count_items", {"bin": source, "item": some})
            remove: Call = ("remove_items", {"bin": source, "item": some, "count": part})
            options += [
                UserTurn(f"Move {part} {some} from {source} to {target}.", (("move_items", {**move, "count": part}),)),
                UserTurn(
                    f"Move all {some} from {source} to {target}.",
                    (counted, ("move_items", {**move, "count": held[some]})),
                ),
                UserTurn(f"Take {part} {some} out of {source}.", (remove,)),
                UserTurn(f"Take {part} {some} out of {source}, and put {count} {item} into {target}.", (remove, add)),
            ]
        return rng.choice(options)

    return Depot, state, draw


def _notebook(rng: random.Random) -> Drawn:
    titles = rng.sample(TITLES, 4)
    state: dict[str, Any] = {title: {"text": rng.choice(LINES), "tags": []} for title in titles[:3]}
    unused = [title for title in TITLES if title not in state]

    def draw(world: World, gap: bool) -> UserTurn:
        title, line, tag = rng.choice(sorted(world.state)), rng.choice(LINES), rng.choice(TAGS)
        append: Call = ("append_text", {"title": title, "text": line})
        tagged: Call = ("add_tag", {"title": title, "tag": tag})
        if gap:
            return UserTurn(f'Please add the line "{line}"{GAP}to the note {title}', (append,))
        options = [
            UserTurn(f'Add the line "{line}" to the note {title}.', (append,)),
            UserTurn(f"Tag the note {title} with {tag}.", (tagged,)),
            UserTurn(f"What does the note {title} say?", (("read_note", {"title": title}),)),
            UserTurn(f'Add the line "{line}" to the note {title}, and tag it with {tag}.', (append, tagged)),
            UserTurn("Which notes are there?", (("list_notes", {}),)),
        ]
        if len(world.state) > 2:
            options.append(UserTurn(f"Delete the note {title}.", (("delete_note", {"title": title}),)))
        if fresh := [one for one in unused if one not in world.state]:
            new = rng.choice(fresh)
            text = world.state[title]["text"]
            read: Call = ("read_note", {"title": title})
            create: Call = ("create_note", {"title": new, "text": line})
            options += [
                UserTurn(f'Create a note {new} with the text "{line}".', (create,)),
                UserTurn(
                    f"Create a note {new} with the same text as the note {title}.",
                    (read, ("create_note", {"title": new, "text": text})),
                ),
            ]
        return rng.choice(options)

    return Notebook, state, draw
