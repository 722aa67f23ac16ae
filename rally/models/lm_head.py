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
from rally.models.kernels.dispatch import has_triton
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
    if half and isinstance(head, nn.Linear) and head.bias is None:
        whole = _exact_head(hidden.flatten(0, -2), head.weight)
        return whole.unflatten(0, hidden.shape[:-1])
    return head(hidden)  # type: ignore[no-any-return]


def _exact_head(hidden_XC: Tensor, weight_VC: Tensor) -> Tensor:
    """The logits in float32, with a gradient in the dtype of the weight."""
    if torch.is_grad_enabled():
        return _ExactHead.apply(hidden_XC, weight_VC)  # type: ignore[no-any-return]
    return _exact_product(hidden_XC, weight_VC.t())


class _ExactHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_XC: Tensor, weight_VC: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_XC, weight_VC)
        return _exact_product(hidden_XC, weight_VC.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_XC, weight_VC = ctx.saved_tensors
        gradient_XV = gradients[0].to(weight_VC.dtype)
        of_hidden = gradient_XV @ weight_VC if ctx.needs_input_grad[0] else None
        return of_hidden, gradient_XV.t() @ hidden_XC if ctx.needs_input_grad[1] else None


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

    The backward pass computes the logits again, chunk by chunk; or, with `keep`, it reads the probabilities that the
    forward pass has kept in the dtype of the hidden states, and can run once. The entropy has a gradient only if
    `entropy_gradient`, which excludes `keep`.
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
        keep: bool = False,
    ) -> tuple[Tensor, Tensor]:
        assert not (keep and entropy_gradient), "the gradient of the entropy needs exact logits"
        ctx.masks = masks_of_chunks(masks, len(hidden_UC), rows)
        kept_UV = hidden_UC.new_empty((len(hidden_UC), len(weight_VC))) if keep else None
        parts = []
        for number, (hidden, targets, allowed) in enumerate(
            zip(hidden_UC.split(rows), targets_U.split(rows), ctx.masks, strict=True)
        ):
            logits = _logits(hidden, weight_VC, temperature, allowed)
            known = _statistics(logits, targets)
            if kept_UV is not None:
                _keep_probabilities(logits, known[2], kept_UV[number * rows : number * rows + len(hidden)])
            parts.append(known)
        logp_U, entropy_U, normaliser_U = (torch.cat(x) for x in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_UC, weight_VC, targets_U, entropy_U, normaliser_U, logp_U)
        ctx.temperature, ctx.rows, ctx.entropy_gradient, ctx.kept_UV = temperature, rows, entropy_gradient, kept_UV
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_U)
        return logp_U, entropy_U

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_UC, weight_VC, *known, logp_U = ctx.saved_tensors
        known += [gradient / ctx.temperature for gradient in gradients]
        needs_weight, nothing = ctx.needs_input_grad[1], (None,) * 6
        if ctx.kept_UV is not None:
            gradient_UV, ctx.kept_UV = _gradient_of_kept(ctx.kept_UV, known[0], logp_U, known[3]), None
            of_weight = gradient_UV.t() @ hidden_UC if needs_weight else None
            return gradient_UV @ weight_VC, of_weight, *nothing
        hidden_gradients = []
        weight_gradient = torch.zeros_like(weight_VC, dtype=torch.float32) if needs_weight else None
        for allowed, hidden, *part in zip(ctx.masks, *(x.split(ctx.rows) for x in (hidden_UC, *known)), strict=True):
            logits = _logits(hidden, weight_VC, ctx.temperature, allowed)
            gradient = _logits_gradient(logits, _Known(*part), ctx.entropy_gradient, weight_VC.dtype)
            hidden_gradients.append(gradient @ weight_VC)
            if weight_gradient is not None:
                _add_exact_product(weight_gradient, gradient.t(), hidden)
        weight_gradient = None if weight_gradient is None else weight_gradient.to(weight_VC.dtype)
        return torch.cat(hidden_gradients), weight_gradient, *nothing


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


def _add_exact_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a float32 total, without rounding in between."""
    if has_kernels(a.device) and a.dtype != torch.float32:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total += (a @ b).float()


def _logits(hidden: Tensor, weight_VC: Tensor, temperature: float, allowed: TokenMasks | None) -> Tensor:
    logits = _exact_product(hidden, weight_VC.t())
    scaled = logits if temperature == 1 else logits.div_(temperature)
    return scaled if allowed is None else allowed.applied(scaled)


def _statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and logsumexp; needs one more tensor of the size of the logits. The specification of the
    kernel."""
    if _by_kernel(logits):
        from rally.models.kernels import token_logprobs

        return token_logprobs.statistics(logits, targets)
    probability = torch.softmax(logits, dim=-1)
    highest, at = logits.max(dim=-1)
    normaliser = highest - probability.gather(1, at[:, None]).squeeze(1).log()
    logp = logits.gather(1, targets[:, None]).squeeze(1) - normaliser
    return logp, normaliser - probability.mul_(logits).sum(-1), normaliser


def _by_kernel(logits: Tensor) -> bool:
    return has_kernels(logits.device) and logits.dtype == torch.float32 and has_triton()


def _logits_gradient(logits: Tensor, known: _Known, with_entropy: bool, dtype: torch.dtype) -> Tensor:
    """The gradient of both outputs with respect to the logits, which it may overwrite. The specification of the kernel.

    d logp / d logit_j = [j is the target] - p_j, and d entropy / d logit_j = -p_j (log p_j + entropy).
    """
    if _by_kernel(logits):
        from rally.models.kernels import token_logprobs

        of_entropy = known.entropy_gradient if with_entropy else None
        columns = (known.targets, known.entropy, known.normaliser, known.logp_gradient, of_entropy)
        return token_logprobs.logits_gradient(logits, *columns, dtype)
    logits.sub_(known.normaliser[:, None])
    factor = -known.logp_gradient[:, None]
    if with_entropy:
        factor = factor - known.entropy_gradient[:, None] * (logits + known.entropy[:, None])
    gradient = logits.exp_().mul_(factor).scatter_add_(1, known.targets[:, None], known.logp_gradient[:, None])
    return gradient.to(dtype)


def _keep_probabilities(logits: Tensor, normaliser: Tensor, out_XV: Tensor) -> None:
    """Write the probabilities of the rows, rounded to the dtype of `out_XV`. May overwrite the logits."""
    if _by_kernel(logits):
        from rally.models.kernels import token_logprobs

        token_logprobs.probabilities(logits, normaliser, out_XV)
    else:
        out_XV.copy_(logits.sub_(normaliser[:, None]).exp_())


def _gradient_of_kept(kept_UV: Tensor, targets: Tensor, logp: Tensor, logp_gradient: Tensor) -> Tensor:
    """The gradient of the log-probabilities with respect to the logits, in place of the kept probabilities. That of the
    target, 1 - p, is exact: a rounded p near 1 would leave nothing of it."""
    if has_kernels(kept_UV.device) and has_triton():
        from rally.models.kernels import token_logprobs

        token_logprobs.scale_probabilities(kept_UV, targets, logp, logp_gradient)
        return kept_UV
    at_target = -torch.expm1(logp) * logp_gradient
    kept_UV.mul_(-logp_gradient[:, None])
    return kept_UV.scatter_(1, targets[:, None], at_target[:, None].to(kept_UV.dtype))
