"""What `rollout.trace.*` must hold together: a key without effect is named."""

from __future__ import annotations

from collections.abc import Iterator

from rally.config.errors import shown
from rally.config.schema import ROLLOUT, Config


def trace(config: Config) -> Iterator[str]:
    given = config.rollout.trace
    if given.backend is None:
        for name, value in given.model_dump(exclude_defaults=True).items():
            yield f"{ROLLOUT}.trace.{name}={shown(value)} has no effect without {ROLLOUT}.trace.backend; set mlflow."
