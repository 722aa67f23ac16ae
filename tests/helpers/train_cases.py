"""Helpers of the training tests: episodes of random tokens, a policy that keeps its gradients, tiny folders."""

import io
import itertools
import random
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from small_models import VOCABULARY
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rally.chat import tiny_tokenizer
from rally.config import Config, load_config
from rally.data import write_rows
from rally.models import attention
from rally.recipes.arithmetic import data as arithmetic
from rally.track import RunConsole
from rally.train.divergence import Tried
from rally.train.policy import OptimizerSettings, Policy
from rally.types import (
    Episode,
    Generation,
    Segment,
    StopReason,
    Task,
    ToolCall,
    ToolResponse,
    ToolResult,
    ToolStatus,
    Turn,
)

TASK = Task(id="row-0", data_source="rally/arithmetic", prompt=({"role": "user", "content": "What is 2+3?"},))
EASY = arithmetic.ArithmeticSpec(a=(1, 9), b=(1, 9), c=(1, 9), forms=("{a}+{b}*{c}",))


def segment(rng: random.Random, pattern: str, prompt: int = 5) -> Segment:
    """Random tokens: `pattern` has s for sampled and o for observed, such as "sssoos"; old log-probs are arbitrary."""
    mask = tuple(int(letter == "s") for letter in pattern)
    return Segment(
        prompt_ids=tuple(rng.randrange(VOCABULARY) for _ in range(prompt)),
        response_ids=tuple(rng.randrange(VOCABULARY) for _ in pattern),
        response_mask=mask,
        response_logprobs=tuple(rng.uniform(-5.5, -3.5) * m for m in mask),
    )


def episode(name: str, group: str, reward: float | None, *segments: Segment, **fields: Any) -> Episode:
    parts: dict[str, Any] = {"stop_reason": StopReason.STOP, "task": TASK, **fields}
    return Episode(id=name, group=group, reward=reward, segments=segments, **parts)


def uneven_episodes(seed: int = 0) -> list[Episode]:
    """Two groups with signal and one without; lengths from 1 to 40; one episode has two segments."""
    rng = random.Random(seed)
    return [
        episode("a0", "a", 1.0, segment(rng, "ssssooooss", prompt=3)),
        episode("a1", "a", 0.0, segment(rng, "s", prompt=40)),
        episode("a2", "a", 0.3, segment(rng, "ss" * 15 + "ooo", prompt=9)),
        episode("b0", "b", 0.0, segment(rng, "sosos"), segment(rng, "sss", prompt=12)),
        episode("b1", "b", 2.0, segment(rng, "s" * 7, prompt=1)),
        episode("c0", "c", 1.2, segment(rng, "sssss", prompt=8)),
        episode("c1", "c", 1.2, segment(rng, "ss", prompt=6)),
    ]


def told_episode(name: str, reward: float, pattern: str, earned: list[float | None], texts: list[str]) -> Episode:
    """Turns as a loop records them: runs of sampled tokens, each followed by a tool response and its reward."""
    one, turns, at = segment(random.Random(name), pattern), [], 0
    runs = pattern.replace("so", "s|o").replace("os", "o|s").split("|")
    calls = iter(zip(earned, texts, strict=True))
    for run in runs:
        where = {"start": at, "end": at + len(run)}
        turns.append(Turn(role="assistant", text="", **where) if run[0] == "s" else _tool_turn(*next(calls), **where))
        at += len(run)
    return episode(name, "g", reward, one, turns=tuple(turns))


def _tool_turn(reward: float | None, text: str, **where: int) -> Turn:
    call = ToolCall(name="search", raw=text)
    result = ToolResult(call=call, status=ToolStatus.OK, response=ToolResponse(text=text), reward=reward)
    return Turn(role="tool", text=text, tool_results=(result,), reward=reward, **where)


def observed_otherwise(one: Episode, seed: int) -> Episode:
    """The same turns with observed spans of other content and length between them. Equal spans stay equal, because
    an estimator may compare the observations of two episodes."""
    return replace(one, segments=tuple(_observed_otherwise(old, seed) for old in one.segments))


def _observed_otherwise(old: Segment, seed: int) -> Segment:
    new = Segment(prompt_ids=old.prompt_ids)
    tokens = zip(old.response_mask, old.response_ids, old.response_logprobs, strict=True)
    for sampled, run in itertools.groupby(tokens, key=lambda token: token[0]):
        _, ids, logprobs = zip(*run, strict=True)
        if sampled:
            new = new.append_sampled(Generation(ids=ids, logprobs=logprobs, finish="stop"))
        else:
            rng = random.Random(f"{seed} {ids}")
            new = new.append_observed([rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 9))])
    return new


Gradients = dict[str, torch.Tensor]


class KeepingPolicy(Policy):
    """A policy with learning rate 0 that keeps the gradients of each mini-batch."""

    def __init__(self, model: PreTrainedModel, gradient_checkpointing: bool = False) -> None:
        attention.install(model)
        super().__init__(model, OptimizerSettings(lr=0.0, weight_decay=0.0), 1, gradient_checkpointing)
        self.kept: list[Gradients] = []

    def optimizer_step(self, tried: Sequence[Tried] = ()) -> float:
        self.kept.append({n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None})
        return super().optimizer_step(tried)


def calm_model(seed: int = 0) -> PreTrainedModel:
    """A small Qwen2 in which rounding errors do not grow, so that results can be compared to 1e-6."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.05,
    )
    return Qwen2ForCausalLM(config).eval()


def assert_equal(a: Gradients, b: Gradients, tolerance: float = 1e-6) -> None:
    """No entry differs by more than `tolerance`, and by no more than that share of the largest entry."""
    largest = max(float(gradient.abs().max()) for gradient in b.values())
    assert difference(a, b) <= tolerance * min(1.0, largest)


def difference(a: Gradients, b: Gradients) -> float:
    assert a.keys() == b.keys() and a
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def size(gradients: Gradients) -> float:
    """The scale for rounding errors: the largest entry, or 1."""
    return max(1.0, *(float(g.abs().max()) for g in gradients.values()))


def small_policy(model: PreTrainedModel, lr: float = 1e-3, total: int = 10, **settings: Any) -> Policy:
    attention.install(model)
    return Policy(model, OptimizerSettings(lr=lr, **settings), total)


def write_model(folder: Path, seed: int = 0) -> Path:
    """A random Qwen2 of two layers with the tiny tokenizer, as a model folder."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_tasks(folder: Path, train: int = 12, test: int = 4) -> Path:
    write_rows(arithmetic.rows(train, 0, "train", EASY), folder / "train.parquet")
    write_rows(arithmetic.rows(test, 0, "test", EASY), folder / "test.parquet")
    return folder


REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    """Any text earns a number, so that a random model has something to learn from."""
    return {"score": (sum(map(ord, solution_str)) % 7) / 7 + bonus, "length": len(solution_str)}
'''


def write_reward(folder: Path) -> Path:
    path = folder / "reward.py"
    path.write_text(REWARD, encoding="utf-8")
    return path


def run_tree(home: Path, out: Path) -> dict[str, Any]:
    """A run of three small steps with the files that the fixture `home` made."""
    return {
        "data": {
            "train_files": str(home / "train.parquet"),
            "val_files": str(home / "test.parquet"),
            "train_batch_size": 3,
            "max_prompt_length": 32,
            "max_response_length": 24,
        },
        "actor_rollout_ref": {
            "model": {"path": str(home / "model"), "enable_gradient_checkpointing": False},
            "actor": {"ppo_mini_batch_size": 3, "optim": {"lr": 1e-3}},
            "rollout": {"n": 4, "agent_loop_config": {"tools": ["calculator"]}, "max_turns": 2},
        },
        "custom_reward_function": {"path": str(home / "reward.py")},
        "reward": {"num_workers": 1},
        "trainer": {"default_local_dir": str(out), "total_training_steps": 3, "save_freq": 1},
    }


def run_config(home: Path, out: Path, *overrides: str) -> Config:
    return load_config(overrides=list(overrides), base=run_tree(home, out))


class Paper:
    """A console whose output can be read."""

    def __init__(self) -> None:
        self._file = io.StringIO()
        self.console = RunConsole(Console(file=self._file, width=400, highlight=False))

    @property
    def text(self) -> str:
        return self._file.getvalue()


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """Simulates a full disk: writes beyond `count` bytes of a file fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
