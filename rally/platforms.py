"""Kinds of accelerators, and what torch, torch.distributed, Ray and their drivers call them.

Outside this module only the kernels, the runner over CUDA graphs, CUDA's virtual memory and its IPC name a kind of
accelerator. Functions of a device do nothing, or use main memory, where the device is a CPU. torch is imported when a
function needs it, because loading a configuration must stay fast.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rally.types import RallyError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A kind of accelerator. `kernels`: Rally's own kernels, CUDA graphs, IPC and virtual memory work on it; otherwise
    attention and layers are plain torch."""

    device_type: str  # as torch calls it
    backend: str  # of torch.distributed
    visible_devices: str  # the variable that limits which devices a process sees
    socket_interface: str  # the variable that names the network interface of the backend
    ray_resource: str
    package: str | None = None  # what adds the device to torch
    kernels: bool = False

    @property
    def module(self) -> Any:
        """torch's module of functions for this kind of device, such as torch.cuda."""
        import torch

        if self.package is not None and not hasattr(torch, self.device_type) and find_spec(self.package) is not None:
            import_module(self.package)
        return getattr(torch, self.device_type, None)

    def device_count(self) -> int:
        """How many such devices torch finds on this machine."""
        return 0 if self.module is None else int(self.module.device_count())

    def supports_bfloat16(self) -> bool:
        return bool(self.module.is_bf16_supported(**({"including_emulation": False} if self.kernels else {})))

    def empty_cache(self) -> None:
        """Give the memory that torch keeps for later tensors back to the devices."""
        if self.module is not None:
            self.module.empty_cache()

    def missing(self) -> str:
        """Why this machine has no such device."""
        if self.module is None:
            return f"torch has no {self.device_type} devices here, because {self.package} is not installed"
        return "torch finds no GPU" if self.kernels else f"torch finds no {self.device_type} device"

    def visible(self, count: int | None = None) -> list[str]:
        """The devices that this process sees, as the machine names them; the first `count` if it does not restrict
        them."""
        names = os.environ.get(self.visible_devices)
        if names is None:
            return [str(number) for number in range(self.device_count() if count is None else count)]
        return [name.strip() for name in names.split(",") if name.strip()]


CUDA = Platform(
    device_type="cuda",
    backend="nccl",
    visible_devices="CUDA_VISIBLE_DEVICES",
    socket_interface="NCCL_SOCKET_IFNAME",
    ray_resource="GPU",
    kernels=True,
)
NPU = Platform(
    device_type="npu",
    backend="hccl",
    visible_devices="ASCEND_RT_VISIBLE_DEVICES",
    socket_interface="HCCL_SOCKET_IFNAME",
    ray_resource="NPU",
    package="torch_npu",
)
PLATFORMS = {platform.device_type: platform for platform in (CUDA, NPU)}
"""By torch's name of the device."""

SHARED_VARIABLE, SEVERAL_ON_ONE_GPU = "RALLY_RANKS_SHARE_GPUS", "NCCL_MULTI_RANK_GPU_ENABLE"
SHARED_BACKENDS = (CUDA.backend, "gloo")


def shared_backend() -> str | None:
    """The backend of torch.distributed for ranks that share GPUs (RALLY_RANKS_SHARE_GPUS), which is for tests on
    machines with fewer GPUs than ranks. None: each rank has a device of its own."""
    value = os.environ.get(SHARED_VARIABLE) or None
    if value is not None and value not in SHARED_BACKENDS:
        raise RallyError(f"{SHARED_VARIABLE}={value} is not a backend; set it to {' or '.join(SHARED_BACKENDS)}")
    return value


def rank_device(platform: Platform, local_rank: int) -> torch.device:
    """The device of a rank, by its number on its node."""
    import torch

    index = local_rank % platform.device_count() if shared_backend() is not None else local_rank
    return torch.device(platform.device_type, index)


def named_platform(device_type: str) -> Platform:
    """The platform that trainer.device names. `auto` is the first of which this machine has a device, else CUDA."""
    if device_type != "auto":
        return PLATFORMS.get(device_type, CUDA)
    return next((one for one in PLATFORMS.values() if one.device_count()), CUDA)


def platform_of(device: torch.device) -> Platform | None:
    """The platform of a device; None for a CPU."""
    return PLATFORMS.get(device.type)


def on_accelerator(device: torch.device) -> bool:
    return device.type != "cpu"


def has_kernels(device: torch.device) -> bool:
    """Whether Rally's own kernels run on the device."""
    platform = platform_of(device)
    return platform is not None and platform.kernels


FP8_CAPABILITY = (8, 9)  # the least compute capability of GPUs that multiply 8-bit floats


def fp8_problem(device: torch.device) -> str | None:
    """Why a device cannot multiply matrices of 8-bit floats; None if it can. A CPU can, in plain torch."""
    import torch

    if not on_accelerator(device):
        return None
    if not has_kernels(device) or torch.version.hip is not None:
        return f"runs on NVIDIA GPUs and on CPUs, not on {device.type} here"
    capability = torch.cuda.get_device_capability(device)
    if capability >= FP8_CAPABILITY:
        return None
    has, least = (".".join(map(str, numbers)) for numbers in (capability, FP8_CAPABILITY))
    name = torch.cuda.get_device_name(device)
    return f"needs a GPU of compute capability {least} or more, and {name} has {has}"


def empty_cache(device: torch.device) -> None:
    if platform := platform_of(device):
        platform.empty_cache()


def wait_for_stream(device: torch.device) -> None:
    """Wait until the device has done the work of this thread's current stream."""
    if platform := platform_of(device):
        platform.module.current_stream(device).synchronize()


@contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Within it each operation of torch on an accelerator gives the same bits each time, or raises an error. Otherwise
    the gradient of flash attention, for one, adds in the order in which blocks of threads end."""
    import torch

    if platform_of(device) is None:
        yield
        return
    memory: Any = import_module("torch.utils.deterministic")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch wants it set, and reads it at each product
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # it would write all new memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def use_expandable_segments(device: torch.device) -> bool:
    """Let torch's allocator on a GPU extend what it has instead of adding blocks of fixed sizes. Blocks that fit
    micro-batches of one length do not fit those of the next, so it would reserve the whole GPU for two thirds of it,
    and start over when that is full. Returns False, and does nothing, where the user has configured the allocator.
    Child processes are not concerned: servers that sleep refuse such memory."""
    if not has_kernels(device) or any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        return False
    import torch

    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return True


def memory_info(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of an accelerator, without what torch has cached."""
    platform = platform_of(device)
    assert platform is not None, "a CPU shares its memory with everything else"
    platform.module.empty_cache()
    free, total = platform.module.mem_get_info(device)
    return int(free), int(total)


def memory_left(device: torch.device) -> int | None:
    """Bytes that tensors can still get on an accelerator, with what torch has cached; None for a CPU."""
    platform = platform_of(device)
    if platform is None:
        return None
    free, _ = platform.module.mem_get_info(device)
    return int(free + platform.module.memory_reserved(device) - platform.module.memory_allocated(device))


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """A context after which the random state of the CPU and of the device is what it was before."""
    import torch

    if not on_accelerator(device):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device.index or 0], device_type=device.type)


REGISTERED = 2**20  # bytes from which memory is pinned in its own size


def pinned_memory(size: int, device: torch.device) -> Tensor:
    """So many bytes of main memory that an accelerator copies from and to by itself; ordinary memory for a CPU. torch
    rounds what it pins up to a power of two, which can double the states of an optimizer, and keeps it when it is
    freed. CUDA pins memory in its own size as well."""
    import torch

    platform = platform_of(device)
    if platform is None:
        return torch.empty(size, dtype=torch.uint8)
    if platform.kernels and size >= REGISTERED:
        # private: the memory of a shared mapping has small pages, whatever is advised
        try:
            memory = _Registered(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as problem:
            raise RallyError(_not_pinned(size, str(problem))) from problem
        memory.madvise(mmap.MADV_DONTFORK)  # a process that is forked would copy all pinned pages
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        with platform.module.device(device):
            memory.register(platform.module.cudart(), whole.data_ptr())
        return whole
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _not_pinned(size: int, why: str) -> str:
    return (
        f"{size:,} bytes of main memory cannot be pinned ({why}); free main memory, or leave out what rests there: "
        "optimizer_offload=true, or weights for checkpoint_engine.backend=nccl"
    )


class _Registered(mmap.mmap):
    """Anonymous memory that CUDA pins until nothing uses it."""

    registered: tuple[Any, int] | None = None

    def register(self, runtime: Any, address: int) -> None:
        if problem := int(runtime.cudaHostRegister(address, len(self), 0)):
            raise RallyError(_not_pinned(len(self), f"CUDA error {problem}"))
        self.registered = (runtime, address)

    def __del__(self) -> None:
        if self.registered is not None:
            runtime, address = self.registered
            with suppress(Exception):  # at the end of the process CUDA may be gone
                runtime.cudaHostUnregister(address)


def from_host(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of main memory on the device, copied without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if on_accelerator(device) else tensor
