"""Real W&B, offline: it stores what the run wrote."""

import json
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tracker_cases import NAMES, ledger_of, make_place, row, send

pytest.importorskip("wandb")

from wandb.proto.wandb_internal_pb2 import Record

from rally.track.export.wandb_tracker import WandbRun

HEADER, BLOCK, CHUNK = 7, 32768, struct.Struct("<IHB")


def wandb_records(path: Path) -> Iterator[Record]:
    """The records of an offline run: a LevelDB log of protocol buffers, for which W&B has no reader in Python."""
    data, at, whole = path.read_bytes(), HEADER, b""
    while at < len(data):
        left = BLOCK - at % BLOCK
        if left < CHUNK.size:
            at += left
            continue
        _, length, kind = CHUNK.unpack_from(data, at)
        at += CHUNK.size
        whole += data[at : at + length]
        at += length
        if kind in (1, 4):  # full, or last
            yield Record.FromString(whole)
            whole = b""


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


def soon(read: Callable[[], list[dict[str, Any]]], count: int) -> list[dict[str, Any]]:
    """Waits, since W&B's own process still writes for a moment after it has reported success."""
    until = time.monotonic() + 120
    while len(rows := read()) < count and time.monotonic() < until:
        time.sleep(0.05)
    return rows


def test_wandb_keeps_the_history_offline_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    place = make_place(tmp_path)
    ledger = ledger_of(place, "wandb")
    tracker = WandbRun(place, ledger)
    send(tracker, ledger, row(0), row(1))
    tracker.close(ok=True)
    first = ledger.id
    tracker = WandbRun(replace(place, after=1), ledger)
    send(tracker, ledger, row(2))
    tracker.close(ok=True)
    assert (ledger.id, ledger.through) == (first, 2)
    rows = soon(lambda: wandb_history(place.folder), 3)
    assert [one["_step"] for one in rows] == [0, 1, 2]
    for one in rows:
        assert {name: one[name] for name in NAMES} == {name: row(one["_step"]).metrics[name] for name in NAMES}
    config = "".join(str(record.run) for path in place.folder.glob("wandb/*/*.wandb") for record in wandb_records(path))
    assert "train_files" in config and "s3cr3t" not in config
    folders = sorted(map(str, place.folder.glob("wandb/offline-run-*")))
    assert len(folders) == 2 and tracker.where == f"wandb sync {' '.join(folders)}"

    WandbRun(place, ledger).close(ok=False)
    assert (ledger.id != first, ledger.through) == (True, -1)
