"""The KV cache: GPU memory that can be released and mapped again, the page pool, and the tensors.

`VirtualMemory` keeps its address while its memory is released (CUDA virtual memory management). `PagePool` counts the
references of each page and allocates consecutive pages if possible, so that a backend without a paged kernel can read a
history as a view instead of copying it at every step. Such runs begin at multiples of `stride` if possible, so that
many of them form one regular view. `KVStore` holds the keys and values.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from rally.engines.base import EngineError
from rally.models.kv_layers import KVLayer

ALIGNMENT = 64  # bytes, as torch aligns its own tensors
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


HEADROOM = 2**30  # bytes that stay free beside the KV cache, for what is not allocated by torch


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise EngineError(
            f"the GPU driver call {name} failed (error {status}), so the KV cache could not be allocated; lower "
            "rollout.gpu_memory_utilization, or set rollout.free_cache_engine=false"
        )


class VirtualMemory:
    """At least `size` bytes at a fixed address on one GPU, mapped at once. `unmap` returns them to the driver."""

    def __init__(self, size: int, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # creates the CUDA context
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
        self.map()

    @property
    def mapped(self) -> bool:
        return self._handle is not None

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self._address.value, False), "version": 3}

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The memory as a tensor; it may be used only while the memory is mapped."""
        count = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
        return torch.as_tensor(self, device=torch.device("cuda", self._place.id))[:count].view(dtype).view(shape)

    def map(self) -> None:
        """Map fresh memory; its contents are undefined."""
        assert self._handle is None, "mapped twice"
        handle, size = ctypes.c_uint64(), ctypes.c_size_t(self.size)
        if torch.cuda.mem_get_info(self._place.id)[0] < self.size + HEADROOM:
            torch.cuda.empty_cache()  # torch's cached memory is on the same GPU
        _call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), ctypes.c_uint64(0))
        _call("cuMemMap", self._address, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        access = _Access(self._place, _READ_WRITE)
        _call("cuMemSetAccess", self._address, size, ctypes.byref(access), ctypes.c_size_t(1))
        self._handle = handle

    def unmap(self) -> None:
        """Return the memory to the driver, after all work that uses it."""
        assert self._handle is not None, "unmapped twice"
        torch.cuda.synchronize()
        _call("cuMemUnmap", self._address, ctypes.c_size_t(self.size))
        _call("cuMemRelease", self._handle)
        self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            with suppress(EngineError, RuntimeError, AttributeError, TypeError):  # at interpreter shutdown
                self.unmap()
                _call("cuMemAddressFree", self._address, ctypes.c_size_t(self.size))


class LentMemory:
    """`size` zeroed bytes as a tensor, `flat`. With `lend` they are memory of the GPU that can be released and mapped
    again at the same address; its contents are then zeros."""

    def __init__(self, size: int, device: torch.device, lend: bool) -> None:
        size = max(size, ALIGNMENT)
        self._virtual = VirtualMemory(size, device) if lend else None
        if self._virtual is not None:
            self.flat = self._virtual.tensor((size,), torch.uint8).zero_()
        elif device.type == "cpu":
            self.flat = _untouched_zeros(size)
        else:
            self.flat = torch.zeros(size, dtype=torch.uint8, device=device)

    @property
    def lent(self) -> bool:
        """Whether it can be released."""
        return self._virtual is not None

    def release(self) -> None:
        assert self._virtual is not None
        self._virtual.unmap()

    def restore(self) -> None:
        assert self._virtual is not None
        self._virtual.map()
        self.flat.zero_()


FREE = b"\x01"


class PagePool:
    """Page numbers and their reference counts. A page with count 0 is free."""

    def __init__(self, num_pages: int, stride: int = 1) -> None:
        assert num_pages > 0
        self.num_pages = num_pages
        self.stride = stride
        self.clear()

    def clear(self) -> None:
        """Free every page, whoever holds it."""
        self.num_free = self.num_pages
        self._free = bytearray(FREE * self.num_pages)
        self._references = [0] * self.num_pages
        self._cursor = self._stretch = 0  # where the last search ended

    def reset(self) -> None:
        """Allocate pages in the order of a new pool again; all must be free."""
        assert self.num_free == self.num_pages, "a page is still held"
        self._cursor = self._stretch = 0

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, consecutive if possible; None if fewer are free."""
        if count > self.num_free:
            return None
        pages = self._aligned(count) or self._run(count) or self._scattered(count)
        for page in pages:
            self._free[page] = 0
            self._references[page] = 1
        self.num_free -= count
        return pages

    def _aligned(self, count: int) -> list[int] | None:
        """A run at the beginning of a completely free stretch of `stride` pages."""
        if not 1 < count <= self.stride:
            return None
        pattern = FREE * self.stride
        stretches = self.num_pages // self.stride
        for i in range(self._stretch, self._stretch + stretches):
            first = i % stretches * self.stride
            if self._free.startswith(pattern, first):
                self._stretch = i + 1
                return list(range(first, first + count))
        return None

    def _run(self, count: int) -> list[int] | None:
        pattern = FREE * count
        start = self._free.find(pattern, self._cursor)
        if start < 0:
            start = self._free.find(pattern)
        if start < 0:
            return None
        self._cursor = start + count
        return list(range(start, start + count))

    def _scattered(self, count: int) -> list[int]:
        pages, at = [], -1
        for _ in range(count):
            at = self._free.find(FREE, at + 1)
            pages.append(at)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._references[page] > 0, "a free page cannot be shared"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._references[page] > 0, "released twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free[page] = 1
                self.num_free += 1

    def references(self, page: int) -> int:
        return self._references[page]


class KVStore:
    """The tensors behind the pages: keys and values of each attention call as [slot, kv head, head size].

    There is one page more than in the pool, to which padding tokens write. Tensors of equal width are stored together,
    so that pages are copied by one operation per width.
    """

    def __init__(
        self,
        layers: Sequence[KVLayer],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        lend: bool = False,
        routes: tuple[int, int] = (0, 0),
    ) -> None:
        """`routes`: routers and experts of a token, if their choices are stored beside keys and values."""
        self.layers = tuple(layers)
        self.page_size = page_size
        self.num_pages = num_pages
        self.device = device
        widths = Counter(width for layer in layers for width in _stored_widths(layer))
        item = torch.empty((), dtype=dtype).element_size()
        shapes = [(count, num_pages + 1, page_size * width) for width, count in sorted(widths.items())]
        sizes = [-(-prod(shape) * item // ALIGNMENT) * ALIGNMENT for shape in shapes]
        # zeros, not empty: a masked slot is multiplied by 0, and 0 * NaN from stale memory would be NaN
        route_size = (num_pages + 1) * page_size * prod(routes) * 2
        self.memory = LentMemory(sum(sizes) + route_size, device, lend)
        starts = itertools.accumulate(sizes, initial=0)
        tensors = [
            self.memory.flat[start : start + prod(shape) * item].view(dtype).view(shape)
            for start, shape in zip(starts, shapes, strict=False)
        ]
        rows = {shape[2] // page_size: iter(tensor) for shape, tensor in zip(shapes, tensors, strict=True)}
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for layer in layers:
            if layer.source is not None:
                self.keys.append(self.keys[layer.source])
                self.values.append(self.values[layer.source])
                continue
            stored = [next(rows[width]) for width in _stored_widths(layer)]
            key = stored[0].view(-1, layer.heads, layer.key_size)
            self.keys.append(key)
            self.values.append(
                key[..., : layer.value_size]
                if layer.values_in_keys
                else stored[1].view(-1, layer.heads, layer.value_size)
            )

        self.paged = tensors
        self.routes: Tensor | None = None  # int16 [slot, routers, experts of a token]
        if route_size:
            flat = self.memory.flat[sum(sizes) : sum(sizes) + route_size].view(torch.int16)
            self.paged = [*tensors, flat.view(1, num_pages + 1, -1)]
            self.routes = flat.view(-1, *routes)

    def write(self, layer: int, places_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store the keys and values of new tokens."""
        kind = self.layers[layer]
        if kind.source is not None:
            return
        self.keys[layer].index_copy_(0, places_T, k_TKD.to(self.keys[layer].dtype))
        if not kind.values_in_keys:
            self.values[layer].index_copy_(0, places_T, v_TKD.to(self.values[layer].dtype))

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (from, to) of all layers, in this order."""
        for a, b, pages in _stretches(copies):
            for tensor in self.paged:
                tensor[:, b : b + pages] = tensor[:, a : a + pages]

    def copy_pages_at(self, source_n: Tensor, target_n: Tensor) -> None:
        """The same for page numbers that are on the device; every page is read before any is written."""
        for tensor in self.paged:
            tensor[:, target_n] = tensor[:, source_n]


def _stored_widths(layer: KVLayer) -> list[int]:
    """Numbers per token of the key, and of the value if it is stored apart."""
    if layer.source is not None:
        return []
    key = layer.heads * layer.key_size
    return [key] if layer.values_in_keys else [key, layer.heads * layer.value_size]


def _untouched_zeros(size: int) -> Tensor:
    """Zeroed bytes on the CPU. The system provides their memory only when they are first written, so a cache that is
    planned for many requests costs nothing until they come."""
    whole = np.zeros(size + ALIGNMENT, np.uint8)  # calloc; torch.zeros would write every page
    start = -whole.ctypes.data % ALIGNMENT
    return torch.from_numpy(whole[start : start + size])


def _stretches(copies: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(first source page, first target page, pages) of each stretch that goes up by one on both sides."""
    start = 0
    for i in range(1, len(copies) + 1):
        goes_on = i < len(copies) and copies[i] == (copies[i - 1][0] + 1, copies[i - 1][1] + 1)
        if not goes_on:
            yield *copies[start], i - start
            start = i
