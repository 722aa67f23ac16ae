"""The benchmark of rollout servers, over a fake one: its numbers come from the engine that a run would use."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks import servers
from benchmarks.report import Circumstances
from benchmarks.rollout_workloads import Workload
from rally.chat import tiny_tokenizer
from rally.config import load_config
from rally.engines.embedded import attention
from rally.engines.remote import RemoteEngine, ServerReplica, Sglang, WeightFiles
from rally.train.load import load_model
from rally.train.server_parts import client_settings_of, oracle_of
from rally.types import RallyError, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from fake_server import FakeServer
from test_engines_remote import SETTINGS

PLAN = servers.Plan(
    workload=Workload(name="try", conversations=3, prompt=6, new=4, turns=2, observed=2, tool_seconds=0.0),
    episodes=2,
    new=6,
    running=4,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, tokenizer = tmp_path_factory.mktemp("model"), tiny_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), num_hidden_layers=2, **sizes)).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


async def test_what_is_measured_is_measured_through_the_engine(folder: Path, tmp_path: Path) -> None:
    model = load_model(str(folder))
    attention.install(model)
    options = Namespace(model=folder, rows=None, dtype="float32", sglang_python="py", overrides=[])
    config = load_config(base=servers.tree_of("sglang", PLAN, options, tmp_path / "run"))
    async with FakeServer("sglang", load_model(str(folder))) as fake:
        replica = ServerReplica(fake.url, Sglang(), client_settings_of(config, model))
        files = WeightFiles(model.save_pretrained, tmp_path)
        settings = servers.dataclasses.replace(SETTINGS, sampling=SamplingParams(), sleeps=True)
        engine = RemoteEngine([replica], files, oracle_of(model), settings)
        await engine.start()
        found = {
            "mismatch": await servers.mismatch(engine, model, PLAN, options),
            "updates": [await servers.update(engine, sleep) for sleep in (False, True)],
            "served": await servers.speed(engine, PLAN, model.config.vocab_size),
            "bare": {"samples_per_second": 100.0},
            "train": [{"timing_s/step": 2.0}],
            "minutes": 1.0,
        }
        await engine.close()
    assert found["mismatch"]["tokens"] > 2 and found["mismatch"]["k3"] < 1e-9
    assert [one["asleep"] for one in found["updates"]] == [0, 1]
    assert all(one["whole"] > one["write"] > 0 for one in found["updates"])
    servers.write(tmp_path, Circumstances(), {"sglang": found})
    assert json.loads((tmp_path / "servers.json").read_text())["servers"]["sglang"]["served"] == found["served"]
    share = found["served"]["samples_per_second"] / 100
    assert f"and 100.0: {share:.0%}" in (tmp_path / "servers.md").read_text()


def test_training_steps_need_rows(tmp_path: Path) -> None:
    with pytest.raises(RallyError, match="need --rows"):
        servers.run(Namespace(parts="train", rows=None))
