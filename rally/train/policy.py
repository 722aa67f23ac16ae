"""The policy: the module, its optimizer and its learning-rate schedule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from rally.data import episode_seed
from rally.types import RallyError


class DivergedError(RallyError):
    """Training has produced numbers that are not finite."""


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


class Policy:
    """A module with its optimizer. The module is in eval mode except during an update."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: OptimizerSettings,
        total_steps: int,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.model = model
        self.settings = settings
        decayed = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            decayed, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule_factor(settings, total_steps))
        if gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.eval()

    @property
    def device(self) -> torch.device:
        return self.model.device

    def optimizer_step(self) -> float:
        """Clip, step, clear; returns the gradient norm before clipping. A norm that is not finite changes nothing."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip or math.inf))
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(norm):
            raise DivergedError(
                f"the gradient norm is {norm}, so the step was not applied; lower the learning rate, or look at the "
                "rewards and the data of this step"
            )
        return norm

    def advance(self) -> None:
        """Go on to the next step's learning rate. A step without any gradient took no optimizer step, and torch would
        warn about that in vain."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
            self.schedule.step()

    def state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Moments and step are the checkpoint's; learning rate, schedule and decay are those of this run's settings."""
        own = {name: value for name, value in self.optimizer.param_groups[0].items() if name != "params"}
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict({**state["schedule"], "base_lrs": self.schedule.base_lrs})
        own["lr"] = self.settings.lr * self.schedule.lr_lambdas[0](self.schedule.last_epoch)
        self.optimizer.param_groups[0].update(own)


def step_seed(seed: int, step: int) -> int:
    """What dropout draws from in one step: a resumed run draws what the first one would have drawn."""
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
