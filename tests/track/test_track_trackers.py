"""Real TensorBoard, MLflow and OTLP: their own readers return what the run wrote."""

import json
import math
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("tensorboard")
pytest.importorskip("mlflow")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from mlflow import MlflowClient
from mlflow.entities import Trace as MlflowTrace
from mlflow.entities import ViewType
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import _validate_metric
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from track_episodes import NASTY, make_episode
from tracker_cases import NAMES, ledger_of, make_place, row, send

from rally.track.export.delivery import EpisodeFile, PositionedMetrics
from rally.track.export.episode_spans import trace_of
from rally.track.export.mlflow_tracker import MlflowRun, MlflowTraces, connect, experiment_of, how_to_look, metric_name
from rally.track.export.otel_traces import OtelTraces
from rally.track.export.settings import TrackerRun
from rally.track.export.tensorboard_tracker import EventFiles
from rally.track.export.traces import Traces
from rally.track.run_folder.folder import RunFolder
from rally.types import Episode, RallyError, ToolCall, ToolResponse, ToolResult, ToolStatus

HOSTILE = NASTY + "\x00 end"


@pytest.fixture
def place(tmp_path: Path) -> TrackerRun:
    return make_place(tmp_path)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowClient]:
    """One database for the whole file, since creating one takes seconds."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'all.db'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        yield MlflowClient(tracking_uri=uri)


# TensorBoard


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    read = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    return {tag: {e.step: e.value for e in read.Scalars(tag)} for tag in read.Tags()["scalars"]}


def single(value: float) -> float:
    """A number at TensorBoard's precision."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def test_event_files_hold_the_metrics_and_after_a_resume_each_step_once(place: TrackerRun) -> None:
    ledger = ledger_of(place, "tensorboard")
    first = EventFiles(place, ledger)
    send(first, ledger, row(0), row(1), row(2), row(3))
    first.close(ok=False)
    again = EventFiles(replace(place, after=1), ledger_of(place, "tensorboard"))
    send(again, ledger, row(2, shift=10))
    again.close(ok=True)
    found = scalars(place.folder / "tensorboard")
    for name in NAMES:
        rows = (row(0), row(1), row(2, shift=10))
        assert found[name] == {one.position: single(one.metrics[name]) for one in rows}
    assert all(math.isnan(value) for value in found["bad"].values())


def test_event_files_go_on_after_a_failure_with_each_step_once(place: TrackerRun) -> None:
    tracker = EventFiles(place, ledger_of(place, "tensorboard"))
    tracker.send(row(1))
    tracker.send(row(2))
    tracker._writer.close()  # as after a full disk: every write fails
    with pytest.raises(OSError, match="closed"):
        tracker.send(row(2, shift=5))
    tracker.send(row(2, shift=5))
    tracker.close(ok=True)
    wanted = {1: single(row(1).metrics[NAMES[0]]), 2: single(row(2, shift=5).metrics[NAMES[0]])}
    assert scalars(place.folder / "tensorboard")[NAMES[0]] == wanted


def test_the_folder_of_the_event_files_is_in_the_one_the_environment_names(
    place: TrackerRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "elsewhere"))
    tracker = EventFiles(place, ledger_of(place, "tensorboard"))
    tracker.send(row(1))
    tracker.close(ok=True)
    own = tmp_path / "elsewhere" / "project" / "experiment"
    assert scalars(own)[NAMES[0]].keys() == {1}
    assert str(own) in tracker.where


# MLflow


def history(store: MlflowClient, run: str, name: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in store.get_metric_history(run, metric_name(name))]


def test_an_mlflow_run_has_the_metrics_the_configuration_and_no_secret(place: TrackerRun, store: MlflowClient) -> None:
    ledger = ledger_of(place, "mlflow")
    tracker = MlflowRun(place, ledger)
    send(tracker, ledger, row(0), row(1))
    tracker.send(row(1))  # a request whose answer was lost is sent again
    tracker.close(ok=True)
    run = store.get_run(ledger.id)
    assert (run.info.run_name, run.info.status) == ("experiment", "FINISHED")
    assert run.data.params["trainer.seed"] == "3" and run.data.params["data.train_files"] == "['a', 'b']"
    assert "s3cr3t" not in str(run.to_dictionary())
    for name in NAMES:
        assert history(store, ledger.id, name) == [(one.position, one.metrics[name]) for one in (row(0), row(1))]
    assert [math.isnan(value) for _, value in history(store, ledger.id, "bad")] == [True, True]


names = st.text(st.sampled_from("a/.@é \n"), max_size=8) | st.text(max_size=300)


@given(names)
@example("..@")
def test_every_name_is_one_that_mlflow_takes(name: str) -> None:
    _validate_metric(metric_name(name), 1.0, 0, 0)
    assert metric_name("x" * 300 + name) != metric_name("x" * 301 + name), "also those that are too long stay two"
    assert metric_name("a/./b//c/") == "a/_u2e_/b_u2f_/c_u2f_"
    assert metric_name("critic/rewards/mean") == "critic/rewards/mean"


def test_what_an_mlflow_server_refuses_does_not_keep_the_rest_from_it(
    place: TrackerRun, store: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rally.track.export.mlflow_tracker.metric_name", lambda name: name)
    tracker = MlflowRun(place, ledger := ledger_of(place, "mlflow"))
    tracker.send(PositionedMetrics(1, 1000.0, {"a": 1.0, "b//": 2.0, "c": 3.0, "d": 4.0}))
    assert store.get_run(ledger.id).data.metrics == {"a": 1.0, "c": 3.0, "d": 4.0}
    assert tracker.where.endswith(", without 1 metrics that it rejected (tracking/log.txt)")
    store.delete_run(ledger.id)
    with pytest.raises(MlflowException, match="active"):
        tracker.send(PositionedMetrics(2, 1000.0, {"a": 1.0}))


def test_a_run_whose_configuration_could_not_be_told_is_not_gone_on_with(
    place: TrackerRun, store: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*given: Any, **named: Any) -> None:
        raise ConnectionError

    with monkeypatch.context() as patch, pytest.raises(ConnectionError):
        patch.setattr(MlflowClient, "log_batch", away)
        MlflowRun(place, ledger_of(place, "mlflow"))
    MlflowRun(place, ledger := ledger_of(place, "mlflow"))
    assert store.get_run(ledger.id).data.params["trainer.seed"] == "3"


def test_an_mlflow_run_goes_on_or_is_told_anew(place: TrackerRun, store: MlflowClient) -> None:
    ledger = ledger_of(place, "mlflow")
    tracker = MlflowRun(place, ledger)
    send(tracker, ledger, row(1), row(2))
    tracker.close(ok=False)
    first = ledger.id
    assert store.get_run(first).info.status == "KILLED"

    ledger = ledger_of(place, "mlflow")
    MlflowRun(replace(place, after=2), ledger)
    assert (ledger.id, ledger.through, store.get_run(first).info.status) == (first, 2, "RUNNING")

    MlflowRun(replace(place, after=1), ledger)
    assert (ledger.id != first, ledger.through) == (True, -1)  # so all steps are sent
    assert store.get_run(first).info.lifecycle_stage == "deleted"
    experiment = store.get_run(first).info.experiment_id
    assert first not in {run.info.run_id for run in store.search_runs([experiment], run_view_type=ViewType.ACTIVE_ONLY)}


def test_a_local_database_lies_in_the_run_folder(place: TrackerRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    seen: dict[str, str] = {}

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            self.tracking_uri = tracking_uri

        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str, artifact_location: str | None = None) -> str:
            seen["files"] = str(artifact_location)
            return "1"

    monkeypatch.setattr("rally.track.export.mlflow_tracker.MlflowClient", Client)
    client = connect(place.folder)
    assert experiment_of(client, "p", place.folder) == "1"
    database = place.folder / "mlflow.db"
    assert how_to_look(client).startswith(f"mlflow ui --backend-store-uri sqlite:///{database}")
    assert seen["files"] == (place.folder / "mlflow_files").as_uri()


# Traces


def hostile_episode(text: str) -> Episode:
    base = make_episode("hostile " + NASTY, step=3, extra={"note": text})
    call = ToolCall(name="calculate", arguments={"expression": text}, id="c0", raw=text)
    failed = ToolResult(call=call, status=ToolStatus.ERROR, response=ToolResponse(text=text), seconds=0.5)
    turns = (
        replace(base.turns[0], text=text, tool_calls=(call,)),
        replace(base.turns[1], text=text, tool_results=(failed,)),
        replace(base.turns[2], text=text),
    )
    task = replace(base.task, id="task " + NASTY, prompt=({"role": "user", "content": text},))
    return replace(base, task=task, turns=turns, reward=0.25, timings={"started": 1e9, "total": 2.0})


def stored(store: MlflowClient, project: str) -> dict[str, MlflowTrace]:
    experiment = store.get_experiment_by_name(project)
    assert experiment is not None
    found = store.search_traces(locations=[experiment.experiment_id], max_results=100)
    return {trace.info.tags["episode"]: trace for trace in found}


@pytest.mark.parametrize("text", [HOSTILE, "x" * 2**20 + HOSTILE], ids=["short", "megabyte"])
def test_mlflow_gives_back_the_episode(place: TrackerRun, store: MlflowClient, text: str) -> None:
    project = f"traces {len(text)}"
    run = MlflowRun(replace(place, project=project), ledger := ledger_of(place, "mlflow"))
    backend = MlflowTraces(place.folder, project, "experiment", ledger.id)
    episode = hostile_episode(text)
    for _ in range(2):  # a request whose answer was lost is sent again
        backend.add([trace_of(episode, run=project, sample=1, decode=lambda ids: text)])
    run.close(ok=True)
    [trace] = stored(store, project).values()
    root, first, tools, call, second = trace.data.spans
    segment = episode.segments[0]
    [written] = root.attributes["segments"]
    assert written["prompt_ids"] == list(segment.prompt_ids)
    assert written["response_ids"] == list(segment.response_ids)
    assert written["response_mask"] == list(segment.response_mask)
    turns = (first, tools, second)
    for name, all_of_it in (("ids", segment.response_ids), ("mask", segment.response_mask)):
        assert [value for span in turns for value in span.attributes[name]] == list(all_of_it)
    assert [v for span in turns for v in span.attributes["logprobs"]] == list(segment.response_logprobs)
    assert first.inputs["messages"][0]["content"] == first.outputs["content"] == tools.outputs["text"] == text
    assert root.inputs["messages"][0]["content"] == text.replace("\ud800", "\\ud800")
    assert call.outputs["text"] == second.outputs["content"] == written["response_text"] == text
    assert call.attributes["call"]["raw"] == text and call.attributes["status"] == "error"
    assert (root.outputs["reward"], root.outputs["stop_reason"]) == (0.25, "stop")
    assert (root.start_time_ns, root.end_time_ns) == (10**18, 10**18 + 2 * 10**9)
    assert (call.parent_id, first.parent_id) == (tools.span_id, root.span_id)
    wanted = {"step": "3", "validate": "false", "rollout_n": "1", "reward": "0.25", "experiment": "experiment"}
    assert wanted.items() <= trace.info.tags.items()
    assert "\x1b" not in str(trace.info.tags) and "\u202e" not in str(trace.info.tags)
    assert [t.info.trace_id for t in store.search_traces(locations=[trace.info.experiment_id], run_id=ledger.id)]


def test_traces_of_a_file_are_counted_and_steps_that_were_set_aside_are_gone(
    place: TrackerRun, store: MlflowClient
) -> None:
    folder = RunFolder(place.folder)
    backend = MlflowTraces(place.folder, "set aside", "experiment", "")
    traces = Traces(folder, backend, "run-1", 2, None)
    for step in (1, 2):
        batch = [make_episode(f"{step}-{g}-{i}", group=f"{step}-{g}", step=step) for g in range(3) for i in range(2)]
        folder.log_episodes(step, batch)
        traces.send(EpisodeFile(2 * step, step, False))
    assert traces.where.startswith("8 episodes traced, 4 left out by max_samples_per_step_per_worker: ")
    assert len(stored(store, "set aside")) == 8
    backend.take_up("run-1", after=1)
    assert {trace.info.tags["step"] for trace in stored(store, "set aside").values()} == {"1"}
    backend.take_up("another", after=0)
    assert len(stored(store, "set aside")) == 4


class Collector(BaseHTTPRequestHandler):
    """The receiving end of OTLP."""

    requests: list[ExportTraceServiceRequest]
    status = 200

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest()
        request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
        self.requests.append(request)
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Collector]]:
    handler = type("Handler", (Collector,), {"requests": []})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        yield handler
        server.shutdown()
        thread.join()


def test_open_telemetry_gets_the_same_spans(collector: type[Collector]) -> None:
    backend = OtelTraces("project", "experiment")
    trace = trace_of(hostile_episode(HOSTILE), run="r", sample=0)
    backend.add([trace])
    backend.close()
    [request] = collector.requests
    [resource] = request.resource_spans
    service = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert (service["service.name"], service["rally.experiment"]) == ("rally", "experiment")
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    assert [span.name for span in spans] == ["episode", "generate", "tools", "calculate", "generate"]
    assert {span.trace_id for span in spans} == {trace.id.to_bytes(16)}
    root, first, *_ = spans
    assert first.parent_span_id == root.span_id and root.start_time_unix_nano == 10**18
    told = {a.key: a.value for a in first.attributes}
    assert json.loads(told["outputs"].string_value)["content"] == HOSTILE
    assert json.loads(told["ids"].string_value) == [5, 6, 7]
    assert told["cached_tokens"].int_value == 0
    assert {a.key: a.value.string_value for a in root.attributes}["stop_reason"] == json.dumps("stop")


def test_a_collector_that_refuses_is_told_of(collector: type[Collector]) -> None:
    collector.status = 400
    backend = OtelTraces("project", "experiment")
    with pytest.raises(RallyError, match="did not accept the spans"):
        backend.add([trace_of(make_episode(), run="r", sample=0)])
