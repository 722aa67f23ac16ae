"""Trains two steps on the CPU with the files of verl's examples: data preparation, tool YAML, tools, rewards and loops.

    git clone https://github.com/volcengine/verl
    git clone https://github.com/verl-project/verl-recipe
    pip install pandas datasets              # for verl's data preparation; langgraph for the case langgraph
    python -m benchmarks.verl_runs verl verl-recipe [gsm8k_tool search retool interaction langgraph own_loop dapo]

Nothing is edited but the ports in tool YAMLs. The downloads of the preparation scripts are replaced by rows made here
in the format of the data sets. The policy is a random model of two layers whose turns are scripted: its "samples" are
forced, with the log-probabilities that the model gives to it. The tools, the search server, the sandbox server, the
rewards and the updates are real. The output is one line for each case.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import torch
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from benchmarks.verl_examples import stage
from rally.chat.tiny_tokenizer import CHAT_TEMPLATE, tiny_tokenizer
from rally.cli.main import app
from rally.compat.verl.import_names import offer_verl_names
from rally.engines.embedded.engine import EmbeddedEngine
from rally.track import RunFolder
from rally.types import Generation, SamplingParams, WeightSpan

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CONFIG = "examples/sglang_multiturn/config"
COMMON = (
    *("algorithm.adv_estimator=grpo", "data.train_batch_size=2", "data.max_prompt_length=6000"),
    *("data.max_response_length=1500", "actor_rollout_ref.model.path=model", f"{A}.optim.lr=1e-4", f"{R}.n=4"),
    *(f"{A}.ppo_mini_batch_size=2", f"{A}.ppo_micro_batch_size_per_gpu=2", f"{R}.log_prob_micro_batch_size_per_gpu=2"),
    *(f"{R}.name=embedded", "trainer.n_gpus_per_node=1", "trainer.device=cpu", "trainer.total_training_steps=2"),
    *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.logger=['console']"),
    *(
        "actor_rollout_ref.actor.use_kl_loss=True",
        "reward.num_workers=1",
        f"{R}.multi_turn.max_tool_response_length=600",
    ),
)
WORD_PROBLEMS = {
    f"Tom has {a} boxes with {b} pens each. How many pens does he have?": a * b
    for a, b in zip(range(3, 11), range(7, 15), strict=True)
}
PLACES = ("Paris", "Rome", "Lima", "Oslo", "Cairo", "Delhi", "Quito", "Tunis")
LANDS = ("France", "Italy", "Peru", "Norway", "Egypt", "India", "Ecuador", "Tunisia")
OPERATION, ENCLOSED = r"(-?\d+) @ (-?\d+)", r"\((-?\d+)\)"
Script = Callable[[str, int, random.Random], str]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answer_of(prompt: str) -> int:
    return next(answer for question, answer in WORD_PROBLEMS.items() if question in prompt)


def gsm8k_turn(prompt: str, turn: int, rng: random.Random) -> str:
    answer = answer_of(prompt) + rng.choice((0, 0, 1))
    return call("calc_gsm8k_reward", answer=str(answer)) if turn == 0 else f"#### {answer}"


def corrected_turn(prompt: str, turn: int, rng: random.Random) -> str:
    return f"#### {answer_of(prompt) + (rng.choice((0, 1)) if turn else 1)}"


def search_turn(prompt: str, turn: int, rng: random.Random) -> str:
    land = next(land for land in LANDS if f"capital of {land}?" in prompt)
    if turn == 0:
        return call("search", query_list=[f"capital of {land}"])
    found = re.findall(rf"([A-Z]\w+) is the capital of {land}", prompt)
    return f"<answer>{rng.choice([*found[-1:], 'Atlantis'])}</answer>"


def code_turn(prompt: str, turn: int, rng: random.Random) -> str:
    a, b = re.findall(r"What is (\d+) times (\d+)", prompt)[-1]
    if turn == 0:
        return call("code_interpreter", code=f"```python\n{a} * {b}\n```")
    printed = re.findall(r"<tool_response>\s*(\d+)", prompt)
    return f"The answer is \\boxed{{{rng.choice([*printed[-1:], '0'])}}}"


def graph_turn(prompt: str, turn: int, rng: random.Random) -> str:
    """Calls the operator @ until one number is left: `a @ b`, innermost and leftmost first."""
    expression = re.findall(r"Compute ([^<\n]+)", prompt)[-1]
    for result in re.findall(r"<tool_response>\s*(-?\d+)", prompt):
        expression = re.sub(OPERATION, result, re.sub(ENCLOSED, r"\1", expression), count=1)
    expression = re.sub(ENCLOSED, r"\1", expression)
    if found := re.search(OPERATION, expression):
        return call("calculate", a=int(found[1]), b=int(found[2]), operand="@")
    return f"It is \\boxed{{{rng.choice([expression.strip(), '0'])}}}"


def dapo_turn(prompt: str, turn: int, rng: random.Random) -> str:
    a, b = re.findall(r"What is (\d+) times (\d+)", prompt)[-1]
    return "So. " * rng.choice((1, 60, 90, 200)) + f"\nAnswer: {int(a) * int(b)}"


class ScriptedPolicy:
    """Forces the turns of the engine, with the log-probabilities that its module gives to them."""

    def __init__(self, script: Script, tokenizer: PreTrainedTokenizerBase) -> None:
        self.script, self.tokenizer = script, tokenizer

    def method(policy) -> Any:
        sampled = EmbeddedEngine.generate

        async def generate(
            self: EmbeddedEngine, prompt_ids: Sequence[int], params: SamplingParams, **options: Any
        ) -> Generation:
            prompt = policy.tokenizer.decode(list(prompt_ids))
            turn = prompt.count("<|im_start|>assistant\n") - 1
            if str(options.get("session")).startswith("startup-"):
                return await sampled(self, prompt_ids, params, **options)  # a check before training
            text = policy.script(prompt, turn, random.Random(params.seed))
            ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"] + [policy.tokenizer.eos_token_id]
            cut = ids[: params.max_tokens]
            with torch.no_grad(), self._lock:
                logits = self.core.runner.model(input_ids=torch.tensor([[*prompt_ids, *cut]])).logits[0]
            scores = torch.log_softmax(logits.float() / (params.temperature or 1.0), -1)
            first = len(prompt_ids) - 1
            logprobs = tuple(float(scores[first + at, token]) for at, token in enumerate(cut))
            spans = (WeightSpan(self.weight_version, 0, len(cut)),)
            finish = "stop" if len(cut) == len(ids) else "length"
            return Generation(ids=tuple(cut), logprobs=logprobs, finish=finish, spans=spans)

        return generate


def write_model(folder: Path) -> PreTrainedTokenizerBase:
    # Loops of verl render the message {}, to find the text that a template always begins with.
    template = CHAT_TEMPLATE.replace("for message in messages %}", "for message in messages if message.role %}")
    tokenizer = tiny_tokenizer(chat_template=template)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def prepare(script: str, *options: str) -> None:
    """Run a data preparation script of verl, whose downloads give the rows made here."""
    import datasets
    import huggingface_hub

    offer_verl_names()
    gsm8k = [{"question": question, "answer": f"Easy.\n#### {answer}"} for question, answer in WORD_PROBLEMS.items()]
    rows = {"openai/gsm8k": gsm8k, "BytedTsinghua-SIA/DAPO-Math-17k": dapo_rows()}

    def load_dataset(path: str, *names: str, **kwargs: Any) -> Any:
        made = datasets.Dataset.from_list(rows[path])
        return datasets.DatasetDict({"train": made, "test": made})

    def download(*, filename: str, local_dir: str, **kwargs: Any) -> str:
        path = str(Path(local_dir) / filename)
        datasets.Dataset.from_list(search_rows()).to_parquet(path)
        return path

    with (
        mock.patch.object(datasets, "load_dataset", load_dataset),
        mock.patch.object(huggingface_hub, "hf_hub_download", download),
        mock.patch.object(sys, "argv", [script, *options]),
    ):
        runpy.run_path(script, run_name="__main__")


def dapo_rows() -> list[dict[str, Any]]:
    return [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"What is {a} times {b}? End with Answer: and the number."}],
            "ability": "MATH",
            "reward_model": {"style": "rule", "ground_truth": str(a * b)},
            "extra_info": {"index": str(a), "split": "train"},
        }
        for a, b in zip(range(12, 20), range(21, 29), strict=True)
    ]


def search_rows() -> list[dict[str, Any]]:
    return [
        {
            "data_source": "nq",
            "question": f"What is the capital of {land}?",
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": [place]}},
        }
        for place, land in zip(PLACES, LANDS, strict=True)
    ]


@contextlib.contextmanager
def serving(*command: str) -> Iterator[int]:
    """A server of Rally on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "rally", "serve", *command, "--port", str(port)])
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
                break
            if process.poll() is not None:
                raise SystemExit(f"rally serve {command[0]} has ended with {process.returncode}")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait()


def with_port(path: str, port: int) -> str:
    """A copy of a tool YAML of verl with the port of a server of ours."""
    text = re.sub(r"http://[\w.]+:\d+", f"http://127.0.0.1:{port}", Path(path).read_text())
    Path("tools.yaml").write_text(text)
    return "tools.yaml"


def gsm8k_tool() -> list[str]:
    prepare("examples/data_preprocess/gsm8k_multiturn_w_tool.py", "--local_save_dir", "data")
    shaping = "examples/sglang_multiturn/gsm8k_toolcall_shaping/gsm8k_toolcall_shaping.py"
    return [
        *("--config-path", CONFIG, "--config-name", "gsm8k_multiturn_grpo", "data.train_files=data/train.parquet"),
        f"{R}.multi_turn.tool_config_path={CONFIG}/tool_config/gsm8k_tool_config.yaml",
        *(f"custom_reward_function.path={shaping}", "custom_reward_function.name=toolcall_shaping_reward"),
    ]


def interaction() -> list[str]:
    prepare("examples/data_preprocess/gsm8k_multiturn_w_interaction.py", "--local_save_dir", "data")
    return [
        *("--config-path", CONFIG, "--config-name", "gsm8k_multiturn_grpo_w_interaction"),
        *("data.train_files=data/train.parquet", f"{R}.multi_turn.max_assistant_turns=3"),
        f"{R}.multi_turn.interaction_config_path={CONFIG}/interaction_config/gsm8k_interaction_config.yaml",
    ]


def search(port: int) -> list[str]:
    prepare("examples/data_preprocess/preprocess_search_r1_dataset.py", "--local_dir", "data")
    return [
        *("--config-path", CONFIG, "--config-name", "search_multiturn_grpo", "data.train_files=data/train.parquet"),
        f"{R}.multi_turn.tool_config_path={with_port(f'{CONFIG}/tool_config/search_tool_config.yaml', port)}",
    ]


def retool(port: int) -> list[str]:
    import datasets

    rows = [{"Problem": f"What is {a} times 21?", "Answer": 21 * a} for a in range(12, 20)]
    folder = Path("data/Maxwell-Jia/AIME_2024")
    folder.mkdir(parents=True)
    datasets.Dataset.from_list(rows).to_parquet(str(folder / "train.parquet"))
    return [
        *(f"data.train_files={folder}", "data.custom_cls.path=recipe/retool/retool.py"),
        *("data.custom_cls.name=CustomRLHFDataset", "custom_reward_function.path=recipe/retool/retool.py"),
        *("custom_reward_function.name=compute_score", f"{R}.multi_turn.enable=True"),
        f"{R}.multi_turn.tool_config_path={with_port('recipe/retool/sandbox_fusion_tool_config.yaml', port)}",
    ]


def langgraph() -> list[str]:
    options = ("--train_size", "8", "--test_size", "2", "--output_dir", "data")
    prepare("recipe/langgraph_agent/example/create_dataset.py", *options)
    return [
        *("data.train_files=data/train.parquet", f"{R}.multi_turn.format=hermes"),
        f"{R}.agent.agent_loop_config_path=recipe/langgraph_agent/example/agent.yaml",
    ]


def own_loop() -> list[str]:
    """verl's own tool loop, as a user's file."""
    prepare("examples/data_preprocess/gsm8k_tool_agent_loop.py", "--local_save_dir", "data")
    Path("my_loop.py").write_text(Path("own_0/tool_agent_loop.py").read_text())
    Path("agent.yaml").write_text("- name: tool_agent\n  _target_: my_loop.ToolAgentLoop\n")
    tools = f"{CONFIG}/tool_config/gsm8k_tool_config.yaml"
    if not Path(tools).exists():  # verl 0.9 has the loop and no tools
        tools = "tools.yaml"
        Path(tools).write_text("tools: [{class_name: verl.tools.gsm8k_tool.Gsm8kTool, config: {type: native}}]\n")
    return [
        *("data.train_files=data/train.parquet", f"{R}.agent.agent_loop_config_path=agent.yaml"),
        *(f"{R}.multi_turn.tool_config_path={tools}", f"{R}.multi_turn.format=hermes"),
    ]


def dapo() -> list[str]:
    prepare("examples/data_preprocess/dapo_multiturn_w_tool.py", "--local_save_dir", "data")
    return [
        *("data.train_files=data/train.parquet", "data.max_response_length=600", "reward_model.reward_manager=dapo"),
        *("reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=300"),
        *("reward_model.overlong_buffer.penalty_factor=1.0", "algorithm.filter_groups.enable=True"),
        *("algorithm.filter_groups.metric=score", "algorithm.filter_groups.max_num_gen_batches=5"),
        *(f"{A}.clip_ratio_low=0.2", f"{A}.clip_ratio_high=0.28", f"{A}.loss_agg_mode=token-mean"),
        f"{R}.agent.default_agent_loop=single_turn_agent",
    ]


CASES: dict[str, tuple[Callable[..., list[str]], Script, str]] = {
    "gsm8k_tool": (gsm8k_tool, gsm8k_turn, ""),
    "search": (search, search_turn, "retrieval"),
    "retool": (retool, code_turn, "sandbox"),
    "interaction": (interaction, corrected_turn, ""),
    "langgraph": (langgraph, graph_turn, ""),
    "own_loop": (own_loop, gsm8k_turn, ""),
    "dapo": (dapo, dapo_turn, ""),
}


@contextlib.contextmanager
def server_of(kind: str) -> Iterator[list[int]]:
    if not kind:
        yield []
        return
    command = [kind]
    if kind == "retrieval":
        texts = [f'"{place}"\n{place} is the capital of {land}.' for place, land in zip(PLACES, LANDS, strict=True)]
        lines = [json.dumps({"id": str(number), "contents": text}) for number, text in enumerate(texts)]
        Path("corpus.jsonl").write_text("\n".join(lines))
        subprocess.run([sys.executable, "-m", "rally", "data", "index", "corpus.jsonl", "--out", "index"], check=True)
        command.append("index")
    with serving(*command) as port:
        yield [port]


def run_case(name: str) -> str:
    """Train the case in the working directory. Returns its line of the table."""
    make, script, kind = CASES[name]
    policy = ScriptedPolicy(script, write_model(Path("model")))
    with server_of(kind) as ports, mock.patch.object(EmbeddedEngine, "generate", policy.method()):
        arguments = [*COMMON, *make(*ports)]
        flags = [word for word in arguments if not re.match(r"[\w+.]+=", word)]
        keys = [word for word in arguments if word not in flags]
        if not any(key.startswith("data.val_files") for key in keys):
            keys.append(
                next(key for key in keys if key.startswith("data.train_files")).replace("train_files", "val_files")
            )
        app(["train", *flags, *keys, "trainer.default_local_dir=run"], standalone_mode=False)
    return summary(name, RunFolder(Path("run")))


def summary(name: str, run: RunFolder) -> str:
    steps = sorted({row.step for row in run.read_metrics()})
    episodes = [episode for step in steps for episode in run.read_episodes(step)]
    errors = [str(episode.error) for episode in episodes if episode.error]
    observed = sum(turn.role in ("tool", "user") for episode in episodes for turn in episode.turns)
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    assert not errors, errors[0]
    spread = f"{min(rewards):.2f} to {max(rewards):.2f}, mean {sum(rewards) / len(rewards):.2f}"
    return f"| {name} | {len(steps)} | {len(episodes)} | {observed} | {spread} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verl", type=Path)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], default=[])
    arguments = parser.parse_args()
    checkouts = [arguments.verl.resolve(), arguments.recipe.resolve()]
    if len(arguments.cases) != 1:
        print(
            "| case | steps | episodes | tool and user turns | rewards |\n| --- | --- | --- | --- | --- |", flush=True
        )
        for name in arguments.cases or CASES:  # each in a process: the cases import different files by the same names
            command = [sys.executable, "-m", "benchmarks.verl_runs", *map(str, checkouts), name]
            ended = subprocess.run(command, capture_output=True, text=True)
            last = ended.stdout.strip().split("\n")[-1]
            print(
                last if ended.returncode == 0 else f"{name} FAILED: {ended.stdout[-500:]}{ended.stderr[-1500:]}",
                flush=True,
            )
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for checkout in checkouts:
            stage(checkout, Path(folder))
        print(run_case(arguments.cases[0]))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
