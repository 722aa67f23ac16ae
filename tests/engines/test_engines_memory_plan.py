"""The plan of an engine's memory: for its requests, within what the machine and its control groups leave."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_models import make_model

from rally.engines import EngineError, EngineSettings
from rally.engines.embedded import memory_plan
from rally.engines.embedded.kv_cache import KVStore
from rally.engines.embedded.memory_plan import cgroup_free_bytes, kv_bytes_per_token, plan_memory, plan_words
from rally.models.kv_layers import KVLayer

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
