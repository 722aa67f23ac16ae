"""Builds the Trainer of a run from a Config, and finds and rewinds to the checkpoint it resumes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from rally.chat import ChatCodec
from rally.config import Config
from rally.config.trainer import RunConfig
from rally.data import TaskSet, restore
from rally.engines import EmbeddedEngine
from rally.engines.base import TrainingEngine
from rally.envs import Environments
from rally.models.load import check_vocabulary, reloading_problem
from rally.models.lora import unadapted_experts
from rally.models.sharding import ALONE, Ranks
from rally.models.untrained_tokens import KEY, chat_ids, warn_of_untrained_tokens
from rally.nodes import THIS_MACHINE, RunNodes
from rally.platforms import on_accelerator, platform_of
from rally.runs.build.data import sampler_of
from rally.runs.build.engines import engine_of, samples_during_update
from rally.runs.build.models import RunPlan
from rally.runs.build.policy_and_critic import critic_of, kl_control_of, policy_of, reference_of, teachers_of
from rally.runs.build.rank_engines import rank_engines_of
from rally.runs.build.rollout import rollout_of, sampling_of, validation_passes
from rally.runs.build.run_inputs import RunError, RunInputs
from rally.runs.build.tracking import exporter_paused, extra_folders_of, sinks_of, trace_of
from rally.runs.build.update_settings import trainer_settings_of, update_settings_of
from rally.runs.env_checks import opening_of
from rally.track import RunConsole, RunFolder
from rally.train.async_trainer import AHEAD, AsyncSettings, AsyncTrainer, read_sampled_ahead
from rally.train.checkpoint.store import COUNTERS, Checkpoint, CheckpointStore, open_checkpoint
from rally.train.health_checks import watched
from rally.train.reference import FrozenModel
from rally.train.startup_check import NO_TEXT, check_critic, check_frozen, check_training, compared_rows
from rally.train.trainer import Trainer
from rally.util.background_threads import BackgroundWriter

UNCORRECTED = (
    "rollout.quantization=fp8 without algorithm.rollout_correction: the policy that is trained is not the one that "
    "sampled, and the ratios of the update begin at policy / FP8 sampler instead of 1, so that the clip cuts off some "
    "tokens for the difference alone; algorithm.rollout_correction.rollout_is=token corrects it, for one more forward"
)
PLAIN_TORCH = (
    "attention and layers are plain torch; there are no fused layers, no graphs and no lending of memory, and no such "
    "device has run this version of Rally"
)


def trainer_of(
    config: Config,
    inputs: RunInputs,
    folder: RunFolder,
    store: CheckpointStore,
    checkpoint: Checkpoint | None,
    steps: int,
    console: RunConsole,
    ranks: Ranks = ALONE,
    nodes: RunNodes = THIS_MACHINE,
) -> Trainer:
    """The trainer with all its components. With 0 steps it only validates."""
    train_tasks = inputs.train_tasks if steps else inputs.val_tasks
    assert train_tasks is not None
    sampler = sampler_of(config, train_tasks, steps)
    if checkpoint and (change := restore(sampler, checkpoint.sampler_state())):
        console.note(change)
    ranks.start(RunPlan(config, checkpoint.path if checkpoint else None, steps))
    policy = policy_of(config, checkpoint, steps, ranks)
    if steps and (unadapted := unadapted_experts(policy.model)):
        console.note(unadapted)
    if (platform := platform_of(policy.device)) and not platform.kernels:
        console.note(f"{platform.device_type}: {PLAIN_TORCH}")
    used = chat_ids(inputs.codec)
    check_vocabulary(policy.model, inputs.tokenizer, used)
    if steps and (problem := reloading_problem(inputs.tokenizer, policy.model.config)):
        console.warn_once("tokenizer", problem)
    warn_of_untrained_tokens(str(config.model.path), inputs.tokenizer, used, KEY, console.warn_once)
    engine: TrainingEngine
    if config.samples_in_ranks:
        engine = rank_engines_of(config, inputs, policy, nodes, checkpoint.actor if checkpoint else None)
    else:
        engine = engine_of(config, inputs, policy, nodes)
    if isinstance(engine, EmbeddedEngine) and engine.core.fp8 is not None:
        console.note(engine.core.fp8.words())
        correction = config.algorithm.rollout_correction
        if steps and not (correction.rollout_is or correction.tests or correction.bypass_mode):
            console.warn_once("fp8", UNCORRECTED)
    if config.uses_loop_workers:
        count = config.rollout.agent.num_workers
        console.note(f"{count} loop workers play episodes; limits of tools hold for each of them")
    texts = startup_texts(inputs.codec, train_tasks, inputs.environments) if config.trainer.startup_check else ()
    compared = compared_rows(texts, config.max_model_len) if steps else []
    if texts and steps and not compared:
        console.warn_once("startup", NO_TEXT)
    if compared:
        found = check_training(policy, compared, config.max_model_len, partial(console.warn_once, "startup"))
        console.note(f"start-up check: {found}")
    if checkpoint:
        with checkpoint.restoring(COUNTERS):
            version = int(checkpoint.counters().get("weight_version", 0))
        engine.begin_at(version)
    critic = critic_of(config, checkpoint, steps, ranks) if steps else None
    if critic is not None and compared and ranks.world_size == 1:
        check_critic(critic.learner, compared, config.max_model_len, partial(console.warn_once, "critic"))
    teachers = teachers_of(config, policy.model) if steps else None
    if teachers is not None and compared and ranks.world_size == 1:
        for key, teacher in teachers.models.items():
            if isinstance(teacher, FrozenModel):
                name, exact = f"the teacher {key}", config.rollout.deterministic
                check_frozen(teacher, compared, config.max_model_len, name, deterministic=exact)
    for learner in [policy, *([] if critic is None else [critic.learner])]:
        learner.rest()
        if isinstance(engine, EmbeddedEngine):
            learner.leave_free(engine.core.lent_bytes)
    sampling = sampling_of(config, inputs.codec)
    make: Callable[..., Trainer] = Trainer
    fixed_lag = config.fixed_lag
    if checkpoint and not fixed_lag and checkpoint.holds(AHEAD):
        console.note(f"the batch that {checkpoint.path.name} holds was sampled with a fixed lag; it is sampled again")
    if config.asynchronous and steps:
        schedule = AsyncSettings(
            ahead=config.batches_ahead,
            partial_rollout=config.async_training.partial_rollout,
            fixed_lag=fixed_lag,
        )
        console.note(_announced(config, schedule))
        make = partial(
            AsyncTrainer,
            schedule=schedule,
            sampled_ahead=read_sampled_ahead(checkpoint) if checkpoint and fixed_lag else None,
            overlap=samples_during_update(config, policy.model),
        )
    return make(
        settings=trainer_settings_of(config, steps),
        update=update_settings_of(config),
        policy=policy,
        tokenizer=inputs.tokenizer,
        codec=inputs.codec,
        engine=engine,
        rollout=rollout_of(config, inputs, engine, nodes),
        sampling=sampling,
        validation=validation_passes(config, sampling),
        train_tasks=train_tasks,
        sampler=sampler,
        val_tasks=inputs.val_tasks,
        folder=folder,
        checkpoints=store,
        console=console,
        sinks=sinks_of(
            config.trainer,
            folder,
            console,
            steps,
            checkpoint.step if checkpoint else -1,
            trace_of(config, folder, inputs.tokenizer),
        ),
        reference=reference_of(config, policy.model) if steps else None,
        teachers=teachers,
        reward_kl=kl_control_of(config, checkpoint) if steps else None,
        critic=critic,
        extra_episode_folders=extra_folders_of(config.trainer),
        start_step=checkpoint.step if checkpoint else 0,
        startup_texts=texts,
        history=[watched(row.metrics) for row in folder.read_metrics() if row.step] if checkpoint else [],
        recorder=BackgroundWriter(record_delay(policy.device)),
    )


def record_delay(device: torch.device) -> float:
    """Seconds until episodes are written. The main thread first gives a GPU the work of an update, and waits for it
    afterwards; a thread that encodes JSON would halve its speed at that time."""
    return 0.7 if on_accelerator(device) else 0.0


def _announced(config: Config, schedule: AsyncSettings) -> str:
    """How far ahead an asynchronous run samples, and what limits it."""
    mode, ahead, versions = config.trainer.v1.trainer_mode, schedule.ahead, schedule.max_staleness
    told = f"{mode}: {ahead:g} batches are sampled ahead, and no trained token is older than {versions} weight versions"
    if config.batches_asked == ahead:
        return told
    most = config.trainer.v1.sampler.max_off_policy_threshold
    return f"{told}; {config.batches_asked:g} were asked for, and trainer.v1.sampler.max_off_policy_threshold={most}"


def startup_texts(codec: ChatCodec, tasks: TaskSet, environments: Environments) -> list[tuple[int, ...]]:
    """The first two prompts, as real text for the comparison at the start. Prompts of a vision model are replaced by
    their text."""
    texts = []
    for task in tasks.select(range(min(2, len(tasks)))):
        prompt = list(task.prompt) or opening_of(environments, task).messages
        if codec.patches is not None:
            contents = [message["content"] for message in prompt]
            parts = [part for content in contents if not isinstance(content, str) for part in content]
            words = [content for content in contents if isinstance(content, str)]
            words += [part["text"] for part in parts if isinstance(part, dict) and part.get("type") == "text"]
            prompt = [{"role": "user", "content": " ".join(words).replace("<image>", "")}]
        texts.append(codec.encode_prompt(prompt))
    return texts


def resume_point(trainer: RunConfig, store: CheckpointStore) -> Checkpoint | None:
    """The checkpoint that a run resumes from (trainer.resume_mode)."""
    mode = trainer.resume_mode
    if mode == "auto":
        return store.latest()
    if mode == "resume_path":
        return open_checkpoint(Path(str(trainer.resume_from_path)))
    if store.latest() is not None:
        raise RunError(
            f"{trainer.run_dir} holds checkpoints and trainer.resume_mode=disable would overwrite them; choose another "
            "trainer.experiment_name, or remove the folder"
        )
    return None


def rewind(
    folder: RunFolder,
    store: CheckpointStore,
    checkpoint: Checkpoint | None,
    console: RunConsole,
    extra: Sequence[RunFolder] = (),
) -> None:
    """Move records and checkpoints of later steps aside, so that no step is recorded twice."""
    step = checkpoint.step if checkpoint else -1
    with exporter_paused(folder):
        aside = folder.rewind(step)
    if checkpoint or aside:  # otherwise the contents of the other folders belong to other runs
        for other in extra:
            other.rewind(step)
    for place in store.supersede_after(step):
        console.note(f"moved the checkpoint of a later step to {place}")
    if checkpoint:
        console.note(f"resuming from {checkpoint.path}, step {checkpoint.step}")
    if aside:
        console.note(f"moved the records of later steps to {aside}")
