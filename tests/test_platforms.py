"""What depends on the kind of accelerator, and a whole training on a stand-in for one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rally.config import load_config
from rally.config.errors import ConfigError
from rally.platforms import CUDA, NPU, PLATFORMS, named_platform

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
