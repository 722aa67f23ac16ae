"""The coefficient of the KL in the reward: fixed, or moved by and by until the measured KL is the wanted one.

When it moves it is state of the run, and a checkpoint carries it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rally.train.snapshot import Part, json_part

FILE = "reward_kl.json"
LARGEST_ERROR = 0.2  # a KL far off the target moves the coefficient no faster than one that is 20 % off


@dataclass(kw_only=True)
class KlControl:
    """`target` is the wanted mean KL of a sampled token; without one the coefficient stays.

    A KL that is 20 % or more above the target all the time multiplies the coefficient by about e ** 0.2 for every
    `horizon` episodes.
    """

    coefficient: float
    target: float | None = None
    horizon: int = 10000

    def see(self, kl: float, episodes: int) -> None:
        """Move the coefficient, once the KL of a step's episodes is known."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
            self.coefficient *= 1 + error * episodes / self.horizon

    def part(self) -> Part:
        """The coefficient's part of a checkpoint, as it is now."""
        return json_part(FILE, {"coefficient": self.coefficient})

    def read(self, folder: Path) -> None:
        """Go on from a checkpoint. A fixed coefficient is the configuration's, as a learning rate is."""
        path = folder / FILE
        if self.target is not None and path.exists():
            self.coefficient = json.loads(path.read_text(encoding="utf-8"))["coefficient"]
