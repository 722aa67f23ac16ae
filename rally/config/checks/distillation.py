"""Checks of `distillation.*`. Each problem is one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from rally.config.model import Dtype
from rally.config.schema import Config

SECTION = "distillation"
LOSS = f"{SECTION}.distillation_loss"
TOPK = "forward_kl_topk"
KINDS = ("rally", "vllm", "sglang")
MAX_TOPK = 256  # of `rally serve engine`


def distillation(config: Config) -> Iterator[str]:
    keys = config.distillation
    if not keys.enabled:
        return
    yield from _teachers(config)
    yield from _served(config)
    yield from _loss(config)
    if config.trainer.world_size > 1:
        yield from _several_gpus(config)


def _teachers(config: Config) -> Iterator[str]:
    teachers = config.distillation.teachers
    if not teachers:
        yield f"{SECTION}.enabled=true needs a teacher; set {SECTION}.teacher_models.teacher_model.model_path."
    for name, teacher in config.distillation.teacher_models.items():
        section = f"{SECTION}.teacher_models.{name}"
        if name not in teachers and (name != "teacher_model" or teacher.server.url is not None):
            yield f"{section} has no model_path; set it, or leave the teacher out."
        dtype = teacher.inference.get("dtype")
        if teacher.server.url is None and dtype not in (None, *get_args(Dtype)):
            yield f"{section}.inference.dtype={dtype} is not known; use one of {', '.join(get_args(Dtype))}."
        if name in teachers and len(teachers) > 1 and teacher.key is None:
            yield f"{section}.key is not set, and there are several teachers; set it to the rows that it teaches."
    for key, count in Counter(teacher.key for teacher in teachers.values()).items():
        if key is not None and count > 1:
            yield f"{count} teachers have {SECTION}.teacher_models.*.key={key}; give each its own key."


def _served(config: Config) -> Iterator[str]:
    keys = config.distillation
    served = {name: teacher for name, teacher in keys.teachers.items() if teacher.server.url is not None}
    for name, teacher in served.items():
        section, kind = f"{SECTION}.teacher_models.{name}", teacher.inference.get("name")
        if kind not in KINDS:
            yield f"{section}.server.url needs {section}.inference.name, one of {', '.join(KINDS)}; it is {kind!r}."
        if kind == "rally" and keys.distillation_loss.topk > MAX_TOPK and keys.distillation_loss.loss_mode == TOPK:
            topk = keys.distillation_loss.topk
            yield f"{LOSS}.topk={topk}: `rally serve engine` returns at most {MAX_TOPK} tokens; lower it."
    if served and keys.distillation_loss.loss_mode.endswith("_full"):
        mode = keys.distillation_loss.loss_mode
        yield (
            f"{LOSS}.loss_mode={mode} needs the teacher's whole distribution, which no server returns; use {TOPK}, or "
            f"leave {SECTION}.teacher_models.*.server.url out."
        )
    if keys.param_offload and served and len(served) == len(keys.teachers):
        yield f"{SECTION}.param_offload=true has no effect on served teachers; leave it out."


def _loss(config: Config) -> Iterator[str]:
    loss = config.distillation.distillation_loss
    if loss.loss_mode in ("k1", "kl") and not loss.use_policy_gradient:
        problem = f"{LOSS}.loss_mode={loss.loss_mode} has a gradient that does not depend on the teacher"
        yield f"{problem}; set {LOSS}.use_policy_gradient=true, or another loss_mode."
    if loss.use_task_rewards:
        return
    idle = {
        "actor_rollout_ref.actor.use_kl_loss=true": config.actor.use_kl_loss,
        "actor_rollout_ref.actor.entropy_coeff": config.actor.entropy_coeff != 0,
        "algorithm.use_kl_in_reward=true": config.algorithm.use_kl_in_reward,
        f"{LOSS}.distillation_loss_coef": loss.distillation_loss_coef != 1,
    }
    for key in (key for key, written in idle.items() if written):
        yield f"{key} has no effect with {LOSS}.use_task_rewards=false; leave one of them out."


def _several_gpus(config: Config) -> Iterator[str]:
    keys, count = config.distillation, config.trainer.world_size
    advice = "set trainer.n_gpus_per_node=1"
    if len(keys.teachers) > 1:
        yield f"{len(keys.teachers)} teachers are supported on one GPU only, not on {count}; {advice}."
    if keys.distillation_loss.loss_mode.endswith("_full"):
        mode = keys.distillation_loss.loss_mode
        yield f"{LOSS}.loss_mode={mode} works on one GPU only; use forward_kl_topk, or {advice}."
