"""The plan of an engine's memory: for its requests, within what the machine and its control groups leave."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_models import full_logprobs, make_model

from rally.engines import EngineError, EngineSettings
from rally.engines.embedded import EngineCore, RolloutDemand, memory_plan
from rally.engines.embedded.kv_cache import KVStore
from rally.engines.embedded.memory_plan import (
    cgroup_free_bytes,
    kv_bytes_per_token,
    plan_memory,
    plan_words,
    wanted_snapshots,
    wanted_tokens,
)
from rally.engines.embedded.request_slots import Request
from rally.models.kv_layers import KVLayer
from rally.types import SamplingParams

GIB = 1 << 30


def write_group(folder: Path, limit: str, usage: int, cached: int, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    key = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 5\n{key} {cached}\n")


@pytest.mark.drill("reliability", "An engine in a container of 2 GiB", "Its plan fits the container, not the machine")
def test_the_limit_of_every_control_group_above_counts(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("0::/job/step\n")
    root = tmp_path / "fs"
    write_group(root / "job" / "step", "max", 100, 50)
    write_group(root / "job", str(2 * GIB), GIB, GIB // 4)
    write_group(root, str(64 * GIB), GIB, 0)
    assert sorted(cgroup_free_bytes(root, proc)) == [GIB + GIB // 4, 63 * GIB]
    proc.write_text("5:cpu,cpuacct:/a\n4:memory:/docker/abc\n")
    write_group(root / "memory" / "docker" / "abc", str(GIB), 2 * GIB, 0, version=1)
    assert cgroup_free_bytes(root, proc) == [0]
    proc.write_text("4:memory:/only/on/the/host\n")
    write_group(root / "memory", str(3 * GIB), GIB, 0, version=1)
    assert cgroup_free_bytes(root, proc) == [2 * GIB]
    assert cgroup_free_bytes(tmp_path / "none", proc) == cgroup_free_bytes(root, tmp_path / "none") == []


def test_a_plan_is_made_for_requests_and_not_for_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    per_token = kv_bytes_per_token(model.config, 4)
    settings = EngineSettings(max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=256)
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 1000 * GIB)
    assert plan_memory(model, settings).kv_bytes == 2 * 8 * 1024 * per_token
    capped = plan_memory(model, replace(settings, max_kv_bytes=3 * 1024 * per_token))
    assert capped.kv_bytes == 3 * 1024 * per_token
    assert "3,072 tokens, that is 3 of 8 requests of 1,024 tokens at once" in plan_words(capped, settings)
    least = plan_memory(model, replace(settings, max_kv_bytes=1))
    assert least.pages * settings.page_size >= 1024, "one history always fits"
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 1024 * per_token)
    with pytest.raises(EngineError, match="one history of"):
        plan_memory(model, replace(settings, max_kv_bytes=GIB))


DEMAND = RolloutDemand(histories=1024, tokens=460)


def test_a_gpu_keeps_no_more_kv_than_its_rollouts_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 episodes of 204 + 256 tokens of Qwen2.5-1.5B, on a GPU that has 65 GiB for the cache."""
    settings = EngineSettings(max_model_len=460, max_num_seqs=256, demand=DEMAND)
    tokens = wanted_tokens(settings, on_gpu=True)
    assert 1024 * 460 + 1024 * 16 <= tokens <= 1.1 * 1024 * 460
    assert tokens * 28 * 2 * 2 * 128 * 2 < 14 * GIB, "28,672 bytes a token"
    assert wanted_tokens(replace(settings, demand=None), on_gpu=True) == sys.maxsize, "a server takes what it is given"
    assert wanted_tokens(settings, on_gpu=False) == 2 * 256 * 460, "main memory is taken as it is used"
    turns = replace(settings, demand=DEMAND._replace(turns=5))
    assert wanted_tokens(turns, on_gpu=True) - tokens == 4 * 1024 * 16, "each turn leaves a partly filled page"
    copied = wanted_tokens(settings, on_gpu=True, shares_pages=False)
    assert copied - tokens == 256 * 28 * 16, "a running request copies its history, of 29 pages"
    assert wanted_snapshots(settings, 256, on_gpu=True) == 4 * 256
    few = replace(settings, demand=DEMAND._replace(histories=8))
    assert (wanted_snapshots(few, 256, on_gpu=True), wanted_snapshots(few, 256, on_gpu=False)) == (32, 512)

    model = make_model()
    per_token = kv_bytes_per_token(model.config, 4)
    monkeypatch.setattr(memory_plan, "on_accelerator", lambda device: True)
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 1000 * GIB)
    assert plan_memory(model, settings).kv_bytes == copied * per_token, "float32 is plain torch"
    monkeypatch.setattr(memory_plan, "has_kernels", lambda device: True)
    half = model.bfloat16()
    assert plan_memory(half, settings).kv_bytes == tokens * per_token // 2
    assert plan_memory(half, replace(settings, backend="gather")).kv_bytes == copied * per_token // 2
    one = replace(settings, max_model_len=2000, max_num_seqs=1, demand=RolloutDemand(1, 16))
    assert plan_memory(half, one).pages == 126, "one whole history always fits"
    model = half.float()
    free = 2 * plan_memory(model, settings).step_bytes + 2000 * per_token
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: free)
    assert plan_memory(model, settings).kv_bytes < tokens * per_token, "the share of the free memory is still the limit"


@pytest.mark.parametrize("backend", ["paged", "gather"])
def test_more_histories_than_the_plan_knows_are_evicted_and_right(backend: str) -> None:
    """As a validation of more prompts than a batch: conversations of two turns that wait for each other."""
    model = make_model()
    sizes = {"max_model_len": 96, "max_num_seqs": 3, "demand": RolloutDemand(2, 96)}
    settings = EngineSettings(backend=backend, **sizes)  # type: ignore[arg-type]
    core = EngineCore(model, settings, num_pages=wanted_tokens(settings, on_gpu=True) // settings.page_size)

    def sample(prompts: list[list[int]]) -> list[Request]:
        requests = [core.add(p, SamplingParams(max_tokens=24, seed=i)) for i, p in enumerate(prompts)]
        while core.busy:
            core.step()
        return requests

    first = sample([[i % 90, 1, 2] * 8 for i in range(12)])
    second = sample([[*request.ids, 5, 6] for request in first])
    assert core.pool.num_free + len(core.index) == core.pool.num_pages < 12 * 96 // 16
    for request in (*first[::4], *second[::4]):
        want = full_logprobs(model, request.ids, request.prompt_len)
        assert request.logprobs == pytest.approx(want, abs=1e-5)


def test_the_memory_that_comes_back_after_an_update_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    core = EngineCore(make_model(), EngineSettings(max_model_len=96, max_num_seqs=3), num_pages=20)
    assert core.lent_bytes == 0, "nothing is lent on a CPU"
    monkeypatch.setattr(type(core.store.memory), "lent", True)
    assert core.lent_bytes == core.store.memory.flat.nbytes + GIB


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.drill("reliability", "A KV cache planned for many requests", "It takes memory only as requests come")
def test_unused_cache_takes_no_memory_and_is_zero() -> None:
    before = resident()
    store = KVStore(
        [KVLayer(8, 64, 64)] * 4,
        num_pages=4096,
        page_size=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    (paged,) = store.paged
    size = paged.numel() * 4
    assert size > GIB and resident() - before < size // 4
    assert not paged[:, 17].any() and paged.data_ptr() % 64 == 0
    paged[:, 5] = 1.0
    store.copy_pages([(5, 6)])
    assert store.keys[3][6 * 16].sum() == 8 * 64
    half = KVStore([KVLayer(1, 8, 8)], num_pages=2, page_size=4, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert half.keys[0].dtype == torch.bfloat16 and half.keys[0].shape == (12, 1, 8)
