"""Checks of the rows before any weight is loaded: prompt lengths, and the loops, tools, users and rewards they name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice

from rally.chat import ChatCodec
from rally.config import Config
from rally.data import DataError, TaskSet
from rally.interactions import Interactions
from rally.loops import LoopSpec, find_loop, load_loop_config
from rally.rewards import check_truth
from rally.tools import ToolBox
from rally.track import RunConsole
from rally.types import RallyError, Task
from rally.util.background_threads import available_cores

MOST_WORKERS = 16


def fitting(tasks: TaskSet, codec: ChatCodec, config: Config, console: RunConsole) -> TaskSet:
    """The tasks whose prompts fit data.max_prompt_length, as data.filter_overlong_prompts and truncation decide."""
    most, data = config.prompt_length, config.data
    if data.need_tools_kwargs:
        bare = next((task.id for task in tasks if not task.tools_kwargs), None)
        if bare is not None:
            raise DataError(f"row {bare} has no extra_info.tools_kwargs, which data.need_tools_kwargs=true requires")
    lengths = _lengths(tasks, codec, data.filter_overlong_prompts_workers)
    long = [i for i, n in enumerate(lengths) if n > most]
    if not long:
        return tasks
    worst = f"{len(long)} of {len(tasks)} prompts exceed data.max_prompt_length={most} (the longest has {max(lengths)})"
    if data.filter_overlong_prompts:
        if len(long) == len(tasks):
            raise DataError(f"{worst}, so filtering leaves none; raise data.max_prompt_length")
        console.note(f"{worst}; they are left out")
        return tasks.select([i for i, n in enumerate(lengths) if n <= most])
    if data.truncation == "error":
        raise DataError(
            f"{worst}, the first in row {tasks[long[0]].id}; raise it, set data.filter_overlong_prompts=true, or "
            "choose data.truncation=left, right or middle"
        )
    console.note(f"{worst}; they are truncated ({data.truncation})")
    return tasks


def _lengths(tasks: TaskSet, codec: ChatCodec, workers: int | None) -> list[int]:
    """The prompt lengths in tokens. Tokenizers release the GIL, so threads help. Rows may hold images, so only some are
    submitted to the pool at a time."""
    lengths: list[int] = []
    left = iter(tasks)
    with ThreadPoolExecutor(workers or min(MOST_WORKERS, available_cores())) as pool:
        while some := list(islice(left, 256)):
            lengths += pool.map(lambda task: _length(task, codec), some)
    return lengths


def _length(task: Task, codec: ChatCodec) -> int:
    with _naming(task):
        return len(codec.encode_prompt(task.prompt))


SCORED_BY_FUNCTIONS = ("tool_agent", "single_turn_agent")  # other loops may score their episodes themselves


class RowError(RallyError):
    """A row whose every episode would fail."""


def check_rows(config: Config, tasks: TaskSet, interactions: Interactions, toolbox: ToolBox) -> set[str]:
    """Raise if a row names a user, loop or tool that does not exist, a data source that no reward function scores or a
    ground truth that no answer can equal, or if its loop refuses it. Returns the names of the loops that the rows ask
    for."""
    check_loop, asked = LoopCheck(config), set[str]()
    selections: set[tuple[str, ...] | None] = set()
    for task in tasks:
        interactions.find(task)
        selection = _selection(task)
        if selection not in selections:
            with _naming(task):
                toolbox.schemas(selection)
            selections.add(selection)
        asked.add(check_loop(task))
    return asked


class LoopCheck:
    """Checks that the loop of a row exists and can play it, and that an answer can be right."""

    def __init__(self, config: Config) -> None:
        rollout = config.rollout
        path, self._overridden = rollout.agent.agent_loop_config_path, rollout.agent_loop_class is not None
        self._loops = load_loop_config(path) if path else {}
        self._default, self._options = config.agent_loop_name, rollout.agent_loop_config.model_extra or {}
        self._by_functions = config.reward_function.path is None and not self._overridden and not config.uses_classifier
        self._specs: dict[str, LoopSpec] = {}
        if self._overridden:
            self._specs[self._default] = find_loop(self._default, self._loops)

    def __call__(self, task: Task) -> str:
        """Raise RowError, or return the name of the loop that the row asks for."""
        asked = task.agent_name or self._default
        name = self._default if self._overridden else asked
        with _naming(task):
            if name not in self._specs:
                self._specs[name] = find_loop(name, self._loops)
            if self._by_functions and name in SCORED_BY_FUNCTIONS and name not in self._loops:
                check_truth(task.data_source, task.ground_truth)
            options = self._options if name == self._default else {}
            self._specs[name].cls.check_row(task.row, {**self._specs[name].options, **options})
        return asked


def missing_tools(config: Config, tasks: Iterable[Task], toolbox: ToolBox) -> str | None:
    """A sentence if rows of the tool loop name a tool in their prompt and have keywords for it, but the run has none of
    that name: the policy would be asked for what it cannot do."""
    if config.rollout.agent_loop_class is not None or not toolbox.names:
        return None
    found: list[tuple[str, str]] = []
    for task in tasks:
        unknown = task.tools_kwargs.keys() - toolbox.names
        if unknown and (task.agent_name or config.agent_loop_name) == "tool_agent":
            text = str([message.get("content") for message in task.prompt])
            found += [(task.id, name) for name in sorted(unknown) if name in text][:1]
    if not found:
        return None
    (row, name), more = found[0], len(found) - 1
    others = f" ({more:,} other rows are alike)" if more else ""
    return (
        f"the prompt of row {row} speaks of the tool {name}, for which the row has tools_kwargs{others}, but the tools "
        f"of the run are {', '.join(toolbox.names)}; offer that tool, or make rows for these"
    )


def _selection(task: Task) -> tuple[str, ...] | None:
    """The tools that a row selects; None is all of them."""
    names = task.extra_info.get("tool_selection")
    if names is None:
        return None
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise RowError(f"row {task.id}: extra_info.tool_selection is {names!r}; make it a list of tool names")
    return tuple(names)


@contextmanager
def _naming(task: Task) -> Iterator[None]:
    try:
        yield
    except RallyError as mistake:
        raise RowError(f"row {task.id}: {mistake}") from None


def warn_of_repeats(rows: int, batch_size: int, console: RunConsole) -> None:
    """Warn if a batch needs more rows than there are: it is filled from further epochs."""
    if batch_size > rows:
        console.warn_once(
            "repeats",
            f"data.train_batch_size={batch_size} is more than the {rows} training rows, so a step uses rows more than "
            f"once; set it to {rows} or less, or add rows",
        )
