"""Processes of one machine that hold a policy together, over torch.distributed: each has a part of every layer.

Numbers and orders go over gloo on the loopback device; weights and gradients over NCCL between GPUs, over gloo between
CPUs. Where the processes find each other is a file in a folder of their own, so no port is open to anybody else.

Shapes: X any numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

from rally.distributed.messages import decode, encode
from rally.models import attention
from rally.models.parallel import CARRIED, Message
from rally.train.value_model import HEAD

FOREVER = timedelta(days=3650)  # between two orders there may be a rollout of any length
WITHIN = "rally_within"
Found = TypeVar("Found")


class ProcessGroup:
    """What a rank knows of all of them. `seconds` bounds how long one waits for the others in the midst of an order.
    For the next order the others wait as long as it takes."""

    def __init__(self, number: int, count: int, meeting: Path, device: str, seconds: float) -> None:
        self.number, self.count, self.device = number, count, device
        if device == "cuda":
            torch.cuda.set_device(number)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # it is read, and ports are opened, at the first exchange
        bound = timedelta(seconds=seconds)
        with _on_loopback():
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo",
                store=FileStore(str(meeting), count),
                rank=number,
                world_size=count,
                timeout=bound,
            )
            self._numbers = dist.new_group(backend="gloo", timeout=bound)
            self._orders = dist.new_group(backend="gloo", timeout=FOREVER if number else bound)
        self._mesh = init_device_mesh(device, (count,))
        self._spread: list[FSDPModule] = []

    def tell(self, message: Message) -> None:
        """From rank 0 to all others, each of which must `hear`."""
        content = torch.frombuffer(bytearray(encode(message)), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(content)]), 0, group=self._orders)
        dist.broadcast(content, 0, group=self._orders)

    def hear(self) -> Message:
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0, group=self._orders)
        content = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(content, 0, group=self._orders)
        return decode(content.numpy().tobytes())

    def gathered(self, numbers_X: Tensor) -> list[Tensor]:
        mine = numbers_X.detach().double().cpu()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._numbers)
        padded = torch.zeros(max(map(int, sizes)), dtype=torch.float64)
        padded[: len(mine)] = mine
        found = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(found, padded, group=self._numbers)
        return [one[: int(size)] for one, size in zip(found, sizes, strict=True)]

    def spread(self, model: PreTrainedModel, *, carried: Any, reshard: bool) -> None:
        """Layer by layer, so that no device ever holds more than one of them whole. Gradients are summed over the
        ranks, in float32, since the weight of a token was fixed before rows were shared out."""
        attention.install(model)
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": reshard,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        }
        for module in [*_by_themselves(model), *_layers(model)]:
            fully_shard(module, **options)
        fully_shard(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                self._spread.append(module)
        setattr(model, WITHIN, MethodType(_within, model))
        register_fsdp_forward_method(model, WITHIN)
        setattr(model, CARRIED, carried)

    def within(self, model: PreTrainedModel, work: Callable[..., Found], *given: Any) -> Found:
        if model.base_model is model:  # then its own forward is what `work` calls
            return work(model, *given)
        found: Found = getattr(model, WITHIN)(work, *given)
        return found

    def rest(self) -> None:
        """Between two orders every rank has its part of each layer and no more, whatever a forward pass left there:
        ranks that differed in it would not gather at the same time."""
        for module in self._spread:
            module.reshard()

    def leave(self) -> None:
        """All must do it at once: between GPUs, one that leaves alone may wait forever for those that are gone."""
        dist.destroy_process_group()


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _by_themselves(model: PreTrainedModel) -> list[nn.Module]:
    """Modules that hold weights of another dtype than the rest, since gradients that are summed in one go have one
    dtype; and a value head, which is no part of the forward of the body that it hangs on."""
    usual = model.dtype
    other = [m for m in model.modules() if any(p.dtype != usual for p in m.parameters(recurse=False))]
    head = getattr(model, HEAD, None)
    return other if head is None or head in other else [*other, head]


def _within(model: PreTrainedModel, work: Callable[..., Found], *given: Any) -> Found:
    """As a method, so that the weights that belong to no layer are there while it runs, as in the module's forward."""
    return work(model, *given)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """gloo would listen on whatever the machine's name resolves to."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        if before is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = before
