"""Logits, log-probabilities and entropies from hidden states, as the model's own class computes them.

Some classes scale or cap their logits after the output layer. What a class does is not read from its configuration: its
own forward is called on given hidden states, with the layers below replaced (`own_logits`). Where that is the output
layer times a constant, the constant is found once (`head_scale`) and the fast paths apply it.

Log-probabilities are computed in chunks: logits are float32 and never all in memory at once.

Shapes: U positions, C hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rally.models.attention import body_of, causal_of
from rally.models.token_masks import TokenMasks
from rally.platforms import has_kernels, on_accelerator

MAX_LOGITS = {"cpu": 2**24, "accelerator": 2**28}  # elements of one chunk: fits into a CPU's cache; keeps a GPU busy


SCALE_ATTRIBUTE = "rally_head_scale"
PROBE_ROWS, PROBE_VOCABULARY = 6, 48

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A matrix product of (hidden, weight, bias)."""


def head_logits(model: PreTrainedModel, hidden_UC: Tensor, product: Product | None = None) -> Tensor:
    """Logits of hidden states, used by rollout and training. `product` computes the output layer if it is linear."""
    scale = head_scale(model)
    if scale is None:
        return own_logits(model, hidden_UC, lambda head, hidden: _head(head, hidden, product))
    logits = _head(_output_layer(model), hidden_UC, product)
    return logits if scale == 1 else logits * scale


def plain_weight(model: PreTrainedModel) -> Tensor | None:
    """The weight [V, C] of an output layer without a bias, whose logits the class at most scales; None for others."""
    head = causal_of(model).get_output_embeddings()
    plain = type(head) is nn.Linear and head.bias is None and head_scale(model) is not None
    return head.weight if plain else None


def head_scale(model: PreTrainedModel) -> float | None:
    """The constant by which the class multiplies its output layer's product; None if its logits are another function
    of that. Found once, with a small random output layer in float32."""
    if not hasattr(model, SCALE_ATTRIBUTE):
        setattr(model, SCALE_ATTRIBUTE, _probe_scale(model))
    scale: float | None = getattr(model, SCALE_ATTRIBUTE)
    return scale


@torch.no_grad()
def _probe_scale(model: PreTrainedModel) -> float | None:
    weight_VC = _output_layer(model).weight
    assert isinstance(weight_VC, Tensor)
    size = weight_VC.shape[-1]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((PROBE_ROWS, size), generator=generator) * torch.logspace(-1, 1, PROBE_ROWS)[:, None]
    weight = torch.randn((PROBE_VOCABULARY, size), generator=generator)
    product = F.linear(hidden, weight)
    try:
        own = own_logits(model, hidden, lambda _, hidden: F.linear(hidden, weight))
    except Exception:  # noqa: BLE001 a class that cannot be called so; the comparison at the start finds what it does
        return 1.0
    if own.shape != product.shape:
        return None
    scale = float((own * product).sum() / product.square().sum())
    if float((own - scale * product).abs().max()) > 1e-5 * float(own.abs().max()):
        return None
    return 1.0 if abs(scale - 1) < 1e-5 else scale


def own_logits(model: PreTrainedModel, hidden_UC: Tensor, layer: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    """Logits from the class's own forward, with the layers below replaced by given hidden states and the product of
    the output layer by `layer`. It works on a shallow copy, so other threads may use the model."""
    model = causal_of(model)
    twin = copy.copy(model)
    twin._modules = dict(model._modules)
    head, body = _output_layer(model), body_of(model)
    names = {id(child): name for name, child in model._modules.items()}
    twin._modules[names[id(body)]] = _Given()
    if (name := names.get(id(head))) is not None:
        twin._modules[name] = _Replaced(lambda hidden: layer(head, hidden))
    output = twin.forward(inputs_embeds=hidden_UC.unsqueeze(0), use_cache=False)
    logits: Tensor = output.logits[0]
    return logits


class _Given(nn.Module):
    """Stands for the layers below the head: the hidden states are the embeddings it is given."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _Hidden:
        return _Hidden(inputs_embeds)


class _Hidden:
    """The output of a base model that has hidden states and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, item: int | slice) -> Any:
        return (self.last_hidden_state,)[item]

    def __getattr__(self, name: str) -> None:
        return None


class _Replaced(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden: Tensor) -> Tensor:
        return self.function(hidden)


def _output_layer(model: PreTrainedModel) -> nn.Module:
    head = causal_of(model).get_output_embeddings()
    assert isinstance(head, nn.Module)
    return head


def _head(head: nn.Module, hidden: Tensor, product: Product | None = None) -> Tensor:
    """In float32 on a GPU: a bfloat16 logit of 20 is off by up to 0.06, and so would its log-probability be."""
    if product is not None and isinstance(head, nn.Linear):
        return product(hidden, head.weight, head.bias)
    half = has_kernels(hidden.device) and hidden.dtype in (torch.bfloat16, torch.float16)
    if half and isinstance(head, nn.Linear) and head.bias is None and not torch.is_grad_enabled():
        leading = hidden.shape[:-1]
        return torch.mm(hidden.flatten(0, -2), head.weight.t(), out_dtype=torch.float32).unflatten(0, leading)
    return head(hidden)  # type: ignore[no-any-return]


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """The number of positions per chunk."""
    return max(1, MAX_LOGITS["accelerator" if on_accelerator(device) else "cpu"] // vocabulary)


def masks_of_chunks(masks: TokenMasks | None, positions: int, rows: int) -> list[TokenMasks | None]:
    """The masks of each chunk of `rows` positions."""
    firsts = range(0, max(1, positions), rows)
    return [None if masks is None else masks.within(first, first + rows) for first in firsts]


class HeadLogprobs(torch.autograd.Function):
    """(log-probability of each target, entropy) under softmax(hidden @ weight.T / temperature), over the allowed tokens
    where there are `masks`.

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
        masks: TokenMasks | None = None,
    ) -> tuple[Tensor, Tensor]:
        ctx.masks = masks_of_chunks(masks, len(hidden_UC), rows)
        parts = [
            _statistics(_logits(hidden, weight_VC, temperature, allowed), targets)
            for hidden, targets, allowed in zip(hidden_UC.split(rows), targets_U.split(rows), ctx.masks, strict=True)
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
        for allowed, hidden, *part in zip(ctx.masks, *(x.split(ctx.rows) for x in (hidden_UC, *known)), strict=True):
            logits = _logits(hidden, weight_VC, ctx.temperature, allowed)
            gradient = _logits_gradient(logits, _Known(*part), ctx.entropy_gradient).to(weight_VC.dtype)
            hidden_gradients.append(gradient @ weight_VC)
            if weight_gradient is not None:
                weight_gradient += _exact_product(gradient.t(), hidden)
        weight_gradient = None if weight_gradient is None else weight_gradient.to(weight_VC.dtype)
        return torch.cat(hidden_gradients), weight_gradient, None, None, None, None, None


class _Known(NamedTuple):
    """For each position, what the backward pass has before it computes the logits again."""

    targets: Tensor
    entropy: Tensor
    normaliser: Tensor
    logp_gradient: Tensor
    entropy_gradient: Tensor


def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32. A GPU accumulates a bf16 product in float32, which is then not rounded."""
    if has_kernels(a.device) and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def _logits(hidden: Tensor, weight_VC: Tensor, temperature: float, allowed: TokenMasks | None) -> Tensor:
    logits = _exact_product(hidden, weight_VC.t())
    scaled = logits if temperature == 1 else logits.div_(temperature)
    return scaled if allowed is None else allowed.applied(scaled)


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
