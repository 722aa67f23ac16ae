"""Layers that hold state, such as convolutions and linear attention, in packed forwards.

transformers computes these layers over a batch of rows, each from an empty state. A packed forward needs more: its one
row holds segments of several histories, and a segment begins where another segment ended, with a state that the caller
kept, or empty. `install` replaces the functions that the modeling module of a model calls, by its names there: the
convolution, the scan, and the fused kernels that would skip both. Inside a packed forward ours run; otherwise the
original function is called with the same arguments.

A packed forward is one whose body is called with the keyword `rally`, a `StateContext`. Gradient checkpointing computes
layers again in another thread, where that keyword may not arrive; the context is therefore a forward variable.

States are float32, as are gates and norms. The scans are in `state_scans.py`, what a batch looks like in
`segment_tree.py`.

Shapes: T packed tokens, N segments, R rows of initial states, C channels, W kernel width, H heads, K key size, V value
size.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from rally.models.forward_variables import forward_variable
from rally.models.segment_tree import DecodeTree, SegmentTree
from rally.models.state_scans import chunked_scan, conv, stepwise, stepwise_scan


class StateContext(Protocol):
    """What a packed forward tells the layers that hold state.

    A state is named after its module, `model.layers.3.linear_attn.conv0` or `...scan0`. A convolution's is [C, W - 1],
    its last inputs, oldest first. A scan's is [H, K, V] in float32, and [channels, V] for Mamba 1 and RecurrentGemma.
    """

    @property
    def tree(self) -> SegmentTree | DecodeTree: ...

    @property
    def keeps_states(self) -> bool:
        """Whether `store_final_states` is called."""
        ...

    def initial_states(self, name: str) -> Tensor | None:
        """[R, ...]; None if no segment has an `initial` row."""
        ...

    def store_final_states(self, name: str, states: Tensor) -> None:
        """[N, ...], the state at the end of every segment."""
        ...


@dataclass
class _StateLayer:
    """A layer that is being computed in a packed forward. Its convolutions and scans are numbered by their calls."""

    context: StateContext
    name: str
    outer: _StateLayer | None
    calls: dict[str, int]

    def run(self, kind: str, compute: Callable[..., tuple[Tensor, Tensor | None]], *arguments: Any) -> Tensor:
        """Call `compute(*arguments, tree, initial, keep)` between reading and storing the state."""
        number = self.calls.get(kind, 0)
        self.calls[kind] = number + 1
        name = f"{self.name}.{kind}{number}"
        output, final = compute(
            *arguments, self.context.tree, self.context.initial_states(name), self.context.keeps_states
        )
        if final is not None:
            self.context.store_final_states(name, final)
        return output


_context: ContextVar[StateContext | None] = forward_variable("packed forward")
_layer: ContextVar[_StateLayer | None] = ContextVar("layer of a packed forward", default=None)

Original = Callable[..., Any]


def _conv1d(
    layer: _StateLayer,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Any = None,
    **_: Any,
) -> Tensor:
    output_CT = layer.run("conv", conv, hidden_states[0], weight, bias)
    if activation is not None:
        output_CT = ACT2FN[activation](output_CT)
    return output_CT.to(hidden_states.dtype)[None]


def _gated_delta_rule(
    layer: _StateLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    q, k = query[0].float(), key[0].float()
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(value.shape[2] // x.shape[1], 1) for x in (q * q.shape[-1] ** -0.5, k))
    output = layer.run("scan", chunked_scan, q, k, value[0], g[0].float(), beta[0].float())
    return output.to(query.dtype)[None], None


def _mamba2_scan(
    layer: _StateLayer,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt_TH = dt[0].clamp(*dt_limit).float()
    x_THV = hidden_states[0].float()
    k, q = (y[0].float().repeat_interleave(x_THV.shape[1] // y.shape[2], 1) for y in (B, C))
    output = layer.run("scan", chunked_scan, q, k, x_THV * dt_TH[..., None], A.float() * dt_TH, None)
    if D is not None:
        output = output + D[..., None] * x_THV
    return output[None]


def _selective_scan(
    layer: _StateLayer,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    *,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> Tensor:
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    x_TC, dt_TC, A_CV = hidden_states[0].t(), dt[0].t().float(), A.float()

    def step(state: Tensor, dt: Tensor, scaled: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.addcmul(scaled[..., None] * b[:, None], torch.exp(A_CV * dt[..., None]), state)
        return state, torch.einsum("ncv,nv->nc", state, c)

    inputs = (dt_TC, dt_TC * x_TC.float(), B[0].t().float(), C[0].t().float())
    output_TC = layer.run("scan", stepwise, step, inputs, torch.zeros_like(A_CV)).to(hidden_states.dtype)
    if D is not None:
        output_TC = output_TC + x_TC * D
    if z is not None:
        output_TC = output_TC * F.silu(z[0].t())
    return output_TC.t()[None]


def _rwkv_attention(
    layer: _StateLayer, time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """RWKV 4. The state is numerator and denominator of a weighted mean, and the exponent that both are scaled by."""
    decay = -torch.exp(time_decay.float())

    def step(state: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        numerator, denominator, exponent = state.unbind(-1)
        top = torch.maximum(exponent, k + time_first)
        old, new = torch.exp(exponent - top), torch.exp(k + time_first - top)
        output = (old * numerator + new * v) / (old * denominator + new)
        top = torch.maximum(exponent + decay, k)
        old, new = torch.exp(exponent + decay - top), torch.exp(k - top)
        return torch.stack([old * numerator + new * v, old * denominator + new, top], -1), output

    inputs = (key[0].float(), value[0].float())
    empty = key.new_zeros((key.shape[-1], 3), dtype=torch.float32)
    empty[:, 2] = -1e38
    output_TC = layer.run("scan", stepwise, step, inputs, empty)
    return output_TC.to(key.dtype)[None], None


def _lightning_attention(
    layer: _StateLayer, self: Any, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor | None]:
    qkv_TH = self.act_fn(self.qkv_proj(hidden_states[0])).unflatten(-1, (self.num_attention_heads, -1))
    q, k, v = (x.float() for x in qkv_TH.split(self.head_dim, -1))
    g_TH = -self.slope_rate.float().flatten().expand(len(q), -1)
    output = layer.run("scan", chunked_scan, q, k, v, g_TH, None).to(hidden_states.dtype).flatten(1)
    output = torch.sigmoid(self.output_gate(hidden_states[0])) * self.norm(output)
    return self.out_proj(output)[None], None


def _rg_lru_scan(
    layer: _StateLayer, self: Any, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    gate = (recurrent_gate * ~reset)[0].float()
    return layer.run("scan", stepwise_scan, gate, hidden_states[0].float()).to(hidden_states.dtype)[None], None


class TreeConv1d(nn.Conv1d):
    """A causal convolution with padding on both sides, whose caller cuts the right side off."""

    def forward(self, input: Tensor) -> Tensor:
        layer = _layer.get()
        if layer is None:
            return super().forward(input)
        return layer.run("conv", conv, input[0], self.weight[:, 0], self.bias)[None]


class TreeShift(nn.ZeroPad2d):
    """Each token's predecessor; 0 for the first one."""

    def forward(self, input: Tensor) -> Tensor:
        layer = _layer.get()
        if layer is None:
            return super().forward(input)
        before = F.pad(input.new_ones((input.shape[-1], 1)), (0, 1))
        return layer.run("conv", conv, input[0].t(), before, None).t()[None]


def _no_fused_kernel(layer: _StateLayer, *_: Any, **__: Any) -> None:
    """The module computes the convolution and the scan separately."""


REPLACED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv1d,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba2_split_conv1d_scan_combined": _no_fused_kernel,
    "mamba_selective_scan": _selective_scan,
    "mamba_inner_fn": _no_fused_kernel,
    "rwkv_linear_attention": _rwkv_attention,
    "MiniMaxLightningAttention.forward": _lightning_attention,
    "RecurrentGemmaRglru._rnn_scan": _rg_lru_scan,
}
"""Functions and methods of transformers' modeling modules, and what they are in a packed forward."""

LAYERS = {"MiniMaxLightningAttention", "RecurrentGemmaRecurrentBlock", "RwkvFeedForward"}
"""Classes of layers that hold state without calling one of those functions directly."""

SUBMODULES: dict[str, type[nn.Module]] = {"conv_1d": TreeConv1d, "time_shift": TreeShift}
"""Submodules of such layers that look at earlier tokens."""


def install(model: nn.Module, body: nn.Module) -> None:
    """Make the layers of `model` that hold state compute packed forwards of `body`. Other forwards do not change. May
    be called again, for example after a module was replaced."""
    for name in {type(module).__module__ for module in model.modules()}:
        if name.startswith("transformers."):
            _replace_functions(sys.modules[name])
    found = False
    for name, module in model.named_modules():
        if _holds_state(type(module)):
            found = True
            module.rally_name = name
            for child, ours in SUBMODULES.items():
                if type(getattr(module, child, None)) is ours.__base__:
                    getattr(module, child).__class__ = ours
            if _enter_layer not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_enter_layer, with_kwargs=True)
                module.register_forward_hook(_leave_layer, always_call=True)
    if found and _enter_body not in body._forward_pre_hooks.values():
        body.register_forward_pre_hook(_enter_body, with_kwargs=True)
        body.register_forward_hook(_leave_body, always_call=True)


def holds_state(model: nn.Module) -> bool:
    """Whether a layer of `model` carries more than keys and values from token to token."""
    return any(_holds_state(type(module)) for module in model.modules())


def _holds_state(kind: Any) -> bool:
    if not kind.__module__.startswith("transformers."):
        return False
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return kind.__name__ in LAYERS or (code is not None and not REPLACED.keys().isdisjoint(code.co_names))


def _replace_functions(modeling: Any) -> None:
    for path, ours in REPLACED.items():
        *owner, name = path.split(".")
        place = getattr(modeling, owner[0], None) if owner else modeling
        original = getattr(place, name, None)
        if original is not None and not hasattr(original, "rally_original"):
            setattr(place, name, _switched(original, ours))


def _switched(original: Original, ours: Callable[..., Any]) -> Original:
    @functools.wraps(original)
    def switched(*args: Any, **kwargs: Any) -> Any:
        layer = _layer.get()
        return original(*args, **kwargs) if layer is None else ours(layer, *args, **kwargs)

    switched.rally_original = original  # type: ignore[attr-defined]
    return switched


def _enter_body(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    _context.set(kwargs.get("rally"))
    return args, kwargs


def _leave_body(module: nn.Module, args: Any, output: Any) -> None:
    _context.set(None)


def _enter_layer(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    context = kwargs.get("rally") or _context.get()
    if context is not None:
        if not hasattr(context, "tree"):
            raise TypeError(f"this forward does not support {type(module).__name__}, which holds state")
        _layer.set(_StateLayer(context, str(module.rally_name), _layer.get(), {}))
        if "attention_mask" in kwargs:  # these layers know masks of padding, and a packed forward has none
            kwargs = {**kwargs, "attention_mask": None}
    return args, kwargs


def _leave_layer(module: nn.Module, args: Any, output: Any) -> None:
    layer = _layer.get()
    if layer is not None and layer.name == module.rally_name:
        _layer.set(layer.outer)
