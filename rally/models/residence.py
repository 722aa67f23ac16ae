"""Where the weights of a model are: on its device while they are used, and in main memory while they rest.

A model whose weights may rest carries its `Residence` as an attribute. Whatever computes with a model or gathers its
weights does so inside `on_device(model)`, which may be nested. Other models are always on their device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

RESIDENCE_ATTRIBUTE, DEVICE_ATTRIBUTE = "rally_residence", "rally_device"
CPU = torch.device("cpu")


class Residence:
    """Moves the weights and buffers of a model between `device` and main memory. Sharded ones stay sharded."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.device = device_of(model)
        self.resting = False
        self.moves = 0  # how often the weights were moved
        self._model = model
        self._users = 0
        self._rests_after = False  # whether it moves to main memory when its last user leaves
        self._lock = threading.Lock()
        setattr(model, DEVICE_ATTRIBUTE, self.device)
        setattr(model, RESIDENCE_ATTRIBUTE, self)

    @contextmanager
    def use(self) -> Iterator[None]:
        """A context in which the model is on its device. Weights that rested before it rest again after it, or after
        the last of several such contexts, in whatever threads."""
        with self._lock:
            if not self._users:
                self._rests_after = self.resting
            self._wake()
            self._users += 1  # not if the device has no room: nobody would leave
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._rests_after and not self._users:
                    self._rest()

    def wake(self) -> None:
        """Move the model to its device, where it stays."""
        with self._lock:
            self._rests_after = False
            self._wake()

    def rest(self) -> None:
        """Move the model to main memory, as soon as it is not in use."""
        with self._lock:
            if self._users:
                self._rests_after = True
            else:
                self._rest()

    def _wake(self) -> None:
        if self.resting:
            self._move(self.device)
            self.resting = False

    def _rest(self) -> None:
        if not self.resting:
            self._move(CPU)
            self.resting = True

    def _move(self, device: torch.device) -> None:
        """Move everything into new memory, also where device and main memory are the same: there is one mechanism, and
        the tests see it at work. `_apply` is what `nn.Module.to` calls, and FSDP2 follows it."""
        moved: dict[int, Tensor] = {}  # by address: tied weights are met twice; the values keep the addresses taken

        def once(value: Tensor) -> Tensor:
            if _address(value) in moved:
                return value
            new = value.detach().to(device, copy=True)
            if address := _address(new):  # an empty shard has none
                moved[address] = new
            return new

        self._model._apply(once)
        self.moves += 1


def _address(value: Tensor) -> int:
    return (value.to_local() if hasattr(value, "to_local") else value).data_ptr()


def on_device(model: PreTrainedModel) -> AbstractContextManager[None]:
    """A context in which the weights of the model are on its device."""
    residence: Residence | None = getattr(model, RESIDENCE_ATTRIBUTE, None)
    return nullcontext() if residence is None else residence.use()


def device_of(model: PreTrainedModel) -> torch.device:
    """The device that the model computes on, wherever its weights are."""
    device: torch.device = getattr(model, DEVICE_ATTRIBUTE, model.device)
    return device
