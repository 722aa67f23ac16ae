"""Keeps optimizer states and activations in main memory, where a device has too little of its own.

Results are those without offloading, to the last bit: states are copied unchanged, and AdamW treats every element
alone, so it may run over one bucket of parameters after the other. Where device and main memory are the same, on a
CPU, the copies are made all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rally.platforms import pinned_memory, platform_of


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """What of a model under training rests in main memory. `bucket_bytes` bounds the optimizer states that visit the
    device at once, unless a single parameter has more. Smaller activations than `min_activation_bytes` stay."""

    optimizer: bool = False
    params: bool = False
    activations: bool = False
    bucket_bytes: int = 2**29
    min_activation_bytes: int = 2**20


ON_DEVICE = OffloadSettings()


def host_copy(value: Tensor, device: torch.device | None = None) -> Tensor:
    """A copy in main memory: pinned for `device`, by default that of the value, and possibly still on its way."""
    there = pinned_memory(value.nbytes, device or value.device).view(value.dtype).view(value.shape)
    return there.copy_(value, non_blocking=True)


class HostStates:
    """The optimizer's states, which live in main memory and visit the device bucket by bucket. `masters` live there
    too; other parameters of the optimizer are the weights themselves and stay on the device."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: Sequence[nn.Parameter],
        device: torch.device,
        bucket_bytes: int,
    ) -> None:
        self.largest_visit = 0  # bytes of states that were on the device at once
        self._optimizer, self._device, self._bucket_bytes = optimizer, device, bucket_bytes
        self._masters = {id(master) for master in masters}
        for master in masters:
            master.data = host_copy(master.data)
        self._synchronize()

    def buckets(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[list[str]]:
        """The names of the parameters, divided so that the states of a bucket stay below `bucket_bytes`."""
        bucket, size = list[str](), 0
        for name, parameter in parameters.items():
            own = parameter.numel() * 4 * (3 if id(parameter) in self._masters else 2)
            if bucket and size + own > self._bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(name)
            size += own
        if bucket:
            yield bucket

    @contextmanager
    def visit(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """A context in which the states of the parameters are on the device. States that are new have a place in main
        memory afterwards."""
        at_home = {}
        for parameter in parameters:
            state = self._optimizer.state.get(parameter, {})
            at_home[parameter] = _Home(parameter.data if id(parameter) in self._masters else None, dict(state))
            state.update({name: self._fetched(value) for name, value in state.items()})
            if (master := at_home[parameter].master) is not None:
                parameter.data = self._fetched(master)
        yield
        visited = 0
        for parameter, home in at_home.items():
            state = self._optimizer.state[parameter]
            visited += sum(value.nbytes for value in state.values())
            for name, value in state.items():
                state[name] = home.state[name].copy_(value, non_blocking=True) if home.state else host_copy(value)
            if home.master is not None:
                visited += home.master.nbytes
                parameter.data = home.master.copy_(parameter.data, non_blocking=True)
        self.largest_visit = max(self.largest_visit, visited)
        self._synchronize()

    def home_of(self, value: Tensor) -> Tensor:
        """A loaded state in the memory where it lives."""
        return host_copy(value, self._device)

    def _fetched(self, value: Tensor) -> Tensor:
        return value.to(self._device, non_blocking=True, copy=True)

    def _synchronize(self) -> None:
        """Wait for the copies: the CPU may read their targets at any time from now on."""
        if platform := platform_of(self._device):
            platform.module.synchronize(self._device)


class _Home(NamedTuple):
    master: Tensor | None
    state: dict[str, Tensor]


class _Offloaded(NamedTuple):
    """A tensor in main memory, and its form on the device. Kernels require strides, and sum in an order that depends on
    them."""

    value: Tensor  # without repeated elements
    device: torch.device
    strides: tuple[int, ...]
    shape: torch.Size


class ActivationOffload:
    """Moves what autograd saves for the backward pass to main memory, and back when the backward pass needs it. Weights
    and small tensors stay. On a GPU the copies to main memory run beside the computation, on a stream of their own."""

    def __init__(self, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.offloaded = 0  # bytes that went to main memory
        self.returned = 0  # bytes that came back
        self._stream: Any = None  # a stream of the device

    def hooks(self) -> saved_tensors_hooks:
        """A context for forward and backward passes."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, value: Tensor) -> Tensor | _Offloaded:
        origin = value if value._base is None else value._base
        if isinstance(origin, nn.Parameter) or value.is_sparse:
            return value
        once = value.detach()
        for dimension, stride in enumerate(value.stride()):
            if stride == 0:
                once = once.narrow(dimension, 0, min(1, value.shape[dimension]))
        if once.nbytes < self.min_bytes:
            return value
        self.offloaded += once.nbytes
        platform = platform_of(value.device)
        if platform is None:
            return _Offloaded(once.clone(), value.device, once.stride(), value.shape)
        if self._stream is None:
            self._stream = platform.module.Stream(value.device)
        self._stream.wait_stream(platform.module.current_stream(value.device))
        with platform.module.stream(self._stream):
            there = torch.empty_like(once, device="cpu", pin_memory=True).copy_(once, non_blocking=True)
        value.record_stream(self._stream)  # its memory is not reused before the copy is done
        return _Offloaded(there, value.device, once.stride(), value.shape)

    def _unpack(self, packed: Tensor | _Offloaded) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.returned += packed.value.nbytes
        platform = platform_of(packed.device)
        if platform is not None and self._stream is not None:
            platform.module.current_stream(packed.device).wait_stream(self._stream)
        shape, dtype = packed.value.shape, packed.value.dtype
        there = torch.empty_strided(shape, packed.strides, dtype=dtype, device=packed.device)
        return there.copy_(packed.value, non_blocking=True).expand(packed.shape)
