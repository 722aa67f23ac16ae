"""Doctor check of the tools: each is really called once, through the same session as in an episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import NamedTuple

from rally.doctor.check_context import DoctorCase, Finding
from rally.runs.row_checks import missing_tools
from rally.tools.sample_arguments import Example, example_of
from rally.track.display_text import one_line
from rally.types import Task, ToolCall, ToolResult, ToolStatus

SHOWN = 80
NOTHING = "null"  # None as JSON


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
    if missing := missing_tools(case.config, case.tasks, box):
        yield Finding("tools", "warning", missing)
    for tool in box.tools:
        if tool.destructive:
            note = f"{tool.name} was not called, because a call may be destructive"
            yield Finding("tools", "warning", f"{note}; try it by hand where that does no harm")
    for tried in asyncio.run(_try_all(case)):
        yield judge(tried)


async def _try_all(case: DoctorCase) -> list[TriedTool]:
    names = [tool.name for tool in case.toolbox.tools if not tool.destructive]
    return await asyncio.gather(*(_try(case, name) for name in names))


async def _try(case: DoctorCase, name: str) -> TriedTool:
    """Call a tool with the keywords of a row. A tool without an example gets made-up arguments."""
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
    """A failed call is an error, or a warning if the arguments were made up: a tool may rightly reject those."""
    result, made_up = tried.result, not tried.example.known
    answer = one_line(result.response.text or f"{len(result.response.image or ())} images")
    answer = answer if len(answer) <= SHOWN else f"{answer[: SHOWN - 3]}..."
    with_what = "made-up arguments" if made_up else "its example"
    call = f"{tried.name} was called with {with_what} {json.dumps(tried.example.arguments, ensure_ascii=False)}"
    if tried.trouble and result.ok:
        what = ", ".join(f"{name}: {count}" for name, count in tried.trouble.items())
        return Finding(
            "tools",
            "error",
            f"{call} and answered, but failed afterwards ({what}); check its other methods",
        )
    if result.ok and result.response.text == NOTHING:
        problem = f"{call} and answered {NOTHING}, as a function without `return` does"
        return Finding("tools", "warning", f"{problem}; return the text that the model should read")
    if result.ok:
        return Finding("tools", "ok", f"{call} and answered in {result.seconds:.3f} s: {answer!r}")
    problem = f"{call} and failed in {result.seconds:.3f} s ({result.status}): {answer!r}"
    if made_up and result.status in (ToolStatus.ERROR, ToolStatus.BAD_ARGUMENTS):
        advice = "if these are valid arguments fix the tool, else give it an `example` (docs/doctor.md)"
        return Finding("tools", "warning", f"{problem}; {advice}")
    return Finding("tools", "error", f"{problem}; fix the tool, or start the service it needs")
