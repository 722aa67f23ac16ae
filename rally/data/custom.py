"""Rows may come from a class of the user's; each is checked as a row of a file is.

Its objects have `len()` and `[number]`, which gives a row as a mapping; the rows of a data set of verl are its
`dataframe`, unless it has a `[number]` of its own. The class is given what it takes of `data_files`, `tokenizer`,
`config` (the keys of `data.*`), `processor` and `max_samples`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rally.data.read import DataError, Row, plain, read_rows
from rally.importing import ImportFailed, import_path


@dataclass(frozen=True)
class CustomRows:
    """The rows of a user's object."""

    source: Any

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> Row:
        try:
            row = self.source[number]
        except Exception as error:  # a user's class may fail in any way
            told = f"{type(error).__name__}: {error}"
            raise DataError(f"data.custom_cls fails at row {number} (counted from 0; {told}); mend it") from error
        if not isinstance(row, Mapping):
            raise DataError(f"data.custom_cls gives a row of type {type(row).__name__}; it must be a mapping")
        return {str(key): plain(value) for key, value in row.items() if value is not None}

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))


class FileRows:
    """What a data set of verl derives from: the rows of its files, in `dataframe`. A subclass may read them anew in
    `_read_files_and_tokenize`, from `data_files`."""

    def __init__(
        self, data_files: str | Sequence[str], tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.tokenizer, self.processor = tokenizer, processor
        self.config, self.max_samples = config, max_samples
        self.prompt_key = config.prompt_key
        self.dataframe: Any = []
        self._read_files_and_tokenize()

    def _read_files_and_tokenize(self) -> None:
        self.dataframe = [row for file in self.data_files for row in read_rows(Path(file))]

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, number: int) -> Any:
        rows = self.dataframe
        return rows.iloc[number].to_dict() if hasattr(rows, "iloc") else rows[number]


def load_custom_rows(path: str, name: str, offered: Mapping[str, Callable[[], Any]]) -> CustomRows:
    """The rows of an object of the class `name` in `path`, made with what it takes of `offered`."""
    try:
        cls = getattr(import_path(path, "rows"), name, None)
    except ImportFailed as failed:
        raise DataError(f"data.custom_cls.path={path} cannot be imported ({failed}); correct it") from failed
    if not isinstance(cls, type):
        raise DataError(f"{path} has no class {name}; correct data.custom_cls.name")
    taken = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    try:
        made = cls(**{key: make() for key, make in offered.items() if takes_any or key in taken})
        rows = CustomRows(made)
        len(rows)
    except DataError:
        raise
    except Exception as error:  # a user's class may fail in any way
        told = f"{type(error).__name__}: {error}"
        raise DataError(f"the class {name} of {path} cannot give rows ({told}); mend it") from error
    return rows
