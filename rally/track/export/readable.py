"""A trace becomes OpenTelemetry spans, which both MLflow and OTLP take; every text in them is valid UTF-8."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from rally.track.export.spans import Span, Trace
from rally.track.text import visible

Attributes = dict[str, Any]

_SURROGATE = re.compile(r"[\ud800-\udfff]")


def readable_spans(
    trace: Trace, attributes: Callable[[Trace, Span], Attributes], resource: Resource
) -> Iterator[ReadableSpan]:
    """The spans of a trace, each with the attributes that a backend wants."""
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
    """JSON that people can read, except where a lone surrogate has no UTF-8: there JSON's own escapes stand for it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def as_plain_json(value: Any) -> str:
    """The same for readers that take texts out of JSON again: a lone surrogate is written out, as on the console."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda match: f"\\\\u{ord(match.group()):04x}", text)


def tag_texts(tags: dict[str, str], most: int) -> dict[str, str]:
    """Tags are looked for and shown in tables, so they hold nothing that acts and end at `most` characters."""
    return {name: visible(text)[:most] for name, text in tags.items()}


def _context(trace: Trace, place: int) -> SpanContext:
    return SpanContext(trace.id, trace.span_id(place), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
