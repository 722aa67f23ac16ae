"""Configuration snippets from the documentation of verl and similar projects load, or name what is not built yet."""

from pathlib import Path

import pytest

from rally.config import Config, ConfigError, load_config

R = "actor_rollout_ref.rollout"


def problems(path: Path | None = None, overrides: tuple[str, ...] = ()) -> tuple[str, ...]:
    try:
        load_config(path, overrides)
    except ConfigError as error:
        return error.problems
    return ()


def keys_refused(found: tuple[str, ...]) -> set[str]:
    assert all("not built yet" in line for line in found), found
    return {line.partition("=")[0] for line in found}


YAML_SNIPPETS = {
    "two lines switch multi-turn on": (
        """
actor_rollout_ref:
  rollout:
    name: sglang
    multi_turn: true
""",
        set(),
    ),
    "tools hang on the rollout": (
        """
actor_rollout_ref:
  rollout:
    name: sglang
    multi_turn: true
    tool_kwargs:
      tools_config_file: {tools}
""",
        set(),
    ),
    "the asynchronous engine": (
        """
actor_rollout_ref:
  rollout:
    name: "sglang_async"
    multi_turn:
      enable: True
""",
        set(),
    ),
    "server and agent loop": (
        """
actor_rollout_ref:
  rollout:
    name: sglang
    mode: standalone
    port_start: 30000
    tensor_model_parallel_size: 2
    data_parallel_size: 1
    gpu_memory_utilization: 0.6
    use_agent_loop: True
    max_turns: 10
    stop_on_tool_success: True
""",
        set(),
    ),
    "a loop class of one's own": (
        """
actor_rollout_ref:
  rollout:
    agent_loop_class: "examples.sglang_multiturn.gsm8k_toolcall_shaping.agent_loop.GSM8KToolAgentLoop"
    agent_loop_config:
      max_turns: 10
      tools: ["calculator"]
      stop_on_correct: True
""",
        set(),
    ),
    "reward shaping": (
        """
reward_shaping:
  enable: True
  intermediate_rewards:
    tool_call_success: 0.1
    valid_reasoning: 0.05
  penalties:
    invalid_tool_call: -0.1
    max_turns_exceeded: -0.5
    redundant_tool_call: -0.05
""",
        set(),
    ),
    "dotted keys in YAML": (
        """
data.return_raw_chat: true
actor_rollout_ref.rollout.mode: async
actor_rollout_ref.rollout.name: sglang
""",
        set(),
    ),
}


@pytest.mark.parametrize("name", YAML_SNIPPETS)
def test_yaml_of_the_documents_loads_or_reports_what_is_not_built(name: str, tmp_path: Path) -> None:
    text, refused = YAML_SNIPPETS[name]
    (tmp_path / "tools.yaml").write_text("tools: []")
    file = tmp_path / "run.yaml"
    file.write_text(text.replace("{tools}", str(tmp_path / "tools.yaml")))
    assert keys_refused(problems(file)) == refused


@pytest.mark.parametrize("name", list(YAML_SNIPPETS)[:5])
def test_yaml_of_the_documents_loads_without_what_is_not_built(name: str, tmp_path: Path) -> None:
    text, _ = YAML_SNIPPETS[name]
    (tmp_path / "tools.yaml").write_text("tools: []")
    kept = [line for line in text.splitlines() if not line.strip().startswith(("name:", "mode:", "port", "tensor"))]
    file = tmp_path / "run.yaml"
    file.write_text("\n".join(kept).replace("{tools}", str(tmp_path / "tools.yaml")))
    assert load_config(file).agent_loop_name.endswith(("tool_agent", "GSM8KToolAgentLoop"))


def test_the_command_line_of_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("rally.config.checks.consistency.count_gpus", lambda _: 8)
    (tmp_path / "data/gsm8k_tool").mkdir(parents=True)
    for name in ("train", "test"):
        (tmp_path / f"data/gsm8k_tool/{name}.parquet").touch()
    line = (
        "algorithm.adv_estimator=grpo",
        "data.train_files=$HOME/data/gsm8k_tool/train.parquet",
        "data.val_files=$HOME/data/gsm8k_tool/test.parquet",
        "data.train_batch_size=256",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct",
        f"{R}.name=sglang",
        f"{R}.use_agent_loop=True",
        f"{R}.tensor_model_parallel_size=2",
        f"{R}.gpu_memory_utilization=0.6",
        f"{R}.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=256",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.001",
        "trainer.n_gpus_per_node=8",
        "trainer.total_epochs=20",
    )
    config = load_config(overrides=line)
    config.require_training()
    assert config.agent_loop_name == "tool_agent"
    assert config.data.train_files == (str(tmp_path / "data/gsm8k_tool/train.parquet"),)


ONE_LINERS = {
    f"{R}.agent_loop_class = path.to.MyAgentLoop": True,
    f"{R}.max_turns=5": True,
    f"{R}.timeout_per_turn=30": True,
    f"{R}.stop_strings=['<|im_end|>', '##DONE##']": True,
    "reward_shaping.tool_format_reward=0.05": True,
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct": True,
    f"{R}.multi_turn.use_inference_chat_template = True": True,
    f"{R}.multi_turn.tokenization_sanity_check_mode=ignore_strippable": True,
    f"{R}.multi_turn.tokenization_sanity_check_mode=strict": True,
    f"{R}.multi_turn.tokenization_sanity_check_mode=disable": True,
    f"{R}.name=sglang_async": True,
    f"{R}.name=vllm": True,
    f"{R}.name=trtllm": True,
    f"{R}.quantization=fp8": True,
    "data.return_multi_modal_inputs=False": True,
    "trainer.val_before_train=False": True,
    "trainer.experiment_name=qwen2.5-3b-it_rm-searchR1-like-sgl-multiturn-2025-05-01-12-00": True,
}


@pytest.mark.parametrize("line", ONE_LINERS)
def test_one_line_of_the_documents(line: str) -> None:
    found = problems(overrides=(line,))
    assert bool(found) is not ONE_LINERS[line]
    assert keys_refused(found) <= {line.partition("=")[0].strip()}


def test_a_reward_function_by_path_and_name(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.touch()
    lines = (f"custom_reward_function.path={file}", "custom_reward_function.name=my_score")
    config: Config = load_config(overrides=lines)
    assert (config.reward_function.path, config.reward_function.name) == (str(file), "my_score")
