"""The export process: follows a run folder until standard input ends, then sends the rest and reports where it is.

    python -m rally.track.export '<ExportSettings as JSON>'

A byte on standard input announces new records, `e` a successful end of the run; end of input alone means that the run
was killed. Each line on standard output is a JSON list of kind, name and text.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rally.track.export.delivery import (
    AnyStream,
    DeliveryLedger,
    Destination,
    EpisodeFiles,
    MetricsLines,
    PositionedMetrics,
    StillSending,
    Stream,
    sole_exporter,
)
from rally.track.export.episode_spans import Decode
from rally.track.export.settings import ExportSettings, TraceSettings, TrackerRun
from rally.track.export.traces import TraceBackend, Traces
from rally.track.run_folder.folder import RunFolder

Tell = Callable[[str, str, str], None]
POLL_SECONDS = 5.0  # between retries; new records are announced
ENDED = b"e"


def main(text: str) -> None:
    settings = ExportSettings.from_json(text)
    # Output of libraries goes to the log, not to the channel that the training process reads.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(kind: str, name: str, text: str) -> None:
        try:
            out.write(json.dumps([kind, name, text]) + "\n")
        except BrokenPipeError:  # the run was killed; its records are still exported
            print(kind, name, text, file=sys.stderr)  # noqa: T201 - a program writes to its log

    try:
        with sole_exporter(settings.state):
            streams = list(build_streams(settings, tell))
            for stream in streams:
                stream.open()
            tell("ready", "", "")
            os.nice(10)  # training has priority
            follow(streams)
    except StillSending as problem:
        tell("refused", "", str(problem))


def follow(streams: list[AnyStream]) -> None:
    """Export until standard input ends."""
    signals, ok = b"-", False
    while signals:
        news, _, _ = select.select([0], [], [], POLL_SECONDS)
        signals = os.read(0, 4096) if news else b"-"
        ok = ok or ENDED in signals
        for stream in streams:
            stream.pump()
    for stream in streams:
        stream.close(ok)


def build_streams(settings: ExportSettings, tell: Tell) -> Iterator[AnyStream]:
    place = TrackerRun(Path(settings.folder), settings.project, settings.name, settings.after)
    folder = RunFolder(settings.folder)
    for name in settings.trackers:
        ledger = DeliveryLedger.read(settings.state / f"{name}.json")
        yield Stream(name, MetricsLines(folder), ledger, partial(_tracker, name, place), tell)
    if settings.trace is not None:
        # Last, because traces are linked to the run of the metrics, which must be open.
        ledger = DeliveryLedger.read(settings.state / f"traces-{settings.trace.backend}.json")
        connect = partial(_traces, settings.trace, settings, folder)
        yield Stream(f"{settings.trace.backend} traces", EpisodeFiles(folder), ledger, connect, tell)


def _tracker(name: str, place: TrackerRun, ledger: DeliveryLedger) -> Destination[PositionedMetrics]:
    """Open a tracker. Its library is imported only here."""
    match name:
        case "tensorboard":
            from rally.track.export.tensorboard_tracker import EventFiles

            return EventFiles(place, ledger)
        case "mlflow":
            from rally.track.export.mlflow_tracker import MlflowRun

            return MlflowRun(place, ledger)
        case _:
            from rally.track.export.wandb_tracker import WandbRun

            return WandbRun(place, ledger)


def _traces(trace: TraceSettings, settings: ExportSettings, folder: RunFolder, ledger: DeliveryLedger) -> Traces:
    last = 2 * settings.after + 1  # the position of the last episodes before the resume
    build = _mlflow_traces if trace.backend == "mlflow" else _otel_traces
    backend = build(trace, settings, ledger, last)
    return Traces(folder, backend, ledger.id.split()[0], trace.max_samples, _decoder(trace))


def _mlflow_traces(trace: TraceSettings, settings: ExportSettings, ledger: DeliveryLedger, last: int) -> TraceBackend:
    from rally.track.export.mlflow_tracker import MlflowTraces

    run = DeliveryLedger.read(settings.state / "mlflow.json").id if "mlflow" in settings.trackers else ""
    backend = MlflowTraces(Path(settings.folder), trace.project, trace.experiment, run)
    own, _, linked = ledger.id.partition(" ")
    if own and (not ledger.continues(last) or linked != run):
        backend.take_up(own, settings.after)
    ledger.begin(f"{own or secrets.token_hex(8)} {run}", min(ledger.through, last))
    return backend


def _otel_traces(trace: TraceSettings, settings: ExportSettings, ledger: DeliveryLedger, last: int) -> TraceBackend:
    from rally.track.export.otel_traces import OtelTraces

    # A collector cannot delete, so episodes that are sampled again get new ids.
    own = ledger.id if ledger.continues(last) else secrets.token_hex(8)
    ledger.begin(own, min(ledger.through, last))
    return OtelTraces(trace.project, trace.experiment)


def _decoder(trace: TraceSettings) -> Decode | None:
    if trace.tokenizer is None:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(trace.tokenizer)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


if __name__ == "__main__":
    main(sys.argv[1])
