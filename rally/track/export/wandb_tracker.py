"""Metrics and the configuration become a run in W&B, offline where nobody is logged in; no step is there twice.

W&B takes steps in order only and drops earlier ones. So a run that goes on after a step it has already told of is told
anew, from the first step, under a new id; the earlier telling stays as it is.
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
    """One run, named like the experiment of the configuration, in the project of the configuration."""

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
            # What this process prints is of no use to anybody.
            settings=wandb.Settings(console="off", silent=silent),
        )
        if not continued:
            ledger.begin(id)
        self.where = self._how_to_sync() if self._run.offline else self._run.url or "nowhere, as WANDB_MODE says"

    def send(self, item: PositionedMetrics) -> None:
        # Without commit, W&B keeps a step back until the next one comes, and a kill would lose it.
        self._run.log(item.metrics, step=item.position, commit=True)

    def close(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)

    def _how_to_sync(self) -> str:
        """Each time that a run goes on offline it has one more folder, and all of them together are the run."""
        folders = Path(self._run.dir).parent.parent.glob(f"offline-run-*-{self._run.id}")
        return shlex.join(["wandb", "sync", *map(str, sorted(folders))])


def _mode() -> Literal["offline"] | None:
    """None is W&B's own choice, by WANDB_MODE or because somebody is logged in; nobody can be asked for a key here."""
    return None if os.environ.get("WANDB_MODE") or wandb.login(prompt=False) else "offline"
