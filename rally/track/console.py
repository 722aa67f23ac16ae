"""The console of a run: live progress bars on a terminal, plain lines in a log file, one line per step.

Text from models, tools and users is printed literally: markup is not interpreted and escape sequences are made visible.
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

_SHOWN: tuple[tuple[str, str, str], ...] = (  # metric, label, format (fixed, so that columns align)
    (REWARD, "reward_mean", "{:.3f}"),
    (TOOL_SUCCESS, "tool_call_success", "{:.3f}"),
    (NUM_TURNS, "num_turns", "{:.2f}"),
    ("actor/ppo_kl", "kl", "{:z.5f}"),
    ("train/loss", "loss", "{:.4f}"),
    ("val/loss", "val_loss", "{:.4f}"),
    ("train/tokens_per_s", "tokens/s", "{:.0f}"),
    ("timing_s/gen", "gen", "{:.2f}s"),
    ("timing_s/update_actor", "update_actor", "{:.2f}s"),
    ("perf/samples_per_s", "samples/s", "{:.1f}"),
)


class Phase:
    """A running phase of work; `advance` reports that `n` more of its items are done."""

    def __init__(self, on_advance: Callable[[int], None]) -> None:
        self.done = 0
        self._on_advance = on_advance

    def advance(self, n: int = 1) -> None:
        self.done += n
        self._on_advance(n)


class LastingConsole(Console):
    """A console that becomes quiet when its output pipe breaks, instead of ending the run.

    Ctrl-C also ends a `tee` that the run is piped into, while the current step is still to be finished and saved.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())  # flushing its buffer at exit would fail again
        os.close(nowhere)


class RunConsole:
    """The output of a run to its user. Tests can replace `console` and `clock`."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.console = console or LastingConsole(highlight=False)
        self._clock = clock
        self._live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._progress: Progress | None = None
        self._warned: set[str] = set()

    @contextmanager
    def phase(self, label: str, total: int | None = None) -> Iterator[Phase]:
        """A progress bar that disappears when the phase ends. Without a terminal, or if the phase fails, prints one
        line."""
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
        """Print one line with the main metrics of a step. Missing metrics are left out."""
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
        """Print a warning the first time that `key` is given."""
        if key not in self._warned:
            self._warned.add(key)
            self._line(Text.assemble(("warning: ", "bold yellow"), visible(text)))

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        self.show(text_table(title, rows))

    def banner(self, title: str, facts: Mapping[str, str] | None = None) -> None:
        """Print a title and a few facts about what follows."""
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
        # Phases may overlap, and a terminal has one live area: the bars share it.
        if self._progress is None or not self._progress.task_ids:
            self._progress = _progress(self.console)
            self._progress.start()
        return _Bar(self._progress, self._progress.add_task(label, total=total))


@dataclass(frozen=True)
class _Bar:
    """One bar of the shared live area; does nothing without a terminal."""

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
        transient=True,  # the step line already reports what happened
    )


def text_table(title: str, rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column holds names. Every cell is printed literally."""
    name = Text(one_line(title), style="bold")
    # A title is wrapped to the width of its table, so the table is at least as wide.
    table = Table(title=name, title_justify="left", show_header=False, box=SIMPLE, min_width=name.cell_len)
    for _ in range(max(map(len, rows), default=0)):
        table.add_column(overflow="fold")  # never truncate a path or a name
    for row in rows:
        table.add_row(*(Text(visible(cell), style="" if i else "dim") for i, cell in enumerate(row)))
    return table
