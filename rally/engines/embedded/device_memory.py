"""GPU memory with a fixed address whose physical pages can be handed back and taken again.

CUDA graphs remember addresses, so the KV store may not move; while weights are trained its memory is better used
otherwise. The address range is reserved once through CUDA's virtual memory calls; giving back unmaps the physical
memory and returns it to the driver whole, so nothing fragments, and taking maps fresh memory at the same address.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from rally.engines.base import EngineError

_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise EngineError(
            f"the GPU driver refused {name} (error {status}): the memory for KV could not be had; lower "
            "rollout.gpu_memory_utilization, or set rollout.free_cache_engine=false"
        )


class DeviceMemory:
    """`size` bytes on one GPU, taken at once."""

    def __init__(self, size: int, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # there must be a context
        number = device.index if device.index is not None else torch.cuda.current_device()
        self._place = _Location(_ON_DEVICE, number)
        self._properties = _Properties(type=_PINNED, location=self._place)
        grain = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(self._properties), 0)
        self.size = -(-size // grain.value) * grain.value
        self._address = ctypes.c_uint64()
        _call(
            "cuMemAddressReserve",
            ctypes.byref(self._address),
            ctypes.c_size_t(self.size),
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        self._handle: ctypes.c_uint64 | None = None
        self.take()

    @property
    def taken(self) -> bool:
        return self._handle is not None

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self._address.value, False), "version": 3}

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The memory as a tensor; it may be used only while the memory is taken."""
        count = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
        return torch.as_tensor(self, device=torch.device("cuda", self._place.id))[:count].view(dtype).view(shape)

    def take(self) -> None:
        """Map fresh memory; its contents are undefined."""
        assert self._handle is None, "taken twice"
        handle, size = ctypes.c_uint64(), ctypes.c_size_t(self.size)
        torch.cuda.empty_cache()  # what torch keeps for later belongs to the same card
        _call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), ctypes.c_uint64(0))
        _call("cuMemMap", self._address, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        access = _Access(self._place, _READ_WRITE)
        _call("cuMemSetAccess", self._address, size, ctypes.byref(access), ctypes.c_size_t(1))
        self._handle = handle

    def give_back(self) -> None:
        """Return the memory to the driver, after all work that uses it."""
        assert self._handle is not None, "given back twice"
        torch.cuda.synchronize()
        _call("cuMemUnmap", self._address, ctypes.c_size_t(self.size))
        _call("cuMemRelease", self._handle)
        self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            with suppress(EngineError, RuntimeError, AttributeError, TypeError):  # an interpreter on its way out
                self.give_back()
                _call("cuMemAddressFree", self._address, ctypes.c_size_t(self.size))
