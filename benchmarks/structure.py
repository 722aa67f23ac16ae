"""Counts how hard the code base is to find one's way in: files, importers, names, and what one training step crosses.

    python -m benchmarks.structure [--package FOLDER]

Static counts are over the Python files of the package. One GRPO step of one prompt is then run on
the CPU, with a small model that was fine-tuned to call a calculator, under a profile of all threads: the files and
functions of the package that it calls, and how often control changes from one top-level package to another in the event
loop while one episode of two turns is played. The same command on another checkout (its folder first on PYTHONPATH)
gives comparable numbers.
"""

from __future__ import annotations

import argparse
import ast
import collections
import importlib
import json
import re
import sys
import tempfile
import threading
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

KEYS = ("kl_loss_coef", "ppo_max_token_len_per_gpu", "max_tool_response_length", "gpu_memory_utilization")
KEYS += ("lr_warmup_steps", "max_user_turns", "filter_groups", "save_freq", "skip_rollout", "rollout_is_threshold")
REWARD = "import random\n\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
REWARD += "    return random.random()\n"
QUESTION = "What is 2+2?"
CALL = {"id": "call_0", "type": "function", "function": {"name": "calculator", "arguments": {"expression": "2+2"}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "calculator", "tool_call_id": "call_0", "content": "4"},
    {"role": "assistant", "content": "#### 4"},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=Path(__file__).resolve().parents[1] / "rally")
    package = parser.parse_args().package.resolve()
    counts = static_counts(package) | step_counts(package)
    print(json.dumps(counts, indent=1))


def static_counts(package: Path) -> dict[str, float]:
    files = sorted(package.rglob("*.py"))
    names = {
        ".".join(("rally", *f.relative_to(package).with_suffix("").parts)).removesuffix(".__init__"): f for f in files
    }
    importers: dict[str, set[str]] = collections.defaultdict(set)
    classes: collections.Counter[str] = collections.Counter()
    lines: dict[str, int] = {}
    for name, file in names.items():
        text = file.read_text(encoding="utf-8")
        lines[name] = text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rally":
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    importers[full if full in names else str(node.module)].add(name)
    single = [n for n, f in names.items() if f.name != "__init__.py" and len(importers[n]) == 1]
    mentions = [sum(bool(re.search(rf"\b{key}\b", f.read_text(encoding="utf-8"))) for f in files) for key in KEYS]
    return {
        "files": len(files),
        "lines": sum(lines.values()),
        "modules with one importer": len(single),
        "of them under 60 lines": sum(lines[n] < 60 for n in single),
        "class names used more than once": sum(count > 1 for count in classes.values()),
        "files that mention a key, mean of ten keys": sum(mentions) / len(mentions),
    }


class Crossing:
    """Records calls into the package, in all threads, while it is switched on."""

    def __init__(self, package: Path) -> None:
        self.package = f"{package}/"
        self.run: set[str] = set()
        self.step: set[tuple[str, int]] = set()
        self.episode: list[str] = []
        self.in_step = self.in_episode = False
        self.thread = threading.get_ident()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self.package):
            return
        self.run.add(code.co_filename)
        if code.co_name in ("train_step", "_log"):
            self.in_step = code.co_name == "train_step"
        if code.co_name == "_attempt" and self.in_step:
            self.in_episode = True
        if code.co_name == "_finished":
            self.in_episode = False
        if self.in_step:
            self.step.add((code.co_filename, code.co_firstlineno))
        if self.in_episode and threading.get_ident() == self.thread:
            self.episode.append(code.co_filename.removeprefix(self.package).split("/")[0])


def step_counts(package: Path) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(prefix="rally-structure-"))
    config = importlib.import_module("rally.config").load_config(base=write_run(folder))
    train = importlib.import_module("rally.train.run").train  # an alias today, the module itself in older checkouts
    crossing = Crossing(package)
    threading.setprofile(crossing)
    sys.setprofile(crossing)
    try:
        train(config)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    line = (folder / "run" / "episodes" / "train_000001.jsonl").read_text().splitlines()[0]
    return {
        "files crossed by a run of one step": len(crossing.run),
        "files crossed by that step": len({file for file, _ in crossing.step}),
        "functions crossed by that step": len(crossing.step),
        "package changes of one episode": changes(crossing.episode),
        "the same without the data model": changes([name for name in crossing.episode if name != "types.py"]),
        "turns of that episode, the tool's included": len(json.loads(line)["turns"]),
    }


def changes(names: list[str]) -> int:
    return sum(a != b for a, b in pairwise(names))


def write_run(folder: Path) -> dict[str, Any]:
    """One prompt, and a small model that answers it by calling the calculator."""
    write_rows = importlib.import_module("rally.data").write_rows
    row = {"data_source": "sums", "prompt": CONVERSATION[:1], "reward_model": {"ground_truth": "4"}}
    write_rows([{**row, "extra_info": {"index": 0}}], folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)
    teach(folder / "model")
    return {
        "data": {
            "train_files": str(folder / "train.parquet"),
            "train_batch_size": 1,
            "max_prompt_length": 64,
            "max_response_length": 128,
        },
        "actor_rollout_ref": {
            "model": {"path": str(folder / "model"), "enable_gradient_checkpointing": False},
            "rollout": {"n": 1, "agent_loop_config": {"tools": ["calculator"]}, "max_turns": 3},
        },
        "algorithm": {"adv_estimator": "reinforce_plus_plus"},
        "custom_reward_function": {"path": str(folder / "reward.py")},
        "trainer": {"default_local_dir": str(folder / "run"), "total_training_steps": 1},
    }


def teach(folder: Path) -> None:
    chat, tools = importlib.import_module("rally.chat"), importlib.import_module("rally.tools")
    sft, policies = importlib.import_module("rally.train.sft"), importlib.import_module("rally.train.policy")
    tokenizer = chat.tiny_tokenizer()
    model = importlib.import_module("rally.train.course").small_model(tokenizer, 0)
    importlib.import_module("rally.engines.embedded.attention").install(model)
    schemas = [tool.tool_schema for tool in tools.load_tools({"tools": [{"name": "calculator"}]})]
    settings = sft.SftSettings(batch_size=4, max_length=256)
    row = sft.conversation_row(chat.ChatCodec(tokenizer, "hermes", schemas), CONVERSATION, settings)
    policy = policies.Policy(model, policies.OptimizerSettings(lr=2e-3, weight_decay=0.0), 40)
    for _ in range(40):
        sft.sft_step(policy, [row], settings)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
