"""The models that a run loads, with their parameter counts, as configurations describe them: no weights are loaded."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rally.config import Config
from rally.config.checks.multi_gpu import sends_images
from rally.models.load import load_model_config
from rally.models.lora import LoraSettings, lora_rank
from rally.models.vision import image_parts_of
from rally.models.vision_loading import auto_class, freeze_tower, freeze_unused
from rally.models.vision_memory import vision_shape


class ParameterCounts(NamedTuple):
    """Parameters of a model: all, the trained ones, those active for a token (with experts only some), and those that
    images reach and nothing else."""

    parameters: int
    trained: int
    active: int
    tower: int = 0


class LoadedModel(NamedTuple):
    """A model that a run loads, and the bytes of each of its parameters."""

    path: str
    model_config: PreTrainedConfig
    parameters: int
    width: int


class DescribedCritic(NamedTuple):
    """The configuration of a critic's model, and its counts."""

    model_config: PreTrainedConfig
    size: ParameterCounts


def size_of(model: PreTrainedModel) -> ParameterCounts:
    """The counts of a module, which may be on the meta device."""
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    config = model.config.get_text_config()
    experts, chosen = (getattr(config, name, None) for name in ("num_experts", "num_experts_per_tok"))
    of_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    idle = of_experts * (1 - chosen / experts) if experts and chosen else 0
    # An embedding lookup costs no multiplication; a tied matrix is also the output head.
    looked_up = 0 if config.tie_word_embeddings else sum(p.numel() for p in model.get_input_embeddings().parameters())
    tower = sum(p.numel() for part in image_parts_of(model).values() for p in part.parameters())
    return ParameterCounts(parameters, trained, int(parameters - idle - looked_up), tower)


def size_from(
    model_config: PreTrainedConfig,
    lora: LoraSettings | None = None,
    *,
    trust: bool = False,
    tower_frozen: bool = False,
    text_only: bool = False,
) -> ParameterCounts:
    """The counts of the model that a configuration describes, with the adapters that would be trained. `text_only`: a
    vision model is used for text."""
    with torch.device("meta"):
        model = auto_class(model_config).from_config(model_config, trust_remote_code=trust)
    if tower_frozen:
        freeze_tower(model)
    elif text_only or vision_shape(model_config) is None:  # a model whose images are not supported is used for text
        freeze_unused(model)
    size = size_of(model)
    return size if lora is None else size._replace(trained=_adapter_numbers(model, lora))


def _adapter_numbers(model: PreTrainedModel, lora: LoraSettings) -> int:
    head, rank = model.get_output_embeddings(), lora_rank(lora)
    every = lora.targets == LoraSettings.targets
    tower = {module for part in image_parts_of(model).values() for module in part.modules()} if every else set()
    linear = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and (every or name.endswith(lora.targets))
        if module not in tower
    ]
    return sum(rank * (module.in_features + module.out_features) for module in linear)


def described_critic(config: Config, policy_config: PreTrainedConfig, policy: ParameterCounts) -> DescribedCritic:
    """The critic of a run that has one: critic.model.path, or a copy of the policy. All of it is trained, but for the
    tower of a vision model that is used for text. It has no output head."""
    model, shown = config.critic.model, sends_images(config)
    if model.path:
        trust, overrides = model.trust_remote_code, dict(model.override_config)
        own = load_model_config(model.path, trust_remote_code=trust, overrides=overrides, option="critic.model.path")
        size = size_from(own, trust=trust, text_only=not shown)
    else:
        unused = 0 if shown and vision_shape(policy_config) is not None else policy.tower
        own, size = policy_config, policy._replace(trained=policy.parameters - unused)
    text = own.get_text_config()
    head = 0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size
    return DescribedCritic(own, size._replace(parameters=size.parameters - head, trained=size.trained - head))


def teachers_of(config: Config, width: int, *, counted: bool = True) -> list[LoadedModel]:
    """Each teacher that is loaded in process; `width` is that of the policy's parameters. To count parameters takes
    time; without, there are none."""
    if not config.distillation.enabled:
        return []
    trust, found = config.model.trust_remote_code, []
    for name, teacher in config.distillation.teachers.items():
        path, dtype = str(teacher.model_path), teacher.inference.get("dtype") or config.model.dtype
        if teacher.server.url is None:
            option = f"distillation.teacher_models.{name}.model_path"
            stored = load_model_config(path, trust_remote_code=trust, option=option)
            own = width if dtype == "auto" else getattr(torch, dtype).itemsize
            parameters = size_from(stored, trust=trust).parameters if counted else 0
            found.append(LoadedModel(path, stored, parameters, own))
    return found


def teacher_bytes(config: Config, width: int) -> list[int]:
    """The weights of each teacher that is loaded in process; `width` is that of the policy's parameters."""
    return [teacher.width * teacher.parameters for teacher in teachers_of(config, width)]
