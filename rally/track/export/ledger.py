"""What a tracker has is known after a kill at any moment: each position is noted before it is sent, and again after."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rally.track.lines import write_atomic


@dataclass
class Ledger:
    """Kept in a file beside the run. Positions below or at `through` have arrived; `sending` may have."""

    path: Path
    id: str = ""  # what the tracker calls this run
    through: int = -1
    sending: int | None = None

    @classmethod
    def read(cls, path: Path) -> Ledger:
        return cls(path, **json.loads(path.read_text("utf-8"))) if path.exists() else cls(path)

    def continues(self, after: int) -> bool:
        """Whether a run that goes on after position `after` can go on in the same place, with no point there twice."""
        return bool(self.id) and self.sending is None and self.through <= after

    def begin(self, id: str, through: int = -1) -> None:
        self.id, self.through, self.sending = id, through, None
        self._write()

    def will_send(self, position: int) -> None:
        self.sending = position
        self._write()

    def was_sent(self, position: int) -> None:
        self.through, self.sending = position, None
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        known = {"id": self.id, "through": self.through, "sending": self.sending}
        write_atomic(self.path, json.dumps(known) + "\n")
