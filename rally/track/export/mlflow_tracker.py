"""Sends metrics and configuration as an MLflow run, and episodes as MLflow traces."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.entities import Span as MlflowSpan
from mlflow.entities import Trace as MlflowTrace
from mlflow.exceptions import MlflowException
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import SpanAttributeKey, TraceTagKey
from opentelemetry.sdk.resources import Resource

from rally.track.export.delivery import DeliveryLedger, PositionedMetrics
from rally.track.export.episode_spans import Span, Trace
from rally.track.export.otel_traces import Attributes, as_json, as_plain_json, readable_spans, tag_texts
from rally.track.export.settings import TrackerRun, flat, without_password

REFUSED = "INVALID_PARAMETER_VALUE"
MAX_METRICS = 1000  # per request
MAX_PARAMS = 100
MAX_PARAM = 6000  # characters
MAX_NAME = 250
# What MLflow rejects in names: other characters, empty path parts, the parts `.` and `..`, and two leading dots.
_FORBIDDEN = re.compile(r"[^\w\-. :/]|^/|/(?=/|$)|^\.\.|(?<![^/])\.{1,2}(?![^/])", re.ASCII)
_log = logging.getLogger(__name__)


def connect(folder: Path) -> MlflowClient:
    """The store of MLFLOW_TRACKING_URI, or a database in the run folder."""
    return MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or _local(folder))


def experiment_of(client: MlflowClient, name: str, folder: Path) -> str:
    """The id of the experiment of this name, which is created if it is missing."""
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return str(experiment.experiment_id)
    local = client.tracking_uri == _local(folder)
    # Without a location, MLflow would write artifacts into the working directory.
    return str(client.create_experiment(name, artifact_location=_files(folder) if local else None))


def how_to_look(client: MlflowClient) -> str:
    """The command that shows the store, or the URL of its server."""
    uri = without_password(client.tracking_uri)
    if uri.startswith(("http://", "https://")):
        return uri
    hint = "" if find_spec("flask") else "  (the UI needs the full package: pip install mlflow)"
    return f"mlflow ui --backend-store-uri {uri}{hint}"


class MlflowRun:
    """An MLflow run named after trainer.experiment_name, in an experiment named after trainer.project_name."""

    def __init__(self, place: TrackerRun, ledger: DeliveryLedger) -> None:
        self._client = connect(place.folder)
        experiment = experiment_of(self._client, place.project, place.folder)
        if ledger.continues(place.after) and self._is_active(ledger.id):
            self._client.update_run(ledger.id, status="RUNNING")
        else:
            id = str(self._client.create_run(experiment, run_name=place.name).info.run_id)
            self._log_config(id, place)  # a continued run has it already
            if ledger.id and self._is_active(ledger.id):
                self._client.delete_run(ledger.id)
            ledger.begin(id)
        self._id = ledger.id
        self._refused: set[str] = set()

    @property
    def where(self) -> str:
        lacking = f", without {len(self._refused)} metrics that it rejected (tracking/log.txt)" if self._refused else ""
        return how_to_look(self._client) + lacking

    def send(self, item: PositionedMetrics) -> None:
        # With the original time, a row that is sent again is stored once.
        points = [
            Metric(metric_name(name), value, int(item.at * 1000), item.position) for name, value in item.metrics.items()
        ]
        for first in range(0, len(points), MAX_METRICS):
            self._add(points[first : first + MAX_METRICS])

    def _add(self, points: list[Metric]) -> None:
        """Log all points. If MLflow rejects the request, bisect it and leave out only the points it rejects."""
        try:
            self._client.log_batch(self._id, metrics=points)
        except MlflowException as error:
            if error.error_code != REFUSED or not self._is_active(self._id):
                raise
            if len(points) > 1:
                half = len(points) // 2
                self._add(points[:half])
                self._add(points[half:])
            else:
                self._refused.add(points[0].key)
                _log.warning("MLflow rejected %s: %s", points[0].key, error)

    def close(self, ok: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if ok else "KILLED")

    def _is_active(self, id: str) -> bool:
        try:
            return bool(self._client.get_run(id).info.lifecycle_stage == "active")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise

    def _log_config(self, id: str, place: TrackerRun) -> None:
        params = [Param(metric_name(key), value[:MAX_PARAM]) for key, value in flat(place.config())]
        for first in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(id, params=params[first : first + MAX_PARAMS])


def metric_name(name: str) -> str:
    """The name with characters that MLflow rejects replaced: `@` by `_at_`, others by their code point. A long name is
    truncated and ends with a hash, so that names stay distinct."""
    spelled = _FORBIDDEN.sub(_spelled, name.replace("@", "_at_")) or "_"
    if len(spelled) <= MAX_NAME:
        return spelled
    tail = "_" + hashlib.blake2b(spelled.encode(), digest_size=4).hexdigest()
    return spelled[: MAX_NAME - len(tail)] + tail


def _spelled(match: re.Match[str]) -> str:
    return "".join(f"_u{ord(character):x}_" for character in match.group())


def _local(folder: Path) -> str:
    return f"sqlite:///{folder.absolute() / 'mlflow.db'}"


def _files(folder: Path) -> str:
    return (folder.absolute() / "mlflow_files").as_uri()


MAX_TAG = 250  # the lowest limit among MLflow's stores
PAGE = 100  # traces per request


class MlflowTraces:
    """Traces in an experiment named after the project; with `run`, linked to that run."""

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
        """Delete the traces of `run` after step `after`, and link the others to the current MLflow run."""
        steps = {trace.info.trace_id: int(trace.info.tags["step"]) for trace in self._stored(run)}
        for later in _pages([id for id, step in steps.items() if step > after]):
            self._traces.delete_traces(self._experiment, trace_ids=later)
        for kept in _pages([id for id, step in steps.items() if step <= after]):
            self._link(kept)

    def _stored(self, run: str) -> Iterator[MlflowTrace]:
        page: str | None = None
        while True:
            traces = self._traces.search_traces(
                experiment_ids=[self._experiment],
                filter_string=f"tags.`rally.run` = '{run}'",
                max_results=PAGE,
                page_token=page,
                include_spans=False,
            )
            yield from traces
            page = traces.token
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
            # MLflow shows these in its table; the first turn holds the exact messages.
            written |= {key: as_plain_json(values[key]) for key in (SpanAttributeKey.INPUTS, SpanAttributeKey.OUTPUTS)}
            tags = tag_texts({TraceTagKey.TRACE_NAME: trace.name, "experiment": self._name, **trace.tags}, MAX_TAG)
            written |= {f"{SpanAttributeKey.TRACE_TAG_PREFIX}{name}": as_json(text) for name, text in tags.items()}
        return written


def _pages(ids: list[str]) -> Iterator[list[str]]:
    for first in range(0, len(ids), PAGE):
        yield ids[first : first + PAGE]


def _id(trace: Trace) -> str:
    return f"tr-{trace.id:032x}"
