"""Builds the tasks of a run, its environments, and the sampler that chooses the rows of each step from a Config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rally.compat.verl.config_for_loops import as_written
from rally.compat.verl.samplers import AbstractSampler, VerlSampler
from rally.config import Config
from rally.config.env import EnvEntry
from rally.data import (
    EasyToHard,
    EasyToHardOptions,
    RowSampler,
    SamplerSettings,
    SolvedSometimes,
    SolvedSometimesOptions,
    TaskSet,
    load_custom_rows,
    load_sampler_class,
    load_tasks,
)
from rally.data.row_files import DataError
from rally.data.tasks import CustomRows
from rally.envs import Environment, Environments, EnvSpec
from rally.envs.child import ChildEnvironment
from rally.envs.registry import find_environment
from rally.envs.rows import SeedPlan, env_tasks
from rally.runs.build.models import tokenizer_of
from rally.types import Task


def tasks_of(config: Config, files: Sequence[str], *, validate: bool = False) -> TaskSet:
    data = config.data
    return load_tasks(
        list(files),
        prompt_key=data.prompt_key,
        reward_fn_key=data.reward_fn_key,
        image_key=data.image_key,
        max_samples=data.val_max_samples if validate else data.train_max_samples,
        shuffle=data.validation_shuffle if validate else data.shuffle,
        seed=config.trainer.seed if data.seed is None else data.seed,
        rows=_custom_rows(config, files),
    )


def environments_of(config: Config) -> Environments:
    """The environments of env.name or env.mixture; none if the rows are in files."""
    env = config.env
    specs = [EnvSpec(label=e.label or e.name, make=_made_by(e), args=e.args) for e in env.entries]
    return Environments(specs, env.timeout, env.unfinished_reward)


def _made_by(entry: EnvEntry) -> Callable[..., Environment]:
    return find_environment(entry.name) if entry.python is None else partial(ChildEnvironment, entry.python, entry.name)


def env_tasks_of(
    config: Config,
    environments: Environments,
    *,
    validate: bool = False,
    complete: Callable[[Task], Task] = lambda task: task,
) -> TaskSet | None:
    """The rows of the environments; None if there are none of that kind. `complete` may add prompts."""
    env = config.env
    if not env.entries or (validate and not any(env.val_sizes.values())):
        return None
    plan = SeedPlan(
        weights={entry.label or entry.name: entry.weight for entry in env.entries},
        train_size=env.train_size,
        train_seed=env.train_seed,
        val_size=env.val_size,
        val_seed=env.val_seed,
        val_sizes=env.val_sizes,
    )
    return env_tasks(environments, plan, validate=validate, complete=complete)


def _custom_rows(config: Config, files: Sequence[str]) -> CustomRows | None:
    """The rows of a user's dataset class (data.custom_cls), if there is one."""
    chosen = config.data.custom_cls
    if chosen.path is None or chosen.name is None:
        return None
    offered: dict[str, Callable[[], Any]] = {
        "data_files": lambda: list(files),
        "tokenizer": lambda: tokenizer_of(config),
        "config": lambda: as_written(config.data.model_dump(mode="json")),
        "processor": lambda: None,
        "max_samples": lambda: -1,
    }
    return load_custom_rows(chosen.path, chosen.name, offered)


def _custom_sampler(config: Config, tasks: TaskSet, settings: SamplerSettings) -> RowSampler:
    """The sampler of a user's class, which is Rally's or verl's."""
    path, name = str(config.data.sampler.class_path), str(config.data.sampler.class_name)
    cls: Any = load_sampler_class(path, name, (RowSampler, AbstractSampler))
    if issubclass(cls, RowSampler):
        return cls(tasks, settings)  # type: ignore[no-any-return]
    keys = as_written(config.data.model_dump(mode="json"))
    sampler = VerlSampler(lambda rows: cls(data_source=rows, data_config=keys), tasks, settings)
    own = len(sampler.sampler) if hasattr(sampler.sampler, "__len__") else len(tasks)
    if own != len(tasks) and config.trainer.total_training_steps is None:
        raise DataError(
            f"an epoch of {name} has {own} rows and the data {len(tasks)}; set trainer.total_training_steps"
        )
    return sampler


def sampler_of(config: Config, tasks: TaskSet, steps: int) -> RowSampler:
    """The sampler for a run of `steps` steps. A run of 0 steps gets the default one."""
    data, chosen = config.data, config.data.curriculum
    settings = SamplerSettings(
        batch_size=data.train_batch_size,
        total_steps=steps,
        seed=config.trainer.seed if data.seed is None else data.seed,
        shuffle=data.shuffle,
    )
    if steps and data.sampler.class_path and data.sampler.class_name:
        return _custom_sampler(config, tasks, settings)
    if steps and chosen.by == "field":
        grow = chosen.grow_steps or max(1, steps // 2)
        options = EasyToHardOptions(field=chosen.field, start_share=chosen.start_share, grow_steps=grow)
        return EasyToHard(tasks, settings, options)
    if steps and chosen.by == "success":
        band = SolvedSometimesOptions(
            low=chosen.low, high=chosen.high, explore=chosen.explore, solved_at=chosen.solved_at
        )
        return SolvedSometimes(tasks, settings, band)
    return RowSampler(tasks, settings)
