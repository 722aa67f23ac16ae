"""Loads the tasks of a run, from data files or from a user's dataset class, and validates every row.

The objects of a user's class have `len()` and `[number]`, which returns a row as a mapping. A subclass of verl's
RLHFDataset (`FileRows`) has its rows in `dataframe`, unless it defines `[number]`. The constructor gets those of
`data_files`, `tokenizer`, `config` (the keys of `data.*`), `processor` and `max_samples` that it takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rally.data.messages import check_mapping, check_messages, load_images, place_images, shown
from rally.data.row_files import DataError, Files, Row, RowFile, RowLocation, RowSet, plain, read_rows
from rally.importing import ImportFailed, import_path
from rally.types import Message, RallyError, Task

TaskSet: TypeAlias = RowSet[Task]


def load_tasks(
    files: Files,
    *,
    prompt_key: str = "prompt",
    reward_fn_key: str = "data_source",
    image_key: str = "images",
    max_samples: int = -1,
    shuffle: bool = False,
    seed: int = 0,
    rows: RowFile | None = None,
) -> TaskSet:
    """The validated tasks of Parquet, JSONL or JSON files, in the order of the files, or of `rows`, which a user's
    class made from the files.

    `max_samples` (-1: all) takes the first rows, or with `shuffle` a random choice by `seed`. The sampler, not this
    function, determines the order of training.
    """
    if max_samples < 1 and max_samples != -1:
        raise DataError(f"max_samples is {max_samples}; it must be -1 (all rows) or at least 1")
    build = partial(_task, prompt_key=prompt_key, reward_fn_key=reward_fn_key, image_key=image_key)
    tasks = RowSet(files, build, rows)
    if 0 < max_samples < len(tasks):
        tasks = tasks.select(_sample(len(tasks), max_samples, shuffle, seed))
    tasks.validate()
    return tasks


def _sample(total: int, count: int, shuffle: bool, seed: int) -> list[int]:
    if not shuffle:
        return list(range(count))
    chosen: list[int] = np.random.default_rng(seed).choice(total, size=count, replace=False).tolist()
    return sorted(chosen)


def _task(place: RowLocation, row: Row, *, prompt_key: str, reward_fn_key: str, image_key: str) -> Task:
    data_source = row.get(reward_fn_key)
    if not isinstance(data_source, str) or not data_source:
        raise DataError(f"{_described(row, reward_fn_key)}; it must be a string that names the reward, such as 'math'")
    agent_name = row.get("agent_name")
    if not isinstance(agent_name, str | None):
        raise DataError(f"agent_name is {shown(agent_name)}; it must be a string, or absent")
    images = load_images(row, image_key, place.folder)
    prompt = place_images(_prompt(row, prompt_key), images, place.folder, prompt_key, image_key)
    reward_model = _reward_model(row)
    extra = _with_selection(check_mapping(row.get("extra_info"), "extra_info"), row.get("tools"))
    tools = _tools_kwargs(extra)
    interaction = check_mapping(extra.get("interaction_kwargs"), "extra_info.interaction_kwargs")
    decoded: dict[str, Any] = {prompt_key: prompt, "reward_model": reward_model, "extra_info": extra}
    decoded |= {image_key: images} if images else {}
    added = {
        "raw_prompt": [dict(message) for message in prompt],
        "index": extra.get("index", place.number),
        "tools_kwargs": tools,
        "interaction_kwargs": interaction,
    }
    return Task(
        id=f"{place.name}:{place.number}",
        data_source=data_source,
        prompt=tuple(prompt),
        ground_truth=reward_model.get("ground_truth"),
        agent_name=agent_name,
        tools_kwargs=tools,
        interaction_kwargs=interaction,
        extra_info=extra,
        row={**row, **decoded, **added},
    )


def _prompt(row: Row, key: str) -> list[Message]:
    if key not in row:
        raise DataError(f"{_described(row, key)}; it must be a list of messages (prompt_key names the column)")
    prompt = check_messages(row[key], key)
    if prompt[-1]["role"] == "assistant":
        raise DataError(f"{key} ends with the assistant; its last message must be from user, tool or system")
    return prompt


def _reward_model(row: Row) -> dict[str, Any]:
    reward_model = check_mapping(row.get("reward_model"), "reward_model")
    if "ground_truth" not in reward_model and reward_model.get("style") != "model":
        raise DataError(
            "reward_model.ground_truth is missing; add it (any JSON value but null), or set reward_model.style to "
            "'model'"
        )
    return reward_model


_SECTIONS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")


def _tools_kwargs(extra: dict[str, Any]) -> dict[str, dict[str, Any]]:
    field = "extra_info.tools_kwargs"
    return {
        name: {
            section: check_mapping(value, f"{field}.{name}.{section}") if section in _SECTIONS else value
            for section, value in check_mapping(kwargs, f"{field}.{name}").items()
        }
        for name, kwargs in check_mapping(extra.get("tools_kwargs"), field).items()
    }


def _with_selection(extra: dict[str, Any], tools: Any) -> dict[str, Any]:
    """A column `tools` of names is another spelling of extra_info.tool_selection."""
    if not isinstance(tools, list) or not all(isinstance(name, str) for name in tools):
        return extra
    selection = extra.get("tool_selection", tools)
    if selection != tools:
        raise DataError(
            f"tools is {shown(tools)} but extra_info.tool_selection is {shown(selection)}; they must agree, keep one"
        )
    return {**extra, "tool_selection": tools}


def _described(row: Row, key: str) -> str:
    return f"{key} is {shown(row[key])}" if key in row else f"{key} is missing (the row has {', '.join(row)})"


@dataclass(frozen=True)
class CustomRows:
    """The rows of a user's dataset object."""

    source: Any

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> Row:
        try:
            row = self.source[number]
        except RallyError:
            raise
        except Exception as error:  # a user's class may fail in any way
            problem = f"{type(error).__name__}: {error}"
            raise DataError(f"data.custom_cls fails at row {number} (counted from 0; {problem}); fix it") from error
        if not isinstance(row, Mapping):
            raise DataError(f"data.custom_cls returned a row of type {type(row).__name__}; it must be a mapping")
        return {str(key): plain(value) for key, value in row.items() if value is not None}

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))


TOKENIZED_ROWS = (
    "the data set class tokenizes its rows itself, and Rally renders and tokenizes the prompt column, with its images, "
    "itself; leave data.custom_cls out, or let __getitem__ return the row with its messages"
)


class FileRows:
    """Rally's counterpart of verl's RLHFDataset: the rows of its files are in `dataframe`. A subclass may override
    `_read_files_and_tokenize`, which reads `data_files`."""

    def __init__(
        self, data_files: str | Sequence[str], tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.tokenizer, self.processor = tokenizer, processor
        self.config, self.max_samples = config, max_samples
        self.prompt_key, self.image_key = config.prompt_key, config.get("image_key", "images")
        self.max_prompt_length, self.truncation = config.get("max_prompt_length"), config.get("truncation", "error")
        self.return_raw_chat, self.return_full_prompt = True, False
        self.dataframe: Any = []
        self._read_files_and_tokenize()

    def _read_files_and_tokenize(self) -> None:
        self.dataframe = [row for file in self.data_files for row in read_rows(Path(file))]

    def _build_messages(self, example: Any, *args: Any, **options: Any) -> Any:
        raise DataError(TOKENIZED_ROWS)

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, number: int) -> Any:
        rows = self.dataframe
        return rows.iloc[number].to_dict() if hasattr(rows, "iloc") else rows[number]


def load_custom_rows(path: str, name: str, offered: Mapping[str, Callable[[], Any]]) -> CustomRows:
    """The rows of an object of the class `name` in `path`. Its constructor gets the keywords of `offered` it takes."""
    try:
        cls = getattr(import_path(path, "rows"), name, None)
    except ImportFailed as failed:
        raise DataError(f"data.custom_cls.path={path} cannot be imported ({failed}); correct it") from failed
    if not isinstance(cls, type):
        raise DataError(f"{path} has no class {name}; correct data.custom_cls.name")
    taken = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    try:
        rows = CustomRows(cls(**{key: make() for key, make in offered.items() if takes_any or key in taken}))
        len(rows)
    except DataError:
        raise
    except Exception as error:  # a user's class may fail in any way
        problem = f"{type(error).__name__}: {error}"
        raise DataError(f"the class {name} of {path} cannot be used ({problem}); fix it") from error
    return rows
