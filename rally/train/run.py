"""What `rally train` and `rally eval` do: from one Config to a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rally.chat import ChatCodec
from rally.config import Config
from rally.config.trainer import RunConfig
from rally.data import TaskSet, restore, total_steps
from rally.engines import build_engine
from rally.engines.base import TrainingEngine
from rally.interactions import Interactions
from rally.loops import Runner
from rally.patches import Patches
from rally.rewards import Scorer
from rally.tools import ToolBox
from rally.track import RunConsole, RunFolder, sole_writer
from rally.train import critic_parts, data_parts, model_parts, parts, server_parts, tracking_parts
from rally.train.brought import config_for_loops
from rally.train.checkpoint import Checkpoint, CheckpointStore, open_checkpoint
from rally.train.fit import FitSettings, Trainer, run
from rally.train.heap import settled_heap
from rally.train.interrupt import resume_command, stopped
from rally.train.policy import Policy
from rally.train.prompts import fitting
from rally.train.ranks import ALONE, Plan, Ranks
from rally.train.rollout import Rollout
from rally.train.row_checks import check_rows, warn_of_repeats
from rally.train.skip import dump_of, skipping
from rally.train.unlearned import KEY, chat_ids, warn_of_unlearned
from rally.train.watch import watched
from rally.types import RallyError


class RunError(RallyError):
    """A run that cannot begin or go on as asked."""


@dataclass(frozen=True)
class Outcome:
    """Where a run left its results, and its last validation."""

    folder: Path
    steps: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Inputs:
    """What a run reads before any weight is loaded: tokenizer, tools, users, rows; all mistakes in them show here."""

    tokenizer: PreTrainedTokenizerBase
    toolbox: ToolBox
    interactions: Interactions
    codec: ChatCodec
    train_tasks: TaskSet | None
    val_tasks: TaskSet | None


def read_inputs(config: Config, console: RunConsole, *, train: bool = True) -> Inputs:
    tokenizer = model_parts.tokenizer_of(config)
    toolbox = parts.toolbox_of(config)
    interactions = parts.interactions_of(config)
    codec = parts.codec_of(config, tokenizer, toolbox)
    report = codec.probe()
    if not report.append_only and config.rollout.multi_turn.tokenization_sanity_check_mode != "disable":
        console.warn_once("template", f"{report.words}\nmulti_turn.history is '{config.history}'.")
    elif toolbox.schemas() and report.troubles:
        console.warn_once("template", report.troubles)

    def tasks(files: Sequence[str], validate: bool) -> TaskSet | None:
        if not files:
            return None
        found = fitting(data_parts.tasks_of(config, files, validate=validate), codec, config, console)
        check_rows(config, found, interactions, toolbox)
        return found

    return Inputs(
        tokenizer,
        toolbox,
        interactions,
        codec,
        tasks(config.data.train_files, False) if train else None,
        tasks(config.data.val_files, True),
    )


def train(config: Config, console: RunConsole | None = None, ranks: Ranks = ALONE) -> Outcome:
    """Train as configured; resumes by itself where the run folder holds a checkpoint."""
    check_ranks(config.trainer, ranks)
    console = console or RunConsole()
    config.require_training()
    inputs = read_inputs(config, console, train=not config.trainer.val_only)
    if config.trainer.val_only:
        return _evaluate(config, inputs, console)
    check_sight(str(config.model.path), inputs.codec.patches, ranks)
    with sole_writer(config.run_dir):
        return _train(config, inputs, console, ranks)


def _train(config: Config, inputs: Inputs, console: RunConsole, ranks: Ranks) -> Outcome:
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
            f"trainer.critic_warmup={config.trainer.critic_warmup} leaves no step of {steps} to train the policy in; "
            "make it smaller"
        )
    if config.rollout.skip_rollout:
        console.warn_once("skip", f"episodes of {dump_of(config)} are trained on, whatever weights sampled them")
    rewind(folder, store, checkpoint, console, tuple(tracking_parts.extra_folders_of(config.trainer).values()))
    trainer = _trainer(config, inputs, folder, store, checkpoint, steps, console, ranks)
    folder.save_config(config.to_yaml())  # a command that cannot go on leaves the file of the one that could
    folder.save_versions()
    with closing(inputs.toolbox), settled_heap(), trainer.interrupt.listening():
        metrics = run(trainer)
    if trainer.done < steps:
        again = resume_command("train", folder.config_path, config.to_yaml(), config.trainer.resume_mode)
        raise stopped(console, trainer.done, steps, again)
    return Outcome(config.run_dir, steps, metrics)


def _trainer(
    config: Config,
    inputs: Inputs,
    folder: RunFolder,
    store: CheckpointStore,
    checkpoint: Checkpoint | None,
    steps: int,
    console: RunConsole,
    ranks: Ranks = ALONE,
) -> Trainer:
    """All the parts of a run; with 0 steps it only validates."""
    train_tasks = inputs.train_tasks if steps else inputs.val_tasks
    assert train_tasks is not None
    sampler = data_parts.sampler_of(config, train_tasks, steps)
    if checkpoint and (change := restore(sampler, checkpoint.sampler_state())):
        console.note(change)
    ranks.begin(Plan(config, checkpoint.path if checkpoint else None, steps))
    policy = policy_of(config, checkpoint, steps, ranks)
    warn_of_unlearned(str(config.model.path), inputs.tokenizer, chat_ids(inputs.codec), KEY, console)
    engine = _engine(config, inputs, policy)
    if checkpoint:
        engine.begin_at(checkpoint.counters().get("weight_version", 0))
    sampling = parts.sampling_of(config, inputs.codec)
    return Trainer(
        settings=fit_settings(config, steps),
        update=parts.update_settings_of(config),
        policy=policy,
        tokenizer=inputs.tokenizer,
        codec=inputs.codec,
        engine=engine,
        rollout=rollout_of(config, inputs, engine),
        sampling=sampling,
        validation=parts.validation_passes(config, sampling),
        train_tasks=train_tasks,
        sampler=sampler,
        val_tasks=inputs.val_tasks,
        folder=folder,
        checkpoints=store,
        console=console,
        sinks=tracking_parts.sinks_of(
            config.trainer,
            folder,
            console,
            steps,
            checkpoint.step if checkpoint else -1,
            tracking_parts.trace_of(config, folder, inputs.tokenizer),
        ),
        reference=parts.reference_of(config, policy.model) if steps else None,
        reward_kl=critic_parts.kl_control_of(config, checkpoint) if steps else None,
        critic=critic_parts.critic_of(config, checkpoint, steps, ranks) if steps else None,
        extra_episode_folders=tracking_parts.extra_folders_of(config.trainer),
        start_step=checkpoint.step if checkpoint else 0,
        history=[watched(row.metrics) for row in folder.read_metrics() if row.step] if checkpoint else [],
    )


def check_ranks(trainer: RunConfig, ranks: Ranks) -> None:
    asked = trainer.n_gpus_per_node
    if asked != ranks.count:
        raise RunError(
            f"trainer.n_gpus_per_node={asked} is for `rally train`, `rally sft` and rally.cluster, which start the "
            "other processes; leave it out here"
        )


def check_sight(model: str, patches: Patches | None, ranks: Ranks) -> None:
    if ranks.count > 1 and patches is not None:
        raise RunError(f"{model} sees images, which is for one GPU; set trainer.n_gpus_per_node=1")


def policy_of(config: Config, checkpoint: Checkpoint | None, steps: int, ranks: Ranks = ALONE) -> Policy:
    """As configured, or as the checkpoint left it."""
    policy = Policy(
        model_parts.model_of(config, str(checkpoint.actor) if checkpoint else None, ranks),
        parts.optimizer_settings_of(config),
        max(0, steps - config.trainer.critic_warmup),
        gradient_checkpointing=config.model.enable_gradient_checkpointing,
        offload=config.actor.fsdp_config.optimizer_offload,
    )
    if checkpoint:
        policy.load_state(checkpoint.state())
    return policy


def _engine(config: Config, inputs: Inputs, policy: Policy) -> TrainingEngine:
    if config.rollout.name != "embedded":
        if inputs.codec.patches is not None:
            raise RunError(
                f"{config.model.path} sees images, and servers are given tokens alone; set "
                "actor_rollout_ref.rollout.name=embedded"
            )
        return server_parts.remote_engine_of(config, policy.model, parts.sampling_of(config, inputs.codec))
    settings = parts.engine_settings_of(config)
    return build_engine(config.rollout.name, policy.model, settings, decode=inputs.codec.decode)


def runner_of(config: Config, inputs: Inputs, engine: TrainingEngine) -> Runner:
    return Runner(
        engine=engine,
        codec=inputs.codec,
        toolbox=inputs.toolbox,
        interactions=inputs.interactions,
        settings=parts.loop_settings_of(config),
        default_loop=config.agent_loop_name,
        override_rows=config.rollout.agent_loop_class is not None,
        loops=parts.loops_of(config),
        max_retries=config.rollout.max_retries if config.rollout.on_error == "retry" else 0,
        run_config=config_for_loops(config),
    )


def scorer_of(config: Config) -> Scorer:
    spec, reward, limited = parts.reward_spec_of(config), config.reward, config.reward_model
    if config.reward_manager_name == "rate_limited":
        return Scorer(spec, limited.max_concurrent, limited.timeout, limited.calls_per_minute)
    return Scorer(spec, reward.num_workers, reward.timeout)


def rollout_of(config: Config, inputs: Inputs, engine: TrainingEngine) -> Rollout:
    return Rollout(
        runner=skipping(runner_of(config, inputs, engine), config),
        scorer=scorer_of(config),
        policy=parts.failure_policy_of(config),
        seed=parts.engine_settings_of(config).seed,
        shaping=parts.shaping_of(config),
        step_timeout=config.rollout.step_timeout,
        in_batch=parts.reward_spec_of(config).batch,
    )


def fit_settings(config: Config, steps: int) -> FitSettings:
    trainer, data = config.trainer, config.data
    return FitSettings(
        total_steps=steps,
        batch_size=data.train_batch_size,
        n=config.rollout.n,
        seed=trainer.seed if data.seed is None else data.seed,
        credit=parts.credit_settings_of(config),
        filter=parts.filter_settings_of(config),
        reward_kl_kind=config.algorithm.kl_penalty,
        save_freq=trainer.save_freq,
        test_freq=trainer.test_freq,
        val_before_train=trainer.val_before_train or steps == 0,
        val_batch_size=data.val_batch_size,
        max_prompt_length=data.max_prompt_length,
        mismatch_alarm=config.rollout.mismatch_alarm,
        watch=parts.watch_settings_of(config),
        show_validation=trainer.log_val_generations,
    )


def resume_point(trainer: RunConfig, store: CheckpointStore) -> Checkpoint | None:
    """The checkpoint a run goes on from, as trainer.resume_mode says."""
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
    """Set aside what an earlier attempt wrote after the point this one begins at, so that no step is there twice."""
    step = checkpoint.step if checkpoint else -1
    with tracking_parts.unread(folder):
        aside = folder.rewind(step)
    if checkpoint or aside:  # else what is in the other folders is not this run's
        for other in extra:
            other.rewind(step)
    for place in store.supersede_after(step):
        console.note(f"a checkpoint of a later step is now {place}")
    if checkpoint:
        console.note(f"resuming from {checkpoint.path}, step {checkpoint.step}")
    if aside:
        console.note(f"what an earlier attempt wrote after that point is now in {aside}")


def total_steps_of(config: Config, rows: int) -> int:
    by_epochs = total_steps(rows, config.data.train_batch_size, config.trainer.total_epochs)
    return config.trainer.total_training_steps or by_epochs


def evaluate(config: Config, console: RunConsole | None = None) -> Outcome:
    """Validate `model.path` on `data.val_files` and write metrics and episodes to the run folder."""
    console = console or RunConsole()
    check_ranks(config.trainer, ALONE)
    if not config.model.path:
        raise RunError("there is nothing to evaluate: actor_rollout_ref.model.path is not set; name a model folder")
    return _evaluate(config, read_inputs(config, console, train=False), console)


def _evaluate(config: Config, inputs: Inputs, console: RunConsole) -> Outcome:
    if inputs.val_tasks is None:
        raise RunError("there is nothing to evaluate: data.val_files is not set; name a .parquet or .jsonl file")
    with sole_writer(config.run_dir / "eval"):  # beside what training wrote, never over it
        return _validated(config, inputs, console)


def _validated(config: Config, inputs: Inputs, console: RunConsole) -> Outcome:
    folder = RunFolder(config.run_dir / "eval").create()
    tracking_parts.set_evaluation_aside(folder)
    folder.save_config(config.to_yaml())
    folder.save_versions()
    store = CheckpointStore(config.run_dir / "checkpoints", warn=console.note)
    trainer = _trainer(config, inputs, folder, store, None, 0, console)
    with closing(inputs.toolbox):
        return Outcome(folder.path, 0, run(trainer))
