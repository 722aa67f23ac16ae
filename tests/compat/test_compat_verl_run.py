"""Files and command lines of verl train unchanged: Hydra's flags, classes, rows, rewards."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from train_cases import write_model
from typer.testing import CliRunner

from rally.cli.main import app
from rally.compat.verl.config_for_loops import config_for_loops
from rally.config import load_config
from rally.data import write_rows
from rally.track import RunFolder

A, R, F = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"

CONFIG = """
hydra:
  searchpath:
    - file://verl/trainer/config
defaults:
  - ppo_trainer
  - _self_
data:
  max_prompt_length: 200
  max_response_length: 24
  return_raw_chat: True
actor_rollout_ref:
  hybrid_engine: True
  rollout:
    multi_turn:
      enable: True
      max_assistant_turns: 2
"""
TOOL = """
from typing import Any, Optional
from uuid import uuid4
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

class StockTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._shops = {}

    async def create(self, instance_id: Optional[str] = None, shop: str = "", **kwargs) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self._shops[instance_id] = shop
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        return ToolResponse(text=f"{parameters['item']} at {self._shops[instance_id]}: 3"), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._shops[instance_id]
"""
TOOLS = """
tools:
  - class_name: "stock_tool.StockTool"
    config: {type: native}
    tool_schema:
      type: "function"
      function:
        name: "stock"
        description: "How many there are."
        parameters:
          type: "object"
          properties:
            item: {type: "string", description: "What is asked for."}
          required: ["item"]
"""
REWARD = """
from verl.trainer.ppo.reward_score.base import RewardManager

@RewardManager.register("shop")
def compute_reward(data):
    said = [[turn["content"] for turn in t if turn["role"] == "assistant"] for t in data["trajectories"]]
    return [len("".join(texts)) % 5 / 5 for texts in said]
"""
LOOP = """
from verl.protocol import DataProto
from verl.workers.rollout.sglang_rollout.agent_loop.base import AgentLoopBase

class Twice(AgentLoopBase):
    def __init__(self, max_turns=9):
        self.max_turns = max_turns

    async def generate(self, llm_server, data: DataProto, **kwargs) -> DataProto:
        [history] = data.batch["prompt"]
        for _ in range(self.max_turns):
            answer = await llm_server.generate(prompts=[history], max_new_tokens=5, **kwargs)
            history = history + [{"role": "assistant", "content": answer["text"][0]}, {"role": "user", "content": "?"}]
        output = data.clone()
        output.batch["response"] = [history]
        return output
"""
TOKENS = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

class Once(AgentLoopBase):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.response_length = self.config.actor_rollout_ref.rollout.response_length
        self.turns = self.config.actor_rollout_ref.rollout.multi_turn.get("max_assistant_turns")

    async def run(self, sampling_params, **kwargs):
        prompt = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        said = await self.server_manager.generate(request_id="r", prompt_ids=prompt, sampling_params=sampling_params)
        ids = said.token_ids[: self.response_length]
        extra = {"seen": [self.response_length, self.turns]}
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=[1] * len(ids), extra_fields=extra)
"""
ROW = {
    "data_source": "shop",
    "agent_name": "tool_agent",
    "prompt": [{"role": "system", "content": "Use `stock`."}, {"role": "user", "content": "Nails?"}],
    "ability": "shop",
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {
        "split": "train",
        "index": 0,
        "need_tools_kwargs": True,
        "tools_kwargs": {"stock": {"create_kwargs": {"shop": "north"}}},
    },
}


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_model(tmp_path / "model")
    (tmp_path / "config").mkdir()
    texts = {"config/shop_grpo.yaml": CONFIG, "stock_tool.py": TOOL, "tools.yaml": TOOLS}
    for name, text in {**texts, "shop_reward.py": REWARD, "twice_loop.py": LOOP, "once_loop.py": TOKENS}.items():
        (tmp_path / name).write_text(text)
    write_rows([ROW] * 4, tmp_path / "train.parquet")
    return tmp_path


WORDS = (
    *("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=False", "algorithm.kl_ctrl.kl_coef=0.0"),
    *("data.train_files=train.parquet", "data.val_files=train.parquet", "data.train_batch_size=2"),
    *("data.truncation='error'", "data.filter_overlong_prompts=True", "data.filter_overlong_prompts_workers=2"),
    *("data.dataloader_num_workers=8", "actor_rollout_ref.model.path=model"),
    *("actor_rollout_ref.model.use_remove_padding=True", "actor_rollout_ref.model.enable_gradient_checkpointing=True"),
    *(f"{A}.strategy=fsdp2", f"{A}.optim.lr=1e-4", f"{A}.ppo_mini_batch_size=2", f"{A}.ppo_micro_batch_size_per_gpu=2"),
    *(f"{A}.use_dynamic_bsz=False", f"{A}.use_kl_loss=True", f"{A}.kl_loss_coef=0.001", f"{A}.entropy_coeff=0"),
    *(f"{A}.kl_loss_type=low_var_kl", f"{A}.use_torch_compile=False", f"{A}.fsdp_config.param_offload=False"),
    *(f"{A}.fsdp_config.optimizer_offload=True", f"{A}.fsdp_config.fsdp_size=-1"),
    *(f"{R}.mode=async", f"{R}.n=4", f"{R}.log_prob_micro_batch_size_per_gpu=2", f"{R}.agent.num_workers=8"),
    *(f"{R}.gpu_memory_utilization=0.5", f"{R}.tensor_model_parallel_size=1", f"{R}.calculate_log_probs=False"),
    *(f"{R}.free_cache_engine=True", f"{R}.enable_chunked_prefill=True", f"{R}.load_format=safetensors"),
    *(f"{F}.log_prob_micro_batch_size_per_gpu=2", f"{F}.fsdp_config.param_offload=True"),
    *("custom_reward_function.path=shop_reward.py", "custom_reward_function.name=compute_reward"),
    *("trainer.critic_warmup=0", 'trainer.logger=["console","file"]', "trainer.project_name=shop"),
    *("trainer.n_gpus_per_node=1", "trainer.nnodes=1", "trainer.save_freq=-1", "trainer.test_freq=1"),
    *("trainer.default_local_dir=run", "trainer.total_training_steps=1", "trainer.val_before_train=False"),
    *("reward.num_workers=1", "+trainer.balance_batch=True"),
)


def trained(shop: Path, more: Sequence[str]) -> RunFolder:
    file = ["--config-path", str(shop / "config"), "--config-name", "shop_grpo"]
    result = CliRunner().invoke(app, ["train", *file, *WORDS, *more])
    assert result.exit_code == 0, (result.output, result.exception)
    return RunFolder(shop / "run")


def test_a_command_line_with_a_tool_class_and_a_reward_over_trajectories(shop: Path) -> None:
    run = trained(shop, [f"{R}.multi_turn.tool_config_path=tools.yaml"])
    episodes = list(run.read_episodes(1))
    assert len(episodes) == 8 and all(e.error is None and e.reward is not None for e in episodes)
    told = {name: value for row in run.read_metrics() for name, value in row.metrics.items()}
    for name in (
        *("critic/rewards/mean", "critic/rewards/std", "response_length/mean", "num_turns/mean", "actor/kl_loss"),
        *("timing_s/gen", "timing_s/update_actor", "perf/samples_per_s", "actor/ppo_kl", "actor/grad_norm"),
        *("val-core/shop/reward/mean@1", "val-aux/num_turns/mean", "prompt_length/mean", "perf/throughput"),
    ):
        assert name in told, name


def test_the_same_with_a_loop_over_messages(shop: Path) -> None:
    run = trained(shop, [f"{R}.agent_loop_class=twice_loop.Twice", f"{R}.agent_loop_config.max_turns=2"])
    episodes = list(run.read_episodes(1))
    assert len(episodes) == 8 and all(e.error is None for e in episodes)
    for episode in episodes:
        roles = [turn.role for turn in episode.turns]
        assert roles[:2] == ["assistant", "user"]
        assert all(0 < turn.end - turn.start <= 5 for turn in episode.turns if turn.role == "assistant")


def test_a_loop_over_tokens_reads_the_keys_of_the_run(shop: Path) -> None:
    run = trained(shop, [f"{R}.agent_loop_class=once_loop.Once"])
    episodes = list(run.read_episodes(1))
    assert len(episodes) == 8 and all(e.error is None for e in episodes)
    assert all(e.extra["seen"] == [24, 2] for e in episodes)
    sampled = [logprob for e in episodes for s in e.segments for logprob in s.response_logprobs]
    assert sampled and all(logprob < 0 for logprob in sampled)


@pytest.mark.parametrize("text", ["${", "a ${b}", r"\${c", r"\\${d}", "plain"])
def test_a_loop_reads_keys_as_they_were_written(text: str) -> None:
    config = load_config(base={"data": {}})
    rollout = config.rollout.model_copy(update={"stop_strings": (text,)})
    config = config.model_copy(
        update={"actor_rollout_ref": config.actor_rollout_ref.model_copy(update={"rollout": rollout})}
    )
    assert list(config_for_loops(config).actor_rollout_ref.rollout.stop_strings) == [text]
