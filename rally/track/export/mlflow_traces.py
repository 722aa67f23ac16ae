"""A trace is stored by MLflow as it is: spans with inputs, outputs and attributes, tags to search by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mlflow.entities import Span as MlflowSpan
from mlflow.entities import Trace as MlflowTrace
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import SpanAttributeKey, TraceTagKey
from opentelemetry.sdk.resources import Resource

from rally.track.export.mlflow_runs import connect, experiment_of, how_to_look
from rally.track.export.readable import Attributes, as_json, as_plain_json, readable_spans, tag_texts
from rally.track.export.spans import Span, Trace

MAX_TAG = 250  # the shortest limit of the stores
PAGE = 100  # traces of one request


class MlflowTraces:
    """Traces in an experiment named like the project; with `run`, they are also that run's."""

    def __init__(self, folder: Path, project: str, experiment: str, run: str) -> None:
        self._client = connect(folder)
        self._traces = TracingClient(self._client.tracking_uri)
        self._experiment = experiment_of(self._client, project, folder)
        self._name = experiment
        self._run = run
        self.where = how_to_look(self._client)

    def add(self, traces: Sequence[Trace]) -> None:
        spans = [
            MlflowSpan(span)
            for trace in traces
            for span in readable_spans(trace, self._attributes, Resource.get_empty())
        ]
        self._traces.log_spans(self._experiment, spans)
        self._link([_id(trace) for trace in traces])

    def take_up(self, run: str, after: int) -> None:
        """Remove the traces of `run` later than the step it goes on after; link the others to the MLflow run of now."""
        steps = {trace.info.trace_id: int(trace.info.tags["step"]) for trace in self._stored(run)}
        for later in _pages([id for id, step in steps.items() if step > after]):
            self._traces.delete_traces(self._experiment, trace_ids=later)
        for kept in _pages([id for id, step in steps.items() if step <= after]):
            self._link(kept)

    def _stored(self, run: str) -> Iterator[MlflowTrace]:
        page: str | None = None
        while True:
            found = self._traces.search_traces(
                experiment_ids=[self._experiment],
                filter_string=f"tags.`rally.run` = '{run}'",
                max_results=PAGE,
                page_token=page,
                include_spans=False,
            )
            yield from found
            page = found.token
            if not page:
                return

    def _link(self, ids: list[str]) -> None:
        if self._run:
            self._client.link_traces_to_run(ids, self._run)

    def close(self) -> None:
        """Everything is stored when `add` returns."""

    def _attributes(self, trace: Trace, span: Span) -> Attributes:
        values = {
            SpanAttributeKey.REQUEST_ID: _id(trace),
            SpanAttributeKey.SPAN_TYPE: span.kind,
            SpanAttributeKey.INPUTS: span.inputs,
            SpanAttributeKey.OUTPUTS: span.outputs,
        }
        values |= span.attributes
        written = {name: as_json(value) for name, value in values.items()}
        if span.parent is None:
            # MLflow makes the columns of its table of these; the first turn has the same messages to the letter.
            written |= {key: as_plain_json(values[key]) for key in (SpanAttributeKey.INPUTS, SpanAttributeKey.OUTPUTS)}
            tags = tag_texts({TraceTagKey.TRACE_NAME: trace.name, "experiment": self._name, **trace.tags}, MAX_TAG)
            written |= {f"{SpanAttributeKey.TRACE_TAG_PREFIX}{name}": as_json(text) for name, text in tags.items()}
        return written


def _pages(ids: list[str]) -> Iterator[list[str]]:
    for first in range(0, len(ids), PAGE):
        yield ids[first : first + PAGE]


def _id(trace: Trace) -> str:
    return f"tr-{trace.id:032x}"
