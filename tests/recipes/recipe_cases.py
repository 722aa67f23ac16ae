"""Every shipped recipe at a small scale: its own YAML, with a tiny random model and a few of its own rows."""

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from vision_cases import write_vision_model

from rally.chat import tiny_tokenizer
from rally.data import write_rows
from rally.models.lora import LoraSettings, adapter_weights, add_adapters, save_adapters
from rally.recipes.geometry.data import GeometrySizes, write_geometry
from rally.recipes.gsm8k_tool.data import write_gsm8k, write_gsm8k_sft
from rally.recipes.repair.data import RepairSizes, write_repair
from rally.recipes.retool.data import RetoolSizes, write_retool
from rally.recipes.search_r1.data import write_search_r1
from rally.recipes.tool_use.data import write_tool_use
from rally.recipes.triage import data as triage
from rally.recipes.triage.data import TriageSizes, write_triage
from rally.retrieval import IndexSpec, build_index

R, A = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
MODELS = (
    "models/triage",
    *(
        f"runs/rally/{n}/actor"
        for n in (
            "gsm8k_tool_sft/checkpoints/global_step_4",
            "gsm8k_tool_sft_smollm/checkpoints/global_step_345",
            "repair_sft/checkpoints/global_step_8",
            "retool_sft/checkpoints/global_step_40",
            "search_r1_sft/checkpoints/global_step_6",
            "tool_use_sft/checkpoints/global_step_8",
            "triage_sft/checkpoints/global_step_220",
        )
    ),
)
ADAPTERS = "runs/rally/gsm8k_tool_sft_lora/checkpoints/global_step_12/actor"
SMALL_TRAIN = (
    "actor_rollout_ref.model.path=models/tiny",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "data.train_batch_size=2",
    "data.gen_batch_size=null",
    "data.max_prompt_length=3000",
    "data.max_response_length=48",
    "data.val_max_samples=1",
    f"{A}.ppo_mini_batch_size=2",
    f"{R}.n=2",
    f"{R}.max_num_seqs=8",
    f"{R}.val_kwargs.n=1",
    "reward_model.reward_kwargs.overlong_buffer_cfg.len=8",
    "algorithm.filter_groups.max_num_gen_batches=0",
    "critic.ppo_mini_batch_size=2",
    "trainer.total_training_steps=2",
    "trainer.critic_warmup=0",
    "data.curriculum.grow_steps=1",
    "reward.num_workers=1",
)
SMALL_ENV = ("env.train_size=48", "env.val_size=1")
"""Instead of the size of a validation file, for recipes of environments."""
STUB_AGENT = "actor_rollout_ref.rollout.agent_loop_config.agent=stub_repair_agent:run"
SMALL_SFT = (
    "model.path=models/tiny",
    "model.enable_gradient_checkpointing=false",
    "data.train_batch_size=2",
    "data.max_length=4000",
    "trainer.total_training_steps=2",
)


BASH = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


def write_tiny_model(folder: Path) -> None:
    tokenizer = tiny_tokenizer(triage.WORDS)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=1,
        max_position_embeddings=4096,
        initializer_range=0.1,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **sizes,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_tiny_adapters(model: Path, folder: Path) -> None:
    adapted = Qwen2ForCausalLM.from_pretrained(model)
    add_adapters(adapted, LoraSettings(rank=16, alpha=32), "models/tiny")
    save_adapters(adapted, adapter_weights(adapted), folder)


def passing(rows, total, label):  # type: ignore[no-untyped-def]
    return rows


def write_home(home: Path) -> Path:
    """All inputs of the recipes, with few rows each, at the paths in their YAML."""
    write_tiny_model(home / "models" / "tiny")
    for model in MODELS:
        (home / model).mkdir(parents=True)
    write_tiny_adapters(home / "models" / "tiny", home / ADAPTERS)
    sums = [
        {"question": f"What is {n} and {n}?", "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"}
        for n in range(1, 9)
    ]
    for split in ("train", "test"):
        write_rows(sums, home / "source" / f"{split}.jsonl")
    write_gsm8k(home / "data" / "gsm8k", home / "source", "agent_loop", passing, "calculator")
    write_gsm8k_sft(home / "data" / "gsm8k", home / "source", passing)
    write_gsm8k(home / "data" / "gsm8k_interaction", home / "source", "interaction", passing)
    write_triage(home / "data" / "triage", TriageSizes(8, 2, 8, 8), 0)
    write_retool(home / "data" / "retool", RetoolSizes(8, 2, 8), None, None, 0)
    _write_search(home)
    write_geometry(home / "data" / "geometry", GeometrySizes(4, 1), (1, 2, 3), None, 0)
    write_vision_model(home / "models" / "tiny_vision")
    write_tool_use(home / "data" / "tool_use", 7, 0, passing)
    _write_repair(home)
    return home


def _write_repair(home: Path) -> None:
    """Rows of repositories, and a conversation by hand, since those of the recipe need mini-swe-agent."""
    write_repair(home / "data" / "repair", RepairSizes(4, 1, 0), 0, passing)
    call = {"type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
    tool = {"type": "function", "function": {"name": "bash", "description": "Runs.", "parameters": BASH}}
    messages = [
        {"role": "user", "content": "Repair it."},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "a.py", "name": "bash"},
        {"role": "assistant", "content": "Done."},
    ]
    write_rows([{"messages": messages, "tools": [tool]}] * 4, home / "data" / "repair" / "sft.parquet")


def _write_search(home: Path) -> None:
    questions = [
        {
            "id": f"q{n}",
            "question": f"Who is Person {n}?",
            "golden_answers": [f"Mr {n}"],
            "supporting_titles": [f"Person {n}"],
        }
        for n in range(30)
    ]
    passages = [{"id": str(n), "title": f"Person {n}", "text": f"{n} is Mr {n}."} for n in range(30)]
    write_rows(questions, home / "hotpotqa" / "train.jsonl")
    write_rows(passages, home / "hotpotqa" / "corpus.jsonl")
    out = home / "data" / "search_r1"
    write_search_r1(out, home / "hotpotqa", None, sft=True)
    build_index(out / "corpus.jsonl", out / "index", IndexSpec())
