"""TRL's GRPOTrainer on the demo's task, set up for speed: fp32, no checkpointing, no reference model, one batch of 256.

Generation is transformers' padded `generate`: of the two ways TRL has without a server, the faster one here.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from benchmarks.demo_models import DemoModels
from benchmarks.grpo_row import Step
from rally.data import load_tasks
from rally.models.load import load_model, load_tokenizer
from rally.scoring import arithmetic
from rally.tools.builtin.calculator import CalculatorError, calculate
from rally.tools.results import shorten


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression exactly and returns its value.

    Args:
        expression: the expression, e.g. 12*(3+4)/7
    """
    try:
        return calculate(expression)
    except CalculatorError as refusal:  # with the text and the length of the demo's tool loop
        return shorten(f"Error: {refusal}", 64, "middle")


def reward(completions: list[list[dict[str, Any]]], truth: list[str], **others: Any) -> list[float]:
    words = ("\n".join(m["content"] for m in c if m["role"] == "assistant") for c in completions)
    return [arithmetic.score(text, right) for text, right in zip(words, truth, strict=True)]


class Stopwatch(TrainerCallback):
    """Times each step; TRL's own logging comes after it and is not counted."""

    def __init__(self) -> None:
        self.began = self.seconds = 0.0
        self.steps: list[Step] = []

    def on_step_begin(self, *unused: Any, **others: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *unused: Any, **others: Any) -> None:
        self.seconds = time.perf_counter() - self.began

    def on_log(self, *unused: Any, **others: Any) -> None:
        logs = others["logs"]
        if "completions/mean_length" in logs:
            self.steps.append(Step(self.seconds, float(logs["completions/mean_length"])))


def trl_steps(demo: DemoModels, count: int, seed: int) -> list[Step]:
    tokenizer = load_tokenizer(str(demo.start))
    tokenizer.response_template = qwen3_template  # the Hermes tags, which the demo's template writes too
    tasks = load_tasks(demo.data / "train.parquet")
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=load_model(str(demo.start)),
            processing_class=tokenizer,
            reward_funcs=reward,
            tools=[calculator],
            train_dataset=Dataset.from_list([{"prompt": list(t.prompt), "truth": str(t.ground_truth)} for t in tasks]),
            args=_settings(Path(folder), count, seed),
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return watch.steps


def _settings(folder: Path, steps: int, seed: int) -> GRPOConfig:
    """The demo's training settings (rally.demo.training_stages.course_config) as TRL's arguments."""
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=steps,
        seed=seed,
        per_device_train_batch_size=256,
        num_generations=8,
        max_completion_length=256,
        max_tool_calling_iterations=2,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )
