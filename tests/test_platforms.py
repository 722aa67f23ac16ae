"""What depends on the kind of accelerator, and a whole training on a stand-in for one."""

import ctypes
import json
import mmap
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rally import platforms
from rally.config import load_config
from rally.config.errors import ConfigError
from rally.platforms import (
    ALLOCATOR_VARIABLES,
    CUDA,
    NPU,
    PLATFORMS,
    REGISTERED,
    SHARED_VARIABLE,
    Platform,
    named_platform,
    pinned_memory,
    rank_device,
    shared_backend,
    use_expandable_segments,
)
from rally.types import RallyError

ROOT = Path(__file__).parents[1]
STAND_IN = ROOT / "tests/helpers/npu_stand_in"
NAMED = re.compile(r"torch\.cuda|torch\.npu|[\"'](cuda|npu)[\"']|\bis_cuda\b|CUDA_VISIBLE_DEVICES|[\"']nccl[\"']")
ALLOWED = {
    "rally/platforms.py",
    "rally/config/trainer.py",  # the values of trainer.device
    "rally/config/checks/consistency.py",  # a server that has no NPU
    "rally/config/rollout.py",  # the values of checkpoint_engine.backend
    "rally/config/verl_key_tables.py",  # names of verl
    "rally/doctor/environment.py",  # NVIDIA's driver
    "rally/engines/embedded/cuda_runner.py",
    "rally/engines/embedded/kv_cache.py",  # CUDA's virtual memory
    "rally/engines/remote/weight_updates.py",  # CUDA IPC
}


def test_only_the_platforms_and_the_kernels_name_a_kind_of_accelerator() -> None:
    files = {str(path.relative_to(ROOT)): path for path in (ROOT / "rally").rglob("*.py")}
    named = {
        name
        for name, path in files.items()
        if "models/kernels" not in name and NAMED.search(path.read_text(encoding="utf-8"))
    }
    assert named <= ALLOWED, f"use rally.platforms in {sorted(named - ALLOWED)}"


class Runtime:
    """The functions of CUDA that pin memory."""

    def __init__(self, problem: int = 0) -> None:
        self.problem = problem
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.problem:
            self.pinned[address] = size
        return self.problem

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.memset(address, 0, self.pinned.pop(address))  # it is still mapped
        return 0


def mapping_of(tensor: torch.Tensor) -> str:
    """What the system knows of the mapping that holds the tensor."""
    for one in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]:
        first, last = (int(number, 16) for number in one.split(maxsplit=1)[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return one
    raise AssertionError("no mapping holds the tensor")


def no_huge_pages(advice: int) -> None:
    if advice == mmap.MADV_HUGEPAGE:
        raise OSError(22, "Invalid argument")


def test_large_memory_is_pinned_in_its_own_size_while_a_tensor_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, sizes = Runtime(), list[int]()
    module = SimpleNamespace(cudart=lambda: runtime, device=lambda device: nullcontext())
    monkeypatch.setattr(platforms, "platform_of", lambda device: SimpleNamespace(kernels=True, module=module))
    ordinary = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, *, pin_memory, **named: sizes.append(size) or ordinary(size))
    size, device = 3 * REGISTERED + 8, torch.device("cuda")
    tensor = pinned_memory(size, device).view(torch.float32).fill_(2.0)
    assert list(runtime.pinned.items()) == [(tensor.data_ptr(), size)] and tensor.sum() == 2.0 * size / 4
    part = tensor[1:]
    del tensor
    assert runtime.pinned and part[0] == 2.0
    del part
    assert not runtime.pinned and not sizes
    mapping = mapping_of(whole := pinned_memory(size, device).fill_(1))
    assert " rw-p " in mapping, "shared memory has no huge pages"
    flags = set(mapping.split("VmFlags:")[1].split())
    assert "dc" in flags, "no fork copies it"
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()
    del whole
    monkeypatch.setattr(platforms._Registered, "madvise", lambda self, advice: no_huge_pages(advice))
    assert len(pinned_memory(size, device)) == size, "a kernel without huge pages"
    pinned_memory(100, device)
    assert sizes == [100], "torch pins small memory"
    runtime.problem = 2
    with pytest.raises(RallyError, match=r"cannot be pinned \(CUDA error 2\); .* optimizer_offload=true, or weights"):
        pinned_memory(size, device)
    with pytest.raises(RallyError, match=r"^4,611,686,018,427,387,904 bytes .* \(.*Cannot allocate memory\)"):
        pinned_memory(2**62, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_copies_from_and_to_memory_that_is_pinned_in_its_own_size() -> None:
    """The same addresses can be pinned again once nothing uses them."""
    device, size = torch.device("cuda", 0), 3 * REGISTERED + 8
    for seed in range(3):
        there = torch.randint(256, (size,), dtype=torch.uint8, device=device, generator=torch.Generator(device))
        there += seed
        home = pinned_memory(size, device)
        assert home.is_pinned()
        home.copy_(there, non_blocking=True)
        back = home.to(device, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(home, there.cpu()) and torch.equal(back, there)
        del home


def test_the_allocator_is_the_users_where_the_user_has_configured_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    gpu = torch.device("cuda")
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "max_split_size_mb:512")
        assert not use_expandable_segments(gpu)
        monkeypatch.delenv(name)
    assert not use_expandable_segments(torch.device("cpu")) and not told
    assert use_expandable_segments(gpu) and told == ["expandable_segments:True"]
    assert not any(name in os.environ for name in ALLOCATOR_VARIABLES), "servers that a run starts do not inherit it"


def test_a_process_sees_the_devices_that_its_variable_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    assert NPU.visible(2) == ["0", "1"]
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4, 6")
    assert NPU.visible(2) == ["4", "6"]
    assert CUDA.visible_devices == "CUDA_VISIBLE_DEVICES"
    assert {platform.backend for platform in PLATFORMS.values()} == {"nccl", "hccl"}
    assert named_platform("npu") is NPU


def test_an_npu_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.device=npu, but torch has no npu devices here, because torch_npu"):
        load_config(overrides=["trainer.device=npu", "data.train_files=[a]", "actor_rollout_ref.model.path=b"])


RUN = """
import json, sys
from pathlib import Path
from train_cases import Paper, run_config
from rally.distributed import train
from rally.track import RunFolder
home, out = Path(sys.argv[1]), Path(sys.argv[2])
rows = {}
for device in ("cpu", "npu"):
    paper, run = Paper(), out / device
    keys = (f"trainer.device={device}", "trainer.total_training_steps=1", "data.val_files=null")
    more = ("trainer.val_before_train=false", "actor_rollout_ref.actor.use_kl_loss=true")
    train(run_config(home, run, *keys, *more), paper.console)
    rows[device] = RunFolder(run).read_metrics()[-1].metrics
rows["note"] = "npu: attention and layers are plain torch" in paper.text
print(json.dumps(rows))
"""


@pytest.mark.slow
def test_a_training_step_on_an_npu_is_that_of_the_cpu(home: Path, tmp_path: Path) -> None:
    """The device is a stand-in: torch's private backend under the name npu. Everything else is real."""
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "tests/helpers", STAND_IN)))
    child = subprocess.run(
        [sys.executable, "-c", RUN, str(home), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    rows = json.loads(child.stdout.splitlines()[-1])
    assert rows["note"], "what is not there is said"
    assert rows["npu"]["actor/grad_norm"] == pytest.approx(rows["cpu"]["actor/grad_norm"], rel=1e-4)
    assert rows["npu"]["actor/pg_loss"] == pytest.approx(rows["cpu"]["actor/pg_loss"], rel=1e-4, abs=1e-7)
    assert rows["npu"]["critic/rewards/mean"] == rows["cpu"]["critic/rewards/mean"]
    assert rows["npu"]["perf/max_memory_allocated_gb"] == 1.0, "the numbers are those of the device"


def test_ranks_share_gpus_only_where_the_variable_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARED_VARIABLE, raising=False)
    assert shared_backend() is None
    assert rank_device(CUDA, 3) == torch.device("cuda:3")
    monkeypatch.setenv(SHARED_VARIABLE, "nccl")
    monkeypatch.setattr(Platform, "device_count", lambda self: 2)
    assert shared_backend() == "nccl"
    assert [str(rank_device(CUDA, number)) for number in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    monkeypatch.setenv(SHARED_VARIABLE, "1")
    with pytest.raises(RallyError, match="RALLY_RANKS_SHARE_GPUS=1 is not a backend; set it to nccl or gloo"):
        shared_backend()
