"""Doctor checks of the rows: sources, steps, the agent loops and simulated users they name, and prompt lengths."""

from __future__ import annotations

from collections.abc import Iterator

from rally.data import TaskSet
from rally.doctor.check_context import DoctorCase, Finding, listed, some
from rally.loops import find_loop
from rally.runs import build
from rally.runs.build.update_settings import total_steps_of
from rally.runs.row_checks import LoopCheck
from rally.track.display_text import one_line
from rally.types import Task


def rows(case: DoctorCase) -> Iterator[Finding]:
    if case.train_rows is not None:
        yield _summary("training", case.train_rows)
        yield _steps(case, case.train_rows)
    if case.val_rows is not None:
        yield _summary("validation", case.val_rows)
    if case.config.data.need_tools_kwargs:
        bare = [task.id for task in case.tasks if not task.tools_kwargs]
        if bare:
            problem = f"row {bare[0]} has no extra_info.tools_kwargs, which data.need_tools_kwargs=true requires"
            yield Finding("rows", "error", f"{problem}; add them, or leave the key out")


def _summary(kind: str, tasks: TaskSet) -> Finding:
    first, sources = tasks[0], listed([task.data_source for task in some(tasks)])
    question = one_line(str(first.prompt[-1].get("content")))
    asked = question if len(question) <= 60 else f"{question[:57]}..."
    truth = one_line(str(first.ground_truth))[:40]
    text = f"{len(tasks):,} {kind} rows of {sources}; the first ({first.id}) asks {asked!r}, ground truth {truth!r}"
    return Finding("rows", "ok", text)


def _steps(case: DoctorCase, tasks: TaskSet) -> Finding:
    config = case.config
    steps = total_steps_of(config, len(tasks))
    sampler = build.sampler_of(config, tasks, steps)
    size = f"{config.data.train_batch_size} prompts x {config.rollout.n} episodes, chosen by {type(sampler).__name__}"
    if config.data.train_batch_size > len(tasks):
        more = f"more prompts than the {len(tasks):,} rows, so a step uses rows more than once"
        return Finding("rows", "warning", f"{steps:,} steps of {size}; {more}; lower data.train_batch_size")
    return Finding("rows", "ok", f"{steps:,} steps of {size}")


def loops(case: DoctorCase) -> Iterator[Finding]:
    """The agent loop of every row, and the simulated user it names."""
    named = build.loops_of(case.config)
    default, overrides = case.config.agent_loop_name, case.config.rollout.agent_loop_class is not None
    asked = [default if overrides else task.agent_name or default for task in case.tasks] or [default]
    for name in dict.fromkeys(asked):
        find_loop(name, named)
    check_loop = LoopCheck(case.config)
    for task in case.tasks:
        check_loop(task)
    users = case.users
    wanted = [user.name for task in case.tasks if (user := users.find(task)) is not None]
    idle = [name for name in users.names if name not in wanted] if case.tasks else []
    if idle:
        problem = f"no checked row uses the simulated user {idle[0]}"
        yield Finding("loops", "warning", f"{problem}; name it in extra_info.interaction_kwargs.name, or leave it out")
    spoken = f", simulated users {listed(wanted)}" if wanted else ""
    yield Finding("loops", "ok", f"agent loop {listed(asked)}{spoken}")


def lengths(case: DoctorCase) -> Iterator[Finding]:
    if case.train_rows is not None:
        yield _lengths(case, "training", case.train_rows)
    if case.val_rows is not None:
        yield _lengths(case, "validation", case.val_rows)


def _lengths(case: DoctorCase, kind: str, tasks: TaskSet) -> Finding:
    most, data = case.config.prompt_length, case.config.data
    checked = some(tasks)
    counts = sorted(prompt_tokens(case, task) for task in checked)
    over = sum(count > most for count in counts)
    text = f"{kind} prompts have {counts[0]} to {counts[-1]} tokens, half of them at most {counts[len(counts) // 2]}"
    if not over:
        return Finding("lengths", "ok", f"{text}; all {len(checked):,} checked fit data.max_prompt_length={most}")
    share = f"{text}; {over / len(checked):.1%} of {len(checked):,} exceed data.max_prompt_length={most}"
    raised = f"raise it to {counts[-1]}"
    if data.filter_overlong_prompts and over == len(checked):
        return Finding("lengths", "error", f"{share}, and filtering would leave none; {raised}")
    if data.filter_overlong_prompts:
        return Finding("lengths", "warning", f"{share} and would be left out; {raised} to keep them")
    if data.truncation == "error":
        return Finding("lengths", "error", f"{share}; {raised}, or set data.filter_overlong_prompts=true")
    return Finding("lengths", "warning", f"{share} and would be truncated ({data.truncation}); {raised} to keep them")


def prompt_tokens(case: DoctorCase, task: Task) -> int:
    return len(case.codec.encode_prompt(task.prompt))
