"""Sends metrics and configuration as a W&B run, offline if no user is logged in. No step is sent twice.

W&B accepts steps only in order. So a run that resumes before a step that was already sent is sent again from its first
step, under a new id; the earlier W&B run stays.
"""

from __future__ import annotations

import os
import secrets
import shlex
from pathlib import Path
from typing import Literal

import wandb

from rally.track.export.delivery import DeliveryLedger, PositionedMetrics
from rally.track.export.settings import TrackerRun


class WandbRun:
    """A W&B run named after trainer.experiment_name, in the project trainer.project_name."""

    def __init__(self, place: TrackerRun, ledger: DeliveryLedger) -> None:
        continued = ledger.continues(place.after)
        id = ledger.id if continued else secrets.token_hex(4)
        silent = os.environ.get("WANDB_SILENT", "true") != "false"
        self._run = wandb.init(
            project=place.project,
            name=place.name,
            id=id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(place.folder),
            config=place.config(),
            mode=_mode(),
            # Do not capture the output of this process.
            settings=wandb.Settings(console="off", silent=silent),
        )
        if not continued:
            ledger.begin(id)
        self.where = self._how_to_sync() if self._run.offline else self._run.url or "not stored (WANDB_MODE)"

    def send(self, item: PositionedMetrics) -> None:
        # Without commit, W&B holds a step back until the next one, and a kill would lose it.
        self._run.log(item.metrics, step=item.position, commit=True)

    def close(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)

    def _how_to_sync(self) -> str:
        """The command that uploads an offline run, which has one folder per resume."""
        folders = Path(self._run.dir).parent.parent.glob(f"offline-run-*-{self._run.id}")
        return shlex.join(["wandb", "sync", *map(str, sorted(folders))])


def _mode() -> Literal["offline"] | None:
    """None leaves the choice to W&B (WANDB_MODE or a stored login); this process cannot prompt for a key."""
    return None if os.environ.get("WANDB_MODE") or wandb.login(prompt=False) else "offline"
