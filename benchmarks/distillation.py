"""Measures how far a student gets towards its teacher by on-policy distillation, on a CPU, for several losses.

    python -m benchmarks.distillation FOLDER [--steps 60]

Student and teacher are random models of different sizes with one tokenizer. Before and after training, the student
samples the same prompts, and KL(student || teacher) is computed over the whole vocabulary at its sampled tokens, with
the plain forward of transformers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rally.chat.tiny_tokenizer import tiny_tokenizer
from rally.config import load_config
from rally.runs.train import train
from rally.track import RunFolder
from rally.types import Episode

LOSSES: dict[str, dict[str, Any]] = {
    "k1, policy gradient": {"loss_mode": "k1", "use_policy_gradient": True, "loss_max_clamp": 10.0},
    "k3": {"loss_mode": "k3"},
    "forward_kl_topk": {"loss_mode": "forward_kl_topk", "topk": 32, "log_prob_min_clamp": -10.0},
    "forward_kl_full": {"loss_mode": "forward_kl_full"},
    "reverse_kl_full": {"loss_mode": "reverse_kl_full"},
    "jsd_full": {"loss_mode": "jsd_full"},
}


def write_model(folder: Path, hidden: int, layers: int, spread: float, seed: int) -> Path:
    tokenizer = tiny_tokenizer()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        initializer_range=spread,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(file: Path) -> Path:
    rows = [
        {
            "data_source": "rally/arithmetic",
            "prompt": [{"role": "user", "content": f"{i}+{7 * i % 10}="}],
            "reward_model": {"ground_truth": str(i + 7 * i % 10)},
        }
        for i in range(64)
    ]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return file


@torch.no_grad()
def mean_kl(student: PreTrainedModel, teacher: PreTrainedModel, episodes: list[Episode]) -> float:
    """KL(student || teacher) per sampled token."""
    total, tokens = 0.0, 0
    for segment in (segment for episode in episodes for segment in episode.segments):
        ids = torch.tensor([segment.ids])
        prompt = len(segment.prompt_ids)
        at = [prompt + i - 1 for i, sampled in enumerate(segment.response_mask) if sampled]
        q, p = (torch.log_softmax(model(input_ids=ids).logits[0, at].double(), -1) for model in (student, teacher))
        total += float((q.exp() * (q - p)).sum())
        tokens += len(at)
    return total / tokens


def measure(folder: Path, name: str, loss: dict[str, Any], steps: int) -> str:
    out = folder / name.replace(", ", "_").replace(" ", "_")
    tree = {
        "data": {"train_files": str(folder / "rows.jsonl"), "train_batch_size": 32},
        "actor_rollout_ref": {
            "model": {"path": str(folder / "student"), "enable_gradient_checkpointing": False},
            "actor": {"ppo_mini_batch_size": 32, "optim": {"lr": 1e-2}},
            "rollout": {"n": 2},
        },
        "distillation": {
            "enabled": True,
            "teacher_models": {"teacher_model": {"model_path": str(folder / "teacher")}},
            "distillation_loss": {"use_task_rewards": False, **loss},
        },
        "trainer": {"default_local_dir": str(out), "total_training_steps": steps, "logger": ["file"], "device": "cpu"},
    }
    sizes = ["data.max_prompt_length=32", "data.max_response_length=32", "trainer.val_before_train=false"]
    train(load_config(overrides=sizes, base=tree))
    run = RunFolder(out)
    paths = (folder / "student", out / "checkpoints" / f"global_step_{steps}" / "actor", folder / "teacher")
    before, after, teacher = (AutoModelForCausalLM.from_pretrained(path).eval() for path in paths)
    first, last = (run.read_episodes(step) for step in (1, steps))
    return f"| {name} | {mean_kl(before, teacher, first):.3f} | {mean_kl(after, teacher, last):.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    write_model(options.folder / "student", 32, 2, 0.05, 0)
    write_model(options.folder / "teacher", 64, 3, 0.25, 1)
    write_rows(options.folder / "rows.jsonl")
    table = [measure(options.folder, name, loss, options.steps) for name, loss in LOSSES.items()]
    print("\n".join(["| loss | KL before | KL after |", "| --- | --- | --- |", *table]))


if __name__ == "__main__":
    main()
