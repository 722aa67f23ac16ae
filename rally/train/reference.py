"""The frozen reference policy, and the controller of the KL coefficient.

The reference is the model that training started from. With LoRA it is the policy's own module with its adapters off.

Shapes: M sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rally.models import attention
from rally.models.lora import without_adapters
from rally.models.residence import Residence
from rally.train.checkpoint.snapshot import Part, json_part
from rally.train.forward.fused_layers import copy_training_forward
from rally.train.forward.logprobs import token_logprobs
from rally.train.packing import PackedRows

FILE = "reward_kl.json"
LARGEST_ERROR = 0.2  # a KL far off the target moves the coefficient no faster than one that is 20 % off


@dataclass(kw_only=True)
class KlController:
    """The coefficient of the KL in the reward. `target` is the desired mean KL of a sampled token; None: a constant
    coefficient.

    A KL that stays 20 % or more above the target multiplies the coefficient by about e ** 0.2 for every
    `horizon` episodes.
    """

    coefficient: float
    target: float | None = None
    horizon: int = 10000

    def update(self, kl: float, episodes: int) -> None:
        """Adapt the coefficient to the KL of a step's episodes."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
            self.coefficient *= 1 + error * episodes / self.horizon

    def part(self) -> Part:
        """The current coefficient as a part of a checkpoint."""
        return json_part(FILE, {"coefficient": self.coefficient})

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore an adaptive coefficient, if one was saved. A constant one comes from the configuration."""
        if self.target is not None and saved:
            self.coefficient = float(saved["coefficient"])


class Reference(Protocol):
    def __call__(self, packed: PackedRows, temperature: float) -> Tensor:
        """Log-probability of each sampled token [M], without a gradient."""
        ...


class FrozenModel:
    """A reference with its own weights. It computes rows as `like`, the policy, does."""

    def __init__(self, model: PreTrainedModel, *, like: PreTrainedModel | None = None, offload: bool = False) -> None:
        self.model = model
        model.requires_grad_(False)
        attention.install(model)
        if like is not None:
            copy_training_forward(like, model)
        self.residence = Residence(model) if offload else None
        self.sleep()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """A context in which the model is on its device. Outside, with `offload`, it is in main memory."""
        self.wake()
        try:
            yield
        finally:
            self.sleep()

    def wake(self) -> None:
        """Move the model to its device, with `offload`."""
        if self.residence is not None:
            self.residence.wake()

    def sleep(self) -> None:
        """Move the model to main memory, with `offload`."""
        if self.residence is not None:
            self.residence.rest()

    @property
    def resting_bytes(self) -> int:
        """What the model takes of its device when it comes there from main memory."""
        if self.residence is None or not self.residence.resting:
            return 0
        return sum(value.nbytes for value in (*self.model.parameters(), *self.model.buffers()))

    @torch.no_grad()
    def __call__(self, packed: PackedRows, temperature: float) -> Tensor:
        return token_logprobs(self.model, packed, temperature).logp_M


class BaseOfPolicy:
    """The policy's own module with its adapters off, which needs no second model in memory."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @torch.no_grad()
    def __call__(self, packed: PackedRows, temperature: float) -> Tensor:
        with without_adapters(self.model):
            return token_logprobs(self.model, packed, temperature).logp_M


def awake(reference: Reference | None) -> AbstractContextManager[None]:
    """A context in which the reference can be evaluated."""
    return reference.awake() if isinstance(reference, FrozenModel) else nullcontext()
