"""Builds the policy, its reference, its critic and the KL controller from a Config or a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial

import torch
from transformers import PreTrainedModel

from rally.config import Config
from rally.config.distillation import TeacherModel
from rally.engines.remote.prompt_logprobs import PromptClientSettings, PromptLogprobsClient
from rally.models.load import PATH_KEY, load_model, load_model_config, load_tokenizer, pick_device, pick_dtype
from rally.models.lora import has_adapters
from rally.models.rope import decide_rope
from rally.models.sharding import ALONE, Ranks, ranks_of
from rally.models.vision import image_parts_of
from rally.models.vision_loading import freeze_unused, share_patches
from rally.platforms import use_expandable_segments
from rally.runs.build.models import model_of, patches_of, tokenizer_of
from rally.runs.build.rollout import may_use_cuda_ipc
from rally.runs.build.update_settings import (
    critic_limits,
    critic_offload_of,
    critic_recompute_of,
    distillation_settings_of,
    gradient_limits_of,
    offload_settings,
    optimizer_settings,
    optimizer_settings_of,
    policy_offload_of,
    reward_kl_coef,
    update_settings_of,
)
from rally.train.checkpoint.store import STATE, Checkpoint, CheckpointError
from rally.train.critic import FOLDER, OPTIMIZER, Critic, CriticSettings
from rally.train.micro_batches import UNBOUND
from rally.train.policy import Policy
from rally.train.reference import FILE as KL_FILE
from rally.train.reference import BaseOfPolicy, FrozenModel, KlController, Reference
from rally.train.teacher import ServedTeacher, Teachers, check_shared_vocabulary
from rally.train.value_model import load_value_model
from rally.types import Episode

TEACHER_TOKEN = "RALLY_TEACHER_TOKEN"  # the API key of a served teacher


def critic_of(config: Config, checkpoint: Checkpoint | None, steps: int, ranks: Ranks = ALONE) -> Critic | None:
    """The critic, if the advantage estimator needs one."""
    if not config.needs_critic:
        return None
    if checkpoint and not checkpoint.holds(FOLDER):
        raise CheckpointError(
            f"the checkpoint {checkpoint.path} holds no critic; resume from one that does, or start a new run with "
            f"actor_rollout_ref.model.path={checkpoint.actor}"
        )
    model = config.critic.model if config.critic.model.path else config.model
    device = pick_device(config.trainer.device)
    body = load_value_model(
        str(checkpoint.path / FOLDER if checkpoint else model.path),
        device=device if ranks.world_size == 1 else torch.device("cpu"),
        dtype=str(pick_dtype(model.dtype, device)).removeprefix("torch."),
        trust_remote_code=model.trust_remote_code,
        overrides=dict(model.override_config),
        option="critic.model.path" if config.critic.model.path else PATH_KEY,
    )
    decide_rope(body, config.max_model_len)
    if patches := patches_of(config):
        share_patches(body, patches, "critic.model.path")
    else:
        freeze_unused(body)
    ranks.shard(body, offload=config.critic.fsdp_config.offload_policy)
    learner = Policy(
        body,
        optimizer_settings(config.critic.optim, config.critic.grad_clip, gradient_limits_of(config.trainer.guards)),
        steps,
        gradient_checkpointing=config.critic.model.enable_gradient_checkpointing,
        recompute=critic_recompute_of(config),
        offload=critic_offload_of(config),
        deterministic=config.rollout.deterministic,
    )
    critic = Critic(learner, critic_settings_of(config))
    if checkpoint:
        with checkpoint.restoring(f"{FOLDER}/{OPTIMIZER}"):
            critic.read(checkpoint.path)
    return critic


def critic_settings_of(config: Config) -> CriticSettings:
    critic, limits = config.critic, critic_limits(config)
    return CriticSettings(
        mini_batch_groups=critic.ppo_mini_batch_size or config.mini_batch_size,
        clip=critic.cliprange_value,
        aggregation=critic.loss_agg_mode,
        loss_scale=float(config.response_length),
        epochs=critic.ppo_epochs,
        max_tokens=limits.max_tokens,
        max_rows=limits.max_rows,
        forward_max_tokens=critic.forward_max_token_len_per_gpu if critic.use_dynamic_bsz else UNBOUND,
        forward_max_rows=critic.forward_micro_batch_size_per_gpu or critic.ppo_micro_batch_size_per_gpu,
        shuffle_seed=config.trainer.seed if critic.shuffle else None,
        warmup_steps=config.trainer.critic_warmup,
    )


def kl_control_of(config: Config, checkpoint: Checkpoint | None) -> KlController | None:
    """The controller of the KL in the reward; None if the reward has no KL."""
    coefficient, keys = reward_kl_coef(config), config.algorithm.kl_ctrl
    if coefficient == 0:
        return None
    adaptive = keys.type == "adaptive"
    control = KlController(coefficient=coefficient, target=keys.target_kl if adaptive else None, horizon=keys.horizon)
    if checkpoint:
        with checkpoint.restoring(KL_FILE):
            control.restore(checkpoint.read_json(KL_FILE))
    return control


def policy_of(config: Config, checkpoint: Checkpoint | None, steps: int, ranks: Ranks = ALONE) -> Policy:
    """The policy as configured, or restored from a checkpoint."""
    # Before the first weights. Several GPUs keep torch's default, which is all that was tried on them, and so does CUDA
    # IPC, because another process needs further rights to open such memory.
    if steps and ranks.world_size == 1 and not may_use_cuda_ipc(config):
        use_expandable_segments(pick_device(config.trainer.device))
    policy = Policy(
        model_of(
            config,
            str(checkpoint.actor) if checkpoint else None,
            ranks,
            offload_policy=config.actor.fsdp_config.offload_policy,
        ),
        optimizer_settings_of(config),
        max(0, steps - config.trainer.critic_warmup),
        gradient_checkpointing=config.model.enable_gradient_checkpointing,
        recompute=config.model.recompute_num_layers,
        offload=policy_offload_of(config),
        deterministic=config.rollout.deterministic,
    )
    if checkpoint:
        with checkpoint.restoring(STATE):
            policy.load_state(checkpoint.state())
    return policy


def reference_of(config: Config, policy: PreTrainedModel) -> Reference | None:
    """The frozen initial policy, if a KL term needs it; with LoRA the policy's own base."""
    if update_settings_of(config).kl_coef == 0 and reward_kl_coef(config) == 0:
        return None
    if has_adapters(policy):
        return BaseOfPolicy(policy)
    keys = config.actor_rollout_ref.ref.fsdp_config
    model = model_of(config, ranks=ranks_of(policy), offload_policy=keys.offload_policy)
    return FrozenModel(model, like=policy, offload=offload_settings(keys, False, config.trainer.world_size).params)


def teachers_of(config: Config, policy: PreTrainedModel) -> Teachers | None:
    """The teachers of distillation, if it is enabled. Their vocabularies are compared before any weight is loaded."""
    settings = distillation_settings_of(config)
    if settings is None:
        return None
    keys, student = config.distillation, tokenizer_of(config).get_vocab()
    served = {name: _served_teacher(teacher) for name, teacher in keys.teachers.items() if teacher.server.url}
    for name, teacher in keys.teachers.items():
        option = f"distillation.teacher_models.{name}.model_path={teacher.model_path}"
        if ranks_of(policy).rank == 0:
            _check_teacher(config, teacher, student, option, served.get(name))
    return Teachers(
        {
            teacher.key or name: served.get(name) or _teacher(config, teacher, name, policy)
            for name, teacher in keys.teachers.items()
        },
        settings,
        vocabulary=policy.config.get_text_config().vocab_size,
        route=partial(_teacher_key, keys.teacher_key),
        route_key=keys.teacher_key,
    )


def _teacher_key(key: str, episode: Episode) -> str | None:
    task = episode.task
    if key == "data_source":
        return task.data_source
    value = task.row.get(key, task.extra_info.get(key))
    return None if value is None else str(value)


def _served_teacher(teacher: TeacherModel) -> ServedTeacher:
    keys = teacher.server
    settings = PromptClientSettings(
        url=str(keys.url),
        kind=teacher.inference["name"],
        model=str(teacher.model_path),
        timeout=keys.timeout,
        max_connections=keys.max_connections,
        token=os.environ.get(TEACHER_TOKEN),
    )
    return ServedTeacher(PromptLogprobsClient(settings))


def _check_teacher(
    config: Config, teacher: TeacherModel, student: Mapping[str, int], name: str, served: ServedTeacher | None
) -> None:
    """Compare the vocabulary of a teacher with the policy's: that of the server if it tells it, else that of the model
    at the teacher's path, which the server says it serves."""
    settings = distillation_settings_of(config)
    if served is not None and settings and (known := served.check(config.max_model_len, settings)):
        check_shared_vocabulary(student, known.ids, known.rows, f"{name} at {served.client.name}")
        return
    path, trust = str(teacher.model_path), config.model.trust_remote_code
    option = name.partition("=")[0]
    stored = load_model_config(path, trust_remote_code=trust, option=option).get_text_config()
    tokenizer = load_tokenizer(path, trust_remote_code=trust, option=option)
    check_shared_vocabulary(student, tokenizer.get_vocab(), stored.vocab_size, name)


def _teacher(config: Config, teacher: TeacherModel, name: str, policy: PreTrainedModel) -> FrozenModel:
    option = f"distillation.teacher_models.{name}.model_path"
    ranks, device = ranks_of(policy), pick_device(config.trainer.device)
    model = load_model(
        str(teacher.model_path),
        device=device if ranks.world_size == 1 else torch.device("cpu"),
        dtype=str(pick_dtype(teacher.inference.get("dtype") or config.model.dtype, device)).removeprefix("torch."),
        trust_remote_code=config.model.trust_remote_code,
        option=option,
    )
    decide_rope(model, config.max_model_len)
    if (patches := patches_of(config)) and image_parts_of(model):
        share_patches(model, patches, option)
    ranks.shard(model)
    return FrozenModel(model, offload=config.distillation.param_offload)
