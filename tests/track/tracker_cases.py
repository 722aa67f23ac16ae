"""A run and its metrics for the tests of trackers."""

import math
from pathlib import Path
from typing import Any

from rally.redact import learn_tree
from rally.track.export.delivery import DeliveryLedger, PositionedMetrics
from rally.track.export.settings import TrackerRun
from rally.track.run_folder.folder import RunFolder

NAMES = ("critic/rewards/mean", "val-core/rally/arithmetic/reward/mean@4", "val-core/数据 #1/acc/best@2/mean")


def make_place(path: Path) -> TrackerRun:
    folder = RunFolder(path / "run").create()
    learn_tree({"api_key": "s3cr3t-of-the-test"})
    folder.save_config("trainer:\n  seed: 3\n  key: 's3cr3t-of-the-test'\ndata:\n  train_files: [a, b]\n")
    return TrackerRun(folder.path, "project", "experiment", -1)


def row(step: int, shift: float = 0.0) -> PositionedMetrics:
    return PositionedMetrics(
        step, 1000.0 + step, {name: step / 3 + i + shift for i, name in enumerate(NAMES)} | {"bad": math.nan}
    )


def ledger_of(place: TrackerRun, name: str) -> DeliveryLedger:
    return DeliveryLedger.read(place.folder / "tracking" / f"{name}.json")


def send(tracker: Any, ledger: DeliveryLedger, *rows: PositionedMetrics) -> None:
    for one in rows:
        ledger.will_send(one.position)
        tracker.send(one)
        ledger.was_sent(one.position)
