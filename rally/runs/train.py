"""The run behind `rally train`: reads the inputs, builds the trainer, resumes or starts, and trains to the end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch
import yaml
from transformers import PreTrainedConfig

from rally.config import Config
from rally.config.checks.multi_gpu import sends_images
from rally.config.yaml_files import leaves
from rally.engines.embedded.memory_plan import free_bytes
from rally.models.load import load_model_config, pick_device, pick_dtype
from rally.models.sharding import ALONE, Ranks
from rally.nodes import THIS_MACHINE, RunNodes
from rally.platforms import memory_info, on_accelerator
from rally.runs import build
from rally.runs.build.engines import check_servers_installed
from rally.runs.build.models import lora_of
from rally.runs.build.rollout import check_reward_function, loops_of, rollout_cache_dir
from rally.runs.build.run_inputs import RunError, RunInputs, RunOutcome, check_ranks, read_inputs
from rally.runs.build.trainer import resume_point, rewind
from rally.runs.build.update_settings import check_objective, total_steps_of
from rally.runs.cost_estimate import memory_problem
from rally.runs.evaluate import evaluate_inputs
from rally.runs.host_memory import check_disk, checkpoint_bytes, host_memory_problem
from rally.runs.planned_models import ParameterCounts, size_from
from rally.runs.row_checks import warn_of_repeats
from rally.track import RunConsole, RunFolder, sole_writer
from rally.track.run_folder.folder import redacted_yaml
from rally.train.checkpoint.store import CheckpointStore
from rally.train.interrupt_signals import resume_command, stopped
from rally.train.trainer import run

RARE_COLLECTIONS = (50_000, 20, 100)  # thresholds of the garbage collector


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Excludes the objects made so far from garbage collection and collects rarely: full collections over the large
    heap of a run interrupt sampling."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARE_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def train(
    config: Config, console: RunConsole | None = None, ranks: Ranks = ALONE, nodes: RunNodes | None = None
) -> RunOutcome:
    """Train as configured. Resumes if the run folder holds a checkpoint (trainer.resume_mode)."""
    check_ranks(config.trainer, ranks)
    console = console or RunConsole()
    config.require_training()
    inputs = read_inputs(config, console, train=not config.trainer.val_only)
    if config.trainer.val_only:
        return evaluate_inputs(config, inputs, console, ranks, nodes or THIS_MACHINE)
    with sole_writer(config.run_dir):
        return _train(config, inputs, console, ranks, nodes or THIS_MACHINE)


def _check_memory(config: Config) -> None:
    """RunError, before any weight is loaded, if an update cannot fit on this GPU, or what it keeps beside into main
    memory."""
    device = pick_device(config.trainer.device)
    if not on_accelerator(device):
        return
    described, size, width = _described(config)
    on_device = memory_problem(config, described, size, width, memory_info(device)[1])
    if problem := on_device or host_memory_problem(config, described, size, width, free_bytes(torch.device("cpu"))):
        raise RunError(problem)


def _described(config: Config) -> tuple[PreTrainedConfig, ParameterCounts, int]:
    """The configuration of the policy, its counts and the bytes of a parameter."""
    path, device = str(config.model.path), pick_device(config.trainer.device)
    model, trust = config.model, config.model.trust_remote_code
    described = load_model_config(path, trust_remote_code=trust, overrides=dict(model.override_config))
    size = size_from(
        described,
        lora_of(model, 0),
        trust=trust,
        tower_frozen=config.actor.freeze_vision_tower,
        text_only=not sends_images(config),
    )
    return described, size, torch.empty((), dtype=pick_dtype(model.dtype, device)).element_size()


def _name_changed_keys(folder: RunFolder, config: Config, console: RunConsole) -> None:
    """Name the keys in which a resumed run differs from what its folder records: they may be another run's."""
    try:
        recorded = yaml.safe_load(folder.config_path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return  # such as a folder that holds checkpoints alone; the file is written again
    if not isinstance(recorded, dict):
        return
    before, after = dict(leaves(recorded)), dict(leaves(yaml.safe_load(redacted_yaml(config.to_yaml()))))
    changed = [f"{key}: {before[key]} -> {now}" for key, now in after.items() if before.get(key, now) != now]
    if changed:
        console.note(f"resuming with other settings than {folder.config_path} records: {', '.join(changed)}")


def _train(config: Config, inputs: RunInputs, console: RunConsole, ranks: Ranks, nodes: RunNodes) -> RunOutcome:
    assert inputs.train_tasks is not None
    folder = RunFolder(config.run_dir).create()
    store = CheckpointStore(
        config.run_dir / "checkpoints",
        keep=config.trainer.max_actor_ckpt_to_keep,
        background=config.actor.checkpoint.async_save,
        merged="hf_model" in config.actor.checkpoint.save_contents,
        keep_critics=config.trainer.max_critic_ckpt_to_keep,
        warn=lambda text: console.warn_once(text, text),
    )
    checkpoint = resume_point(config.trainer, store)
    steps = total_steps_of(config, len(inputs.train_tasks))
    warn_of_repeats(len(inputs.train_tasks), config.data.train_batch_size, console)
    if checkpoint and checkpoint.step >= steps:
        raise RunError(
            f"{checkpoint.path} is already at step {checkpoint.step} of {steps}, so there is nothing left to train; "
            "raise trainer.total_training_steps or total_epochs, or use another trainer.experiment_name"
        )
    if config.needs_critic and config.trainer.critic_warmup >= steps:
        raise RunError(
            f"trainer.critic_warmup={config.trainer.critic_warmup} leaves none of the {steps} steps to train the "
            "policy; lower it"
        )
    if config.rollout.skip_rollout:
        console.warn_once(
            "skip", f"training on cached episodes of {rollout_cache_dir(config)}, which other weights may have sampled"
        )
    check_objective(config)
    _check_memory(config)
    check_servers_installed(config)
    loops_of(config)
    check_disk(config.run_dir, checkpoint_bytes(config, *_described(config)))
    check_reward_function(config)
    rewind(folder, store, checkpoint, console, tuple(build.extra_folders_of(config.trainer).values()))
    if checkpoint:
        _name_changed_keys(folder, config, console)
    trainer = build.trainer_of(config, inputs, folder, store, checkpoint, steps, console, ranks, nodes)
    folder.save_config(config.to_yaml())  # last, so that a failed start keeps the earlier file
    folder.save_versions()
    with closing(inputs.toolbox), frozen_gc(), trainer.interrupt.listening():
        metrics = run(trainer)
    if trainer.done < steps:
        again = resume_command("train", folder.config_path, config.to_yaml(), config.trainer.resume_mode)
        raise stopped(console, trainer.done, steps, again)
    return RunOutcome(config.run_dir, steps, metrics)
