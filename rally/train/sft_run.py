"""What `rally sft` does: from one SftConfig to a run folder with checkpoints; it resumes like training does."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from rally.chat import ChatCodec
from rally.config import SftConfig
from rally.data import load_conversations, total_steps
from rally.engines.embedded import attention
from rally.track import MetricSink, RunConsole, RunFolder, build_sinks
from rally.track.text import visible
from rally.train.checkpoint import Checkpoint, CheckpointStore
from rally.train.load import load_model, load_tokenizer, pick_device
from rally.train.lora import add_adapters, check_resumable
from rally.train.packing import Row
from rally.train.parts import lora_of
from rally.train.policy import OptimizerSettings, Policy, step_seed
from rally.train.run import Outcome, RunError, resume_point, rewind
from rally.train.sft import SftSettings, conversation_row, sft_batches, sft_loss, sft_step


def sft(config: SftConfig, console: RunConsole | None = None) -> Outcome:
    """Supervised fine-tuning as configured."""
    console = console or RunConsole()
    config.require_training()
    tokenizer = tokenizer_of(config)
    settings = sft_settings_of(config)
    rows = read_rows(config, config.data.train_files, config.data.train_max_samples, tokenizer, console)
    val = read_rows(config, config.data.val_files, config.data.val_max_samples, tokenizer, console)
    by_epochs = total_steps(len(rows), settings.batch_size, config.trainer.total_epochs)
    steps = config.trainer.total_training_steps or by_epochs
    folder = RunFolder(config.run_dir).create()
    folder.save_config(config.to_yaml())
    folder.save_versions()
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
    policy = _policy(config, steps, start)
    rewind(folder, store, start, console)
    sinks = build_sinks(config.trainer.logger, folder, console, steps)
    first = start.step + 1 if start else 1
    metrics = _train(config, settings, policy, tokenizer, store, sinks, rows, val, range(first, steps + 1), console)
    return Outcome(config.run_dir, steps, metrics)


def show(config: SftConfig, console: RunConsole) -> None:
    """The dry run: the resolved configuration, the first conversation with its mask, and the budgets."""
    config.require_training()
    tokenizer = tokenizer_of(config)
    codec = codec_of(config, tokenizer)
    rows = read_rows(config, config.data.train_files, config.data.train_max_samples, tokenizer, console)
    console.note(config.to_yaml().rstrip())
    first, supervised = rows[0], set(rows[0].sampled)
    console.banner("first conversation", {"tokens": str(len(first.ids)), "supervised": str(len(supervised))})
    text = Text()
    for learned, run in itertools.groupby(range(len(first.ids)), key=lambda i: i in supervised):
        text.append(visible(codec.decode([first.ids[i] for i in run])), style="green" if learned else "dim")
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
    console.note("dry run: nothing was trained")


def tokenizer_of(config: SftConfig) -> PreTrainedTokenizerBase:
    model = config.model
    return load_tokenizer(model.tokenizer_path or str(config.model_path), trust_remote_code=model.trust_remote_code)


def codec_of(config: SftConfig, tokenizer: PreTrainedTokenizerBase, thinking: bool | None = None) -> ChatCodec:
    own = {} if thinking is None else {"enable_thinking": thinking}
    return ChatCodec(
        tokenizer,
        config.data.tool_format,
        chat_template=config.model.custom_chat_template,
        template_kwargs={**config.data.apply_chat_template_kwargs, **own},
    )


def sft_settings_of(config: SftConfig) -> SftSettings:
    return SftSettings(
        batch_size=config.data.train_batch_size,
        max_length=config.data.max_length,
        truncation=config.data.truncation,
        max_tokens=config.data.max_token_len_per_gpu,
        max_rows=config.data.micro_batch_size_per_gpu,
    )


def read_rows(
    config: SftConfig, files: Sequence[str], most: int, tokenizer: PreTrainedTokenizerBase, console: RunConsole
) -> list[Row]:
    """The conversations of `files`, checked and encoded, each with its own tools and its own enable_thinking."""
    if not files:
        return []
    conversations = load_conversations(
        list(files),
        messages_key=config.messages_key,
        tools_key=config.tools_key,
        enable_thinking_key=config.enable_thinking_key,
    )
    chosen = conversations if most < 0 else conversations.select(range(min(most, len(conversations))))
    settings, rows = sft_settings_of(config), []
    codecs = functools.cache(functools.partial(codec_of, config, tokenizer))
    with console.phase("encoding", len(chosen)) as phase:
        for i, one in enumerate(chosen):
            codec = codecs(one.enable_thinking)
            own = codec.with_tools(one.tools) if one.tools else codec
            rows.append(conversation_row(own, one.messages, settings, label=str(i)))
            phase.advance()
    return rows


def _policy(config: SftConfig, steps: int, start: Checkpoint | None) -> Policy:
    lora = lora_of(config.model, config.trainer.seed)
    if start:
        check_resumable(start.actor, lora)
    model = load_model(
        str(start.actor if start and not lora else config.model_path),
        device=pick_device(config.trainer.device),
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
        overrides=dict(config.model.override_config),
    )
    if lora:
        add_adapters(model, lora, str(config.model_path), str(start.actor) if start else None)
    attention.install(model)
    optim = config.optim
    policy = Policy(
        model,
        OptimizerSettings(
            lr=optim.lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            grad_clip=optim.clip_grad,
            schedule=optim.lr_scheduler,
            warmup_steps=optim.lr_warmup_steps,
            warmup_ratio=optim.lr_warmup_steps_ratio,
            min_lr_ratio=optim.min_lr_ratio,
        ),
        steps,
        gradient_checkpointing=config.model.enable_gradient_checkpointing,
    )
    if start:
        policy.load_state(start.state())
    return policy


def _train(
    config: SftConfig,
    settings: SftSettings,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    store: CheckpointStore,
    sinks: Sequence[MetricSink],
    rows: Sequence[Row],
    val: Sequence[Row],
    steps: range,
    console: RunConsole,
) -> dict[str, float]:
    trainer = config.trainer
    seed = trainer.seed if config.data.seed is None else config.data.seed
    last: dict[str, float] = {}
    with console.phase("sft", len(steps)) as phase:
        for step, batch in sft_batches(rows, settings, steps=steps, seed=seed, shuffle=config.data.shuffle):
            store.check()
            torch.manual_seed(step_seed(seed, step))
            last = sft_step(policy, batch, settings)
            final = step == steps.stop - 1
            if val and (final or (trainer.test_freq > 0 and step % trainer.test_freq == 0)):
                last["val/loss"] = sft_loss(policy, val, settings)
            for sink in sinks:
                sink.log(step, last)
            if final or (trainer.save_freq > 0 and step % trainer.save_freq == 0):
                store.save(step, policy, tokenizer)
            phase.advance()
    store.wait()
    return last
