"""Kernels of the output head: log-probability, entropy and logsumexp of each row of logits in one pass over them, and
the gradient with respect to the logits in another; or probabilities, and the gradient from them.

`_statistics`, `_logits_gradient`, `_keep_probabilities` and `_gradient_of_kept` in `rally/models/lm_head.py` specify
them in plain torch, which makes seven passes for each of the first two. A row that is not finite has results of NaN.

Shapes: X rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: disallow-untyped-decorators=False


_BLOCK = 4096


def statistics(logits_XV: Tensor, targets_X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability of each target, the entropy and the logsumexp of each row of float32 logits."""
    rows, vocabulary = logits_XV.shape
    assert logits_XV.dtype == torch.float32 and logits_XV.stride(1) == 1
    assert targets_X.dtype == torch.int64 and targets_X.is_contiguous()
    logp, entropy, normaliser = (logits_XV.new_empty(rows) for _ in range(3))
    if rows:
        inputs, outputs = (logits_XV, targets_X), (logp, entropy, normaliser)
        _statistics_kernel[(rows,)](*inputs, *outputs, logits_XV.stride(0), vocabulary, BLOCK=_BLOCK, num_warps=8)
    return logp, entropy, normaliser


def logits_gradient(
    logits_XV: Tensor,
    targets_X: Tensor,
    entropy_X: Tensor,
    normaliser_X: Tensor,
    logp_gradient_X: Tensor,
    entropy_gradient_X: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of log-probabilities and, unless its gradient is None, entropies with respect to the logits."""
    rows, vocabulary = logits_XV.shape
    assert logits_XV.dtype == torch.float32 and logits_XV.stride(1) == 1
    gradient_XV = torch.empty((rows, vocabulary), dtype=dtype, device=logits_XV.device)
    columns = [entropy_X, normaliser_X, logp_gradient_X, *(() if entropy_gradient_X is None else (entropy_gradient_X,))]
    entropy, normaliser, of_logp, *of_entropy = (column.float().contiguous() for column in columns)
    if rows:
        _gradient_kernel[(rows, triton.cdiv(vocabulary, _BLOCK))](
            logits_XV,
            targets_X,
            entropy,
            normaliser,
            of_logp,
            of_entropy[0] if of_entropy else of_logp,
            gradient_XV,
            logits_XV.stride(0),
            vocabulary,
            WITH_ENTROPY=bool(of_entropy),
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return gradient_XV


def probabilities(logits_XV: Tensor, normaliser_X: Tensor, out_XV: Tensor) -> None:
    """Write exp(logits - normaliser) into rows of a contiguous tensor."""
    rows, vocabulary = logits_XV.shape
    assert logits_XV.stride(1) == 1 and out_XV.shape == logits_XV.shape and out_XV.is_contiguous()
    if rows:
        grid = (rows, triton.cdiv(vocabulary, _BLOCK))
        _probabilities_kernel[grid](
            logits_XV, normaliser_X, out_XV, logits_XV.stride(0), vocabulary, BLOCK=_BLOCK, num_warps=8
        )


def scale_probabilities(kept_XV: Tensor, targets_X: Tensor, logp_X: Tensor, logp_gradient_X: Tensor) -> None:
    """Turn probabilities into the gradient of the targets' log-probabilities with respect to the logits, in place."""
    rows, vocabulary = kept_XV.shape
    assert kept_XV.is_contiguous() and targets_X.is_contiguous()
    if rows:
        grid = (rows, triton.cdiv(vocabulary, _BLOCK))
        columns = [column.float().contiguous() for column in (logp_X, logp_gradient_X)]
        _scale_kernel[grid](kept_XV, targets_X, *columns, vocabulary, BLOCK=_BLOCK, num_warps=8)


@triton.jit
def _probabilities_kernel(
    logits_ptr: tl.tensor,
    normaliser_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: int,
    vocabulary: int,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    logp = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=0.0) - tl.load(normaliser_ptr + row)
    tl.store(out_ptr + row * vocabulary + columns, tl.exp(logp).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scale_kernel(
    kept_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    logp_ptr: tl.tensor,
    logp_gradient_ptr: tl.tensor,
    vocabulary: int,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    places = kept_ptr + row * vocabulary + columns
    probability = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(logp_gradient_ptr + row)
    logp = tl.load(logp_ptr + row)
    # 1 - p by its series where p is close to 1, because exp would round it away
    missing = tl.where(logp > -1e-2, -logp * (1.0 + logp * (0.5 + logp / 6.0)), 1.0 - tl.exp(logp))
    gradient = tl.where(columns == tl.load(targets_ptr + row), missing * slope, -probability * slope)
    tl.store(places, gradient.to(kept_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _statistics_kernel(
    logits_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    logp_ptr: tl.tensor,
    entropy_ptr: tl.tensor,
    normaliser_ptr: tl.tensor,
    row_stride: int,
    vocabulary: int,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits_ptr + row * row_stride
    offsets = tl.arange(0, BLOCK)
    peak = tl.max(tl.load(logits_row + offsets, mask=offsets < vocabulary, other=-float("inf")), axis=0)
    total = peak * 0.0
    weighted = peak * 0.0  # the sum of exp(x - peak) * (x - peak)
    for start in range(0, vocabulary, BLOCK):
        inside = start + offsets < vocabulary
        x = tl.load(logits_row + start + offsets, mask=inside, other=-float("inf"))
        higher = tl.maximum(peak, tl.max(x, axis=0))
        shrink = tl.exp(peak - higher)
        weighted = shrink * (weighted + (peak - higher) * total)
        distance = tl.where(inside, x - higher, 0.0)
        mass = tl.where(inside, tl.exp(distance), 0.0)
        total = shrink * total + tl.sum(mass, axis=0)
        weighted += tl.sum(mass * distance, axis=0)
        peak = higher
    logarithm = tl.log(total)
    target = tl.load(logits_row + tl.load(targets_ptr + row))
    tl.store(logp_ptr + row, (target - peak) - logarithm)
    tl.store(entropy_ptr + row, logarithm - weighted / total)
    tl.store(normaliser_ptr + row, peak + logarithm)


@triton.jit
def _gradient_kernel(
    logits_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    entropy_ptr: tl.tensor,
    normaliser_ptr: tl.tensor,
    logp_gradient_ptr: tl.tensor,
    entropy_gradient_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    row_stride: int,
    vocabulary: int,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    logp = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=0.0) - tl.load(normaliser_ptr + row)
    of_logp = tl.load(logp_gradient_ptr + row)
    factor = logp * 0.0 - of_logp
    if WITH_ENTROPY:
        factor -= tl.load(entropy_gradient_ptr + row) * (logp + tl.load(entropy_ptr + row))
    gradient = tl.exp(logp) * factor + tl.where(columns == tl.load(targets_ptr + row), of_logp, 0.0)
    out = gradient_ptr + row * vocabulary + columns
    tl.store(out, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)
