"""Builds the metric loggers, trackers and traces of a run from its configuration."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

from transformers import PreTrainedTokenizerBase

from rally.config import Config
from rally.config.trainer import RunConfig, TrainerConfig
from rally.track import ExportSettings, RunConsole, RunFolder, Sinks, TraceSettings, build_sinks
from rally.track.export import TRACKERS
from rally.track.export.delivery import sole_exporter
from rally.types import RallyError
from rally.util.atomic_files import write_atomic


def sinks_of(
    trainer: RunConfig,
    folder: RunFolder,
    console: RunConsole,
    steps: int,
    after: int,
    trace: TraceSettings | None = None,
) -> Sinks:
    """The sinks that `trainer.logger` names, for a run that continues after step `after`; -1 for a new run."""
    # The folder of an evaluation is inside the run's, but a tracker gets a separate run.
    inside = "" if folder.path == trainer.run_dir else f" {folder.path.name}"
    settings = ExportSettings(
        folder=str(folder.path),
        project=trainer.project_name,
        name=trainer.experiment_name + inside,
        after=after,
        trackers=tuple(name for name in TRACKERS if name in trainer.logger),
        trace=trace,
    )
    return build_sinks(trainer.logger, folder, console, steps, settings)


def extra_folders_of(trainer: TrainerConfig) -> dict[bool, RunFolder]:
    """Further folders for episodes, by whether they are of a validation."""
    extra = {False: trainer.rollout_data_dir, True: trainer.validation_data_dir}
    return {validate: RunFolder(path).share() for validate, path in extra.items() if path}


def set_evaluation_aside(folder: RunFolder) -> None:
    """Move an earlier evaluation aside, so that its metrics do not mix with the next one's. Trackers keep both."""
    state = folder.path / "tracking"
    with exporter_paused(folder):
        aside = folder.rewind(-1)
        if aside is None or not state.is_dir():
            return
        (aside / state.name).mkdir()
        for ledger in state.glob("*.json"):
            os.replace(ledger, aside / state.name / ledger.name)


def exporter_paused(folder: RunFolder) -> AbstractContextManager[None]:
    """A context in which no export process reads the folder. It waits for that of an earlier run."""
    state = folder.path / "tracking"
    return sole_exporter(state) if state.is_dir() else nullcontext()


def trace_of(config: Config, folder: RunFolder, tokenizer: PreTrainedTokenizerBase) -> TraceSettings | None:
    """The settings of `rollout.trace`; None if there is no backend."""
    trace, trainer = config.rollout.trace, config.trainer
    if trace.backend is None:
        return None
    limit = trace.max_samples_per_step_per_worker
    return TraceSettings(
        backend=trace.backend,
        project=trace.project_name or trainer.project_name,
        experiment=trace.experiment_name or trainer.experiment_name,
        tokenizer=_tokenizer_file(folder, tokenizer) if trace.token2text else None,
        max_samples=None if limit is None else limit * config.rollout.agent.num_workers,
    )


def _tokenizer_file(folder: RunFolder, tokenizer: PreTrainedTokenizerBase) -> str:
    """Write the tokenizer as one file, which the export process reads without transformers."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        raise RallyError("rollout.trace.token2text needs a tokenizer with a tokenizer.json; leave token2text out")
    path = folder.path / "tracking" / "tokenizer.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, fast.to_str())
    return str(path)
