"""The reference policy: where training started, frozen; with LoRA it is the policy's own module without its adapters.

Shapes: M sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rally.engines.embedded import attention
from rally.train.forward import token_logprobs
from rally.train.lora import without_adapters
from rally.train.packing import PackedRows


class Reference(Protocol):
    def __call__(self, packed: PackedRows, temperature: float) -> Tensor:
        """Log-probability of each sampled token [M], without a gradient."""
        ...


class FrozenModel:
    """A module of its own."""

    def __init__(self, model: PreTrainedModel, *, offload: bool = False) -> None:
        self.model = model
        self._device, self._offload = model.device, offload
        model.requires_grad_(False)
        attention.install(model)
        self._rest()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Within it the model is on its device; outside, with `offload`, in main memory."""
        self.model.to(self._device)  # type: ignore[arg-type]
        try:
            yield
        finally:
            self._rest()

    def _rest(self) -> None:
        if self._offload:
            self.model.to("cpu")  # type: ignore[arg-type]

    @torch.no_grad()
    def __call__(self, packed: PackedRows, temperature: float) -> Tensor:
        return token_logprobs(self.model, packed, temperature).logp_M


class BaseOfPolicy:
    """The module that is being trained, its adapters switched off: no second model in memory."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @torch.no_grad()
    def __call__(self, packed: PackedRows, temperature: float) -> Tensor:
        with without_adapters(self.model):
            return token_logprobs(self.model, packed, temperature).logp_M


def awake(reference: Reference | None) -> AbstractContextManager[None]:
    """While the block lasts, the reference can be asked."""
    return reference.awake() if isinstance(reference, FrozenModel) else nullcontext()
