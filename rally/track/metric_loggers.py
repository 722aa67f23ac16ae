"""The metric sinks of a run: the run folder, the console and trackers, as `trainer.logger` names them.

An unknown name is an error. Metrics always go to the run folder first, from which the summary, a resumed run and the
trackers read them.
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
    """A destination for the metrics of a step."""

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
    """All sinks of a run, in order. Trackers are open within a `with` block and have received everything at its end."""

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
    """The sinks that `trainer.logger` names; `export` are the settings of trackers and traces."""
    for name in names:
        if name in PLANNED:
            raise RallyError(f"the logger {name} is not supported yet; use {_either(BUILT)}")
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
