"""Times each elementwise kernel against the eager operations it replaces, and compares their results.

Launch with `python -m benchmarks.kernel_elementwise` on a machine with a GPU; it takes under a minute.
The shapes are those of Qwen2.5-1.5B. `differs` is the share of the results' elements that are not equal bit for bit.
Shapes in names: T tokens, C channels, F features, H and K heads, D channels of a head, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN, FFN, HEADS, KV_HEADS, SIZE, VOCABULARY = 1536, 8960, 12, 2, 128, 151936
EPS = 1e-6
BATCHES = (256, 512)
LINEAR_BATCHES = (1, 64, 256, 512, 8192)
LINEARS = ((1536, 2048), (1536, 1536), (1536, 17920), (8960, 1536), (1536, 151936))

Work = Callable[[], Tensor]
"""Does the work once and returns what it computed."""


class Case(NamedTuple):
    name: str
    tokens: int
    ours: Work
    eager: Work


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def norms(tokens: int) -> Iterator[Case]:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    from rally.models.kernels.rms_norm import add_rms_norm, rms_norm

    module = Qwen2RMSNorm(HIDDEN, eps=EPS).to("cuda", torch.bfloat16)
    x_TC, zero_TC, residual_TC = rand(tokens, HIDDEN), torch.zeros_like(rand(tokens, HIDDEN)), rand(tokens, HIDDEN)
    yield Case("rms_norm", tokens, lambda: rms_norm(x_TC, module.weight, EPS), lambda: module(x_TC))
    # What is added is zero, so that the residual stays the same however often it is added to.
    yield Case(
        "add_rms_norm",
        tokens,
        lambda: add_rms_norm(zero_TC, residual_TC, module.weight, EPS),
        lambda: module(residual_TC + zero_TC),
    )


def rotations(tokens: int, normed: bool) -> Iterator[Case]:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    from rally.models.kernels.rotary import rotate_and_store

    module = Qwen3RMSNorm(SIZE, eps=EPS).to("cuda", torch.bfloat16)
    packed = rand(tokens, HEADS + 2 * KV_HEADS, SIZE)
    q_THD, k_TKD, v_TKD = packed.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    angles_TD = torch.rand(tokens, SIZE // 2, device="cuda").repeat(1, 2) * 6
    cos_TD, sin_TD = angles_TD.cos().bfloat16(), angles_TD.sin().bfloat16()
    slots_T = torch.randperm(4 * tokens, device="cuda")[:tokens]
    keys, values, q_out_THD = (
        rand(4 * tokens, KV_HEADS, SIZE),
        rand(4 * tokens, KV_HEADS, SIZE),
        torch.empty_like(q_THD),
    )
    weights: dict[str, Any] = {"q_weight": module.weight, "k_weight": module.weight, "eps": EPS} if normed else {}

    def ours() -> Tensor:
        rotate_and_store(q_THD, k_TKD, v_TKD, cos_TD, sin_TD, slots_T, keys, values, q_out_THD, **weights)
        return q_out_THD

    def eager() -> Tensor:
        q: Tensor
        q, k = (module(q_THD), module(k_TKD)) if normed else (q_THD, k_TKD)
        q, k = apply_rotary_pos_emb(q, k, cos_TD, sin_TD, unsqueeze_dim=1)
        keys[slots_T], values[slots_T] = k, v_TKD
        return q

    yield Case("rotate_and_store" + (", heads normed" if normed else ""), tokens, ours, eager)


def activations(tokens: int) -> Iterator[Case]:
    from rally.models.kernels.activation import gated

    gate_TF, up_TF = rand(tokens, 2 * FFN).chunk(2, dim=1)
    yield Case("gated silu", tokens, lambda: gated(gate_TF, up_TF, "silu"), lambda: F.silu(gate_TF) * up_TF)
    yield Case(
        "gated gelu_tanh",
        tokens,
        lambda: gated(gate_TF, up_TF, "gelu_tanh"),
        lambda: F.gelu(gate_TF, approximate="tanh") * up_TF,
    )


def samplings(tokens: int) -> Iterator[Case]:
    from rally.models.kernels import reference, sampling

    logits_TV = rand(tokens, VOCABULARY).float() * 3
    temperature_T, uniform_T = torch.ones(tokens, device="cuda"), torch.rand(tokens, device="cuda").double()

    def draw(function: Callable[..., None]) -> Tensor:
        ids_T, logprobs_T = torch.empty(tokens, device="cuda", dtype=torch.int64), torch.empty(tokens, device="cuda")
        function(logits_TV, temperature_T, uniform_T, ids_T, logprobs_T)
        return ids_T

    yield Case("sample", tokens, lambda: draw(sampling.sample), lambda: draw(reference.sample))


def linears() -> Iterator[Case]:
    from rally.models.kernels.batch_invariant_matmul import linear

    for channels, features in LINEARS:
        weight_FC = rand(features, channels) * channels**-0.5
        for tokens in LINEAR_BATCHES:
            operands = rand(tokens, channels), weight_FC
            yield Case(
                f"linear {channels}->{features}", tokens, partial(linear, *operands), partial(F.linear, *operands)
            )


def cases() -> Iterator[Case]:
    for tokens in BATCHES:
        yield from norms(tokens)
        yield from rotations(tokens, normed=False)
        yield from rotations(tokens, normed=True)
        yield from activations(tokens)
        yield from samplings(tokens)
    yield from linears()


def report(case: Case) -> str:
    from triton.testing import do_bench

    differs = (case.ours() != case.eager()).float().mean().item()
    ours, eager = (1000 * do_bench(work, warmup=5, rep=25, return_mode="median") for work in (case.ours, case.eager))
    return f"{case.name:32} {case.tokens:6} {ours:10.1f} {eager:10.1f} {eager / ours:8.2f} {100 * differs:9.3f} %"


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, bf16, medians, L2 cold")
    print(f"{'kernel':32} {'T':>6} {'ours us':>10} {'eager us':>10} {'ratio':>8} {'differs':>11}")
    with torch.no_grad():
        for case in cases():
            print(report(case), flush=True)


if __name__ == "__main__":
    main()
