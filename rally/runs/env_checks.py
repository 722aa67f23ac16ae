"""Makes the rows of a run with environments and plays the start of some of them before any weight is loaded.

An environment that cannot be reset, that gives different prompts for one seed, or whose prompts are too long is an
error. Validation prompts that also occur among the training prompts are reported: disjoint seeds are not always
different tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rally.chat import ChatCodec
from rally.config import Config
from rally.data import DataError, TaskSet
from rally.envs import EnvError, Environments
from rally.envs.session import EnvReset
from rally.track import RunConsole
from rally.types import Task

CHECKED = 32  # rows of each environment that are reset, in training and in validation
AT_ONCE = 32


def opening_of(environments: Environments, task: Task) -> EnvReset:
    """The prompt and the tools of one row, by a reset."""
    return openings_of(environments, [task])[0]


def openings_of(environments: Environments, tasks: Sequence[Task]) -> list[EnvReset]:
    """The prompts and tools of the rows. Each environment is reset and closed."""

    async def opening(task: Task, slots: asyncio.Semaphore) -> EnvReset:
        async with slots:
            session = environments.open(task)
            try:
                return await session.reset()
            finally:
                await session.close()

    async def all_of_them() -> list[EnvReset]:
        slots = asyncio.Semaphore(AT_ONCE)
        return list(await asyncio.gather(*(opening(task, slots) for task in tasks)))

    return asyncio.run(all_of_them())


class EnvCheck:
    """The rows of the environments of a run, checked. `have_tools` is known after `fitting`."""

    def __init__(self, config: Config, environments: Environments, codec: ChatCodec, console: RunConsole) -> None:
        self._config, self._environments, self._codec, self._console = config, environments, codec, console
        self.answers = bool(environments.labels)  # an environment may answer with user messages
        self.have_tools = False

    def fitting(self, train: TaskSet | None, val: TaskSet | None) -> tuple[TaskSet | None, TaskSet | None]:
        """The rows of training and validation whose prompts fit."""
        self._check_seats()
        train_rows, train_prompts = self._checked(train, "training")
        val_rows, val_prompts = self._checked(val, "validation")
        self._compare(train_prompts, val_prompts)
        return train_rows, val_rows

    def _check_seats(self) -> None:
        """Refuse settings that start the seats of a match apart from each other, or count their groups as rows."""
        config = self._config
        matches = [label for label in self._environments.labels if self._environments.seats(label) > 1]
        for key, used in {
            f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode} without a fixed lag": config.asynchronous
            and not config.fixed_lag,
            "algorithm.filter_groups.enable=true": config.algorithm.filter_groups.enable,
            "rollout.agent.num_workers above 1": config.uses_loop_workers,
        }.items():
            if matches and used:
                raise EnvError(f"{matches[0]} has several trained seats, which {key} does not support; leave it out")

    def _checked(self, tasks: TaskSet | None, kind: str) -> tuple[TaskSet | None, dict[str, set[str]]]:
        prompts: dict[str, set[str]] = {}
        if tasks is None:
            return None, prompts
        data, most = self._config.data, self._config.prompt_length
        chosen = list(range(len(tasks))) if data.filter_overlong_prompts else _some_of_each(tasks)
        openings = openings_of(self._environments, [tasks[i] for i in chosen])
        again = opening_of(self._environments, tasks[chosen[0]])
        if again != openings[0]:
            raise EnvError(
                f"the environment {tasks[chosen[0]].data_source} gave two different prompts for the same row and seed; "
                "take random numbers from the seed of reset only"
            )
        long: list[int] = []
        for i, (messages, tools) in zip(chosen, openings, strict=True):
            self.have_tools |= bool(tools)
            length = len(self._codec.with_tools(tools).encode_prompt(messages))
            long += [i] if length > most else []
            prompts.setdefault(tasks[i].data_source, set()).add(str(messages))
        return self._fitting(tasks, long, len(chosen), kind), prompts

    def _fitting(self, tasks: TaskSet, long: Sequence[int], checked: int, kind: str) -> TaskSet:
        if not long:
            return tasks
        data, most = self._config.data, self._config.prompt_length
        worst = f"{len(long)} of {checked} checked {kind} prompts of environments exceed data.max_prompt_length={most}"
        if data.filter_overlong_prompts:
            if len(long) == len(tasks):
                raise DataError(f"{worst}, so filtering leaves none; raise data.max_prompt_length")
            self._console.note(f"{worst}; they are left out")
            return tasks.select(sorted(set(range(len(tasks))) - set(long)))
        if data.truncation == "error":
            raise DataError(
                f"{worst}, the first in row {tasks[long[0]].id}; raise it, set data.filter_overlong_prompts=true, or "
                "choose data.truncation=left, right or middle"
            )
        self._console.note(f"{worst}; they are truncated ({data.truncation})")
        return tasks

    def _compare(self, train: dict[str, set[str]], val: dict[str, set[str]]) -> None:
        """Report tasks that are not held out. An environment whose prompts are all equal differs in what follows."""
        for label, prompts in val.items():
            known = train.get(label, set())
            if (shared := len(prompts & known)) and len(prompts | known) > 1:
                self._console.warn_once(
                    f"shared {label}",
                    f"{shared} of {len(prompts)} checked validation prompts of {label} are also among {len(known)} "
                    "checked training prompts, although their seeds differ; make the tasks more varied with env.args",
                )


def _some_of_each(tasks: TaskSet) -> list[int]:
    """The first rows of each environment."""
    seen: dict[str, int] = {}
    chosen = []
    for i, task in enumerate(tasks):
        seen[task.data_source] = seen.get(task.data_source, 0) + 1
        if seen[task.data_source] <= CHECKED:
            chosen.append(i)
    return chosen
