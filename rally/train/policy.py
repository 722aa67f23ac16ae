"""The policy: a module with its optimizer and learning-rate schedule.

A parameter that is not float32 has a float32 master copy, so that small updates are not rounded away. Gradients are
accumulated and steps taken on the masters; the rounded result is copied into the parameter in place, because the engine
reads the same memory.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rally.data import episode_seed
from rally.models.forward_variables import checkpoint_contexts
from rally.models.load import LoadError
from rally.models.residence import Residence, device_of, on_device
from rally.models.sharding import Ranks, ShardPlace, local_tensor, ranks_of, shard_place, total_norm
from rally.platforms import deterministic_algorithms, wait_for_stream
from rally.train import adamw8bit
from rally.train.adamw8bit import AdamW8bit
from rally.train.divergence import WINDOW, DivergedError, GradientLimits, Tried, gradient_problem
from rally.train.offload import ON_DEVICE, ActivationOffload, HostStates, OffloadSettings
from rally.train.packing import PackedRows, Row, pack
from rally.train.recompute import Recompute


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its schedule; `warmup_steps` below 0 means `warmup_ratio` of all steps. `moments_8bit`: the moments are
    stored in 8 bits."""

    lr: float = 1e-6
    moments_8bit: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    schedule: str = "constant"  # constant | cosine | linear
    warmup_steps: int = -1
    warmup_ratio: float = 0.0
    min_lr_ratio: float = 0.0
    num_cycles: float = 0.5
    limits: GradientLimits = field(default_factory=GradientLimits)


class Policy:
    """A module with its optimizer. The module is in eval mode outside of `training()`.

    The optimizer works on the local tensors of this rank. `masters` are those of the trained parameters: the parameter
    itself, its shard, or a float32 copy. `deterministic`: no bit of an update depends on the memory that is free or on
    the timing of a GPU.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: OptimizerSettings,
        total_steps: int,
        gradient_checkpointing: bool = False,
        *,
        recompute: int | None = None,
        offload: OffloadSettings = ON_DEVICE,
        deterministic: bool = False,
    ) -> None:
        self.model = model
        self.settings = settings
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: _master(p) for name, p in self._trained.items()}
        self._rounded = {name for name, p in self._trained.items() if p.dtype != torch.float32}
        self.optimizer = self._optimizer(settings)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule_factor(settings, total_steps))
        self._norms: deque[float] = deque(maxlen=WINDOW)
        if gradient_checkpointing:
            if not model.supports_gradient_checkpointing:
                name = type(model).__name__
                raise LoadError(f"{name} has no gradient checkpointing; set model.enable_gradient_checkpointing=false")
            with warnings.catch_warnings():  # transformers before 5.23 knows no other name
                warnings.filterwarnings("ignore", message=".*activation_checkpointing_enable")
                model.gradient_checkpointing_enable(
                    gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": checkpoint_contexts}
                )
        model.eval()
        self._collected: dict[str, Tensor] = {}  # float32 gradients on the device whose masters are in main memory
        self.host_states: HostStates | None = None
        if offload.optimizer:
            copies = [self.masters[name] for name in self._rounded]
            self.host_states = HostStates(self.optimizer, copies, self.device, offload.bucket_bytes)
        self.residence = Residence(model) if offload.params else None
        self.activations = ActivationOffload(offload.min_activation_bytes) if offload.activations else None
        self.deterministic = deterministic
        self.recompute = self._recompute(recompute) if gradient_checkpointing else None

    def _optimizer(self, settings: OptimizerSettings) -> torch.optim.Optimizer:
        masters = self.masters.values()
        lr, betas, decay = settings.lr, settings.betas, settings.weight_decay
        if not settings.moments_8bit:
            return torch.optim.AdamW(masters, lr=lr, betas=betas, weight_decay=decay, fused=True)
        places = self.layout().values()
        offsets = [math.prod(place.shape[1:]) * place.offset[0] if place.shape else 0 for place in places]
        return AdamW8bit(masters, lr=lr, betas=betas, weight_decay=decay, offsets=offsets)

    def _recompute(self, count: int | None) -> Recompute | None:
        """None: all layers are computed again. Offloaded activations need no memory, and ranks that gather layers must
        agree on them."""
        if count is None and (self.activations is not None or self.ranks.world_size > 1):
            return None
        # the free memory may not change the bits of a deterministic run
        chosen = Recompute(self.model, count, probabilities=not self.deterministic)
        if chosen.layers:
            return chosen
        if count is None:
            return None
        name = type(self.model).__name__
        raise LoadError(f"the layers of {name} are computed again all or none; leave model.recompute_num_layers out")

    @property
    def ranks(self) -> Ranks:
        """The ranks that hold the module together."""
        return ranks_of(self.model)

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def rest(self) -> None:
        """From now on the weights are on the device only while they are used, if they are offloaded."""
        if self.residence is not None:
            self.residence.rest()

    @contextmanager
    def training(self, arriving: int = 0) -> Iterator[None]:
        """A context in which the module is in train mode and backward passes accumulate gradients on the masters.
        `arriving`: the bytes of other models that come to the device meanwhile."""
        exact = deterministic_algorithms(self.device) if self.deterministic else nullcontext()
        with on_device(self.model), exact, nullcontext() if self.activations is None else self.activations.hooks():
            hooks = [
                self._trained[name].register_post_accumulate_grad_hook(self._collector(name)) for name in self._rounded
            ]
            self.model.train()
            if self.recompute is not None:
                self.recompute.begin(self._pending_bytes() + arriving)
            try:
                yield
            finally:
                self.model.eval()
                for hook in hooks:
                    hook.remove()

    def pack(self, rows: Sequence[Row], further_chunks: int = 0) -> PackedRows:
        """A micro-batch to train on, within `training()`. Chooses the layers that its backward pass computes again.
        `further_chunks`: see `Recompute.choose`."""
        packed = pack(rows, self.device)
        return packed if self.recompute is None else self.recompute.choose(packed, further_chunks)

    def leave_free(self, size: int) -> None:
        """The engine will take so many bytes of the device after an update; an update leaves them free if that costs no
        recomputation."""
        if self.recompute is not None:
            self.recompute.spare = size

    def recomputed(self) -> dict[str, float]:
        """The mean number of layers that the micro-batches of the last update computed again, as a metric."""
        chosen = [] if self.recompute is None else self.recompute.chosen
        return {"perf/recomputed_layers": sum(chosen) / len(chosen)} if chosen else {}

    def _pending_bytes(self) -> int:
        """What an update allocates on the device beside activations: gradients in float32, one parameter's gradient
        twice on its way there, and in the first update the optimizer's states."""
        sizes = [local_tensor(p.detach()).numel() for p in self._trained.values()]
        new = not self.optimizer.state and self.host_states is None
        moments = (adamw8bit.BYTES if self.settings.moments_8bit else 8) * sum(sizes) if new else 0
        return 4 * sum(sizes) + 8 * max(sizes, default=0) + int(moments)

    def _collector(self, name: str) -> Callable[[Tensor], None]:
        """A hook that moves a parameter's gradient to its master, so that only one low-precision gradient exists at a
        time."""
        master = self.masters[name]

        def collect(parameter: Tensor) -> None:
            assert parameter.grad is not None
            gradient = local_tensor(parameter.grad)
            if gradient.device.type == "cpu":  # before torch 2.13, FSDP may still be copying it from the device
                wait_for_stream(self.device)
            before = self._collected.get(name) if self.host_states is not None else master.grad
            if before is not None:
                before.add_(gradient)
            elif self.host_states is not None:
                self._collected[name] = gradient.float()
            else:
                master.grad = gradient.float()
            parameter.grad = None

        return collect

    def optimizer_step(self, tried: Sequence[Tried] = ()) -> float:
        """Clip, step, clear. Returns the gradient norm before clipping. A gradient over the limits raises
        `DivergedError` with `tried`, the rows it was computed from, and changes nothing."""
        gradients = self._gradients()
        norm = self._clip(gradients)
        problem = gradient_problem(norm, self._norms, self.settings.grad_clip, self.settings.limits)
        if problem is None:
            self._step(gradients)
            self._norms.append(norm)
        self._clear()
        if problem is not None:
            raise DivergedError(problem, tried)
        return norm

    def _gradients(self) -> dict[str, Tensor]:
        """The local gradients of this rank, on the device."""
        found = {
            name: self._collected.get(name, self.masters[name].grad) if name in self._rounded else p.grad
            for name, p in self._trained.items()
        }
        return {name: local_tensor(gradient) for name, gradient in found.items() if gradient is not None}

    @torch.no_grad()
    def _clip(self, gradients: Mapping[str, Tensor]) -> float:
        """Scale the gradients so that their norm over all ranks is at most `grad_clip`. Returns the norm before."""
        total = total_norm({name: (gradient, self._trained[name]) for name, gradient in gradients.items()}, self.ranks)
        scale = torch.clamp((self.settings.grad_clip or math.inf) / (total + 1e-6), max=1.0)
        for gradient in gradients.values():
            gradient.mul_(scale.to(gradient.device))
        return float(total)

    def _step(self, gradients: dict[str, Tensor]) -> None:
        """Step over all parameters or, with states in main memory, over one bucket after the other."""
        chosen = {name: self.masters[name] for name in gradients}
        self._clear()  # the optimizer steps over all parameters that have a gradient
        for names in [list(chosen)] if self.host_states is None else self.host_states.buckets(chosen):
            with nullcontext() if self.host_states is None else self.host_states.visit([chosen[n] for n in names]):
                for name in names:
                    if chosen[name] is not self._trained[name] and name not in self._rounded:
                        chosen[name].data = local_tensor(self._trained[name].detach())  # FSDP may have moved its shard
                    chosen[name].grad = gradients.pop(name)
                self.optimizer.step()
                self._round(names)
                for name in names:
                    chosen[name].grad = None

    def _clear(self) -> None:
        self._collected.clear()
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self._trained.values():
            parameter.grad = None

    @torch.no_grad()
    def _round(self, names: Iterable[str]) -> None:
        """Write the masters, rounded, into their parameters."""
        for name in names:
            if name in self._rounded:
                local_tensor(self._trained[name].detach()).copy_(self.masters[name])

    def advance(self) -> None:
        """Advance the learning-rate schedule. torch warns if no optimizer step came before, which happens when a step
        has no gradient."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
            self.schedule.step()

    def state(self) -> dict[str, Any]:
        """What resuming needs beside the weights. Tensors are those of this rank; `layout` has their places."""
        masters = {name: self.masters[name].detach() for name in self.masters} if self._rounded else {}
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "masters": masters,
            "grad_norms": list(self._norms),
        }

    def layout(self) -> dict[str, ShardPlace]:
        """The place of this rank's shard of each trained parameter."""
        return {name: shard_place(p) for name, p in self._trained.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore masters, moments and step. Learning rate, schedule and weight decay are those of this run. Tensors
        of the state are whole; each rank reads its own part of them."""
        self._load_optimizer(state["optimizer"])
        self.schedule.load_state_dict({**state["schedule"], "base_lrs": self.schedule.base_lrs})
        self.optimizer.param_groups[0]["lr"] = self.settings.lr * self.schedule.lr_lambdas[0](self.schedule.last_epoch)
        with torch.no_grad(), on_device(self.model):
            for name, master in state.get("masters", {}).items():
                if tuple(master.shape) != tuple(self._trained[name].shape):
                    raise ValueError(f"{name} has another shape, {tuple(master.shape)}")
                own = self.masters[name] if name in self._rounded else local_tensor(self._trained[name].detach())
                own.copy_(master[shard_place(self._trained[name]).slices])
            self._norms.extend(state.get("grad_norms", ()))
            self._round(self._rounded)

    def _load_optimizer(self, saved: Mapping[str, Any]) -> None:
        """Restore the optimizer's states, each where it lives. torch's own `load_state_dict` would move all of them to
        the device of the parameters."""
        names = list(self._trained)
        [group] = saved["param_groups"]
        if len(group["params"]) != len(names):
            raise ValueError(f"it holds the optimizer of {len(group['params'])} parameters instead of {len(names)}")
        if (name := group.get("optimizer", torch.optim.AdamW.__name__)) != type(self.optimizer).__name__:
            raise ValueError(f"its optimizer is {name}; set optim.optimizer={name}, or begin a new run")
        states: dict[Tensor, dict[str, Tensor]] = {}
        for number, one in saved["state"].items():
            name = names[number]
            parameter, master = self._trained[name], self.masters[name]
            states[master] = {key: self._loaded(name, key, value, parameter, master) for key, value in one.items()}
        self.optimizer.state.clear()
        self.optimizer.state.update(states)

    def _loaded(self, name: str, kind: str, value: Any, parameter: Tensor, master: Tensor) -> Tensor:
        place = adamw8bit.place_of_state(kind, shard_place(parameter))
        if len(value.shape) and tuple(value.shape) != place.shape:
            raise ValueError(f"{kind} of {name} should have the shape {place.shape}, and has {tuple(value.shape)}")
        own: Tensor = value[place.slices] if len(value.shape) else value
        if self.host_states is not None:
            return self.host_states.home_of(own)
        return own.to(master.device, copy=True)  # what is on disk may be memory-mapped


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype != torch.float32:
        return nn.Parameter(local_tensor(parameter.detach()).float())
    return nn.Parameter(local_tensor(parameter.detach())) if isinstance(parameter, DTensor) else parameter


def due(step: int, every: int) -> bool:
    """Whether something done every `every` steps is due after this one; -1 is never."""
    return every > 0 and step % every == 0


def step_seed(seed: int, step: int) -> int:
    """The seed of dropout in one step, so that a resumed run draws the same numbers."""
    return episode_seed(seed, step, 0, 0)


def schedule_factor(settings: OptimizerSettings, total_steps: int) -> Callable[[int], float]:
    """Learning-rate factor of step number `done` (0 before the first)."""
    warmup = settings.warmup_steps if settings.warmup_steps >= 0 else int(settings.warmup_ratio * total_steps)
    low = settings.min_lr_ratio

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / (warmup + 1)
        progress = min(1.0, (done - warmup) / max(1, total_steps - warmup))
        if settings.schedule == "cosine":
            return low + (1 - low) * 0.5 * (1 + math.cos(2 * math.pi * settings.num_cycles * progress))
        if settings.schedule == "linear":
            return low + (1 - low) * (1 - progress)
        return 1.0

    return factor
