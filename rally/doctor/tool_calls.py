"""Whether every tool answers: each is called once, for real, through the same session as in an episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import NamedTuple

from rally.doctor.case import DoctorCase, Finding
from rally.tools.sample_arguments import Example, example_of
from rally.track.display_text import one_line
from rally.types import Task, ToolCall, ToolResult, ToolStatus

SHOWN = 80
NOTHING = "null"  # what None is as JSON


class TriedTool(NamedTuple):
    name: str
    example: Example
    result: ToolResult
    trouble: dict[str, int]


def tools(case: DoctorCase) -> Iterator[Finding]:
    box = case.toolbox
    if not box.names:
        yield Finding("tools", "ok", "none are configured")
        return
    for tool in box.tools:
        if tool.destructive:
            told = f"{tool.name} was not called, because a call may destroy something: nobody says that it does not"
            yield Finding("tools", "warning", f"{told}; try it by hand where that does no harm")
    for tried in asyncio.run(_try_all(case)):
        yield judge(tried)


async def _try_all(case: DoctorCase) -> list[TriedTool]:
    names = [tool.name for tool in case.toolbox.tools if not tool.destructive]
    return await asyncio.gather(*(_try(case, name) for name in names))


async def _try(case: DoctorCase, name: str) -> TriedTool:
    """One call with the keywords that a row gives this tool; a tool that knows of no example gets made-up arguments."""
    [tool] = [one for one in case.toolbox.tools if one.name == name]
    example = example_of(tool)
    session = case.toolbox.open(_row_for(case, name), "doctor")
    try:
        [result] = await session.run([ToolCall(name=name, arguments=example.arguments)])
    finally:
        await session.close()
    return TriedTool(name, example, result, session.trouble)


def _row_for(case: DoctorCase, name: str) -> Task:
    offered = [t for t in case.tasks if name in (t.extra_info.get("tool_selection") or [name])]
    return next((t for t in offered if name in t.tools_kwargs), next(iter(offered), case.first_task))


def judge(tried: TriedTool) -> Finding:
    """A failed call is an error; unless the arguments were made up, for those a tool may refuse with reason."""
    result, made_up = tried.result, not tried.example.known
    said = one_line(result.response.text or f"{len(result.response.image or ())} images")
    said = said if len(said) <= SHOWN else f"{said[: SHOWN - 3]}..."
    with_what = "made-up arguments" if made_up else "its example"
    call = f"{tried.name} was called with {with_what} {json.dumps(tried.example.arguments, ensure_ascii=False)}"
    if tried.trouble and result.ok:
        what = ", ".join(f"{name}: {count}" for name, count in tried.trouble.items())
        return Finding("tools", "error", f"{call} and answered, but ended badly ({what}); look at its methods")
    if result.ok and result.response.text == NOTHING:
        told = f"{call} and answered {NOTHING}, as a function without `return` does"
        return Finding("tools", "warning", f"{told}; if the model should read something, return it")
    if result.ok:
        return Finding("tools", "ok", f"{call} and answered in {result.seconds:.3f} s: {said!r}")
    told = f"{call} and failed in {result.seconds:.3f} s ({result.status}): {said!r}"
    if made_up and result.status in (ToolStatus.ERROR, ToolStatus.BAD_ARGUMENTS):
        return Finding(
            "tools", "warning", f"{told}; if these are fair arguments mend the tool, else give it an `example`"
        )
    return Finding("tools", "error", f"{told}; mend the tool, or start what it asks")
