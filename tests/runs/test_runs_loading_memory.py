"""What a process holds in main memory while it loads a model is what the plan of main memory counts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_gguf import write_gguf
from transformers import Qwen2Config, Qwen2ForCausalLM

from rally.config import Config, load_config
from rally.models.load import load_model_config
from rally.runs import train as train_run
from rally.runs.build.run_inputs import RunError
from rally.runs.cost_estimate import memory_problem
from rally.runs.host_memory import LOADED, _loading, host_costs, host_memory_problem
from rally.runs.planned_models import ParameterCounts, size_from

M, R = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
SIZES = {
    "vocab_size": 259,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
WIDE = Qwen2Config(**SIZES, num_hidden_layers=8)


MEASURE = """
import gc, json, re, sys, threading
import torch
from rally.models.load import load_model, load_model_config

def resident():  # without mapped files, which processes share
    with open("/proc/self/status") as status:
        return int(re.search(r"RssAnon:\\s+(\\d+) kB", status.read())[1]) * 1024

peaks = []
for path, dtype in json.loads(sys.argv[1]):
    load_model_config(path)
    gc.collect()
    start, done, most = resident(), threading.Event(), [0]

    def watch():
        while not done.wait(0.001):
            most[0] = max(most[0], resident())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    model = load_model(path, dtype=dtype)
    most[0] = max(most[0], resident())
    done.set()
    thread.join()
    peaks.append(most[0] - start)
    del model
print(json.dumps(peaks))
"""
CASES = (
    ("float32", "float32", 2),
    ("bfloat16", "bfloat16", 2),
    ("bfloat16", "float32", 1),
    ("wide.gguf", "float32", 1),
    ("wide.gguf", "bfloat16", 1),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide")
    model = Qwen2ForCausalLM(WIDE)
    write_gguf(model, path / "wide.gguf")
    model.save_pretrained(path / "float32")
    model.bfloat16().save_pretrained(path / "bfloat16")
    return path


def config_of(path: str, *keys: str) -> Config:
    return load_config(overrides=[f"{M}.path={path}", f"{R}.n=8", "trainer.device=cpu", *keys])


def test_the_plan_is_what_a_process_holds(folder: Path) -> None:
    loaded = json.dumps([(str(folder / name), dtype) for name, dtype, _ in CASES])
    returned = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}  # freed memory, to the system
    command = [sys.executable, "-c", MEASURE, loaded]
    told = subprocess.run(
        command, env={**os.environ, **returned}, capture_output=True, text=True, check=True, timeout=200
    ).stdout
    for (name, dtype, ranks), measured in zip(CASES, json.loads(told.splitlines()[-1]), strict=True):
        described, width = load_model_config(str(folder / name)), getattr(torch, dtype).itemsize
        config = config_of(str(folder / name), f"trainer.n_gpus_per_node={ranks}", f"{R}.name=vllm")
        planned = _loading(config, described, size_from(described), width)
        assert planned / ranks == pytest.approx(measured, rel=0.15), (name, dtype)


def test_ranks_that_load_more_than_they_keep_are_refused() -> None:
    size = size_from(WIDE)
    one, eight = (config_of("wide", f"trainer.n_gpus_per_node={count}") for count in (1, 8))
    assert LOADED not in {cost.what for cost in host_costs(one, WIDE, size, 2)}
    assert [*host_costs(eight, WIDE, size, 2)] == [(LOADED, 8 * 2 * size.parameters)]
    text = str(host_memory_problem(eight, WIDE, size, 2, 10**6))
    assert text.endswith(
        f" {LOADED}); lower trainer.n_gpus_per_node, because each rank loads a whole model before it is divided, or "
        "use a machine with more main memory"
    )


def test_a_gguf_model_is_in_both_plans(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(folder / "wide.gguf")
    described, config = load_model_config(path), config_of(path)
    size: ParameterCounts = size_from(described)
    assert size.parameters == size_from(WIDE).parameters
    assert "an update needs about" in str(memory_problem(config, described, size, 2, 10**6))
    monkeypatch.setattr(train_run, "on_accelerator", lambda device: True)
    monkeypatch.setattr(train_run, "memory_info", lambda device: (10**6, 10**6))
    with pytest.raises(RunError, match=r"an update needs about .* of device memory"):
        train_run._check_memory(config)
    frozen = size._replace(trained=0)
    text = str(host_memory_problem(config, described, frozen, 2, 10**6))
    assert f" {LOADED}); convert the GGUF file to safetensors, or use a machine with more main memory" in text


def test_a_gguf_file_that_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    sizes = []
    for layers in (1, 2):
        write_gguf(Qwen2ForCausalLM(Qwen2Config(**SIZES, num_hidden_layers=layers)), file)
        first = load_model_config(str(file))
        first.num_hidden_layers = 7  # a caller may change its own
        sizes.append(load_model_config(str(file)).num_hidden_layers)
    assert sizes == [1, 2]
