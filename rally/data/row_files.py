"""Reads and writes rows in Parquet, JSONL and JSON files, and downloads data sets from the hub.

Files stay compact in memory; a row is converted to Python when it is accessed (`RowSet`). Nested values survive a
Parquet file unchanged: a column without a common Parquet type is stored as marked JSON text. Files are written
atomically.
"""

from __future__ import annotations

import copy
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rally.types import RallyError
from rally.util.atomic_files import atomic_file
from rally.util.checksums import UNREADABLE, reason

Row = dict[str, Any]
Files = str | Path | Sequence[str | Path]
T = TypeVar("T")

JSON_MARK = {b"rally": b"json"}
"""The metadata of a Parquet column whose cells are JSON text."""

_SHOWN_PROBLEMS = 5
_BATCH = 1024


class DataError(RallyError):
    """A data file, a row or a field is invalid. The text names it and says what is expected."""


class RowLocation(NamedTuple):
    """Where a row comes from: `name` is a short unique name of its file in `folder`, `number` counts from 0."""

    name: str
    number: int
    folder: Path = Path()


class RowFile(Protocol):
    """The rows of one file, kept compact and converted to Python one at a time."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Row: ...

    def __iter__(self) -> Iterator[Row]:
        """All rows in order, faster than one by one."""
        ...


def plain(value: Any) -> Any:
    """The value in plain Python (no NumPy), without mapping entries that are None."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return plain(value.tolist())
    return value


@dataclass(frozen=True)
class ParquetRows:
    """The rows of a Parquet file, kept in memory as an Arrow table."""

    table: pa.Table

    @classmethod
    def read(cls, path: Path) -> ParquetRows:
        try:
            return cls(pq.ParquetFile(path).read())
        except (pa.ArrowException, *UNREADABLE) as error:
            raise DataError(f"{path} cannot be read as Parquet ({error}); write the file again") from error

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, number: int) -> Row:
        return next(iter(ParquetRows(self.table.slice(number, 1))))

    def __iter__(self) -> Iterator[Row]:
        names = self.table.schema.names
        marked = {field.name for field in self.table.schema if JSON_MARK.items() <= (field.metadata or {}).items()}
        for batch in self.table.to_batches(max_chunksize=_BATCH):
            for cells in zip(*map(_readable_cells, names, batch.columns), strict=True):
                row = {name: cell for name, cell in zip(names, cells, strict=True) if cell is not None}
                for name in marked & row.keys():
                    row[name] = _parsed(row[name], f"the column {name}")
                yield row


def _readable_cells(name: str, array: pa.Array) -> list[Any]:
    try:
        return _cells(array)
    except (pa.ArrowException, *UNREADABLE) as error:
        kind = f"of the type {array.type}"
        raise DataError(f"the column {name} {kind} cannot be read ({reason(error)}); write plain values") from error


def _cells(array: pa.Array) -> list[Any]:
    """An Arrow column as `plain` values, several times faster than `to_pylist`, which makes an object per cell."""
    if pa.types.is_struct(array.type) and array.type.num_fields:
        names = [field.name for field in array.type]
        children = zip(*map(_cells, array.flatten()), strict=True)
        structs = [{n: v for n, v in zip(names, values, strict=True) if v is not None} for values in children]
        if not array.null_count:
            return structs
        return [s if valid else None for s, valid in zip(structs, array.is_valid().to_pylist(), strict=True)]
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        flat = iter(_cells(array.flatten()))
        lengths = array.value_lengths().to_pylist()
        return [None if n is None else list(islice(flat, n)) for n in lengths]
    cells = array.to_pylist(maps_as_pydicts="strict")
    return [plain(c) for c in cells] if pa.types.is_nested(array.type) else cells


@dataclass(frozen=True)
class JsonRows:
    """The rows of a JSON file, one object per line or one list of objects, kept in memory as text."""

    lines: list[bytes]

    @classmethod
    def read(cls, path: Path) -> JsonRows:
        content = path.read_bytes()
        if path.suffix == ".json" and content.lstrip().startswith(b"["):
            lines = [json.dumps(row).encode() for row in _parsed(content, f"{path}")]
        else:
            lines = [line for line in content.splitlines() if line.strip()]
        for number, line in enumerate(lines):
            where = f"{path}, row {number} (counted from 0)"
            if not isinstance(_parsed(line, where), dict):
                raise DataError(f"{where}: this is not a JSON object; each row must be one, such as {{...}}")
        return cls(lines)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, number: int) -> Row:
        row: Row = plain(json.loads(self.lines[number]))
        return row

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))


def _parsed(text: bytes | str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{where}: this is not valid JSON ({error}); write the file again") from error


_READERS: dict[str, Callable[[Path], RowFile]] = {
    ".parquet": ParquetRows.read,
    ".jsonl": JsonRows.read,
    ".json": JsonRows.read,
}


def read_rows(path: Path) -> RowFile:
    """The rows of one file, by its suffix."""
    path = path.expanduser()
    if path.suffix not in _READERS:
        raise DataError(f"{path} is not a data file; its name must end in {', '.join(_READERS)}")
    if not path.is_file():
        raise DataError(f"there is no file {path}; correct the path or write the file first")
    return _READERS[path.suffix](path)


class RowSet(Sequence[T]):
    """The rows of several files as `T`s. Each is built on access, so that only compact data stays in memory.

    `build` raises DataError for an invalid row; `validate` reports all of them in one error. `rows`, if given, are the
    rows that a user's class made from the files.
    """

    def __init__(self, files: Files, build: Callable[[RowLocation, Row], T], rows: RowFile | None = None) -> None:
        listed = [files] if isinstance(files, str | Path) else list(files)
        if not listed:
            raise DataError("there is no data file; name at least one")
        self.files = tuple(Path(file) for file in listed)
        self._rows = [read_rows(file) for file in self.files] if rows is None else [rows]
        self._names = _short_names(self.files)[: len(self._rows)]
        self._starts = list(accumulate((len(rows) for rows in self._rows), initial=0))
        self._order: Sequence[int] = range(self._starts[-1])
        self._build = build

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = self._order[index]
        file = bisect_right(self._starts, position) - 1
        number = position - self._starts[file]
        return self._build(RowLocation(self._names[file], number, self._folder(file)), self._rows[file][number])

    def __iter__(self) -> Iterator[T]:
        if isinstance(self._order, range):
            return (self._build(place, row) for _, place, row in self._scan())
        return super().__iter__()

    def select(self, indices: Iterable[int]) -> RowSet[T]:
        """The set of these rows, in this order, without copying data."""
        chosen = copy.copy(self)
        chosen._order = [self._order[i] for i in indices]
        return chosen

    def validate(self) -> None:
        """Build every row once. Raises one DataError with the number of invalid rows and the first of them."""
        if not self:
            raise DataError(f"there are no rows in {', '.join(map(str, self.files))}; write at least one")
        wanted, problems = set(self._order), []
        for position, (file, place, row) in enumerate(self._scan()):
            if position in wanted:
                try:
                    self._build(place, row)
                except DataError as error:
                    problems.append(f"{file}, row {place.number}: {error}")
        if problems:
            more = [f"... and {len(problems) - _SHOWN_PROBLEMS} more"] * (len(problems) > _SHOWN_PROBLEMS)
            head = f"{len(problems)} of {len(self)} rows are invalid (rows are counted from 0):"
            raise DataError("\n  ".join([head, *problems[:_SHOWN_PROBLEMS], *more]))

    def _scan(self) -> Iterator[tuple[Path, RowLocation, Row]]:
        # The rows of a user's class are not assigned to files.
        for at, (file, name, rows) in enumerate(zip(self.files, self._names, self._rows, strict=False)):
            folder = self._folder(at)
            for number, row in enumerate(rows):
                yield file, RowLocation(name, number, folder), row

    def _folder(self, file: int) -> Path:
        return self.files[file].expanduser().parent


def _short_names(files: Sequence[Path]) -> list[str]:
    """The shortest unique name of each file: stem, folder/stem, or the whole path."""
    for shorten in (lambda f: f.stem, lambda f: f"{f.parent.name}/{f.stem}", str):
        names = [shorten(file) for file in files]
        if len(set(names)) == len(names):
            return names
    raise DataError(f"a data file is listed twice in {', '.join(map(str, files))}; list each one once")


def write_rows(rows: Iterable[Mapping[str, Any]], path: str | Path) -> int:
    """Write .parquet or .jsonl, by the suffix. Folders are created. Returns the number of rows."""
    path = Path(path).expanduser()
    if path.suffix not in (".parquet", ".jsonl"):
        raise DataError(f"rows cannot be written to {path}; its name must end in .parquet or .jsonl")
    written: list[Row] = [plain(dict(row)) for row in rows]
    if not written:
        raise DataError(f"there are no rows to write to {path}; give at least one")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as part:
        if path.suffix == ".jsonl":
            part.write_text("".join(f"{_json(row, f'row {i}')}\n" for i, row in enumerate(written)), "utf-8")
        else:
            pq.write_table(_table(written), part)
    return len(written)


def _table(rows: list[Row]) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [_native(name, [row.get(name) for row in rows]) for name in names]
    fields = [field for column in columns for field in column.schema]
    return pa.Table.from_arrays([column.column(0) for column in columns], schema=pa.schema(fields))


def _native(name: str, values: list[Any]) -> pa.Table:
    """One column in Parquet types if the values read back unchanged, otherwise as marked JSON text."""
    try:
        table = pa.table({name: pa.array(values)})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        back = ParquetRows(pq.read_table(sink.getvalue()))
    except (pa.ArrowException, OverflowError):
        return _as_json(name, values)
    # Unlike ==, repr distinguishes 1, 1.0 and True, and the order of keys.
    same = all(repr(row.get(name)) == repr(value) for row, value in zip(back, values, strict=True))
    return table if same else _as_json(name, values)


def _as_json(name: str, values: list[Any]) -> pa.Table:
    texts = [None if value is None else _json(value, f"column {name}, row {i}") for i, value in enumerate(values)]
    return pa.table([texts], schema=pa.schema([pa.field(name, pa.string(), metadata=JSON_MARK)]))


def _json(value: Any, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise DataError(f"{where} (counted from 0) cannot be stored ({error}); write plain values") from error


def download(title: str, name: str, config: str, split: str, folder_holds: str) -> Iterable[dict[str, Any]]:
    """The rows of one split from the hub. `folder_holds`: what a local source folder would have to contain."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"downloading {title} needs the package datasets; run: "
            'pip install "rally-rl[hub]" (or name a source folder)'
        ) from error
    try:
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the download stack raises many unrelated types
        raise DataError(
            f"{title} could not be downloaded ({type(error).__name__}: {error}); "
            f"check the network, or name a source folder with {folder_holds}"
        ) from error
    return rows
