"""Whole GRPO steps on one device: Rally against TRL with colocated vLLM and against verl, in one run.

    python -m benchmarks.grpo_gpu WORK --tokenizer FOLDER [--peer trl=PYTHON] [--peer verl=PYTHON] [--task single,tools]

`single`: 128 prompts x 8 answers of 204 + 256 tokens by random weights of the shape of Qwen2.5-1.5B, one optimizer
step. No token ends an answer early, so every system does the same work. `tools`: the calculator and the rows of --rows
(a parquet file of `rally data gsm8k`); it needs --model, because random weights call no tool. Each system runs in a
process of its own, one after the other, and its first step is left out. Prints a line of JSON for each step, with its
phases, and a table. A system that fails, or is ended after --minutes, is named; its steps until then and those of the
others count. --tiny tries everything on a small shape, on a CPU too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

WORDS = "the river counts seven apples when a train leaves at noon and returns with nine more boxes of tea than it had"
POLL = 0.5
MEMORY = (
    "perf/max_memory_allocated_gb",
    "perf/max_memory_reserved_gb",
    "perf/memory_retries",
    "perf/recomputed_layers",
    "timing_s/update_weights",
)
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Any number that differs between the answers of a group."""
    return (sum(map(ord, solution_str)) % 97) / 97
'''


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a step, and where its files are."""

    folder: Path
    task: str
    model: Path
    rows: Path
    prompts: int = 128
    answers: int = 8
    prompt_tokens: int = 256
    response_tokens: int = 256
    steps: int = 6
    on_cpu: bool = False
    rally_keys: tuple[str, ...] = ()
    minutes: float | None = None

    @property
    def episodes(self) -> int:
        return self.prompts * self.answers


class Step(NamedTuple):
    """Seconds of one step; `tokens` is the mean length of what was sampled."""

    system: str
    task: str
    number: int
    total: float
    rollout: float
    update: float
    tokens: float


def make_work(folder: Path, tokenizer: str, *, tiny: bool, prompts: int) -> None:
    """Write random weights, rows and the reward function."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    known = AutoTokenizer.from_pretrained(tokenizer)
    sizes = (64, 128, 2, 4) if tiny else (1536, 8960, 28, 12)
    config = Qwen2Config(
        **dict(
            zip(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), sizes, strict=True)
        ),
        vocab_size=151_936,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        rope_theta=1e6,
        tie_word_embeddings=True,
        eos_token_id=known.eos_token_id,
        pad_token_id=known.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    known.save_pretrained(folder / "model")
    rng, words = random.Random(0), WORDS.split()
    texts = [" ".join(rng.choice(words) for _ in range(175)) for _ in range(prompts * 8)]
    rows = [
        {
            "data_source": "bench",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"index": index},
        }
        for index, text in enumerate(texts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def shared_keys(work: Work) -> list[str]:
    """Keys that Rally and verl read alike."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={work.rows}",
        f"data.train_batch_size={work.prompts}",
        f"data.max_prompt_length={work.prompt_tokens}",
        f"data.max_response_length={work.response_tokens}",
        f"actor_rollout_ref.model.path={work.model}",
        f"{actor}.ppo_mini_batch_size={work.prompts}",
        f"{actor}.optim.lr=1e-6",
        f"{actor}.use_kl_loss=false",
        f"{rollout}.n={work.answers}",
        f"{rollout}.temperature=1.0",
        f"{rollout}.max_num_seqs=1024",
        f"trainer.total_training_steps={work.steps}",
        "trainer.val_before_train=false",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.n_gpus_per_node=1",
    ]


def rally_steps(work: Work, python: str) -> Iterator[Step]:
    run = work.folder / f"rally-{work.task}"
    keys = [*shared_keys(work), f"trainer.default_local_dir={run}", "trainer.resume_mode=auto"]
    keys += ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768", *work.rally_keys]
    if work.task == "single":
        keys.append(f"custom_reward_function.path={work.folder / 'reward.py'}")
    else:
        keys.append("actor_rollout_ref.rollout.agent_loop_config.tools=[calculator]")
    log = work.folder / f"rally-{work.task}.log"
    # The checkpoint that follows the last step is tens of gigabytes, and nothing reads it.
    command = [python, "-m", "rally.cli", "train", *keys]
    ended = _run(command, log, work.minutes, lambda: any(row["step"] == work.steps for row in _recorded(run)))
    row: dict[str, Any] = {}
    for row in _recorded(run):
        if "timing_s/step" in row:
            seconds = (row["timing_s/step"], row["timing_s/gen"], row["timing_s/update_actor"])
            yield Step("Rally", work.task, int(row["step"]), *seconds, row["sampled_tokens/mean"])
    print(json.dumps({"system": "Rally", "task": work.task, "last step": {k: row[k] for k in MEMORY if k in row}}))
    ended.check()


def _recorded(run: Path) -> list[dict[str, Any]]:
    """The metrics of the steps so far."""
    file = run / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def trl_steps(work: Work, python: str) -> Iterator[Step]:
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in vars(work).items()}
    command = [python, "-m", "benchmarks.grpo_gpu_trl", json.dumps(plain)]
    ended = _run(command, work.folder / f"trl-{work.task}.log", work.minutes)
    for line in ended.text.splitlines():
        if line.startswith("STEP "):
            yield Step("TRL + vLLM" if not work.on_cpu else "TRL", work.task, *json.loads(line.removeprefix("STEP ")))
    ended.check()


def verl_steps(work: Work, python: str) -> Iterator[Step]:
    """verl with FSDP and colocated vLLM, weights and AdamW in bf16 as its fastest setting."""
    if work.task != "single":
        raise SystemFailed("verl is measured on the task single only; its tool loop needs a tool file of its own")
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    keys = [
        *shared_keys(work),
        f"data.val_files={work.rows}",
        f"reward.custom_reward_function.path={work.folder / 'reward.py'}",
        "algorithm.rollout_correction.bypass_mode=true",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.model.use_remove_padding=true",
        f"{actor}.fsdp_config.model_dtype=bf16",
        f"{actor}.fsdp_config.reshard_after_forward=false",
        f"{actor}.use_dynamic_bsz=true",
        f"{actor}.ppo_max_token_len_per_gpu=16384",
        f"{rollout}.name=vllm",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.gpu_memory_utilization=0.4",
        f"{rollout}.max_num_batched_tokens=16384",
        "trainer.nnodes=1",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={work.folder / 'verl'}",
    ]
    ended = _run([python, "-m", "verl.trainer.main_ppo", *keys], work.folder / "verl-single.log", work.minutes)
    for line in ended.text.splitlines():
        numbers = dict(re.findall(r"(training/global_step|timing_s/\w+|response_length/mean):([0-9.e+-]+)", line))
        if "timing_s/step" in numbers:
            names = ("timing_s/step", "timing_s/gen", "timing_s/update_actor", "response_length/mean")
            total, rollout_seconds, update, tokens = (float(numbers[name]) for name in names)
            yield Step(
                "verl + vLLM", work.task, int(numbers["training/global_step"]), total, rollout_seconds, update, tokens
            )
    ended.check()


SYSTEMS: dict[str, Callable[[Work, str], Iterator[Step]]] = {"rally": rally_steps, "trl": trl_steps, "verl": verl_steps}


class SystemFailed(Exception):
    """A system that did not make all steps."""


class Ended(NamedTuple):
    """What a process printed, and how it failed."""

    text: str
    problem: str | None

    def check(self) -> None:
        if self.problem is not None:
            raise SystemFailed(f"{self.problem} with:\n" + "\n".join(self.text.splitlines()[-15:]))


def _run(command: list[str], log: Path, minutes: float | None, done: Callable[[], bool] = lambda: False) -> Ended:
    """Run a process to its end, until `done`, or for so many minutes; then it is ended with what it started. Its output
    is in a file, too."""
    begun, problem = time.monotonic(), None
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            while process.poll() is None and problem is None and not done():
                time.sleep(POLL)
                if minutes is not None and time.monotonic() - begun > 60 * minutes:
                    problem = f"was ended after {minutes:g} minutes; {log} ends"
            if process.returncode:
                problem = f"failed ({process.returncode}); {log} ends"
        finally:  # after Ctrl-C too, which does not reach a session of its own
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    return Ended(text, None if problem is None else f"{' '.join(command[:4])} {problem}")


MADE = "made_for.json"


def unusable(folder: Path, tasks: list[str], made_for: dict[str, Any], steps: int) -> str | None:
    """Why the benchmark would measure something else in this folder, or nothing."""
    if steps < 2:
        return f"--steps {steps} leaves nothing to measure, because the first step is left out; ask for at least 2"
    if (folder / MADE).exists() and json.loads((folder / MADE).read_text(encoding="utf-8")) != made_for:
        return f"{folder} was made with another --tiny or --tokenizer; name another folder"
    for task in tasks:
        if (folder / f"rally-{task}").exists():
            return f"{folder} holds a run of the task {task}, which would be resumed; name another folder"
    return None


def table(steps: list[Step], work: Work) -> Table:
    made = Table(title=f"seconds of a GRPO step, median of the steps after the first; {work.episodes} episodes")
    for name in ("task", "system", "step", "rollout", "update", "samples/s", "sampled tokens", "Rally is faster by"):
        made.add_column(name)
    medians = {}
    for key in dict.fromkeys((step.task, step.system) for step in steps):
        rows = [step for step in steps if (step.task, step.system) == key and step.number > 1]
        if rows:
            medians[key] = [statistics.median(column) for column in zip(*(row[3:] for row in rows), strict=True)]
    for (task, system), (total, rollout, update, tokens) in medians.items():
        rally = medians.get((task, "Rally"))
        cells = (f"{total:.2f}", f"{rollout:.2f}", f"{update:.2f}", f"{work.episodes / total:.1f}", f"{tokens:.0f}")
        made.add_row(task, system, *cells, "" if system == "Rally" or rally is None else f"{total / rally[0]:.2f}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--tokenizer", required=True, help="a folder with the tokenizer of Qwen2.5")
    parser.add_argument("--task", default="single", help="single, tools, or both with a comma")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="trl=... or verl=...")
    parser.add_argument("--model", type=Path, help="a real model, for the task tools")
    parser.add_argument("--rows", type=Path, help="rows for the task tools")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--minutes", type=float, help="after which a system is ended")
    parser.add_argument("--rally", action="append", default=[], metavar="KEY=VALUE", help="further keys of Rally alone")
    given = parser.parse_args()
    import torch

    on_cpu = not torch.cuda.is_available()
    prompts, tokens = (4, 16) if given.tiny else (128, 256)
    folder, tasks = given.work.absolute(), given.task.split(",")
    made_for = {"tiny": given.tiny, "tokenizer": str(Path(given.tokenizer).absolute())}
    if problem := unusable(folder, tasks, made_for, given.steps):
        parser.error(problem)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MADE).exists():
        make_work(folder, given.tokenizer, tiny=given.tiny, prompts=prompts)
        (folder / MADE).write_text(json.dumps(made_for), encoding="utf-8")  # last, when all of it is there
    systems = [("rally", sys.executable), *(tuple(peer.split("=", 1)) for peer in given.peer)]
    steps: list[Step] = []
    failed: list[str] = []
    for task in tasks:
        tools = task == "tools"
        if tools and not (given.model and given.rows):
            parser.error("the task tools needs --model and --rows")
        sizes: dict[str, Any] = {"prompt_tokens": 1024, "response_tokens": 16 if given.tiny else 1024} if tools else {}
        work = Work(
            folder=folder,
            task=task,
            model=given.model.absolute() if tools else folder / "model",
            rows=given.rows.absolute() if tools else folder / "rows.parquet",
            prompts=prompts,
            answers=4 if given.tiny else 8,
            steps=given.steps,
            on_cpu=on_cpu,
            rally_keys=tuple(given.rally),
            minutes=given.minutes,
            **{"response_tokens": tokens, **sizes},
        )
        for name, python in systems:
            try:
                for step in SYSTEMS[name](work, python):
                    print(json.dumps(step._asdict()), flush=True)
                    steps.append(step)
            except SystemFailed as problem:
                print(problem, file=sys.stderr, flush=True)
                failed.append(f"{name} ({task})")
    device = "CPU" if on_cpu else torch.cuda.get_device_name(0)
    Console(width=140).print(
        table(steps, work), f"{device}; torch {torch.__version__}, transformers {version('transformers')}"
    )
    if failed:
        raise SystemExit(f"not all steps were made by {', '.join(failed)}")


if __name__ == "__main__":
    main()
