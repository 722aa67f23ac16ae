"""Doctor check of memory and time: estimates for this machine and, without a GPU here, for common GPUs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from rally.doctor.check_context import DoctorCase, Finding, ReportText, Status
from rally.engines.embedded.memory_plan import free_bytes, kv_bytes_per_token, step_bytes
from rally.models.load import pick_dtype
from rally.platforms import named_platform, platform_of
from rally.runs import build
from rally.runs.build.update_settings import total_steps_of
from rally.runs.cost_estimate import (
    ACTIVATIONS,
    UTILISATION,
    Hardware,
    MemoryCost,
    StepTime,
    at_once,
    shown_bytes,
    step_time,
    training_costs,
)
from rally.runs.planned_models import ParameterCounts

GB = 10**9
GPUS = (
    Hardware("L4", 24 * GB, 121e12, 0.30e12),
    Hardware("RTX 4090", 24 * GB, 165e12, 1.01e12),
    Hardware("L40S", 48 * GB, 362e12, 0.86e12),
    Hardware("A100", 80 * GB, 312e12, 2.04e12),
    Hardware("H100", 80 * GB, 989e12, 3.35e12),
    Hardware("H200", 141 * GB, 989e12, 4.8e12),
    Hardware("B200", 180 * GB, 2250e12, 8.0e12),
)
"""Memory, dense bf16 operations and memory bandwidth according to the vendors."""
LONG = 24 * 3600.0


class Estimate(NamedTuple):
    """The bytes that an update needs, the episodes sampled at a time, and the time of a step; None if it does not
    fit."""

    hardware: Hardware
    needed: int
    running: int
    step: StepTime | None


def cost(case: DoctorCase) -> Iterator[Finding]:
    config, device = case.config, _device(case.config.trainer.device)
    here = this_machine(device)
    width = torch.empty((), dtype=pick_dtype(config.model.dtype, device)).element_size()
    costs = training_costs(config, case.model_config, case.size, width)
    kind = "float32" if width == 4 else "half precision"
    table = "\n".join(f"{one.what:<32} {shown_bytes(one.bytes):>12}" for one in (*costs, *_of_engine(case, width)))
    yield Finding("memory", "ok", f"{_summary(case.size, costs)} ({kind}, {here.name})", (ReportText("note", table),))
    elsewhere = device.type == "cpu" and config.trainer.device != "cpu"  # this may not be the machine that trains
    yield _judge(case, estimate(case, here, width), "warning" if elsewhere else "error")
    if elsewhere:
        half = 4 if config.model.dtype == "float32" else 2
        lines = [_line(case, estimate(case, gpu, half)) for gpu in GPUS]
        note = f"estimates for one GPU at {UTILISATION:.0%} of its peak, with half of all token budgets used"
        yield Finding("time", "ok", note, (ReportText("note", "\n".join(lines)),))


def estimate(case: DoctorCase, hardware: Hardware, width: int) -> Estimate:
    config, model_config, size = case.config, case.model_config, case.size
    costs, settings = training_costs(config, model_config, size, width), build.engine_settings_of(config)
    needed = sum(one.bytes for one in costs)
    stays = needed - sum(one.bytes for one in costs if one.what in ACTIVATIONS)
    history, step = (one.bytes for one in _of_engine(case, width))
    kv_bytes = int((hardware.memory - stays) * settings.memory_share) - step
    needed += 0 if settings.lend_memory else max(0, kv_bytes)
    if needed > hardware.memory or kv_bytes < history:
        return Estimate(hardware, max(needed, stays + int((step + history) / settings.memory_share)), 0, None)
    running = max(1, at_once(config, model_config, width, kv_bytes))
    return Estimate(hardware, needed, running, step_time(config, model_config, size, hardware, running, width))


def _of_engine(case: DoctorCase, width: int) -> tuple[MemoryCost, MemoryCost]:
    """The least memory that sampling needs beside the model and its optimizer."""
    settings, patches = build.engine_settings_of(case.config), build.patches_of(case.config)
    history = settings.max_model_len * kv_bytes_per_token(case.model_config, width)
    return (
        MemoryCost(f"sampling: KV of {settings.max_model_len:,} tokens", history),
        MemoryCost("sampling: a step of the engine", step_bytes(case.model_config, settings, width, patches)),
    )


def _summary(size: ParameterCounts, costs: list[MemoryCost]) -> str:
    trained = "all" if size.trained == size.parameters else f"{size.trained / 1e6:,.1f} million"
    return (
        f"{size.parameters / 1e6:,.1f} million weights, {trained} of them trained: an update holds about "
        f"{shown_bytes(sum(one.bytes for one in costs))}, and sampling uses the rest for its KV cache"
    )


def _judge(case: DoctorCase, estimated: Estimate, too_small: Status) -> Finding:
    line = _line(case, estimated)
    if estimated.step is None:
        advice = "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu, set model.lora_rank, or use more memory"
        return Finding("time", too_small, f"{line}; {advice}")
    if _run_seconds(case, estimated.step) > LONG:
        return Finding("time", "warning", f"{line}; use a faster machine, or fewer steps")
    return Finding("time", "ok", line)


def _line(case: DoctorCase, estimated: Estimate) -> str:
    name = f"{estimated.hardware.name} ({shown_bytes(estimated.hardware.memory)})"
    if estimated.step is None:
        return f"{name}: too small, needs {shown_bytes(estimated.needed)}"
    rollout, update = estimated.step
    return (
        f"{name}: needs {shown_bytes(estimated.needed)}, samples {estimated.running} episodes at a time, about "
        f"{_duration(estimated.step.total)} a step ({_duration(rollout)} rollout, {_duration(update)} update), "
        f"{_duration(_run_seconds(case, estimated.step))} in all"
    )


def _run_seconds(case: DoctorCase, step: StepTime) -> float:
    rows = case.train_rows if case.tasks else None
    known = case.config.trainer.total_training_steps
    return step.total * (known or (total_steps_of(case.config, len(rows)) if rows else 1))


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"


def _device(name: str) -> torch.device:
    platform = named_platform(name)
    return torch.device(platform.device_type if name != "cpu" and platform.device_count() else "cpu")


def this_machine(device: torch.device) -> Hardware:
    """The GPU of this machine by its name, or its CPU by a short measurement."""
    if device.type == "cpu":
        return Hardware("this machine's CPU", free_bytes(device), _cpu_flops(), _cpu_bandwidth())
    platform = platform_of(device)
    assert platform is not None
    properties = platform.module.get_device_properties(0)
    known = next((gpu for gpu in reversed(GPUS) if re.search(rf"\b{gpu.name}\b", properties.name)), None)
    taken = known or GPUS[0]
    name = f"this machine's {properties.name}" + ("" if known else f", of unknown speed, estimated as {taken.name}")
    return Hardware(name, properties.total_memory, taken.flops, taken.bandwidth)


def _cpu_flops(size: int = 1024) -> float:
    a = torch.ones(size, size)
    a @ a
    began = time.perf_counter()
    for _ in range(4):
        a @ a
    return 4 * 2 * size**3 / (time.perf_counter() - began)


def _cpu_bandwidth(megabytes: int = 128) -> float:
    a = torch.zeros(megabytes << 18)
    began = time.perf_counter()
    a.sum()
    return (megabytes << 20) / (time.perf_counter() - began)
