"""Every kernel equals its reference in Triton's interpreter, and compiles for a GPU, which needs none but a process of
its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import HAS_TRITON, INTERPRET


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_kernels_in_the_interpreter() -> None:
    here = Path(__file__).parent
    files = [
        f"test_kernels_{room}.py"
        for room in (
            "norm",
            "rotary",
            "activation",
            "gradients",
            "sampling",
            "matmul",
            "scan_step",
            "grouped_linear",
            "fp8_linear",
            "token_logprobs",
            "branch_sum",
        )
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "interpreted", *files],
        cwd=here,
        env={**os.environ, INTERPRET: "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout


SHARED = 227 * 1024  # bytes of shared memory that a program can have on Hopper


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_kernels_compile_for_a_gpu_without_one(tmp_path: Path) -> None:
    """The interpreter takes programs that the compiler does not. All of them fit into registers and shared memory."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))],
        env={**{k: v for k, v in os.environ.items() if k != INTERPRET}, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(one["shared"] <= SHARED and not one["spilled"] for one in compiled), compiled
    sources = Path(__file__).parents[3].glob("rally/models/kernels/*.py")
    known = {name for file in sources for name in re.findall(r"def (_\w+_kernel)\(", file.read_text())}
    assert {one["kernel"] for one in compiled} == known
