"""Courses that turn a small transformer with random weights into an agent: fine-tune, degrade, then train by reward.

Supervised fine-tuning teaches the tool format, then bad habits degrade it deliberately. The last stage is an ordinary
GRPO run over rows on disk, described by `config.yaml` in its folder like any other.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from rally.chat import ChatCodec, tiny_tokenizer
from rally.config import Config, load_config
from rally.data import TaskSet, load_tasks
from rally.engines.embedded import EmbeddedEngine, EngineSettings
from rally.loops import LoopSettings, Runner
from rally.models.load import save_tokenizer
from rally.rewards import RewardSpec, Scorer
from rally.runs import train as run
from rally.sft.training import SftSettings, conversation_row, sft_step
from rally.tools import ToolBox, ToolLimits, load_tools
from rally.track import RunConsole, RunFolder, conversation_text, write_curve
from rally.train.packing import Row
from rally.train.policy import OptimizerSettings, Policy
from rally.train.rollout.rollout import Rollout
from rally.types import Episode, Message, RallyError, SamplingParams
from rally.util.private_files import private_folder

Tell = Callable[[Any, random.Random], Sequence[Message]]
"""Returns a conversation that shows the habit of this name, about a problem drawn with the generator."""

GOOD = "good"
"""The name of the desired habit."""


@dataclass(frozen=True, kw_only=True)
class TeachingSettings:
    """Sizes of the supervised stage. The defaults were checked over several seeds on the demo's task (docs/demo.md)."""

    clean_blocks: tuple[int, ...] = (200, 100, 100)  # steps; blocks follow until greedy success reaches `gate`
    gate: float = 0.97
    habit_steps: int = 60
    batch: int = 64
    habit_batch: int = 48
    rehearsals: int = 32  # beside each batch of habits


@dataclass(frozen=True)
class TeachingMaterial:
    """The conversations to train on, the bad habits by weight, and the longest episode in tokens."""

    codec: ChatCodec
    tell: Tell
    habits: Mapping[str, float]
    max_length: int


@dataclass(frozen=True)
class Teacher:
    """Fine-tunes one model. `success` returns its greedy success on held-out problems."""

    model: PreTrainedModel
    material: TeachingMaterial
    lessons: TeachingSettings
    success: Callable[[EmbeddedEngine], float]
    rng: random.Random
    console: RunConsole

    def teach(self) -> None:
        """Train on clean conversations until success reaches the gate, then on the bad habits."""
        engine = EmbeddedEngine(self.model, EngineSettings(max_model_len=self.material.max_length))
        done, share = 0, 0.0
        for block in self.lessons.clean_blocks:
            with engine.updating():
                loss = self._train_clean(block, first=done == 0)
            done += block
            share = self.success(engine)
            self.console.note(f"sft {done} steps: loss {loss:.4f}, greedy success on held-out problems {share:.1%}")
            if share >= self.lessons.gate:
                break
        else:
            self.console.warn_once("gate", f"greedy success reached only {share:.1%}; try another --seed")
        with engine.updating():
            self._degrade()
        asyncio.run(engine.close())

    def _train_clean(self, steps: int, *, first: bool) -> float:
        policy = Policy(self.model, OptimizerSettings(lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0), steps)
        policy.schedule = torch.optim.lr_scheduler.LambdaLR(policy.optimizer, _hold_then_fall(steps, warm=first))
        batches = self._batches({GOOD: 1.0}, self.lessons.batch)
        with self.console.phase("sft, clean conversations", steps) as phase:
            for rows in itertools.islice(batches, steps):
                loss = sft_step(policy, rows, self._sft)["train/loss"]
                phase.advance()
        return loss

    def _degrade(self) -> None:
        steps = self.lessons.habit_steps
        fade = OptimizerSettings(lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0, schedule="linear", min_lr_ratio=0.05)
        policy = Policy(self.model, fade, steps)
        habits = self._batches(self.material.habits, self.lessons.habit_batch)
        clean = self._batches({GOOD: 1.0}, self.lessons.rehearsals)
        with self.console.phase("sft, bad habits", steps) as phase:
            for rows, good in itertools.islice(zip(habits, clean, strict=True), steps):
                sft_step(policy, [*rows, *map(_rehearsal, good)], self._sft)
                phase.advance()

    def _batches(self, mix: Mapping[str, float], size: int) -> Iterator[list[Row]]:
        habits, weights = list(mix), list(mix.values())
        codec, tell = self.material.codec, self.material.tell
        while True:
            chosen = self.rng.choices(habits, weights, k=size)
            yield [conversation_row(codec, tell(habit, self.rng), self._sft) for habit in chosen]

    @property
    def _sft(self) -> SftSettings:
        return SftSettings(batch_size=self.lessons.batch, max_length=self.material.max_length, max_tokens=8192)


def _hold_then_fall(steps: int, warm: bool) -> Callable[[int], float]:
    return lambda step: min(1.0, (step + 1) / 30 if warm else 1.0, max(0.1, 2 * (1 - (step + 1) / steps)))


def _rehearsal(row: Row) -> Row:
    """A good conversation without a loss on its first token, the decision to call. It keeps the tool format accurate
    and teaches no habit."""
    return replace(row, sampled=row.sampled[1:], logprobs=row.logprobs[1:])


MAX_TURNS = 3


@dataclass(frozen=True, kw_only=True)
class CourseSettings(TeachingSettings):
    """Sizes of a course."""

    seed: int = 0
    grpo_steps: int = 40
    prompts: int = 32  # of a GRPO step, with 8 episodes each


@dataclass(frozen=True, kw_only=True)
class Course:
    """A task for an agent to learn.

    `write_data(folder, seed)` writes train.parquet, gate.parquet and test.parquet, all scored as `data_source`. `tools`
    are built-in tools by name, or a tool YAML. `words` become single tokens of the tokenizer. `tokenizer` replaces the
    tiny one, with another chat template and its format of calls.
    """

    title: str
    data_source: str
    write_data: Callable[[Path, int], None]
    tell: Tell
    habits: Mapping[str, float]
    tools: Sequence[str] | Path
    words: Sequence[str] = ()
    tokenizer: PreTrainedTokenizerBase | None = None
    prompt_length: int = 64
    response_length: int = 256
    tool_chars: int = 64

    def toolbox(self) -> ToolBox:
        named = self.tools if isinstance(self.tools, Path) else {"tools": [{"name": name} for name in self.tools]}
        return ToolBox(load_tools(named), ToolLimits(max_response_chars=self.tool_chars))


@dataclass(frozen=True)
class CourseResult:
    """Held-out success, sampled and greedy, before and after training by reward."""

    folder: Path
    before: dict[str, float]
    after: dict[str, float]


def run_course(
    course: Course, folder: Path, settings: CourseSettings, console: RunConsole, overrides: Sequence[str] = ()
) -> CourseResult:
    """Run the whole course. Everything it writes is under `folder`."""
    if (folder / "config.yaml").exists():
        raise RallyError(f"{folder} already holds a run; remove it or choose another --out")
    tokenizer = course.tokenizer or tiny_tokenizer(course.words)
    model = small_model(tokenizer, settings.seed)
    codec = ChatCodec(tokenizer, tools=course.toolbox().schemas())
    console.banner(
        course.title,
        {"model": f"{sum(p.numel() for p in model.parameters()):,} parameters, random weights", "run": str(folder)},
    )
    start = private_folder(folder) / "start"
    course.write_data(folder / "data", settings.seed)
    start.mkdir(exist_ok=True)
    config = course_run(course, folder, settings, overrides)  # raises before training
    teach(course, model, codec, load_tasks(folder / "data" / "gate.parquet"), settings, console)
    model.save_pretrained(start)
    save_tokenizer(tokenizer, start)
    step = f"{config.data.train_batch_size} prompts x {config.actor_rollout_ref.rollout.n} episodes a step"
    console.note(f"GRPO: {step}; reward 1 for the right answer, 0 otherwise")
    run.train(config, console)
    return report(course, folder, codec, console)


def small_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A Llama model with random weights and, like Qwen2, biases in attention, which this size needs to learn reliably.
    For the family Qwen2 itself, transformers would replace the tokenizer's class."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            attention_bias=True,
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


REPORTED = (
    *("trainer.default_local_dir", "trainer.val_before_train", "trainer.val_only", "data.val_files"),
    *("actor_rollout_ref.rollout.val_kwargs.n", "actor_rollout_ref.rollout.val_kwargs.do_sample"),
)
"""The keys of the validations that `report` compares."""


def course_run(course: Course, folder: Path, settings: CourseSettings, overrides: Sequence[str]) -> Config:
    """The configuration of the GRPO stage with `overrides`, none of which may change what `report` reads."""
    base = course_config(course, folder, settings)
    config = load_config(overrides=overrides, base=base)
    given, asked = load_config(base=base).flat(), config.flat()
    if changed := [key for key in REPORTED if asked[key] != given[key]]:
        keys = " and ".join(changed)
        raise RallyError(f"success before and after is read from the validations of the demo itself; leave out {keys}")
    return config


def course_config(course: Course, folder: Path, settings: CourseSettings) -> dict[str, Any]:
    """The configuration of the GRPO stage."""
    multi_turn = {"enable": True, "max_assistant_turns": MAX_TURNS, "max_tool_response_length": course.tool_chars}
    if isinstance(course.tools, Path):
        tools: dict[str, Any] = {"multi_turn": {**multi_turn, "tool_config_path": str(course.tools)}}
    else:
        tools = {"multi_turn": multi_turn, "agent_loop_config": {"tools": list(course.tools)}}
    return {
        "data": {
            "train_files": str(folder / "data" / "train.parquet"),
            "val_files": str(folder / "data" / "test.parquet"),
            "train_batch_size": settings.prompts,
            "max_prompt_length": course.prompt_length,
            "max_response_length": course.response_length,
        },
        "actor_rollout_ref": {
            "model": {"path": str(folder / "start"), "enable_gradient_checkpointing": False},
            "actor": {
                "ppo_mini_batch_size": settings.prompts // 2,
                "clip_ratio_high": 0.28,
                "optim": {
                    "lr": 2e-4,
                    "betas": [0.9, 0.95],
                    "weight_decay": 0.0,
                    "lr_scheduler_type": "cosine",
                    "min_lr_ratio": 0.1,
                },
            },
            "rollout": {"n": 8, "val_kwargs": {"do_sample": True, "temperature": 1.0, "n": 1}, **tools},
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


def teach(
    course: Course,
    model: PreTrainedModel,
    codec: ChatCodec,
    gate: TaskSet,
    settings: CourseSettings,
    console: RunConsole,
) -> None:
    """The supervised stage: clean conversations until the gate, then the bad habits."""
    material = TeachingMaterial(codec, course.tell, course.habits, course.prompt_length + course.response_length)
    rng = random.Random(f"demo:{settings.seed}")
    Teacher(model, material, settings, lambda engine: success(course, engine, codec, gate), rng, console).teach()


def success(course: Course, engine: EmbeddedEngine, codec: ChatCodec, tasks: TaskSet) -> float:
    """Greedy success on held-out problems, with the course's tools."""
    runner = Runner(
        engine=engine,
        codec=codec,
        toolbox=course.toolbox(),
        settings=LoopSettings(response_length=course.response_length, max_assistant_turns=MAX_TURNS),
        default_loop="tool_agent",
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=course.response_length, stop_ids=codec.stop_ids)

    async def sample_and_score() -> list[Episode]:
        async with Scorer(RewardSpec(), 1, 10.0) as scorer:
            rollout = Rollout(runner=runner, scorer=scorer)
            return (await rollout.collect(rollout.jobs(tasks, 1, 0, validate=True), sampling)).episodes

    episodes = asyncio.run(sample_and_score())
    return sum(e.reward or 0.0 for e in episodes) / len(tasks)


def report(course: Course, folder: Path, codec: ChatCodec, console: RunConsole) -> CourseResult:
    """Print success before and after, three conversations, and the paths of the results."""
    result = before_and_after(folder, course.data_source)
    before, after = result.before, result.after
    run_folder = RunFolder(folder)
    episodes = list(run_folder.read_episodes(run_folder.episode_steps(validate=True)[-1], validate=True))
    tested = len(load_tasks(folder / "data" / "test.parquet"))
    console.table(
        f"success on {tested} held-out problems",
        [["", "before", "after"], *([name, f"{before[name]:.1%}", f"{after[name]:.1%}"] for name in before)],
    )
    for episode in episodes[:3]:
        console.show(conversation_text(episode, codec.decode))
    curve = write_curve(folder, title=course.title)
    console.table(
        "where to look",
        [
            ["run folder", str(folder)],
            ["every token", shlex.join(["rally", "view", str(folder)])],
            ["curve", str(curve.html)],
            *([["", str(curve.png)]] if curve.png else []),
        ],
    )
    return result


def before_and_after(folder: Path, data_source: str) -> CourseResult:
    """Held-out success at the first and the last validation of a run."""
    rows = RunFolder(folder).read_metrics()
    validated = [r.metrics for r in rows if any(k.startswith("val-core/") for k in r.metrics)]
    return CourseResult(folder, _success_of(validated[0], data_source), _success_of(validated[-1], data_source))


def _success_of(metrics: Mapping[str, float], data_source: str) -> dict[str, float]:
    core = "acc" if f"val-core/{data_source}/acc/mean@1" in metrics else "reward"
    name = f"val-core/{data_source}/{core}/mean@1"
    return {"sampled": metrics[name], "greedy": metrics[f"{name}/greedy"]}
