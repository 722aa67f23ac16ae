"""Runs the hidden tests of a repository in a fresh sandbox, and writes what an agent changed as a patch.

The sandbox gets the inputs of the tests and returns results as JSON. The right values stay outside, where the results
are compared: code of the agent cannot read them, nor take part in the comparison.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import re
import threading
from collections.abc import Coroutine, Mapping
from functools import cache
from typing import Any, TypeVar

from rally.sandbox.sandbox import Sandbox
from rally.sandbox.types import Outcome, Program
from rally.types import RallyError

COMMAND_SECONDS = 20.0
T = TypeVar("T")
_LINE = re.compile(r"[^\n]*\n|[^\n]+")


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="repair-sandbox", daemon=True).start()
    return loop


@cache
def sandbox() -> Sandbox:
    """One sandbox for all agents, used from one event loop."""
    return Sandbox()


def wait_for(work: Coroutine[None, None, T]) -> T:
    """The result of a call of the sandbox, from the thread of an agent."""
    return asyncio.run_coroutine_threadsafe(work, _event_loop()).result()


def check_row(row: Mapping[str, Any]) -> None:
    """RallyError for a row that another version of this recipe wrote, or that was written by hand."""
    info = row.get("extra_info") or {}
    try:
        files, known = (json.loads(info[name]) for name in ("files", "test"))
        fine = all(isinstance(text, str) for text in files.values()) and isinstance(known["module"], str)
        fine = fine and bool(files) and all(len(case) == 3 for case in known["cases"])
    except (KeyError, TypeError, ValueError, AttributeError):
        fine = False
    if not fine:
        raise RallyError(
            "extra_info.files and extra_info.test are not those that this version of the recipe repair writes; make "
            "the rows again with: rally data repair"
        )


_CALLS = """
import importlib, json
module = importlib.import_module({module!r})
results = [getattr(module, name)(*given) for name, given in json.loads({calls!r})]
text = json.dumps(results)
if json.loads(text) == results:  # a tuple is no list
    print()
    print(text)
"""


def passes_hidden_tests(files: Mapping[str, str], test: str) -> bool:
    """Whether every call of the test returns its value, in a sandbox of their own. Ending early does not pass."""
    known = json.loads(test)
    calls = json.dumps([[name, given] for name, given, _ in known["cases"]])
    code = _CALLS.format(module=known["module"], calls=calls)
    held = {name: text.encode() for name, text in files.items()}
    outcome: Outcome = wait_for(sandbox().run(Program(code=code, files=held, timeout=COMMAND_SECONDS)))
    if not outcome.ok or outcome.run is None:
        return False
    results = read_last_line(outcome.run.stdout)
    return bool(results == [wanted for _, _, wanted in known["cases"]])


def read_last_line(text: str) -> Any:
    """The JSON in the last line of an output; None if it is none. Programs of an agent may write anything."""
    try:
        return json.loads(text.rstrip("\n").rpartition("\n")[2])
    except (ValueError, RecursionError):
        return None


def patch_of(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """The changes as a patch that `patch -p1` applies. Files that are no longer there stay as they were."""
    parts = []
    for name, text in before.items():
        old, new = (_LINE.findall(content) for content in (text, after.get(name, text)))
        for line in difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"):
            parts.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(parts)
