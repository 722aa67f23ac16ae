"""Kinds of accelerators, and what torch, torch.distributed, Ray and their drivers call them.

Outside this module only the kernels, the runner over CUDA graphs, CUDA's virtual memory and its IPC name a kind of
accelerator. Functions of a device do nothing, or use main memory, where the device is a CPU. torch is imported when a
function needs it, because loading a configuration must stay fast.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

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


def empty_cache(device: torch.device) -> None:
    if platform := platform_of(device):
        platform.empty_cache()


def memory_info(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of an accelerator, without what torch has cached."""
    platform = platform_of(device)
    assert platform is not None, "a CPU shares its memory with everything else"
    platform.module.empty_cache()
    free, total = platform.module.mem_get_info(device)
    return int(free), int(total)


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """A context after which the random state of the CPU and of the device is what it was before."""
    import torch

    if not on_accelerator(device):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device.index or 0], device_type=device.type)


def from_host(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of main memory on the device, copied without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if on_accelerator(device) else tensor
