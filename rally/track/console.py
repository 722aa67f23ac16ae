"""The console shows what a run does: live bars on a terminal, plain readable lines in a log file, one line per step.

Whatever a model, tool or user wrote is shown as text: no markup is read from it and no escape sequence acts.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from rally.track.display_text import one_line, visible
from rally.track.metrics.episode_metrics import NUM_TURNS, REWARD, TOOL_SUCCESS, VALIDATION, validation_series

_SHOWN: tuple[tuple[str, str, str], ...] = (  # metric, what users call it, format: fixed, so that columns line up
    (REWARD, "reward_mean", "{:.3f}"),
    (TOOL_SUCCESS, "tool_call_success", "{:.3f}"),
    (NUM_TURNS, "num_turns", "{:.2f}"),
    ("actor/ppo_kl", "kl", "{:.5f}"),
    ("train/loss", "loss", "{:.4f}"),
    ("val/loss", "val_loss", "{:.4f}"),
    ("train/tokens_per_s", "tokens/s", "{:.0f}"),
    ("timing_s/gen", "gen", "{:.2f}s"),
    ("timing_s/update_actor", "update_actor", "{:.2f}s"),
    ("perf/samples_per_s", "samples/s", "{:.1f}"),
)


class Phase:
    """A stretch of work under way; `advance` says that `n` more items of it are done."""

    def __init__(self, on_advance: Callable[[int], None]) -> None:
        self.done = 0
        self._on_advance = on_advance

    def advance(self, n: int = 1) -> None:
        self.done += n
        self._on_advance(n)


class LastingConsole(Console):
    """A console that falls silent when whoever reads its output is gone: that is no reason to end a run.

    Ctrl-C also ends the `tee` that a run is piped into, and the step under way is still to be finished and saved.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())  # what is left in its buffer would fail again when the process ends
        os.close(nowhere)


class RunConsole:
    """What the user sees of a run. `console` and `clock` can be given so that tests see the same."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.console = console or LastingConsole(highlight=False)
        self._clock = clock
        self._live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._progress: Progress | None = None
        self._warned: set[str] = set()

    @contextmanager
    def phase(self, label: str, total: int | None = None) -> Iterator[Phase]:
        """A bar that is gone when the phase ends; without a terminal, or when the phase fails, one line instead."""
        label = one_line(label)
        bar = self._open_bar(label, total)
        phase = Phase(bar.advance)
        started, how = self._clock(), "stopped after"
        try:
            yield phase
            how = "in"
        finally:
            bar.close()
            if not self._live or how != "in":
                count = str(phase.done) if total is None else f"{phase.done}/{total}"
                self._line(Text(f"{label} {count} {how} {self._clock() - started:.1f} s"))

    def step_line(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """One line: what was earned, how tools fared, how long it took. Metrics that are not there are left out."""
        line = Text(f"step {step:>{len(str(total))}}/{total}", style="bold")
        validation = ((name, f"val:{name.removeprefix(VALIDATION)}", "{:.3f}") for name in validation_series(metrics))
        for name, label, pattern in (*_SHOWN, *validation):
            if name in metrics:
                value = metrics[name]
                line.append(f"  {one_line(label)}=", style="not bold dim")
                line.append(pattern.format(value), style="not bold" if math.isfinite(value) else "bold red")
        self._line(line)

    def note(self, text: str) -> None:
        self._line(Text(visible(text)))

    def warn_once(self, key: str, text: str) -> None:
        """Warn about `key` the first time only: a run has thousands of steps and one is enough."""
        if key not in self._warned:
            self._warned.add(key)
            self._line(Text.assemble(("warning: ", "bold yellow"), visible(text)))

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        self.show(text_table(title, rows))

    def banner(self, title: str, facts: Mapping[str, str] | None = None) -> None:
        """What is about to run, and the few facts about it that matter."""
        facts = facts or {}
        self._line(Text(one_line(title), style="bold"))
        for name, value in facts.items():
            self._line(Text.assemble((f"  {one_line(name):<{max(map(len, facts))}}  ", "dim"), one_line(value)))

    def show(self, renderable: RenderableType) -> None:
        """Print a conversation, a summary or any other renderable above the bars."""
        self.console.print(renderable)

    def _line(self, text: Text) -> None:
        # soft_wrap: a log file has no width, so a line stays one line.
        self.console.print(text, soft_wrap=True)

    def _open_bar(self, label: str, total: int | None) -> _Bar:
        if not self._live:
            return _Bar(None, TaskID(0))
        # Phases may overlap, and a terminal has room for one live area: the bars share it.
        if self._progress is None or not self._progress.task_ids:
            self._progress = _progress(self.console)
            self._progress.start()
        return _Bar(self._progress, self._progress.add_task(label, total=total))


@dataclass(frozen=True)
class _Bar:
    """One bar of a shared live area, or nothing where there is no terminal."""

    progress: Progress | None
    task: TaskID

    def advance(self, n: int) -> None:
        if self.progress is not None:
            self.progress.advance(self.task, n)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.remove_task(self.task)
            if not self.progress.task_ids:
                self.progress.stop()


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,  # the step line tells what happened; a finished bar would only be scrolled past
    )


def text_table(title: str, rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column names what the others say; every cell is shown as text."""
    name = Text(one_line(title), style="bold")
    # A title is wrapped to the width of its table, so the table is at least as wide.
    table = Table(title=name, title_justify="left", show_header=False, box=SIMPLE, min_width=name.cell_len)
    for _ in range(max(map(len, rows), default=0)):
        table.add_column(overflow="fold")  # a path or a name that is cut short is of no use
    for row in rows:
        table.add_row(*(Text(visible(cell), style="" if i else "dim") for i, cell in enumerate(row)))
    return table
