"""Log-probabilities and entropies from hidden states, in chunks: logits are float32 and never all in memory at once.

Shapes: U positions, C hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

MAX_LOGITS = {"cpu": 2**24, "cuda": 2**28}  # elements of one chunk: fits into a CPU's cache; keeps a GPU busy


def plain_weight(model: PreTrainedModel) -> Tensor | None:
    """The weight [V, C] of an LM head that is nothing but a matrix; None if the head does more."""
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    scaled = any(getattr(config, name, None) for name in ("final_logit_softcapping", "logit_scale"))
    return head.weight if type(head) is nn.Linear and head.bias is None and not scaled else None


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """The number of positions per chunk."""
    return max(1, MAX_LOGITS["cuda" if device.type == "cuda" else "cpu"] // vocabulary)


class HeadLogprobs(torch.autograd.Function):
    """(log-probability of each target, entropy) under softmax(hidden @ weight.T / temperature).

    The backward pass computes the logits again, chunk by chunk. The entropy has a gradient only if `entropy_gradient`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_UC: Tensor,
        weight_VC: Tensor,
        targets_U: Tensor,
        temperature: float,
        rows: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        parts = [
            _statistics(_logits(hidden, weight_VC, temperature), targets)
            for hidden, targets in zip(hidden_UC.split(rows), targets_U.split(rows), strict=True)
        ]
        logp_U, entropy_U, normaliser_U = (torch.cat(x) for x in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_UC, weight_VC, targets_U, entropy_U, normaliser_U)
        ctx.temperature, ctx.rows, ctx.entropy_gradient = temperature, rows, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_U)
        return logp_U, entropy_U

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_UC, weight_VC, *known = ctx.saved_tensors
        known += [gradient / ctx.temperature for gradient in gradients]
        hidden_gradients = []
        weight_gradient = torch.zeros_like(weight_VC, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for hidden, *part in zip(*(x.split(ctx.rows) for x in (hidden_UC, *known)), strict=True):
            logits = _logits(hidden, weight_VC, ctx.temperature)
            gradient = _logits_gradient(logits, _Known(*part), ctx.entropy_gradient).to(weight_VC.dtype)
            hidden_gradients.append(gradient @ weight_VC)
            if weight_gradient is not None:
                weight_gradient += _exact_product(gradient.t(), hidden)
        weight_gradient = None if weight_gradient is None else weight_gradient.to(weight_VC.dtype)
        return torch.cat(hidden_gradients), weight_gradient, None, None, None, None


class _Known(NamedTuple):
    """For each position, what the backward pass has before it computes the logits again."""

    targets: Tensor
    entropy: Tensor
    normaliser: Tensor
    logp_gradient: Tensor
    entropy_gradient: Tensor


def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32. A GPU accumulates a bf16 product in float32, which is then not rounded."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def _logits(hidden: Tensor, weight_VC: Tensor, temperature: float) -> Tensor:
    logits = _exact_product(hidden, weight_VC.t())
    return logits if temperature == 1 else logits.div_(temperature)


def _statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and logsumexp; needs one more tensor of the size of the logits."""
    probability = torch.softmax(logits, dim=-1)
    highest, at = logits.max(dim=-1)
    normaliser = highest - probability.gather(1, at[:, None]).squeeze(1).log()
    logp = logits.gather(1, targets[:, None]).squeeze(1) - normaliser
    return logp, normaliser - probability.mul_(logits).sum(-1), normaliser


def _logits_gradient(logits: Tensor, known: _Known, with_entropy: bool) -> Tensor:
    """Overwrite the logits with the gradient of both outputs with respect to them.

    d logp / d logit_j = [j is the target] - p_j, and d entropy / d logit_j = -p_j (log p_j + entropy).
    """
    logits.sub_(known.normaliser[:, None])
    factor = -known.logp_gradient[:, None]
    if with_entropy:
        factor = factor - known.entropy_gradient[:, None] * (logits + known.entropy[:, None])
    return logits.exp_().mul_(factor).scatter_add_(1, known.targets[:, None], known.logp_gradient[:, None])
