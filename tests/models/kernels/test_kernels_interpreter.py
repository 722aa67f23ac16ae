"""Every kernel equals its reference in Triton's interpreter, which needs no GPU but its own process."""

import os
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
