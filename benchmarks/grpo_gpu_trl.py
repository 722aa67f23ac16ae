"""TRL's GRPOTrainer for `benchmarks.grpo_gpu`, in an environment with TRL: python -m benchmarks.grpo_gpu_trl WORK.

Set up for speed: bf16, vLLM colocated with sleep mode off where memory allows both, no gradient checkpointing, no
reference model, no second pass for importance sampling. Prints a line `STEP [...]` for each step with its phases. On a
CPU it samples with transformers.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

MICRO = 32


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression.

    Args:
        expression: numbers, + - * / // % ** ( ); e.g. 12*(3+4)/7
    """
    from rally.tools.builtin.calculator import CalculatorError, calculate

    try:
        return calculate(expression)
    except CalculatorError as refusal:
        return f"Error: {refusal}"


def any_number(completions: list[list[dict[str, Any]]], **others: Any) -> list[float]:
    return [(sum(map(ord, one[0]["content"])) % 97) / 97 for one in completions]


def last_answer(completions: list[list[dict[str, Any]]], truth: list[str], **others: Any) -> list[float]:
    texts = ("\n".join(m.get("content") or "" for m in one if m["role"] == "assistant") for one in completions)
    answers = (re.findall(r"#### (-?[0-9.,]+)", text) for text in texts)
    return [
        float(bool(found) and found[-1].replace(",", "").rstrip(".") == right)
        for found, right in zip(answers, truth, strict=True)
    ]


class Phases(TrainerCallback):
    """Prints the seconds of each step."""

    def __init__(self, on_cpu: bool) -> None:
        self.on_cpu, self.sampling, self.began = on_cpu, 0.0, time.perf_counter()

    def on_train_begin(self, *unused: Any, **others: Any) -> None:
        self.began = time.perf_counter()

    def on_log(self, arguments: Any, state: Any, control: Any, logs: dict[str, Any], **others: Any) -> None:
        if "completions/mean_length" not in logs:
            return
        if not self.on_cpu:
            torch.cuda.synchronize()
        total = time.perf_counter() - self.began
        numbers = (state.global_step, total, self.sampling, total - self.sampling, logs["completions/mean_length"])
        print("STEP", json.dumps(numbers), flush=True)
        self.sampling, self.began = 0.0, time.perf_counter()


def main(work: dict[str, Any]) -> None:
    tools, on_cpu = work["task"] == "tools", work["on_cpu"]
    episodes = work["prompts"] * work["answers"]
    rows = pq.read_table(work["rows"]).to_pylist()
    data = [{"prompt": row["prompt"], "truth": str(row["reward_model"]["ground_truth"])} for row in rows]
    phases = Phases(on_cpu)

    class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
        def _generate(self, *arguments: Any, **others: Any) -> Any:
            began = time.perf_counter()
            result = super()._generate(*arguments, **others)
            phases.sampling += time.perf_counter() - began
            return result

    vllm: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.4,
        "vllm_max_model_length": work["prompt_tokens"] + work["response_tokens"],
        "vllm_importance_sampling_correction": False,
    }
    micro = min(MICRO, episodes)
    settings = GRPOConfig(
        output_dir=str(Path(work["folder"]) / "trl"),
        use_cpu=on_cpu,
        bf16=not on_cpu,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=episodes // micro,
        generation_batch_size=episodes,
        num_generations=work["answers"],
        temperature=1.0,
        max_completion_length=work["response_tokens"],
        max_steps=work["steps"],
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        beta=0.0,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=0,
        disable_tqdm=True,
        dataloader_pin_memory=not on_cpu,
        model_init_kwargs={"dtype": "float32" if on_cpu else "bfloat16"},
        **({} if on_cpu else vllm),
    )
    trainer = TimedTrainer(
        model=work["model"],
        processing_class=AutoTokenizer.from_pretrained(work["model"]),
        reward_funcs=last_answer if tools else any_number,
        train_dataset=Dataset.from_list(data),
        args=settings,
        callbacks=[phases],
        **({"tools": [calculator]} if tools else {}),
    )
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
