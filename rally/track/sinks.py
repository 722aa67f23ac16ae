"""Metrics go to every sink named in the configuration; a name that cannot be honoured is an error, never a no-op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rally.track.console import RunConsole
from rally.track.folder import RunFolder
from rally.types import RallyError

BUILT = ("console", "file")
PLANNED = ("tensorboard", "mlflow", "wandb", "swanlab", "trackio", "clearml", "vemlp_wandb")


class MetricSink(Protocol):
    """Somewhere the metrics of a step are shown or kept."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...


@dataclass(frozen=True)
class ConsoleSink:
    """One line per step."""

    console: RunConsole
    total_steps: int

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.console.step_line(step, self.total_steps, metrics)


@dataclass(frozen=True)
class FileSink:
    """One JSON line per step in the run folder."""

    folder: RunFolder

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.folder.log_metrics(step, metrics)


def build_sinks(
    names: Sequence[str], folder: RunFolder, console: RunConsole, total_steps: int
) -> tuple[MetricSink, ...]:
    """The sinks of `trainer.logger`, in that order, each once."""
    sinks: dict[str, MetricSink] = {}
    for name in names:
        match name:
            case "console":
                sinks[name] = ConsoleSink(console, total_steps)
            case "file":
                sinks[name] = FileSink(folder)
            case _ if name in PLANNED:
                raise RallyError(f"the logger {name} is not built yet; use console and file")
            case _:
                raise RallyError(f"there is no logger named {name}; use {' and '.join(BUILT)}")
    return tuple(sinks.values())
