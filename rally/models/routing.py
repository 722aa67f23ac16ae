"""Expert choices of mixture-of-experts routers: recorded in one forward, replayed in another, and counted.

Rollout and training compute router logits with different rounding, so near a tie they choose different experts, and the
log-probabilities of the token differ by more than rounding. With replay, training uses the experts that were chosen
before; weights and gradients still come from its own logits.

Inside a router's forward, `topk` over the experts is replaced: the values are gathered at the replayed indices. So each
family keeps its own formula for the weights. Outside of `routed` nothing changes.

Shapes: T packed tokens, L routers, k experts of a token, E experts.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rally.models.forward_variables import forward_variable, recomputing
from rally.types import RallyError

TOPK = (torch.topk, Tensor.topk)
COUNTS = ("num_experts", "n_routed_experts")
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


class RoutingError(RallyError):
    """Routes that do not fit the model."""


class ExpertRouter(NamedTuple):
    """One router: its layer in the decoder, how many experts it chooses from, and how many it chooses."""

    layer: int
    experts: int
    chosen: int


class Routing:
    """The expert choices of one packed forward.

    `replay_TLk` are the experts to use; -1 leaves a token to the router. Afterwards `choices` holds what was used, if
    `record`, `counts` how often each expert was, and `changed` for how many tokens the router would have chosen others.
    """

    def __init__(self, *, replay_TLk: Tensor | None = None, record: bool = False) -> None:
        self.replay_TLk = replay_TLk
        self.record = record
        self.choices: dict[int, list[tuple[Tensor | None, Tensor]]] = {}
        self.counts: dict[int, Tensor] = {}
        self.changed: Tensor | None = None
        self.decided = 0

    def choose(self, number: int, scores_TE: Tensor, original: Any) -> Any:
        """The result of `topk` in router `number`. `original` is what it would return."""
        own_Tk = original.indices
        chosen_Tk = own_Tk
        if self.replay_TLk is not None:
            tokens = _tokens.get()
            given_Tk = (self.replay_TLk if tokens is None else self.replay_TLk[tokens])[:, number].long()
            assert given_Tk.shape == own_Tk.shape, "one route per token"
            chosen_Tk = torch.where(given_Tk >= 0, given_Tk, own_Tk)
        if not recomputing.get():
            self._note(number, chosen_Tk, own_Tk, scores_TE.shape[-1])
        if chosen_Tk is own_Tk:
            return original
        return torch.return_types.topk((scores_TE.gather(1, chosen_Tk), chosen_Tk))

    def _note(self, number: int, chosen_Tk: Tensor, own_Tk: Tensor, experts: int) -> None:
        if self.record:
            self.choices.setdefault(number, []).append((_tokens.get(), chosen_Tk.to(torch.int16)))
        found = torch.bincount(chosen_Tk.flatten(), minlength=experts)
        self.counts[number] = self.counts[number] + found if number in self.counts else found
        if self.replay_TLk is not None:
            differs = (chosen_Tk.sort(-1).values != own_Tk.sort(-1).values).any(-1).sum()
            self.changed = differs if self.changed is None else self.changed + differs
            self.decided += len(chosen_Tk)

    def add(self, other: Routing) -> None:
        """Add the counts of another forward."""
        for number, found in other.counts.items():
            self.counts[number] = self.counts[number] + found if number in self.counts else found
        if other.changed is not None:
            self.changed = other.changed if self.changed is None else self.changed + other.changed
        self.decided += other.decided

    def recorded(self, tokens: int) -> Tensor:
        """What was used for each packed token: int16 [T, L, k]."""
        parts = []
        for number in sorted(self.choices):
            first = self.choices[number][0][1]
            chosen_Tk = first.new_full((tokens, first.shape[1]), -1)
            for at, found in self.choices[number]:
                chosen_Tk[slice(None) if at is None else at] = found
            parts.append(chosen_Tk)
        return torch.stack(parts, 1)


class RouteRecorder:
    """The expert choices of one forward, recorded without a synchronization, so that a CUDA graph can capture it."""

    def __init__(self) -> None:
        self.choices: dict[int, Tensor] = {}

    def choose(self, number: int, scores_TE: Tensor, original: Any) -> Any:
        self.choices[number] = original.indices.to(torch.int16)
        return original

    def recorded(self) -> Tensor:
        """int16 [T, L, k]."""
        return torch.stack([self.choices[number] for number in sorted(self.choices)], 1)


_routing: ContextVar[Routing | RouteRecorder | None] = forward_variable("routing")
_tokens: ContextVar[Tensor | None] = forward_variable("tokens of a part of a packed batch")


@contextmanager
def routed(routing: Routing | RouteRecorder | None) -> Iterator[None]:
    """A context in which routers record and replay as `routing` says; None changes nothing."""
    token = _routing.set(routing)
    try:
        yield
    finally:
        _routing.reset(token)


@contextmanager
def over_tokens(tokens: Tensor) -> Iterator[None]:
    """A context in which a forward computes these tokens of a packed batch, not all of them in order."""
    token = _tokens.set(tokens)
    try:
        yield
    finally:
        _tokens.reset(token)


def install(model: nn.Module) -> None:
    """Make the routers of `model` follow `routed`. May be called again."""
    number = 0
    for name, module in model.named_modules():
        if _is_router(module):
            module.rally_router = number
            module.rally_layer = int(found[1]) if (found := LAYER.search(name)) else number
            number += 1
            kind: Any = type(module)
            if not hasattr(kind.forward, "rally_original"):
                kind.forward = _following(kind.forward)


def routers_of(model: nn.Module) -> list[ExpertRouter]:
    """The routers that can be replayed, in order; `install` must have been called."""
    found: list[Any] = [module for module in model.modules() if hasattr(module, "rally_router")]
    return [ExpertRouter(module.rally_layer, max(_experts(module)), module.top_k) for module in found]


def _is_router(module: Any) -> bool:
    if not type(module).__module__.startswith("transformers.") or not isinstance(getattr(module, "top_k", None), int):
        return False
    functions = (inspect.unwrap(f) for f in vars(type(module)).values() if inspect.isfunction(f))
    return bool(_experts(module)) and any("topk" in f.__code__.co_names for f in functions)


def _experts(module: Any) -> set[int]:
    return {value for name in COUNTS if isinstance(value := getattr(module, name, None), int)}


def _following(original: Any) -> Any:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        routing = _routing.get()
        if routing is None:
            return original(self, *args, **kwargs)
        with _Choice(self, routing) as choice:
            output = original(self, *args, **kwargs)
        if choice.made != 1:
            raise RoutingError(f"the experts that {type(self).__name__} chooses cannot be replayed; leave it disabled")
        return output

    forward.rally_original = original  # type: ignore[attr-defined]
    return forward


class _Choice(TorchFunctionMode):
    """Replaces the `topk` over experts inside one router."""

    def __init__(self, router: Any, routing: Routing | RouteRecorder) -> None:
        super().__init__()
        self.router, self.routing, self.made = router, routing, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return output
        scores = args[0] if args else kwargs["input"]
        if scores.ndim != 2 or scores.shape[-1] not in _experts(self.router):
            return output
        if output.indices.shape[-1] != self.router.top_k:
            return output
        self.made += 1
        return self.routing.choose(self.router.rally_router, scores, output)


def fitting(routes: np.ndarray[Any, Any], routers: list[ExpertRouter], decoder_layers: int) -> np.ndarray[Any, Any]:
    """Routes [tokens, L, k] from routes of some engine, which may count layers without a router too."""
    layers, chosen = routes.shape[1:]
    if not routers or chosen != routers[0].chosen or layers not in (len(routers), decoder_layers):
        expected = f"{len(routers)} layers with {routers[0].chosen} experts a token" if routers else "no routers"
        raise RoutingError(
            f"the rollout returned expert choices of {layers} layers with {chosen} experts a token, and the model has "
            f"{expected}; it is another model"
        )
    if layers == len(routers):
        return routes
    if len({router.layer for router in routers}) < len(routers):
        raise RoutingError("the layers of this model have several routers, whose choices a server does not tell apart")
    return routes[:, [router.layer for router in routers]]


def load_metrics(counts: Mapping[int, Tensor]) -> dict[str, float]:
    """How evenly tokens are spread over experts, as means over layers: the load of the busiest expert as a multiple of
    the mean load, and the entropy of the loads as a share of the largest one. Both are 1 if all loads are equal."""
    if not counts:
        return {}
    ratios, entropies = [], []
    for found in counts.values():
        load_E = found.double().cpu()
        share_E = load_E / load_E.sum().clamp(min=1)
        ratios.append(float(share_E.max() * len(share_E)))
        entropies.append(float(torch.special.entr(share_E).sum() / np.log(max(2, len(share_E)))))
    return {
        "actor/moe_load_max_ratio": sum(ratios) / len(ratios),
        "actor/moe_load_max_ratio/worst_layer": max(ratios),
        "actor/moe_load_entropy": sum(entropies) / len(entropies),
    }
