"""A trace is stored by MLflow as it is: spans with inputs, outputs and attributes, tags to search by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlflow.entities import Span as MlflowSpan
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import SpanAttributeKey, TraceTagKey
from opentelemetry.sdk.resources import Resource

from rally.track.export.mlflow_runs import connect, experiment_of, how_to_look
from rally.track.export.readable import Attributes, as_json, readable_spans, tag_texts
from rally.track.export.spans import Span, Trace

MAX_TAG = 250  # the shortest limit of the stores
PAGE = 500


class MlflowTraces:
    """Traces in an experiment named like the project; with `run`, they are also that run's."""

    def __init__(self, folder: Path, project: str, experiment: str, run: str | None) -> None:
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
        if self._run is not None:
            self._client.link_traces_to_run([_id(trace) for trace in traces], self._run)

    def forget(self, run: str, after: int) -> None:
        """Remove the traces of `run` whose step is later than `after`: the run goes on from there, differently."""
        page: str | None = None
        later: list[str] = []
        while True:
            found = self._traces.search_traces(
                experiment_ids=[self._experiment],
                filter_string=f"tags.`rally.run` = '{run}'",
                max_results=PAGE,
                page_token=page,
                include_spans=False,
            )
            later += [trace.info.trace_id for trace in found if int(trace.info.tags["step"]) > after]
            page = found.token
            if not page:
                break
        for first in range(0, len(later), PAGE):
            self._traces.delete_traces(self._experiment, trace_ids=later[first : first + PAGE])

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
        if span.parent is None:
            tags = tag_texts({TraceTagKey.TRACE_NAME: trace.name, "experiment": self._name, **trace.tags}, MAX_TAG)
            values |= {f"{SpanAttributeKey.TRACE_TAG_PREFIX}{name}": text for name, text in tags.items()}
        return {name: as_json(value) for name, value in values.items()}


def _id(trace: Trace) -> str:
    return f"tr-{trace.id:032x}"
