"""The runs behind `rally sft`: supervised fine-tuning with checkpoints, `--check` and `--dry-run`."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from rally.chat import ChatCodec
from rally.chat.formats import load_formats
from rally.config import SftConfig
from rally.data import Conversation, QuestionAnswer, RowSet, load_conversations, steps_per_epoch, total_steps
from rally.images.patches import Patches
from rally.models import attention
from rally.models.load import check_vocabulary, pick_device, reloading_problem
from rally.models.lora import unadapted_experts
from rally.models.rope import decide_rope
from rally.models.sharding import ALONE, Ranks
from rally.models.untrained_tokens import warn_of_untrained_tokens
from rally.platforms import use_expandable_segments
from rally.runs.build.models import RunPlan, import_external_libs, patches_at, stop_ids_at, tokenizer_at, trained_model
from rally.runs.build.run_inputs import RunError, RunOutcome, check_ranks
from rally.runs.build.tracking import sinks_of
from rally.runs.build.trainer import resume_point, rewind
from rally.runs.build.update_settings import gradient_limits_of, offload_settings, optimizer_settings
from rally.runs.cost_estimate import shown_bytes
from rally.runs.host_memory import check_disk, checkpoint_bytes
from rally.runs.row_checks import warn_of_repeats
from rally.runs.sft_memory import sft_memory, sft_memory_problem
from rally.sft.template_check import check_conversations, print_report
from rally.sft.training import SftError, SftSettings, encode_row, sft_batches, sft_loss, sft_step
from rally.track import RunConsole, RunFolder, Sinks, sole_writer
from rally.track.display_text import visible
from rally.train.checkpoint.store import STATE, Checkpoint, CheckpointStore
from rally.train.divergence import keeping_diverged
from rally.train.interrupt_signals import Interrupt, resume_command, stopped
from rally.train.micro_batches import UNBOUND
from rally.train.packing import Row
from rally.train.policy import Policy, due, step_seed
from rally.train.startup_check import NO_TEXT, check_training, compared_rows
from rally.types import RallyError


class EncodedRows(NamedTuple):
    """Encoded conversations, numbered. `sources` describe them; `truncated` counts those that data.truncation cut."""

    rows: list[Row]
    sources: list[dict[str, str]]
    truncated: int = 0


@dataclass(frozen=True, kw_only=True)
class SftRun:
    """The components of a run."""

    config: SftConfig
    settings: SftSettings
    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    store: CheckpointStore
    sinks: Sinks
    train: EncodedRows
    val: EncodedRows
    console: RunConsole
    interrupt: Interrupt = field(default_factory=Interrupt)


def sft(config: SftConfig, console: RunConsole | None = None, ranks: Ranks = ALONE) -> RunOutcome:
    """Supervised fine-tuning as configured."""
    check_ranks(config.trainer, ranks)
    console = console or RunConsole()
    config.require_training()
    tokenizer = tokenizer_of(config)
    train = read_rows(config, config.data.train_files, config.data.train_max_samples, tokenizer, console)
    val = read_rows(config, config.data.val_files, config.data.val_max_samples, tokenizer, console)
    with sole_writer(config.run_dir):
        return _sft(config, tokenizer, train, val, console, ranks)


def _sft(
    config: SftConfig,
    tokenizer: PreTrainedTokenizerBase,
    train: EncodedRows,
    val: EncodedRows,
    console: RunConsole,
    ranks: Ranks,
) -> RunOutcome:
    settings = sft_settings_of(config)
    by_epochs = total_steps(len(train.rows), settings.batch_size, config.trainer.total_epochs)
    steps = config.trainer.total_training_steps or by_epochs
    warn_of_repeats(len(train.rows), settings.batch_size, console)
    folder = RunFolder(config.run_dir).create()
    store = CheckpointStore(
        config.run_dir / "checkpoints",
        keep=config.trainer.max_ckpt_to_keep,
        background=config.trainer.checkpoint.async_save,
        merged="hf_model" in config.trainer.checkpoint.save_contents,
        warn=lambda t: console.warn_once(t, t),
    )
    start = resume_point(config.trainer, store)
    if start and start.step >= steps:
        raise RunError(f"{start.path} is already at step {start.step} of {steps}; raise trainer.total_training_steps")
    if problem := sft_memory_problem(config, train.rows):
        raise RunError(problem)
    check_disk(config.run_dir, checkpoint_bytes(*sft_memory(config, train.rows)))
    ranks.start(RunPlan(config, start.path if start else None, steps))
    policy = sft_policy_of(config, start, steps, ranks)
    if unadapted := unadapted_experts(policy.model):
        console.note(unadapted)
    written = set(itertools.chain.from_iterable(np.unique(row.ids).tolist() for row in train.rows))
    check_vocabulary(policy.model, tokenizer, written)
    if problem := reloading_problem(tokenizer, policy.model.config):
        console.warn_once("tokenizer", problem)
    texts = [row.ids.tolist() for row in itertools.islice((row for row in train.rows if not row.images), 2)]
    if config.trainer.startup_check:
        warn = functools.partial(console.warn_once, "startup")
        if compared := compared_rows(texts, config.data.max_length):
            console.note(f"start-up check: {check_training(policy, compared, config.data.max_length, warn)}")
        else:
            warn(NO_TEXT)
    warn_of_untrained_tokens(str(config.model_path), tokenizer, written, "model.spelled_tokens", console.warn_once)
    folder.save_config(config.to_yaml())
    folder.save_versions()
    rewind(folder, store, start, console)
    run = SftRun(
        config=config,
        settings=settings,
        policy=policy,
        tokenizer=tokenizer,
        store=store,
        sinks=sinks_of(config.trainer, folder, console, steps, start.step if start else -1),
        train=train,
        val=val,
        console=console,
    )
    with run.sinks, run.interrupt.listening():
        trained = _train(run, range(start.step + 1 if start else 1, steps + 1))
    if trained.done < steps:
        again = resume_command("sft", folder.config_path, config.to_yaml(), config.trainer.resume_mode)
        raise stopped(console, trained.done, steps, again)
    return RunOutcome(config.run_dir, steps, trained.metrics)


def check(config: SftConfig, console: RunConsole) -> bool:
    """Whether every conversation equals what an episode would sample. Prints the counts and the first difference."""
    config.require_training()
    data, codec_for = config.data, codecs_of(config, tokenizer_of(config))
    fine = True
    for name, files, most in (
        ("data.train_files", data.train_files, data.train_max_samples),
        ("data.val_files", data.val_files, data.val_max_samples),
    ):
        if files:
            chosen = conversations_of(config, files, most)
            with console.phase("checking", len(chosen)) as phase:
                report = check_conversations(chosen, codec_for, data.max_length, phase.advance)
            print_report(report, name, sft_settings_of(config), console)
            fine = fine and not report.different and not (report.over_long and data.truncation == "error")
    return fine


def show(config: SftConfig, console: RunConsole) -> None:
    """The dry run: prints the resolved configuration, the first conversation with its mask, and the budgets."""
    config.require_training()
    tokenizer = tokenizer_of(config)
    codec = codec_of(config, tokenizer)
    rows = read_rows(config, config.data.train_files, config.data.train_max_samples, tokenizer, console).rows
    console.note(config.to_yaml().rstrip())
    first, supervised = rows[0], set(rows[0].sampled.tolist())
    console.banner("first conversation", {"tokens": str(len(first.ids)), "supervised": str(len(supervised))})
    text = Text()
    for learned, run in itertools.groupby(range(len(first.ids)), key=lambda i: i in supervised):
        text.append(visible(codec.decode(first.ids[list(run)].tolist())), style="green" if learned else "dim")
    console.show(text)
    steps = total_steps(len(rows), config.data.train_batch_size, config.trainer.total_epochs)
    console.table(
        "budgets",
        [
            ["conversations", str(len(rows))],
            ["steps", str(config.trainer.total_training_steps or steps)],
            ["longest", f"{max(len(r.ids) for r in rows)} tokens of data.max_length={config.data.max_length}"],
        ],
    )
    plan = sft_memory(config, rows)
    costs = [[cost.what, shown_bytes(cost.bytes)] for cost in plan.on_device()]
    beside = [[f"main memory: {cost.what}", shown_bytes(cost.bytes)] for cost in plan.in_main_memory()]
    console.table("memory plan", [*costs, *beside, ["device", str(pick_device(config.trainer.device))]])
    console.note("dry run: nothing was trained")


def tokenizer_of(config: SftConfig) -> PreTrainedTokenizerBase:
    import_external_libs(config)
    return tokenizer_at(config.model, str(config.model_path))


def _patches_of(config: SftConfig) -> Patches | None:
    return patches_at(config.model, str(config.model_path))


def codec_of(config: SftConfig, tokenizer: PreTrainedTokenizerBase, thinking: bool | None = None) -> ChatCodec:
    own = {} if thinking is None else {"enable_thinking": thinking}
    if config.data.tool_format_path:
        load_formats(config.data.tool_format_path)
    return ChatCodec(
        tokenizer,
        config.data.tool_format,
        stop_ids=stop_ids_at(str(config.model_path)),
        template_kwargs={**config.data.apply_chat_template_kwargs, **own},
        patches=_patches_of(config),
    )


def sft_settings_of(config: SftConfig) -> SftSettings:
    return SftSettings(
        batch_size=config.data.train_batch_size,
        max_length=config.data.max_length,
        truncation=config.data.truncation,
        max_tokens=config.data.max_token_len_per_gpu if config.data.use_dynamic_bsz else UNBOUND,
        max_rows=config.data.micro_batch_size_per_gpu,
    )


def conversations_of(config: SftConfig, files: Sequence[str], most: int) -> RowSet[Conversation]:
    """The first `most` conversations of `files`, checked; -1 for all."""
    conversations = load_conversations(
        list(files),
        messages_key=config.messages_key,
        tools_key=config.tools_key,
        enable_thinking_key=config.enable_thinking_key,
        image_key=config.data.image_key,
        pair=QuestionAnswer(config.question_path, config.answer_path) if config.question_path else None,
    )
    return conversations if most < 0 else conversations.select(range(min(most, len(conversations))))


def codecs_of(config: SftConfig, tokenizer: PreTrainedTokenizerBase) -> Callable[[Conversation], ChatCodec]:
    """A function that returns the codec of a conversation, with its own tools and enable_thinking."""
    codecs = functools.cache(functools.partial(codec_of, config, tokenizer))

    def codec_for(one: Conversation) -> ChatCodec:
        codec = codecs(one.enable_thinking)
        calls = any(message.get("tool_calls") for message in one.messages)
        if calls and (problem := codec.format_problem("data.tool_format")):
            raise SftError(problem)
        return codec.with_tools(one.tools) if one.tools else codec

    return codec_for


def read_rows(
    config: SftConfig, files: Sequence[str], most: int, tokenizer: PreTrainedTokenizerBase, console: RunConsole
) -> EncodedRows:
    """The conversations of `files`, checked and encoded."""
    if not files:
        return EncodedRows([], [])
    chosen, codec_for = conversations_of(config, files, most), codecs_of(config, tokenizer)
    settings, encoded = sft_settings_of(config), []
    with console.phase("encoding", len(chosen)) as phase:
        for number, one in enumerate(chosen):
            try:
                encoded.append(encode_row(codec_for(one), one.messages, settings, str(number), number))
            except RallyError as error:
                raise SftError(f"{one.where}: {error}; run rally sft --check to check all rows") from error
            phase.advance()
    rows, truncated = [one.row for one in encoded], sum(one.truncated for one in encoded)
    if truncated:
        empty = sum(not len(row.sampled) for row in rows)
        console.warn_once(
            f"truncated {files}",
            f"{truncated} of {len(rows)} conversations were truncated to data.max_length={settings.max_length} tokens, "
            f"and {empty} have no supervised token left; raise data.max_length",
        )
    return EncodedRows(rows, [{"conversation": one.where} for one in chosen], truncated)


def sft_policy_of(config: SftConfig, start: Checkpoint | None, steps: int, ranks: Ranks = ALONE) -> Policy:
    """The policy as configured, or restored from a checkpoint."""
    if ranks.world_size == 1:
        use_expandable_segments(pick_device(config.trainer.device))
    path = str(start.actor) if start else None
    model = trained_model(config.model, str(config.model_path), config.trainer, path, _patches_of(config), ranks)
    attention.install(model)
    decide_rope(model, config.data.max_length)
    keys = config.model.fsdp_config
    ranks.shard(model, offload=keys.uses_offload_policy)
    limits = gradient_limits_of(config.trainer.guards)
    policy = Policy(
        model,
        optimizer_settings(config.optim, config.optim.clip_grad, limits),
        steps,
        gradient_checkpointing=config.model.enable_gradient_checkpointing,
        recompute=config.model.recompute_num_layers,
        offload=offload_settings(
            keys.model_copy(update={"offload_policy": keys.uses_offload_policy}),
            config.model.enable_activation_offload,
            config.trainer.world_size,
        ),
    )
    if start:
        with start.restoring(STATE):
            policy.load_state(start.state())
    return policy


class _Trained(NamedTuple):
    done: int  # the last completed step
    metrics: dict[str, float]


def _train(run: SftRun, steps: range) -> _Trained:
    config, trainer = run.config, run.config.trainer
    seed = trainer.seed if config.data.seed is None else config.data.seed
    rows, last = run.train.rows, {}
    test_freq, save_freq = (_in_steps(run, freq) for freq in (trainer.test_freq, trainer.save_freq))
    with run.console.phase("sft", len(steps)) as phase:
        for step, batch in sft_batches(rows, run.settings, steps=steps, seed=seed, shuffle=config.data.shuffle):
            run.store.check()
            torch.manual_seed(step_seed(seed, step))
            with keeping_diverged(config.run_dir, step, run.train.sources):
                last = _timed_step(run, step, batch)
            final = step == steps.stop - 1
            if run.val.rows and (final or due(step, test_freq)):
                last["val/loss"] = sft_loss(run.policy, run.val.rows, run.settings)
            run.sinks.log(step, last)
            saved = final or run.interrupt.requested or due(step, save_freq)
            if saved:
                run.store.save(step, run.policy, run.tokenizer)
            phase.advance()
            if saved and run.interrupt.requested:
                break
    run.store.wait()
    return _Trained(step, last)


def _in_steps(run: SftRun, freq: int | str) -> int:
    """A frequency in steps."""
    if isinstance(freq, int):
        return freq
    return steps_per_epoch(len(run.train.rows), run.settings.batch_size)


def _timed_step(run: SftRun, step: int, batch: Sequence[Row]) -> dict[str, float]:
    began = time.perf_counter()
    metrics = sft_step(run.policy, batch, run.settings)
    seconds = time.perf_counter() - began
    return metrics | {
        "train/tokens_per_s": sum(len(row.ids) for row in batch) / seconds,
        "train/truncated_share": run.train.truncated / len(run.train.rows),
        "training/epoch": float((step - 1) // steps_per_epoch(len(run.train.rows), run.settings.batch_size)),
        "timing_s/step": seconds,
    }
