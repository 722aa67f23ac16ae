"""Compiles every kernel for a Hopper GPU that need not be there: python compile_kernels.py

The wrappers run on small tensors of main memory with the channels of real models, and each launch only compiles. Prints
a line of JSON for each compiled kernel: its shared memory, and the bytes of registers that it spills.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"


class NoDriver:
    """What Triton asks a driver when it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(launch: Any) -> Any:
    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(kernel.asm["ptx"])
            file.flush()
            command = [PTXAS, "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", told)))
        compiled = {"kernel": self.__name__, "shared": kernel.metadata.shared, "spilled": spilled}
        sys.stdout.write(json.dumps(compiled) + "\n")

    return run


def compile_all() -> None:
    from rally.models.kernels import (
        activation,
        batch_invariant_matmul,
        branch_sum,
        fp8_linear,
        grouped_linear,
        paged_decode,
        paged_extend,
        rms_norm,
        rotary,
        sampling,
        scan_step,
        token_logprobs,
    )

    bf16, tokens, vocabulary = torch.bfloat16, 64, 151_936

    def half(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=bf16)

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    for channels, features in ((1536, 8960), (5120, 27_648)):
        x, weight = half(tokens, channels), half(channels)
        rms_norm.rms_norm(x, weight, 1e-6)
        rms_norm.add_rms_norm(x, x.clone(), weight, 1e-6)
        rms_norm.rms_norm_backward(x, weight, x, x, 1e-6)
        wide, gate = half(tokens, features), half(tokens, 2 * features)
        activation.gated(gate[:, :features], gate[:, features:], "silu")
        activation.gated_backward(wide, wide, wide, "silu")
        batch_invariant_matmul.linear(x, half(features, channels))
        for size in (channels, features):
            fp8_linear.quantize_rows(half(2, size), ints(2, size, dtype=torch.float8_e4m3fn), torch.zeros(2))
    for heads, kv_heads in ((12, 2), (40, 8)):
        q, pool = half(tokens, heads, 128), half(1000, kv_heads, 128)
        table, angles = ints(tokens, 40), half(tokens, 128)
        k, out = half(tokens, kv_heads, 128), torch.empty_like(q)
        rotary.rotate(q, angles, angles)
        rotary.rotate(q, angles, angles, back=True)
        rotary.rotate_and_store(q, k, k, angles, angles, ints(tokens, dtype=torch.int64), pool, pool.clone(), out)
        sizes: dict[str, Any] = {"page_size": 16, "scale": 0.1, "window": None}
        for longest in (200, 2048):
            lengths = ints(tokens)
            paged_decode.paged_decode(q, pool, pool.clone(), table, lengths, out, max_length=longest, **sizes)
        paged_extend.paged_extend(q, pool, pool.clone(), table, ints(8, 4), out, **sizes)
        sources = branch_sum.sources_of(torch.arange(tokens), tokens)
        branch_sum.branch_sum(k.flatten(1), sources)
    logits, targets, column = torch.zeros(3, vocabulary), ints(3, dtype=torch.int64), torch.zeros(3)
    token_logprobs.statistics(logits, targets)
    for of_entropy in (None, column):
        token_logprobs.logits_gradient(logits, targets, column, column, column, of_entropy, bf16)
    token_logprobs.probabilities(logits, column, half(3, vocabulary))
    token_logprobs.scale_probabilities(half(3, vocabulary), targets, column, column)
    sampling.sample(logits, column, column, targets, column.clone())
    blocks, ends = ints(4, 2), ints(8)
    grouped_linear.grouped_linear(half(8, 2048), half(8, 768, 2048), ints(8), ends, blocks, half(8, 768), 16)
    state, gates = torch.zeros(4, 2, 128, 128), torch.zeros(4, 2)
    scan_step.scan_step(*(half(4, 2, 128) for _ in range(3)), gates, gates, state, ints(4), half(4, 2, 128))


if __name__ == "__main__":
    driver.set_active(NoDriver())
    JITFunction.run = compile_only(JITFunction.run)
    compile_all()
