"""The policy: a module with its optimizer and learning-rate schedule.

A parameter that is not float32 has a float32 master copy, so that small updates are not rounded away. Gradients are
accumulated and steps taken on the masters; the rounded result is copied into the parameter in place, because the engine
reads the same memory.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rally.data import episode_seed
from rally.models.forward_variables import checkpoint_contexts
from rally.models.load import LoadError
from rally.models.sharding import Ranks, ranks_of, shard_like
from rally.train.divergence import WINDOW, DivergedError, GradientLimits, Tried, gradient_problem


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its schedule; `warmup_steps` below 0 means `warmup_ratio` of all steps."""

    lr: float = 1e-6
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
    """A module with its optimizer. The module is in eval mode outside of `training()`."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: OptimizerSettings,
        total_steps: int,
        gradient_checkpointing: bool = False,
        *,
        offload: bool = False,
    ) -> None:
        self.model = model
        self._offload = offload
        self.settings = settings
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: _master(p) for name, p in trained.items()}
        self._rounded = [(p, self.masters[name]) for name, p in trained.items() if p is not self.masters[name]]
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule_factor(settings, total_steps))
        self._norms: deque[float] = deque(maxlen=WINDOW)
        if gradient_checkpointing:
            if not model.supports_gradient_checkpointing:
                name = type(model).__name__
                raise LoadError(f"{name} has no gradient checkpointing; set model.enable_gradient_checkpointing=false")
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": checkpoint_contexts}
            )
        model.eval()
        self._maybe_offload()

    @property
    def ranks(self) -> Ranks:
        """The ranks that hold the module together."""
        return ranks_of(self.model)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @contextmanager
    def training(self) -> Iterator[None]:
        """A context in which the module is in train mode and backward passes accumulate gradients on the masters."""
        if self._offload:
            self._move_optimizer(self.device)
        hooks = [p.register_post_accumulate_grad_hook(_collector(master)) for p, master in self._rounded]
        self.model.train()
        try:
            yield
        finally:
            self.model.eval()
            for hook in hooks:
                hook.remove()
            self._maybe_offload()

    def _maybe_offload(self) -> None:
        """With `offload`, keep optimizer states and masters in main memory between updates."""
        if self._offload:
            self._move_optimizer(torch.device("cpu"))

    def _move_optimizer(self, device: torch.device) -> None:
        for state in self.optimizer.state.values():
            state.update({name: value.to(device) for name, value in state.items() if isinstance(value, Tensor)})
        for _, master in self._rounded:
            master.data = master.data.to(device)

    def optimizer_step(self, tried: Sequence[Tried] = ()) -> float:
        """Clip, step, clear. Returns the gradient norm before clipping. A gradient over the limits raises
        `DivergedError` with `tried`, the rows it was computed from, and changes nothing."""
        limit = self.settings.grad_clip or math.inf
        total = nn.utils.clip_grad_norm_(list(self.masters.values()), limit)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        problem = gradient_problem(norm, self._norms, self.settings.grad_clip, self.settings.limits)
        if problem is None:
            self.optimizer.step()
            self._round()
            self._norms.append(norm)
        self.optimizer.zero_grad(set_to_none=True)
        if problem is not None:
            raise DivergedError(problem, tried)
        return norm

    @torch.no_grad()
    def _round(self) -> None:
        for parameter, master in self._rounded:
            parameter.copy_(master)

    def advance(self) -> None:
        """Advance the learning-rate schedule. torch warns if no optimizer step came before, which happens when a step
        has no gradient."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
            self.schedule.step()

    def state(self) -> dict[str, Any]:
        masters = {name: master.detach() for name, master in self.masters.items()} if self._rounded else {}
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "masters": masters,
            "grad_norms": list(self._norms),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore masters, moments and step. Learning rate, schedule and weight decay are those of this run."""
        own = {name: value for name, value in self.optimizer.param_groups[0].items() if name != "params"}
        self.optimizer.load_state_dict(self._sharded(state["optimizer"]))
        self._copy_mapped()
        self.schedule.load_state_dict({**state["schedule"], "base_lrs": self.schedule.base_lrs})
        own["lr"] = self.settings.lr * self.schedule.lr_lambdas[0](self.schedule.last_epoch)
        self.optimizer.param_groups[0].update(own)
        with torch.no_grad():
            for name, master in state.get("masters", {}).items():
                if master.shape != self.masters[name].shape:
                    raise ValueError(f"{name} has another shape, {tuple(master.shape)}")
                self.masters[name].copy_(shard_like(master, self.masters[name]))
        self._norms.extend(state.get("grad_norms", ()))
        self._round()
        self._maybe_offload()

    def _copy_mapped(self) -> None:
        """Copy optimizer states that may still be memory-mapped from the checkpoint."""
        for state in self.optimizer.state.values():
            here = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.is_cpu}
            state.update({name: value.clone() for name, value in here.items()})

    def _sharded(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        """The optimizer state, sharded as this rank's masters are."""
        masters, names = list(self.masters.values()), list(self.masters)
        for number, one in optimizer["state"].items():
            for value in one.values():
                if value.dim() and value.shape != masters[number].shape:
                    raise ValueError(
                        f"{names[number]} has the shape {tuple(masters[number].shape)}, its optimizer state "
                        f"{tuple(value.shape)}"
                    )
        state = {
            number: {
                name: shard_like(value, masters[number]) if value.shape == masters[number].shape else value
                for name, value in one.items()
            }
            for number, one in optimizer["state"].items()
        }
        return {**optimizer, "state": state}


def _master(parameter: nn.Parameter) -> nn.Parameter:
    return parameter if parameter.dtype == torch.float32 else nn.Parameter(parameter.detach().float())


def _collector(master: nn.Parameter) -> Callable[[Tensor], None]:
    """A hook that moves a parameter's gradient to its master, so that only one low-precision gradient exists at a
    time."""

    def collect(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return collect


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
