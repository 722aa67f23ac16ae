"""Command lines of verl for Megatron and other engines than FSDP: one sentence, with the keys that say the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rally.config.errors import shown
from rally.config.verl_key_tables import REF, A, M
from rally.config.yaml_files import Tree, leaves

BACKENDS = ("megatron", "veomni", "torchtitan", "automodel", "mindspeed", "mindspeed_mm", "mlite")
BACKEND_NAMES = {"megatron": "Megatron", "veomni": "VeOmni", "mlite": "Megatron Lite"}
MEGATRON_OPTIM = (
    *("lr_decay_style", "lr_decay_steps", "lr_warmup_init", "min_lr", "weight_decay_incr_style", "lr_wsd_decay_style"),
    *("lr_wsd_decay_steps", "use_checkpoint_opt_param_scheduler", "override_optimizer_config"),
    *("use_precision_aware_optimizer", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "name", "eps"),
    *("decay_type", "min_lr_factor", "lr_min", "lr_start", "lr_decay_ratio", "optimizer"),
    "use_layer_wise_distributed_optimizer",
)
"""Keys of `optim` that belong to another backend than FSDP, with those that begin with `muon_`."""
BACKEND_ONLY = ("load_weight", "nccl_timeout", "layer_name_map")
"""Keys that verl's files have for Megatron alone."""
SAME_IN_FSDP = {
    "param_offload": "{0}.fsdp_config.param_offload",
    "optimizer_offload": "{0}.fsdp_config.optimizer_offload",
    "grad_offload": "{0}.fsdp_config.optimizer_offload",
    "tensor_model_parallel_size": "trainer.n_gpus_per_node",
    "pipeline_model_parallel_size": "trainer.n_gpus_per_node",
    "context_parallel_size": "trainer.n_gpus_per_node",
    "expert_model_parallel_size": "trainer.n_gpus_per_node",
    "expert_parallel_size": "trainer.n_gpus_per_node",
    "fsdp_size": "{0}.fsdp_config.fsdp_size",
    "lr_decay_style": "{0}.optim.lr_scheduler_type",
    "min_lr": "{0}.optim.min_lr_ratio",
    "tp": "trainer.n_gpus_per_node",
    "ep": "trainer.n_gpus_per_node",
    "seed": "trainer.seed",
    "dtype": f"{M}.dtype",
}


class RefusedBackend(NamedTuple):
    """The sentence, and the keys that it is about."""

    problem: str
    keys: tuple[str, ...]


def refused_backend(tree: Tree, choices: Mapping[str, str]) -> RefusedBackend | None:
    """What a command line of Megatron or another engine asks for; None for one of FSDP."""
    written = dict(leaves(tree))
    found: dict[str, str] = {}
    for key, value in written.items():
        names = [part for part in key.split(".") if part in BACKENDS]
        chosen = [value] if key.endswith(("strategy", "model_engine")) and value in BACKENDS else []
        for name in (*names, *chosen):
            found[key] = name
    for key, value in choices.items():
        for name in BACKENDS:
            if name in value:
                found[key] = name
    listed = [str(name) for name in tree.get("defaults") or () if any(name_ in str(name) for name_ in BACKENDS)]
    if listed:
        found["defaults"] = next(name for name in BACKENDS if name in listed[0])
    if not found:
        return None
    backend = next(iter(found.values()))
    optim = [key for key in written if _of_backend(key)]
    instead: dict[str, None] = {}
    for key in (*found, *optim):
        head, _, _ = key.partition(f".{backend}.")[0].partition(".engine.")
        section = head if head != key else key.partition(".optim.")[0]
        if (name := SAME_IN_FSDP.get(key.rpartition(".")[2])) is not None:
            instead[name.format(section if "." in section or section == "critic" else A)] = None
    same = ", ".join(instead) or f"{A}.strategy=fsdp2, {A}.fsdp_config.* and trainer.n_gpus_per_node"
    first = next(iter(found))
    key = f"{first}={shown(written[first])}" if first in written else f"{first}={choices.get(first, listed)}"
    name = BACKEND_NAMES.get(backend, backend)
    problem = (
        f"{key} asks for {name}, but Rally shards with FSDP2; leave the keys of {name} out, set {A}.strategy=fsdp2, "
        f"and say the same with {same}."
    )
    return RefusedBackend(problem, (*found, *optim))


def _of_backend(key: str) -> bool:
    """Whether a key beside those of a backend's own section belongs to it."""
    optim = f".{key}".partition(".optim.")[2].partition(".")[0]
    if optim in MEGATRON_OPTIM or optim.startswith("muon_") or key.startswith(f"{REF}.optim."):
        return True
    inside = any(f".{key}".startswith(f".{section}.engine.") for section in (A, REF, "critic"))
    return (
        inside
        or ".model.lora." in f".{key}"
        or ".mbridge_config" in key
        or not set(BACKEND_ONLY).isdisjoint(key.split("."))
    )
