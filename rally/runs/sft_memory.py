"""The memory plan of supervised fine-tuning: that of `rally train` for the policy alone, in the keys of `rally sft`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from rally.config import Config, SftConfig
from rally.config.actor import FsdpConfig
from rally.config.model import ModelConfig
from rally.engines.embedded.memory_plan import free_bytes
from rally.models.load import load_model_config, pick_device, pick_dtype
from rally.platforms import memory_info, on_accelerator
from rally.runs.build.models import lora_of
from rally.runs.cost_estimate import MemoryCost, memory_problem, training_costs
from rally.runs.host_memory import host_costs, host_memory_problem
from rally.runs.planned_models import ParameterCounts, size_from
from rally.train.packing import Row

KEYS = {
    "actor.ppo_max_token_len_per_gpu": "data.max_token_len_per_gpu",
    "actor.fsdp_config": "model.fsdp_config",
    "actor.optim.optimizer": "optim.optimizer",
    "actor.checkpoint.async_save": "trainer.checkpoint.async_save",
}
"""The keys of `rally train` that advice names, and those of `rally sft` that mean the same."""


class SftMemory(NamedTuple):
    """A run as the plan of `rally train` reads it, its model, and the bytes of a parameter."""

    config: Config
    model_config: PreTrainedConfig
    size: ParameterCounts
    width: int

    def on_device(self) -> list[MemoryCost]:
        return training_costs(self.config, self.model_config, self.size, self.width)

    def in_main_memory(self) -> list[MemoryCost]:
        return host_costs(self.config, self.model_config, self.size, self.width)

    def problem(self, memory: int, free: int) -> str | None:
        """Why the run cannot fit into `memory` bytes of a device and `free` bytes of main memory; None if it fits."""
        found = memory_problem(*self, memory) or host_memory_problem(*self, free)
        for key, own in KEYS.items() if found else ():
            found = str(found).replace(key, own)
        return found


def sft_memory(config: SftConfig, rows: Sequence[Row]) -> SftMemory:
    """What the run with these rows needs, without loading weights."""
    model, path = config.model, str(config.model_path)
    shows = any(row.images for row in rows)
    described = load_model_config(
        path, trust_remote_code=model.trust_remote_code, overrides=dict(model.override_config)
    )
    size = size_from(described, lora_of(model, 0), trust=model.trust_remote_code, text_only=not shows)
    width = torch.empty((), dtype=pick_dtype(model.dtype, pick_device(config.trainer.device))).element_size()
    return SftMemory(_as_training(config, rows), described, size, width)


def sft_memory_problem(config: SftConfig, rows: Sequence[Row]) -> str | None:
    """Why the run cannot fit on this accelerator, or into its main memory; None if it fits, and on a CPU."""
    device = pick_device(config.trainer.device)
    if not on_accelerator(device):
        return None
    return sft_memory(config, rows).problem(memory_info(device)[1], free_bytes(torch.device("cpu")))


def _as_training(config: SftConfig, rows: Sequence[Row]) -> Config:
    """The keys of the run that decide what an update needs, as those of `rally train`. Rows are the histories, and
    images are the share of the prompt that they have in the row with the largest one."""
    lengths = sorted((len(row.ids) for row in rows), reverse=True)
    data, trainer, model = config.data, config.trainer, config.model
    most = data.micro_batch_size_per_gpu or data.train_batch_size
    batch = sum(lengths[: min(most, data.train_batch_size)])  # the longest rows that may come together
    limit = min(data.max_token_len_per_gpu, batch) if data.use_dynamic_bsz else batch
    shown = max(sum(image.rows * image.columns for image in row.images) / len(row.ids) for row in rows)
    seen = min(lengths[0] - 1, int(shown * lengths[0]))
    named = model.model_dump()
    offload = model.fsdp_config.model_dump(include=set(FsdpConfig.model_fields))
    actor = {
        "ppo_max_token_len_per_gpu": max(limit, lengths[0]),
        "ppo_mini_batch_size": data.train_batch_size,
        "ulysses_sequence_parallel_size": config.sequence_parallel_size,
        "fsdp_config": {**offload, "offload_policy": model.fsdp_config.uses_offload_policy, "param_offload": False},
        "optim": {"optimizer": config.optim.optimizer},
        "checkpoint": trainer.checkpoint.model_dump(),
    }
    shared = {name: value for name, value in named.items() if name in ModelConfig.model_fields and name != "strategy"}
    return Config.model_validate(
        {
            "data": {
                "max_prompt_length": max(1, seen),
                "max_response_length": max(1, lengths[0] - max(1, seen)),
                "train_batch_size": data.train_batch_size,
            },
            "actor_rollout_ref": {
                "model": {**shared, "path": config.model_path},
                "actor": actor,
                # no engine samples: "rally" is sent images, "vllm" is not
                "rollout": {"n": 1, "name": "rally" if any(row.images for row in rows) else "vllm"},
            },
            "trainer": {
                "nnodes": trainer.nnodes,
                "n_gpus_per_node": trainer.n_gpus_per_node,
                "device": trainer.device,
            },
        }
    )
