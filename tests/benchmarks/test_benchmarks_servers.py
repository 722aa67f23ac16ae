"""The benchmark of rollout servers, against a fake server: it measures the engine that a run would use."""

import asyncio
import dataclasses
import json
import time
from argparse import Namespace
from pathlib import Path

import pytest
from fake_server import FakeServer
from remote_cases import SETTINGS
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks import served, servers
from benchmarks.report import Circumstances
from benchmarks.rollout_workloads import Workload
from rally.chat import tiny_tokenizer
from rally.engines.base import EngineError
from rally.engines.remote import CudaIpcWeights, RemoteEngine, ServerReplica, Sglang, WeightFiles
from rally.models import attention
from rally.models.load import load_model
from rally.runs import build
from rally.runs.build.engines import client_settings_of, oracle_of
from rally.types import RallyError, SamplingParams

WORKLOAD = Workload(name="try", conversations=3, prompt=6, new=4, turns=2, observed=2, tool_seconds=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, tokenizer = tmp_path_factory.mktemp("model"), tiny_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), num_hidden_layers=2, **sizes)).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


def spec_of(folder: Path, tmp_path: Path) -> served.Spec:
    options = Namespace(model=folder, rows=None, dtype="float32", sglang_python="py", overrides=[])
    plan = servers.Plan(workload=WORKLOAD, running=4)
    told = served.Spec(
        tree=servers.tree_of("sglang", plan, options, tmp_path / "run"),
        overrides=(),
        parts=("mismatch", "speed", "update"),
        workload=WORKLOAD,
        episodes=2,
        new=6,
        patience=1.0,
        out=str(tmp_path / "sglang.json"),
    )
    (tmp_path / "spec.json").write_text(json.dumps(dataclasses.asdict(told)))
    return served.Spec.read(tmp_path / "spec.json")


def engine_of(fake: FakeServer, model: PreTrainedModel, spec: served.Spec, tmp_path: Path) -> RemoteEngine:
    attention.install(model)
    replica = ServerReplica(fake.url, Sglang(), client_settings_of(spec.config(), model))
    settings = dataclasses.replace(SETTINGS, sampling=SamplingParams(), sleeps=True)
    return RemoteEngine([replica], WeightFiles(model.save_pretrained, tmp_path), oracle_of(model), settings)


async def test_what_is_measured_is_measured_through_the_engine_that_goes_on(folder: Path, tmp_path: Path) -> None:
    spec, model, began = spec_of(folder, tmp_path), load_model(str(folder)), time.perf_counter()
    notes = served.Notes(Path(spec.out))
    async with FakeServer("sglang", load_model(str(folder))) as fake:

        async def measure(engine: served.Measuring, seconds: float) -> None:
            await served.measure(spec, notes, model, engine, seconds)

        engine = served.Measuring(engine_of(fake, model, spec, tmp_path), measure)
        await engine.start()
        after = await engine.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
        await engine.close()
    assert after.spans[-1].version == engine.weight_version == 2 * served.UPDATES, "the run goes on with what was sent"
    found = json.loads(Path(spec.out).read_text())
    assert found == notes.found
    assert found["mismatch"]["tokens"] > 2 and found["mismatch"]["k3"] < 1e-9
    assert [one["asleep"] for one in found["update"]] == [0] * served.UPDATES + [1] * served.UPDATES
    assert all(one["way"] == "files" and one["whole"] > one["write"] > 0 for one in found["update"])
    assert 0 < found["start_seconds"] < time.perf_counter() - began
    result = {**found, "bare": {"samples_per_second": 100.0}, "train": [{"timing_s/step": 2.0}], "minutes": 1.0}
    servers.write(tmp_path, Circumstances(), {"sglang": result})
    told = (tmp_path / "servers.md").read_text()
    assert f"| {found['speed']['samples_per_second'] / 100:.0%} |" in told and "timing_s/step 2" in told


async def test_updates_are_measured_by_handles_and_by_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, model = spec_of(folder, tmp_path), load_model(str(folder))
    taken: list[int] = []

    class Counted(CudaIpcWeights):
        async def stage(self, version: int) -> None:
            taken.append(version)
            await super().stage(version)

    async with FakeServer("sglang", load_model(str(folder)), handles="refused") as fake:
        engine = engine_of(fake, model, spec, tmp_path)
        own = engine.weights = Counted(model.state_dict, WeightFiles(model.save_pretrained, tmp_path))
        monkeypatch.setattr(build, "transport_of", lambda *_: WeightFiles(model.save_pretrained, tmp_path / "other"))
        (tmp_path / "other").mkdir()
        await engine.start()
        told = await served.updates(engine, model, spec)
        assert engine.weights is own, "the run goes on by the way it asked for"
        await engine.close()
    assert [one["way"] for one in told] == ["ipc"] * 2 * served.UPDATES + ["files"] * 2 * served.UPDATES
    assert taken == list(range(1 + 2 * served.UPDATES))
    assert not list((tmp_path / "other").iterdir()), "nothing is left behind"


async def test_a_part_that_fails_or_hangs_leaves_the_others(tmp_path: Path) -> None:
    notes = served.Notes(tmp_path / "found.json")

    async def fails() -> None:
        raise EngineError("the server said no")

    await notes.part("one", 5.0, fails())
    await notes.part("two", 0.05, asyncio.sleep(60))
    await notes.part("three", 5.0, asyncio.sleep(0, "well"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["one_failed"] == "the server said no" and found["two_failed"] == "took more than 0.05 s"
    assert found["three"] == "well" and "three_failed" not in found


def test_a_bare_engine_that_fails_is_told(folder: Path, tmp_path: Path) -> None:
    python = tmp_path / "python.sh"
    python.write_text("#!/bin/sh\necho no GPU here >&2\nexit 3\n")
    python.chmod(0o755)
    options = Namespace(model=folder, out=tmp_path, workload="multi-256", vllm_python=python)
    found = servers.bare("vllm", servers.Plan.of("multi-256", small=True, patience=1.0), options)
    assert "exit status 3" in found["bare_failed"]
    assert (tmp_path / "vllm-bare.log").read_text() == "no GPU here\n"


@pytest.mark.parametrize(("parts", "words"), [("train", "need --rows"), ("spede", "there is no part spede")])
def test_what_cannot_be_measured_is_refused(parts: str, words: str) -> None:
    with pytest.raises(RallyError, match=words):
        servers.run(Namespace(parts=parts, rows=None))
