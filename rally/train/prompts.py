"""Rows that cannot be used are found before training begins: prompts too long, rows without what the run needs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from rally.chat import ChatCodec
from rally.config import Config
from rally.data import DataError, TaskSet
from rally.track import RunConsole
from rally.train.parts import cores, prompt_length

MOST_WORKERS = 16


def fitting(tasks: TaskSet, codec: ChatCodec, config: Config, console: RunConsole) -> TaskSet:
    """The tasks whose prompts fit data.max_prompt_length, as data.filter_overlong_prompts and truncation decide."""
    most, data = prompt_length(config), config.data
    if data.need_tools_kwargs:
        bare = next((task.id for task in tasks if not task.tools_kwargs), None)
        if bare is not None:
            raise DataError(f"row {bare} has no extra_info.tools_kwargs, which data.need_tools_kwargs=true asks for")
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
    console.note(f"{worst}; they are cut ({data.truncation})")
    return tasks


def _lengths(tasks: TaskSet, codec: ChatCodec, workers: int | None) -> list[int]:
    """Tokenizers do not hold Python's lock, so a thread for each core is worth it. A pool takes all that it is given at
    once, and rows can hold images: it is given some at a time."""
    lengths: list[int] = []
    left = iter(tasks)
    with ThreadPoolExecutor(workers or min(MOST_WORKERS, cores())) as pool:
        while some := list(islice(left, 256)):
            lengths += pool.map(lambda task: len(codec.encode_prompt(task.prompt)), some)
    return lengths
