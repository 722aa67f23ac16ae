"""A small run with trackers and traces: real stores hold the contents of the run folder."""

import struct
from pathlib import Path

import pytest
from train_cases import Paper, run_config

pytest.importorskip("tensorboard")
pytest.importorskip("mlflow")

from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rally.chat import tiny_tokenizer
from rally.config import ConfigError
from rally.runs.build.tracking import set_evaluation_aside
from rally.runs.train import train
from rally.track import RunFolder
from rally.track.export.delivery import DeliveryLedger
from rally.track.export.mlflow_tracker import metric_name

TRACKED = (
    "trainer.logger=[tensorboard,mlflow]",
    "trainer.total_training_steps=2",
    "actor_rollout_ref.rollout.trace.backend=mlflow",
    "actor_rollout_ref.rollout.trace.token2text=true",
)


@pytest.fixture(scope="module")
def tracked(home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, MlflowClient, str]:
    folder = tmp_path_factory.mktemp("tracked") / "run"
    paper = Paper()
    train(run_config(home, folder, *TRACKED), paper.console)
    return RunFolder(folder), MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}"), paper.text


Tracked = tuple[RunFolder, MlflowClient, str]


def test_event_files_equal_the_metrics_of_the_run(tracked: Tracked) -> None:
    folder, _, _ = tracked
    read = EventAccumulator(str(folder.path / "tensorboard"), {"scalars": 0}).Reload()
    stored = {(tag, e.step): e.value for tag in read.Tags()["scalars"] for e in read.Scalars(tag)}
    rows = folder.read_metrics()
    single = {(k, r.step): struct.unpack("f", struct.pack("f", v))[0] for r in rows for k, v in r.metrics.items()}
    assert stored == single and len(stored) > 200


def test_mlflow_has_every_metric_and_every_episode(tracked: Tracked) -> None:
    folder, store, said = tracked
    experiment = store.get_experiment_by_name("rally")
    assert experiment is not None
    [run] = store.search_runs([experiment.experiment_id])
    expected = {(metric_name(k), r.step): v for r in folder.read_metrics() for k, v in r.metrics.items()}
    names = run.data.metrics
    assert {(k, m.step): m.value for k in names for m in store.get_metric_history(run.info.run_id, k)} == expected
    assert run.data.params["trainer.total_training_steps"] == "2"
    found = store.search_traces(locations=[experiment.experiment_id], run_id=run.info.run_id, max_results=500)
    files = [(s, v) for v in (False, True) for s in folder.episode_steps(v)]
    episodes = {e.id: e for step, v in files for e in folder.read_episodes(step, validate=v)}
    assert {trace.info.tags["episode"] for trace in found} == set(episodes)
    decode = tiny_tokenizer().decode
    for trace in found:
        episode, root = episodes[trace.info.tags["episode"]], trace.data.spans[0]
        for segment, written in zip(episode.segments, root.attributes["segments"], strict=True):
            assert written["response_ids"] == list(segment.response_ids)
            assert written["response_mask"] == list(segment.response_mask)
            assert written["prompt_text"] == decode(segment.prompt_ids)
        assert root.outputs["reward"] == episode.reward
        assert root.start_time_ns == int(episode.timings["started"] * 1e9)
        assert len([s for s in trace.data.spans if s.span_type == "LLM"]) == sum(
            turn.role == "assistant" for turn in episode.turns
        )
    assert f"mlflow ui --backend-store-uri sqlite:///{folder.path / 'mlflow.db'}" in said
    assert f"mlflow traces: {len(episodes)} episodes traced: " in said


def test_a_trace_key_without_a_backend_is_named(home: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"trace.token2text=true has no effect without .*trace.backend; set that to mlflow or otel"
    ):
        run_config(home, tmp_path, "actor_rollout_ref.rollout.trace.token2text=true")
    with pytest.raises(ConfigError, match=r"trace.backend=weave is not built yet; use mlflow or otel"):
        run_config(home, tmp_path, "actor_rollout_ref.rollout.trace.backend=weave")


def test_a_second_evaluation_leaves_the_first_in_its_tracker(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path).create()
    ledger = tmp_path / "tracking" / "mlflow.json"
    DeliveryLedger(ledger).begin("first", 0)
    set_evaluation_aside(folder)
    assert DeliveryLedger.read(ledger).id == "first", "it was killed before its first number, so it is begun again"
    folder.log_metrics(0, {"a": 1.0})
    set_evaluation_aside(folder)
    assert not DeliveryLedger.read(ledger).id and not folder.read_metrics()
    assert DeliveryLedger.read(tmp_path / "rewound-1" / "tracking" / "mlflow.json").id == "first"
