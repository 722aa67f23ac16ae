"""A stand-in for torch_npu: the device "npu" is torch's private backend under that name, computed on the CPU.

Tensors of the device are wrappers around tensors in main memory. An operation unwraps them, runs on the CPU and wraps
its results, so code that mixes devices or takes "npu" for something else fails as it would on the hardware.
"""

from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

GIB = 2**30


def npu_fusion_attention(*args: Any, **kwargs: Any) -> Any:
    """transformers imports it where torch_npu is installed."""
    raise NotImplementedError


npu_rotary_mul = npu_fusion_attention


class _Module:
    """torch.npu, as far as Rally calls it."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass  # there is one

    @contextmanager
    def device(self, device: Any) -> Any:
        yield

    def manual_seed_all(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = 0) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = 0) -> None:
        torch.default_generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self) -> bool:
        return False  # so that the results are those of the CPU in float32

    def mem_get_info(self, device: Any = 0) -> tuple[int, int]:
        return 2 * GIB, 4 * GIB

    def empty_cache(self) -> None:
        pass

    def synchronize(self, device: Any = 0) -> None:
        pass

    def max_memory_allocated(self) -> int:
        return GIB

    def max_memory_reserved(self) -> int:
        return GIB

    def memory_stats(self) -> dict[str, int]:
        return {}


_setup_privateuseone_for_python_backend("npu", _Module())


class NpuTensor(torch.Tensor):
    """A tensor of the device. `host` has its numbers."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "NpuTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device="npu:0",
        )
        made.host = host
        return made

    def __init__(self, host: torch.Tensor) -> None:
        pass

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _host(value: Any) -> Any:
    if isinstance(value, NpuTensor):
        return value.host
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "npu" else value


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = pytree.tree_leaves((args, kwargs))
    mine = [one for one in given if isinstance(one, NpuTensor)]
    others = [one for one in given if isinstance(one, torch.Tensor) and not isinstance(one, NpuTensor) and one.dim()]
    copies = func in (torch.ops.aten.copy_.default, torch.ops.aten._copy_from.default, torch.ops.aten._to_copy.default)
    if mine and others and not copies and "index" not in str(func):
        raise RuntimeError(f"{func} of tensors on npu:0 and cpu")
    wanted = kwargs.get("device")
    there = torch.device(wanted).type == "npu" if wanted is not None else bool(mine)
    result = func(*pytree.tree_map(_host, args), **pytree.tree_map(_host, kwargs))
    known = {id(one.host): one for one in mine}

    def wrapped(value: Any) -> Any:
        if not there or not isinstance(value, torch.Tensor) or isinstance(value, NpuTensor):
            return value
        return known.get(id(value)) if id(value) in known else NpuTensor(value)

    return pytree.tree_map(wrapped, result)


_every, _aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_every.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")


@torch.library.impl(_aten, "empty.memory_format", "PrivateUse1")
def _empty(size: Any, dtype: Any = None, **options: Any) -> NpuTensor:
    return NpuTensor(torch.empty(size, dtype=dtype))


@torch.library.impl(_aten, "empty_strided", "PrivateUse1")
def _empty_strided(size: Any, stride: Any, dtype: Any = None, **options: Any) -> NpuTensor:
    return NpuTensor(torch.empty_strided(size, stride, dtype=dtype))


@torch.library.impl(_aten, "_copy_from", "PrivateUse1")
def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _host(target).copy_(_host(source))
    return target


torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign,assignment]  # all of it is host memory
