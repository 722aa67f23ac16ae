"""Counts the memory of tensors on a CPU, as an accelerator would."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the memory of all tensors that operations return, while it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._known: set[int] = set()

    def add(self, value: torch.Tensor) -> None:
        storage = value.untyped_storage()
        if storage._cdata not in self._known:
            size = storage.nbytes()
            self._known.add(storage._cdata)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, storage._cdata, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def uncounted(self, value: torch.Tensor) -> torch.Tensor:
        """A copy in main memory, which is not the device's."""
        with _disable_current_modes():
            return value.detach().clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result
