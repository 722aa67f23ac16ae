"""Sends traces by OTLP over HTTP, to the endpoint of the standard OTEL_ environment variables."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from rally.track.display_text import visible
from rally.track.export.episode_spans import Span, Trace
from rally.track.export.settings import without_password
from rally.types import RallyError

Attributes = dict[str, Any]

_SURROGATE = re.compile(r"[\ud800-\udfff]")


def readable_spans(
    trace: Trace, attributes: Callable[[Trace, Span], Attributes], resource: Resource
) -> Iterator[ReadableSpan]:
    """The spans of a trace as OpenTelemetry spans, with the backend's attributes."""
    for place, span in enumerate(trace.spans):
        parent = None if span.parent is None else _context(trace, span.parent)
        failed = None if span.error is None else visible(span.error)
        yield ReadableSpan(
            name=visible(span.name),
            context=_context(trace, place),
            parent=parent,
            resource=resource,
            attributes=attributes(trace, span),
            start_time=int(span.start * 1e9),
            end_time=int(span.end * 1e9),
            status=Status(StatusCode.OK) if failed is None else Status(StatusCode.ERROR, failed),
        )


def as_json(value: Any) -> str:
    """JSON without escapes, except for text with lone surrogates, which has no UTF-8."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def as_plain_json(value: Any) -> str:
    """The same for readers that parse the JSON again: lone surrogates are made visible, as on the console."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda match: f"\\\\u{ord(match.group()):04x}", text)


def tag_texts(tags: dict[str, str], most: int) -> dict[str, str]:
    """Tags as visible text of at most `most` characters."""
    return {name: visible(text)[:most] for name, text in tags.items()}


def _context(trace: Trace, place: int) -> SpanContext:
    return SpanContext(trace.id, trace.span_id(place), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


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
            raise RallyError(f"the OpenTelemetry collector at {self.where} did not accept the spans; is it running?")

    def close(self) -> None:
        self._exporter.shutdown()


def _attributes(trace: Trace, span: Span) -> Attributes:
    values = {"span.type": span.kind, "inputs": span.inputs, "outputs": span.outputs, **span.attributes}
    if span.parent is None:
        values |= tag_texts({"name": trace.name, **trace.tags}, MAX_TAG)
    return {name: _value(value) for name, value in values.items() if value is not None}


def _value(value: object) -> str | bool | int | float:
    """Numbers as they are, everything else as JSON."""
    return value if isinstance(value, (bool, int, float)) else as_json(value)
