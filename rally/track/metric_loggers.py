"""Metrics go to every sink named in the configuration; a name that cannot be honoured is an error, never a no-op.

Whatever is named, they are in the run folder first: the console's summary, a resumed run and the trackers read them
there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rally.track.console import RunConsole
from rally.track.export import TRACKERS, Exporter, ExportSettings, require_packages
from rally.track.run_folder.folder import RunFolder
from rally.types import RallyError

BUILT = ("console", "file", *TRACKERS)
PLANNED = ("swanlab", "trackio", "clearml", "vemlp_wandb")


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


@dataclass(frozen=True)
class Sinks:
    """All sinks of a run, in order; trackers are open in a `with` block, and have everything when it is left."""

    sinks: tuple[MetricSink, ...]
    exporter: Exporter | None = None

    def __enter__(self) -> Sinks:
        if self.exporter is not None:
            self.exporter.__enter__()
        return self

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self.sinks:
            sink.log(step, metrics)
        if self.exporter is not None:
            self.exporter.log(step, metrics)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self.exporter is not None:
            self.exporter.__exit__(kind, *rest)


def build_sinks(
    names: Sequence[str],
    folder: RunFolder,
    console: RunConsole,
    total_steps: int,
    export: ExportSettings | None = None,
) -> Sinks:
    """The sinks of `trainer.logger`; `export` says what the trackers among them, and traces, are given."""
    for name in names:
        if name in PLANNED:
            raise RallyError(f"the logger {name} is not built yet; use {_either(BUILT)}")
        if name not in BUILT:
            raise RallyError(f"there is no logger named {name}; use {_either(BUILT)}")
    sinks: list[MetricSink] = [FileSink(folder)]
    if "console" in names:
        sinks.append(ConsoleSink(console, total_steps))
    if export is None or not (export.trackers or export.trace):
        return Sinks(tuple(sinks))
    require_packages([*export.trackers, *([export.trace.backend] if export.trace else [])])
    return Sinks(tuple(sinks), Exporter(export, console))


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
