"""A trace is sent by OTLP over HTTP to wherever the usual OTEL_ variables say, or counted as not sent."""

from __future__ import annotations

import os
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExportResult

from rally.track.export.place import without_password
from rally.track.export.readable import Attributes, as_json, readable_spans, tag_texts
from rally.track.export.spans import Span, Trace
from rally.types import RallyError

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
DEFAULT = "http://localhost:4318"
MAX_TAG = 1000


class OtelTraces:
    """The service is OTEL_SERVICE_NAME, or rally; the endpoint, headers and time limit are the environment's too."""

    def __init__(self, project: str, experiment: str) -> None:
        self._exporter = OTLPSpanExporter()
        self._resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME", "rally"),
                "rally.project": project,
                "rally.experiment": experiment,
            }
        )
        self.where = without_password(next(filter(None, map(os.environ.get, ENDPOINTS)), DEFAULT))

    def add(self, traces: Sequence[Trace]) -> None:
        spans = [span for trace in traces for span in readable_spans(trace, _attributes, self._resource)]
        if self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise RallyError(f"the OpenTelemetry collector at {self.where} did not take the spans; is it running?")

    def close(self) -> None:
        self._exporter.shutdown()


def _attributes(trace: Trace, span: Span) -> Attributes:
    values = {"span.type": span.kind, "inputs": span.inputs, "outputs": span.outputs, **span.attributes}
    if span.parent is None:
        values |= tag_texts({"name": trace.name, **trace.tags}, MAX_TAG)
    return {name: _value(value) for name, value in values.items() if value is not None}


def _value(value: object) -> str | bool | int | float:
    """Numbers as they are; texts and everything that OpenTelemetry's flat values cannot hold as JSON."""
    return value if isinstance(value, (bool, int, float)) else as_json(value)
