"""Rows are read back unchanged, and files are written atomically."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rally.data import DataError, write_rows
from rally.data.row_files import plain, read_rows

SCALARS = st.one_of(
    st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(st.characters(exclude_categories=["Cs"]))
)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from("abc"), v, max_size=3), max_leaves=6
)
ROWS = st.lists(st.dictionaries(st.sampled_from(["x", "y"]), VALUES | st.none(), min_size=1), min_size=1, max_size=5)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS)
def test_rows_come_back_exactly(tmp_path: Path, suffix: str, rows: list[dict[str, Any]]) -> None:
    file = tmp_path / f"rows.{suffix}"
    rows = [{"id": 1, **row} for row in rows]  # a Parquet file with no column at all has no rows either
    assert write_rows(rows, file) == len(rows)
    assert [repr(row) for row in _by_name(read_rows(file))] == [repr(row) for row in _by_name(map(plain, rows))]
    back = read_rows(file)
    assert [repr(back[i]) for i in range(len(back))] == [repr(row) for row in back], "one by one as all at once"


def _by_name(rows: Any) -> Iterator[dict[str, Any]]:
    return (dict(sorted(row.items())) for row in rows)


def test_columns_with_one_type_stay_native_structs(tmp_path: Path) -> None:
    rows = [{"extra_info": {"index": i, "tools_kwargs": {"calc": {"create_kwargs": {"x": "1"}}}}} for i in range(3)]
    write_rows(rows, tmp_path / "rows.parquet")
    kind = pq.read_schema(tmp_path / "rows.parquet").field("extra_info").type
    assert pa.types.is_struct(kind)
    assert pa.types.is_struct(kind.field("tools_kwargs").type)


def test_mixed_ground_truths_keep_their_types(tmp_path: Path) -> None:
    truths = ["464", 464, 464.0, True, ["a"], {"target": ["b"]}]
    write_rows([{"reward_model": {"ground_truth": truth}} for truth in truths], tmp_path / "rows.parquet")
    back = [row["reward_model"]["ground_truth"] for row in read_rows(tmp_path / "rows.parquet")]
    assert [repr(truth) for truth in back] == [repr(truth) for truth in truths]
    [cell, *_] = pq.read_table(tmp_path / "rows.parquet")["reward_model"].to_pylist()
    assert json.loads(cell) == {"ground_truth": "464"}, "other programs read it as JSON text"


@pytest.mark.parametrize("values", [[1, 2.5], [[1], [2.5]], [{"a": 1, "b": 2}, {"b": 2, "a": 1}], [2**70, 1]])
def test_values_that_parquet_would_change_are_kept(tmp_path: Path, values: list[Any]) -> None:
    write_rows([{"x": value} for value in values], tmp_path / "rows.parquet")
    assert repr([row["x"] for row in read_rows(tmp_path / "rows.parquet")]) == repr(values)


def test_empty_mappings_survive_parquet(tmp_path: Path) -> None:
    write_rows([{"extra_info": {"tools_kwargs": {}}}], tmp_path / "rows.parquet")
    assert list(read_rows(tmp_path / "rows.parquet")) == [{"extra_info": {"tools_kwargs": {}}}]


def test_numpy_values_become_plain(tmp_path: Path) -> None:
    rows = [{"a": np.int64(3), "b": np.array([1.5, 2.5]), "c": {"d": np.bool_(True)}}]
    for suffix in ("parquet", "jsonl"):
        write_rows(rows, tmp_path / f"rows.{suffix}")
        assert repr(list(read_rows(tmp_path / f"rows.{suffix}"))) == "[{'a': 3, 'b': [1.5, 2.5], 'c': {'d': True}}]"


def test_parquet_maps_of_other_writers_become_mappings(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.struct([("x", pa.int64()), ("y", pa.int64())]))
    values = pa.array([[("calc", {"x": 1, "y": None})], None], kind)
    pq.write_table(pa.table({"m": values, "k": [1, 2]}), tmp_path / "rows.parquet")
    assert list(read_rows(tmp_path / "rows.parquet")) == [{"m": {"calc": {"x": 1}}, "k": 1}, {"k": 2}]


def test_folders_are_made_and_no_part_is_left(tmp_path: Path) -> None:
    write_rows([{"a": 1}], tmp_path / "new" / "folder" / "rows.jsonl")
    assert [p.name for p in (tmp_path / "new" / "folder").iterdir()] == ["rows.jsonl"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows([{"a": 1}], file)
    with pytest.raises(DataError, match=r"row 1 \(counted from 0\) cannot be stored"):
        write_rows([{"a": 2}, {"a": object()}], file)
    assert list(read_rows(file)) == [{"a": 1}]
    assert list(tmp_path.iterdir()) == [file]


def test_mistakes_are_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must end in \.parquet or \.jsonl"):
        write_rows([{"a": 1}], tmp_path / "rows.csv")
    with pytest.raises(DataError, match="no rows to write"):
        write_rows([], tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"column a, row 0 \(counted from 0\) cannot be stored"):
        write_rows([{"a": b"bytes"}, {"a": 1}], tmp_path / "rows.parquet")
