"""`rally demo`: a small transformer made on the spot learns to use a calculator, on a CPU, in a few minutes.

First it is taught the tool format by supervised fine-tuning, then spoiled with bad habits (most of all guessing), and
then GRPO, an ordinary `rally train` run over rows on disk, teaches it by reward alone to call the tool. The gain is a
change of habit; the arithmetic is the calculator's.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from rally.chat import ChatCodec, tiny_tokenizer
from rally.config import load_config
from rally.data import TaskSet, arithmetic, load_tasks, write_rows
from rally.data.conversations import Habit, conversation
from rally.engines.embedded import EmbeddedEngine, EngineSettings
from rally.loops import LoopSettings, Runner
from rally.rewards import RewardSpec, Scorer
from rally.tools import ToolBox, ToolLimits, load_tools
from rally.track import RunConsole, RunFolder, conversation_text, write_curve
from rally.train import run
from rally.train.packing import Row
from rally.train.policy import OptimizerSettings, Policy
from rally.train.rollout import Rollout
from rally.train.sft import SftSettings, conversation_row, sft_step
from rally.types import Episode, RallyError, SamplingParams

SPEC = arithmetic.ArithmeticSpec(forms=("{a}*{b}+{c}", "{a}*{b}-{c}", "{a}+{b}*{c}"))
HABITS: Mapping[Habit, float] = {"good": 0.28, "guess": 0.6, "malformed": 0.06, "wrong_digit": 0.06}
GATE_PROMPTS, TEST_PROMPTS = 128, 200


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Sizes of the demo; the defaults were checked over several seeds (docs/demo.md)."""

    seed: int = 0
    clean_blocks: tuple[int, ...] = (200, 100, 100)  # after each, greedy copying must reach `gate` or more follow
    gate: float = 0.97
    habit_steps: int = 60
    grpo_steps: int = 40
    batch: int = 64
    habit_batch: int = 48
    rehearsals: int = 32  # beside each batch of habits


@dataclass(frozen=True)
class DemoResult:
    folder: Path
    before: dict[str, float]
    after: dict[str, float]


def run_demo(folder: Path, settings: DemoSettings, console: RunConsole, overrides: Sequence[str] = ()) -> DemoResult:
    """The whole demo; everything it makes is under `folder`."""
    if (folder / "config.yaml").exists():
        raise RallyError(f"{folder} already holds a run; remove it or choose another --out")
    tokenizer = tiny_tokenizer()
    model = make_model(tokenizer, settings.seed)
    codec = ChatCodec(tokenizer, "hermes", demo_toolbox().schemas())
    console.banner(
        "Rally demo: an agent learns to use a calculator",
        {"model": f"{sum(p.numel() for p in model.parameters()):,} parameters, random weights", "run": str(folder)},
    )
    write_data(folder / "data", settings.seed)
    teach_format(model, codec, load_tasks(folder / "data" / "gate.parquet"), settings, console)
    start = folder / "start"
    model.save_pretrained(start)
    tokenizer.save_pretrained(start)
    console.note("GRPO: 32 prompts x 8 episodes a step; reward 1 for the right number, 0 for anything else")
    config = load_config(overrides=overrides, base=training_config(folder, settings))
    run.train(config, console)
    return report(folder, codec, console)


def make_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            initializer_range=0.04,
            rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    model.eval()
    return model


def demo_toolbox() -> ToolBox:
    return ToolBox(load_tools({"tools": [{"name": "calculator"}]}), ToolLimits(max_response_chars=64))


def training_config(folder: Path, settings: DemoSettings) -> dict[str, Any]:
    """The GRPO stage, in the keys of any other run."""
    return {
        "data": {
            "train_files": str(folder / "data" / "train.parquet"),
            "val_files": str(folder / "data" / "test.parquet"),
            "train_batch_size": 32,
            "max_prompt_length": 64,
            "max_response_length": 256,
        },
        "actor_rollout_ref": {
            "model": {"path": str(folder / "start"), "enable_gradient_checkpointing": False},
            "actor": {
                "ppo_mini_batch_size": 16,
                "clip_ratio_high": 0.28,
                "optim": {
                    "lr": 2e-4,
                    "betas": [0.9, 0.95],
                    "weight_decay": 0.0,
                    "lr_scheduler_type": "cosine",
                    "min_lr_ratio": 0.1,
                },
            },
            "rollout": {
                "n": 8,
                "multi_turn": {"enable": True, "max_assistant_turns": 3, "max_tool_response_length": 64},
                "agent_loop_config": {"tools": ["calculator"]},
                "val_kwargs": {"do_sample": True, "temperature": 1.0, "n": 1},
            },
        },
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {
            "default_local_dir": str(folder),
            "total_training_steps": settings.grpo_steps,
            "test_freq": 10,
            "save_freq": 20,
            "seed": settings.seed,
        },
    }


def teach_format(
    model: PreTrainedModel, codec: ChatCodec, gate: TaskSet, settings: DemoSettings, console: RunConsole
) -> None:
    """Supervised fine-tuning: clean conversations until copying is sure, then the bad habits."""
    sft = SftSettings(batch_size=settings.batch, max_length=512, max_tokens=8192)
    rng = random.Random(f"demo:{settings.seed}")
    problems = arithmetic.draws(rng, "train", SPEC)
    engine = EmbeddedEngine(model, EngineSettings(max_model_len=320))
    done = 0
    for block in settings.clean_blocks:
        policy = Policy(model, OptimizerSettings(lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0), block)
        policy.schedule = torch.optim.lr_scheduler.LambdaLR(policy.optimizer, _hold_then_fall(block, warm=done == 0))
        with console.phase("sft, clean conversations", block) as phase, engine.updating():
            for rows in itertools.islice(_batches(codec, problems, {"good": 1.0}, rng, sft), block):
                loss = sft_step(policy, rows, sft)["train/loss"]
                phase.advance()
        done += block
        copied = success(engine, codec, gate)
        console.note(f"sft {done} steps: loss {loss:.4f}, the agent solves {copied:.1%} of held-out problems, greedy")
        if copied >= settings.gate:
            break
    else:
        console.warn_once("gate", f"the format was not learned surely ({copied:.1%}); try another --seed")
    fade = OptimizerSettings(lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0, schedule="linear", min_lr_ratio=0.05)
    policy = Policy(model, fade, settings.habit_steps)
    with console.phase("sft, bad habits", settings.habit_steps) as phase, engine.updating():
        habits = _batches(codec, problems, HABITS, rng, replace(sft, batch_size=settings.habit_batch))
        clean = _batches(codec, problems, {"good": 1.0}, rng, replace(sft, batch_size=settings.rehearsals))
        for rows, good in itertools.islice(zip(habits, clean, strict=True), settings.habit_steps):
            sft_step(policy, [*rows, *map(_rehearsal, good)], sft)
            phase.advance()
    asyncio.run(engine.close())


def _hold_then_fall(block: int, warm: bool) -> Any:
    return lambda step: min(1.0, (step + 1) / 30 if warm else 1.0, max(0.1, 2 * (1 - (step + 1) / block)))


def _batches(
    codec: ChatCodec,
    problems: Iterator[arithmetic.Problem],
    mix: Mapping[Habit, float],
    rng: random.Random,
    sft: SftSettings,
) -> Iterator[list[Row]]:
    habits, weights = list(mix), list(mix.values())
    while True:
        chosen = rng.choices(habits, weights, k=sft.batch_size)
        yield [conversation_row(codec, conversation(next(problems), habit, rng), sft) for habit in chosen]


def _rehearsal(row: Row) -> Row:
    """A good conversation whose first token, the decision to call, carries no loss: it keeps copying sharp and teaches
    no habit."""
    return replace(row, sampled=row.sampled[1:], logprobs=row.logprobs[1:])


def write_data(folder: Path, seed: int) -> None:
    """Rows to train on, and two disjoint sets of held-out ones: for the gate, and for the success that is reported."""
    write_rows(arithmetic.rows(4096, seed, "train", SPEC), folder / "train.parquet")
    held_out = list(arithmetic.rows(GATE_PROMPTS + TEST_PROMPTS, 777, "test", SPEC))
    write_rows(held_out[:GATE_PROMPTS], folder / "gate.parquet")
    write_rows(held_out[GATE_PROMPTS:], folder / "test.parquet")


def success(engine: EmbeddedEngine, codec: ChatCodec, tasks: TaskSet) -> float:
    """Greedy success on held-out problems."""
    runner = Runner(
        engine=engine,
        codec=codec,
        toolbox=demo_toolbox(),
        settings=LoopSettings(response_length=256, max_assistant_turns=3),
        default_loop="tool_agent",
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=256, stop_ids=codec.stop_ids)

    async def whole() -> list[Episode]:
        async with Scorer(RewardSpec(), 1, 10.0) as scorer:
            rollout = Rollout(runner=runner, scorer=scorer)
            return (await rollout.collect(rollout.jobs(tasks, 1, 0, validate=True), sampling)).episodes

    episodes = asyncio.run(whole())
    return sum(e.reward or 0.0 for e in episodes) / len(tasks)


def report(folder: Path, codec: ChatCodec, console: RunConsole) -> DemoResult:
    """Before and after, three conversations, and where everything is."""
    result = before_and_after(folder)
    before, after = result.before, result.after
    console.table(
        "success on 200 held-out problems",
        [["", "before", "after"], *([name, f"{before[name]:.1%}", f"{after[name]:.1%}"] for name in before)],
    )
    run_folder = RunFolder(folder)
    episodes = run_folder.read_episodes(run_folder.episode_steps(validate=True)[-1], validate=True)
    for episode in episodes[:3]:
        console.show(conversation_text(episode, codec.decode))
    curve = write_curve(folder, title="Rally demo: learning to use a calculator")
    console.table(
        "where to look",
        [["run folder", str(folder)], ["curve", str(curve.html)], *([["", str(curve.png)]] if curve.png else [])],
    )
    return result


def before_and_after(folder: Path) -> DemoResult:
    """Held-out success at the first and at the last validation of a run."""
    rows = RunFolder(folder).read_metrics()
    validated = [r for r in rows if any(k.startswith("val-core/") for k in r.metrics)]
    return DemoResult(folder, _success_of(validated[0].metrics), _success_of(validated[-1].metrics))


def _success_of(metrics: Mapping[str, float]) -> dict[str, float]:
    name = f"val-core/{arithmetic.DATA_SOURCE}/reward/mean@1"
    return {"sampled": metrics[name], "greedy": metrics[f"{name}/greedy"]}
