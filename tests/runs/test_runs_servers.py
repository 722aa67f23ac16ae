"""A whole run over rollout servers: every step samples from the weights of the step before."""

import asyncio
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from fake_server import FakeServer
from train_cases import Paper, run_config
from transformers import AutoModelForCausalLM

from rally.config import ConfigError
from rally.engines import EngineError
from rally.engines.remote import LaunchedServer
from rally.models.load import load_model
from rally.models.lora import LoraSettings, add_adapters
from rally.runs.build.engines import (
    frontends,
    launch_of,
    oracle_of,
    own_servers_of,
    placement,
    router_settings_of,
    shares_gpu,
    transport_of,
    uses_cuda_ipc,
    weights_folder_of,
    write_full_model,
)
from rally.runs.train import train
from rally.track import RunFolder
from rally.types import Generation, SamplingParams

R = "actor_rollout_ref.rollout"


@contextmanager
def elsewhere(*fakes: FakeServer) -> Iterator[None]:
    """The servers in their own thread, as if they were another program."""
    ready, loop, over = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            for fake in fakes:
                await stack.enter_async_context(fake)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


def test_a_run_over_servers_follows_the_policy(home: Path, tmp_path: Path) -> None:
    fakes = [FakeServer("sglang", AutoModelForCausalLM.from_pretrained(home / "model").eval()) for _ in range(2)]
    with elsewhere(*fakes):
        fakes[0].faults.extend(["", "", "500", "no logprobs", "429"])  # the canary and the probe come first
        config = run_config(
            home,
            tmp_path / "run",
            f"{R}.name=sglang_async",
            f"{R}.mode=server",
            f"{R}.server.urls=[{fakes[0].url},{fakes[1].url}]",
            f"{R}.temperature=0.9",
            "data.val_files=null",
            "trainer.val_before_train=false",
            "trainer.total_training_steps=2",
        )
        train(config, Paper().console)
    folder = RunFolder(tmp_path / "run")
    for row in folder.read_metrics():
        assert row.metrics["engine/servers"] == 2
        assert row.metrics["engine/canary_difference"] < 1e-4
        assert row.metrics["actor/rollout_mismatch_kl"] < 1e-7
        assert row.metrics["failures/loop"] == 0
        assert row.metrics["timing_s/update_weights"] > 0
        assert row.metrics["router/sampled_tokens"] > 0 and row.metrics["router/servers_usable"] == 2
    for step in (1, 2):
        episodes = folder.read_episodes(step)
        spans = {span.version for episode in episodes for part in episode.segments for span in part.spans}
        assert len({episode.id for episode in episodes}) == len(episodes) == 12
        assert spans == {step - 1}
    assert not fakes[0].faults
    assert [fake.label for fake in fakes] == ["2", "2"]


@pytest.mark.drill("security", "A local user sends zeros to a run's server", "401; the run trains on its own weights")
def test_a_run_over_a_server_of_rallys_own(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    attacks: list[int] = []
    sample = LaunchedServer.generate

    async def attacked(self: LaunchedServer, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        order = {"folder": str(home / "model"), "version": 0, "in_flight": "keep"}
        async with httpx.AsyncClient(base_url=self.url) as stranger:
            for path, body in (("/load_weights", order), ("/generate", {"prompt_ids": [1]})):
                attacks.append((await stranger.post(path, json=body)).status_code)
        return await sample(self, prompt_ids, params)

    monkeypatch.setattr(LaunchedServer, "generate", attacked)
    config = run_config(
        home,
        tmp_path / "run",
        f"{R}.name=rally",
        f"{R}.gpu_memory_utilization=0.02",
        f"{R}.temperature=0.9",
        f"{R}.top_p=0.95",
        "data.val_files=null",
        "trainer.val_before_train=false",
        "trainer.total_training_steps=2",
    )
    train(config, Paper().console)
    assert len(attacks) > 20 and set(attacks) == {401}
    folder = RunFolder(tmp_path / "run")
    for row in folder.read_metrics():
        assert row.metrics["engine/canary_difference"] < 1e-4
        assert row.metrics["actor/rollout_mismatch_kl"] < 1e-7
        assert row.metrics["failures/loop"] == row.metrics["router/failed_tries"] == 0
        versions = {s.version for e in folder.read_episodes(row.step) for part in e.segments for s in part.spans}
        assert versions == {row.step - 1}


def test_servers_get_adapters_merged_into_the_weights(home: Path, tmp_path: Path) -> None:
    model = load_model(str(home / "model"))
    add_adapters(model, LoraSettings(rank=2), str(home / "model"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    write_full_model(model, "100MB", False, tmp_path / "whole")
    ids = [1, 2, 3, 4]
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    expected_TV = oracle_of(model).forward(ids)
    assert torch.allclose(oracle_of(whole).forward(ids), expected_TV, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(home / "model").eval()
    assert not torch.allclose(oracle_of(base).forward(ids), expected_TV, atol=1e-2)


def test_an_untied_copy_computes_the_same(home: Path, tmp_path: Path) -> None:
    model = load_model(str(home / "model"))
    assert model.config.tie_word_embeddings
    write_full_model(model, "100MB", True, tmp_path / "untied")
    untied = AutoModelForCausalLM.from_pretrained(tmp_path / "untied").eval()
    head, embedding = untied.get_output_embeddings(), untied.get_input_embeddings()
    assert head.weight.data_ptr() != embedding.weight.data_ptr()
    assert torch.equal(oracle_of(untied).forward([1, 2, 3]), oracle_of(model).forward([1, 2, 3]))
    assert model.config.tie_word_embeddings


def test_weights_for_other_machines_are_on_disk(home: Path, tmp_path: Path) -> None:
    model = load_model(str(home / "model"))
    for host, expected in (("127.0.0.1", "/dev/shm"), ("10.0.0.1", str(tmp_path / "run" / "weights"))):
        url = f"{R}.server.url=http://{host}:1"
        config = run_config(home, tmp_path / "run", f"{R}.name=vllm", f"{R}.mode=server", url)
        assert str(weights_folder_of(config, model)) == expected


def test_servers_share_a_gpu_with_the_trainer_where_there_is_no_other(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(home / "model"))
    config = run_config(home, tmp_path / "run", f"{R}.name=vllm", f"{R}.max_num_seqs=10")
    assert not shares_gpu(config, model) and not launch_of(config, model).sleeps
    assert router_settings_of(config).max_in_flight == 13
    on_gpu = Namespace(device=torch.device("cuda", 0), dtype=torch.bfloat16)
    for gpus, asleep in ((1, True), (2, False)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert shares_gpu(config, on_gpu) is launch_of(config, on_gpu).sleeps is asleep
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    kept = run_config(home, tmp_path / "run", f"{R}.name=vllm", f"{R}.free_cache_engine=false")
    assert shares_gpu(kept, on_gpu) and not launch_of(kept, on_gpu).sleeps


def test_handles_are_for_the_trainers_own_gpu(home: Path, tmp_path: Path) -> None:
    model = load_model(str(home / "model"))
    config = run_config(home, tmp_path / "run", f"{R}.name=vllm", f"{R}.checkpoint_engine.backend=ipc")
    with pytest.raises(EngineError, match="one server on one CUDA GPU, the trainer's"):
        transport_of(config, model)
    elsewhere = (f"{R}.name=vllm", f"{R}.mode=server", f"{R}.server.url=http://10.0.0.1:1")
    for key in ("checkpoint_engine.backend=ipc", "free_cache_engine=false"):
        with pytest.raises(ConfigError, match="has no effect on servers that already run"):
            run_config(home, tmp_path / "run", *elsewhere, f"{R}.{key}")


def test_a_broadcast_that_cannot_leave_this_machine_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL uses the same interfaces for all groups of a process, and ranks of one machine need loopback only."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")  # as the process group of the ranks sets it
    two, gpu = Namespace(world_size=2), torch.device("cuda", 0)
    on_gpus = Namespace(device=gpu, dtype=torch.bfloat16, rally_ranks=two, parameters=list, config=Namespace())
    keys = (f"{R}.name=rally", f"{R}.mode=server", f"{R}.checkpoint_engine.backend=nccl", "trainer.n_gpus_per_node=2")
    away = run_config(home, tmp_path / "run", *keys, "trainer.device=cpu", f"{R}.server.url=http://10.0.0.1:1")
    with pytest.raises(EngineError, match=r"the server 10.0.0.1: the 2 ranks .* set the variable NCCL_SOCKET_IFNAME"):
        transport_of(away, on_gpus)
    here = run_config(home, tmp_path / "run", *keys, "trainer.device=cpu", f"{R}.server.url=http://127.0.0.1:1")
    for config, interface in ((here, "lo"), (away, "eth0")):
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", interface)
        transport_of(config, on_gpus).close()


@pytest.mark.parametrize(
    ("keys", "gpus", "shown"),
    [
        (["name=sglang"], 1, True),
        (["name=sglang"], 2, False),
        (["name=sglang", "checkpoint_engine.backend=files"], 1, False),
        (["name=vllm"], 1, False),
        (["name=vllm", "checkpoint_engine.backend=ipc"], 1, True),
    ],
)
def test_the_fastest_way_that_is_safe_is_the_default(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: list[str], gpus: int, shown: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = run_config(home, tmp_path / "run", *(f"{R}.{key}" for key in keys))
    on_gpu = load_model(str(home / "model"))
    monkeypatch.setattr(type(on_gpu), "device", torch.device("cuda", 0))
    assert uses_cuda_ipc(config, on_gpu) is launch_of(config, on_gpu).by_handles is shown


def test_servers_get_the_gpus_that_the_trainer_leaves() -> None:
    assert placement(0, (), 2, 1) == [(), ()]
    assert placement(8, (0,), 2, 2) == [(1, 2), (3, 4)]
    assert placement(8, (2,), 2, 2) == [(0, 1), (3, 4)]
    assert placement(4, (0,), 2, 2) == placement(4, (), 2, 2) == [(0, 1), (2, 3)]
    for gpus, replicas, each in ((0, 1, 2), (4, 3, 2)):
        with pytest.raises(EngineError, match="GPUs"):
            placement(gpus, (), replicas, each)


def test_servers_see_gpus_by_the_names_of_the_machine(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    model = load_model(str(home / "model"))
    on_gpu = Namespace(device=torch.device("cuda", 1), dtype=torch.bfloat16, config=model.config)
    config = run_config(home, tmp_path / "run", f"{R}.name=vllm", f"{R}.data_parallel_size=2")
    for names, expected in ((None, ["0", "2"]), ("4, 5,GPU-7", ["4", "GPU-7"])):
        if names is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        else:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert [s._environment["CUDA_VISIBLE_DEVICES"] for s in own_servers_of(config, on_gpu)] == expected


@pytest.mark.parametrize(("cores", "servers", "each"), [(2, 1, 1), (8, 1, 2), (16, 1, 4), (64, 1, 4), (16, 4, 1)])
def test_processes_that_answer_http_leave_cores_to_the_rest(cores: int, servers: int, each: int) -> None:
    assert frontends(cores, servers) == each
