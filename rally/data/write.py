"""A written file appears whole or not at all, and reading it gives back the rows that were written.

In Parquet a column is stored natively (structs, lists) when it comes back unchanged that way. A column whose values
have no common type, such as ground truths that are now a number and now a text, is stored as JSON text and marked,
so that it also comes back unchanged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rally.data.read import JSON_MARK, DataError, ParquetRows, Row, plain


def write_rows(rows: Iterable[Mapping[str, Any]], path: str | Path) -> int:
    """Writes .parquet or .jsonl by the suffix, making folders as needed; says how many rows there are."""
    path = Path(path).expanduser()
    if path.suffix not in (".parquet", ".jsonl"):
        raise DataError(f"rows cannot be written to {path}; its name must end in .parquet or .jsonl")
    written: list[Row] = [plain(dict(row)) for row in rows]
    if not written:
        raise DataError(f"there are no rows to write to {path}; give at least one")
    with _whole(path) as part:
        if path.suffix == ".jsonl":
            part.write_text("".join(f"{_json(row, f'row {i}')}\n" for i, row in enumerate(written)), "utf-8")
        else:
            pq.write_table(_table(written), part)
    return len(written)


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` that takes its place when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _table(rows: list[Row]) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [_native(name, [row.get(name) for row in rows]) for name in names]
    fields = [field for column in columns for field in column.schema]
    return pa.Table.from_arrays([column.column(0) for column in columns], schema=pa.schema(fields))


def _native(name: str, values: list[Any]) -> pa.Table:
    """One column as Parquet types if it survives the trip there and back, else as marked JSON text."""
    try:
        table = pa.table({name: pa.array(values)})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        back = ParquetRows(pq.read_table(sink.getvalue()))
    except (pa.ArrowException, OverflowError):
        return _as_json(name, values)
    # repr tells 1 from 1.0 and from True, and one order of keys from another; == does not.
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
