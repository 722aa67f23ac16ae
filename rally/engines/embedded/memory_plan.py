"""Plans the memory of a rollout before the first step: KV pages, and the activations of one step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from rally.engines.base import EngineError
from rally.engines.embedded.settings import EngineSettings
from rally.engines.embedded.state_cache import state_bytes
from rally.images.patches import Patches
from rally.models.decoder_families import layer_shapes, mlp_size, shape_of
from rally.models.fp8 import covered_layers
from rally.models.kv_layers import CachedParts
from rally.models.routing import routers_of
from rally.models.vision import patches_of
from rally.models.vision_memory import vision_bytes
from rally.platforms import has_kernels, memory_info, on_accelerator


class MemoryPlan(NamedTuple):
    """`pages` of KV, their bytes, and the bytes a step of the largest size needs while it runs. `free` bytes were
    available when the plan was made. `slots` requests run at once; for a model with states there are `snapshots` of
    them beside, and `state_bytes` for both. `fp8_bytes` are those of quantised weights."""

    pages: int
    kv_bytes: int
    step_bytes: int
    free: int
    slots: int
    snapshots: int = 0
    state_bytes: int = 0
    fp8_bytes: int = 0


def plan_memory(model: PreTrainedModel, settings: EngineSettings, parts: CachedParts | None = None) -> MemoryPlan:
    """KV gets `memory_share` of the free memory, less what a step and quantised weights need, and at most
    `max_kv_bytes` and what `wanted_tokens` says. `parts` are what the model stores; without them the configuration
    tells. Half of the memory at most is for states, a third of it for running requests."""
    on_gpu = on_accelerator(model.device)
    nothing = parts is not None and not any(layer.numbers for layer in parts.layers)  # states alone
    shares_pages = settings.backend != "gather" and has_kernels(model.device) and model.dtype.itemsize == 2
    wanted = wanted_tokens(settings, on_gpu=on_gpu and not nothing, shares_pages=shares_pages)
    config, width = model.config, _width(model)
    stored = None if parts is None else sum(layer.numbers for layer in parts.layers) * width
    per_token = max(1, kv_bytes_per_token(config, width) if stored is None else stored)
    if settings.return_routes:
        per_token += sum(2 * router.chosen for router in routers_of(model))
    step = step_bytes(config, settings, width, patches_of(model))
    free = free_bytes(model.device)
    fp8 = covered_layers(model, settings.option_names.quantization).bytes if settings.quantization else 0
    memory = max(0, int(free * settings.memory_share) - step - fp8)
    row, slots, snapshots = 0 if parts is None else state_bytes(parts.states), settings.max_num_seqs, 0
    if row:
        fitting = memory // 2 // row
        slots = min(slots, max(1, fitting // 3))
        snapshots = max(0, min(wanted_snapshots(settings, slots, on_gpu=on_gpu), fitting - slots - 1))
        memory -= (slots + 1 + snapshots) * row
    allowed = max(0, memory) // per_token
    if settings.max_kv_bytes is not None:
        wanted = min(wanted, settings.max_kv_bytes // per_token)
    wanted = max(wanted, settings.max_model_len + settings.page_size)  # one history must fit
    pages = min(wanted, allowed) // settings.page_size
    if pages * settings.page_size < settings.max_model_len:
        names = settings.option_names
        raise EngineError(
            f"one history of {names.max_model_len}={settings.max_model_len} tokens does not fit into the {allowed} "
            f"tokens of KV that {names.memory}={settings.memory_share} allows; raise it, or lower {names.lengths}"
        )
    kv_bytes = pages * settings.page_size * per_token
    return MemoryPlan(pages, kv_bytes, step, free, slots, snapshots, (slots + 1 + snapshots) * row, fp8)


def wanted_tokens(settings: EngineSettings, *, on_gpu: bool, shares_pages: bool = True) -> int:
    """The most tokens that the KV cache is planned for. A GPU takes what its rollouts can use, so that all histories
    that wait for tools stay cached, and all it is given where nobody knows what they can. A CPU takes at most twice
    what can run at once, because its memory is shared. Without `shares_pages` a running request copies what is cached
    of its history."""
    if not on_gpu:
        return 2 * settings.max_num_seqs * settings.max_model_len
    if settings.demand is None:
        return sys.maxsize
    # a page for each running request is kept free when another one is admitted
    own = 1 if shares_pages else -(-settings.max_model_len // settings.page_size)
    return (settings.demand.pages(settings.page_size) + settings.max_num_seqs * own) * settings.page_size


def wanted_snapshots(settings: EngineSettings, slots: int, *, on_gpu: bool) -> int:
    """The most snapshots of states that are of use beside `slots` running requests."""
    if not on_gpu:
        return 2 * slots
    return 4 * (slots if settings.demand is None else min(slots, settings.demand.histories))


def plan_words(plan: MemoryPlan, settings: EngineSettings) -> str:
    """The plan in a sentence."""
    tokens = plan.pages * settings.page_size
    whole = min(plan.slots, tokens // settings.max_model_len)
    kv, step, free = (size / 2**30 for size in (plan.kv_bytes, plan.step_bytes, plan.free))
    states = f"{plan.state_bytes / 2**30:.2f} GiB for states and their snapshots; " if plan.state_bytes else ""
    fp8 = f"{plan.fp8_bytes / 2**30:.2f} GiB for FP8 weights; " if plan.fp8_bytes else ""
    return (
        f"KV cache of up to {kv:.2f} GiB for {tokens:,} tokens, that is {whole} of {settings.max_num_seqs} requests of "
        f"{settings.max_model_len:,} tokens at once; {states}{fp8}up to {step:.2f} GiB for a step; {free:.1f} GiB were "
        "free"
    )


def kv_bytes_per_token(config: PreTrainedConfig, width: int) -> int:
    """What a configuration tells of the size of a token in the cache. `width` is the size of a number in bytes."""
    return sum(heads * (key + value) for heads, key, value in layer_shapes(config)) * width


def step_bytes(config: PreTrainedConfig, settings: EngineSettings, width: int, patches: Patches | None = None) -> int:
    """The memory that one full step needs beside the KV cache.

    Activations of one layer (the residual, its norm, queries, keys and values, both halves of the MLP and their
    product), twice the float32 logits of every sampled token, and what the vision tower needs for `patches`.
    """
    vision = vision_bytes(config, settings.max_model_len, settings.max_num_batched_tokens, width, patches)
    config = config.get_text_config()
    _, kv_heads, size = shape_of(config)
    wide = (
        4 * config.hidden_size
        + (2 * getattr(config, "num_attention_heads", 0) + 2 * kv_heads) * size
        + 3 * mlp_size(config)
    )
    logits = 2 * 4 * min(settings.max_sampled_rows, settings.max_num_batched_tokens) * config.vocab_size
    return int(settings.max_num_batched_tokens * wide * width + logits + vision)


def free_bytes(device: torch.device) -> int:
    if on_accelerator(device):
        return memory_info(device)[0]
    with open("/proc/meminfo", encoding="ascii") as info:
        fields = dict(line.split(":", 1) for line in info)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min([available, *cgroup_free_bytes()])


def cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")) -> list[int]:
    """What each control group of this process leaves to it, as containers and batch systems limit it (version 1 and
    2). File caches, which the system can drop, count as free."""
    found = []
    lines = proc.read_text(encoding="utf-8").splitlines() if proc.exists() else []
    for _, controllers, name in (line.split(":", 2) for line in lines):
        if controllers == "":
            base, limit, usage, cached = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage, cached = root / "memory", *CGROUP_V1
        else:
            continue
        own = base / name.lstrip("/")
        for folder in [own, *(parent for parent in own.parents if parent == base or base in parent.parents)]:
            found += _left(folder, limit, usage, cached)
    return found


CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _left(folder: Path, limit: str, usage: str, cached: str) -> list[int]:
    try:
        most, used = ((folder / name).read_text(encoding="ascii").strip() for name in (limit, usage))
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:  # not a group of this controller, or outside of the container
        return []
    if not most.isdecimal():  # "max"
        return []
    return [max(0, int(most) - int(used) + int(statistics.get(cached, 0)))]


def _width(model: PreTrainedModel) -> int:
    return torch.empty((), dtype=model.dtype).element_size()
