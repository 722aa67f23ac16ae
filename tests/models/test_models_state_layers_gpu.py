"""Layers that hold state give the same on a GPU as on the CPU, and train in bfloat16 within rounding."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F

from benchmarks.architectures import MAX_LENGTH, small_model, words
from rally.models import attention
from rally.models.segment_tree import SegmentTree, StateSegment
from rally.models.state_scans import chunked_scan, conv, stepwise_scan
from rally.train.forward.fused_layers import training_forward
from rally.train.policy import OptimizerSettings, Policy
from rally.train.startup_check import check_training, compared_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def segments(seed: int) -> list[StateSegment]:
    rng = random.Random(seed)
    return [StateSegment(rng.choice((1, 17, 64, 130)), rng.randrange(-1, number)) for number in range(9)]


@pytest.mark.parametrize("kind", ["delta", "delta per channel", "sum"])
def test_scans_and_convolutions_equal_those_of_the_cpu(kind: str) -> None:
    for seed in range(3):
        here, there = (SegmentTree(segments(seed), torch.device(name)) for name in ("cpu", "cuda"))
        generator, t = torch.Generator().manual_seed(seed), here.tokens
        q, k, v = (torch.randn((t, 4, 32), generator=generator) for _ in range(3))
        g = -F.softplus(torch.randn((t, 4, 32) if kind == "delta per channel" else (t, 4), generator=generator))
        beta = None if kind == "sum" else torch.rand((t, 4), generator=generator)
        results = []
        for tree in (here, there):
            moved = [x.to(tree.device).requires_grad_() for x in (q, F.normalize(k, dim=-1), v, g)]
            output, final = chunked_scan(*moved, None if beta is None else beta.to(tree.device), tree, keep=True)
            assert final is not None
            gradients = torch.autograd.grad(output.square().sum() + final.sum(), moved)
            steps, _ = stepwise_scan(g.flatten(1).exp().to(tree.device), g.flatten(1).to(tree.device), tree)
            mixed, _ = conv(
                g.flatten(1).t().to(tree.device),
                q[0, :, :4].to(tree.device)[:1].expand(g.flatten(1).shape[1], 4),
                None,
                tree,
            )
            results.append([x.detach().cpu() for x in (output, final, *gradients, steps, mixed)])
        for ours, expected in zip(*results, strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "falcon_h1", "lfm2", "jamba"])
def test_packed_training_is_exact_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(small_model(name)).to("cuda", dtype)
    attention.install(model)
    policy = Policy(model, OptimizerSettings(), 1, gradient_checkpointing=True)
    rows = compared_rows([words(1, 150), words(2, 150)], MAX_LENGTH)
    check_training(policy, rows, MAX_LENGTH, lambda warning: None)
    assert training_forward(model) == "packed"
