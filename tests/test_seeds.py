"""Formats from public documentation are accepted: tool files, rows, command-line options, loops, metrics.

`compat/test_compat_verl_run.py` trains with them; `config/test_config_documents.py` has the configurations.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rally.chat import ChatCodec, tiny_tokenizer
from rally.cli.main import app
from rally.config import ConfigError, load_config, load_sft_config
from rally.data import DataError, load_tasks, write_rows
from rally.interactions import load_interactions
from rally.loops.registry import import_loop
from rally.runs.build.tracking import trace_of
from rally.tools import ToolBox, load_tools
from rally.track import RunFolder
from rally.types import RallyError, Task, ToolCall, ToolStatus

R, A = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's working folder with packages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


async def answers(tools: Any, task: Task, *calls: ToolCall) -> list[tuple[str, str, float | None]]:
    session = ToolBox(tools).open(task, "e")
    try:
        return [(r.status.value, r.response.text or "", r.reward) for r in await session.run(list(calls))]
    finally:
        await session.close()


def task(**fields: Any) -> Task:
    return Task(id="t", data_source="d", prompt=({"role": "user", "content": "?"},), **fields)


ARGUMENTS_TOOL = """
from typing import Any
from pydantic import BaseModel, Field
from verl.tools.base_tool import BaseTool, ToolResponse

class Wanted(BaseModel):
    topic: str = Field(..., description="What to look for")

class Shelf(BaseTool[Wanted]):
    name = "shelf"
    description = "Looks into the shelf"
    args_schema = Wanted

    async def create(self, *args, **kwargs) -> tuple[str, ToolResponse]:
        return "one", ToolResponse(text="ready")

    async def execute(self, args: Wanted, **kwargs) -> tuple[dict[str, Any], float, dict]:
        return {"found": args.topic, "pages": [3, 4]}, 0.5, {}
"""
PLAIN_TOOL = """
class MyScaleTool:
    def __init__(self, **create_kwargs):
        self.digits = create_kwargs.get("digits", 1)

    def execute(self, grams: str, **execute_kwargs):
        try:
            return {"kilograms": round(float(grams) / 1000, self.digits), "success": True}
        except ValueError as error:
            return {"kilograms": None, "success": False, "error": str(error)}
"""
TOOL_FILE = """
tools:
  - class_name: shop.tools.shelf.Shelf
    config: {type: native}
    tool_schema:
      name: shelf
      description: "Looks into the shelf"
      parameters: {type: object, properties: {topic: {type: string}}, required: ["topic"]}
  - class_name: my_scale.MyScaleTool
  - name: calculator
    description: "Evaluates an expression"
    parameters: {type: object, properties: {expression: {type: string, description: "What to evaluate"}}}
  - class_name: "verl.tools.search_tool.SearchTool"
    config: {
      "retrieval_service_url": "http://127.0.0.1:9/retrieve",
      "num_workers": 7,
      "rate_limit": 9,
      "default_timeout": 30
    }
  - class_name: "verl.tools.sandbox_fusion_tools.SandboxFusionTool"
    config: {sandbox_fusion_url: "http://127.0.0.1:9/run_code", num_workers: 5, rate_limit: 5, default_timeout: 30}
"""


def test_tool_classes_of_three_kinds_stand_in_one_file(here: Path) -> None:
    write(here / "shop" / "tools" / "shelf.py", ARGUMENTS_TOOL)
    write(here / "my_scale.py", PLAIN_TOOL)
    tools = load_tools(write(here / "conf" / "tools.yaml", TOOL_FILE))
    assert [tool.name for tool in tools] == ["shelf", "my_scale", "calculator", "search", "code_interpreter"]
    assert (tools[3].limits.max_concurrency, tools[3].limits.rate_limit) == (7, None), "both are calls at a time"
    told = asyncio.run(
        answers(
            tools,
            task(tools_kwargs={"my_scale": {"create_kwargs": {"digits": 3}}}),
            ToolCall(name="shelf", arguments={"topic": "nails"}),
            ToolCall(name="my_scale", arguments={"grams": "1234"}),
            ToolCall(name="my_scale", arguments={"grams": "much"}),
            ToolCall(name="calculator", arguments={"expression": "2+3*4"}),
        )
    )
    assert told[0] == ("ok", '{"found": "nails", "pages": [3, 4]}', 0.5)
    assert told[1][1] == '{"kilograms": 1.234, "success": true}'
    assert told[2][0] == ToolStatus.ERROR.value and "could not convert" in told[2][1]
    assert told[3][:2] == ("ok", "14")


def test_a_user_of_verl_is_a_user(here: Path) -> None:
    write(
        here / "teachers.py",
        """
from verl.interactions.base import BaseInteraction

class PatientInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)

    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "Well done.", 1.0, {}
""",
    )
    [patient, gsm8k] = load_interactions(
        {
            "interaction": [
                {"class_name": "teachers.PatientInteraction", "config": {}},
                {"name": "gsm8k", "class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction"},
            ]
        }
    )
    assert (patient.name, gsm8k.name) == ("patient", "gsm8k")


ROW = {
    "data_source": "openai/gsm8k",
    "agent_name": "tool_agent",
    "prompt": [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": "6 eggs, 2 eaten?"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "4"}}},
    },
}
BEGUN = [
    {"role": "user", "content": "How many clips?"},
    {"role": "assistant", "content": "Let me calculate."},
    {"role": "tool", "content": "48", "name": "calculator"},
]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
def test_rows_read_the_same_from_every_kind_of_file(here: Path, suffix: str) -> None:
    rows = [ROW, ROW | {"prompt": BEGUN, "tools": ["calculator"]}]
    if suffix == "json":
        write(here / "rows.json", json.dumps(rows))
    else:
        write_rows(rows, here / f"rows.{suffix}")
    first, second = load_tasks(here / f"rows.{suffix}")
    assert (first.agent_name, first.ground_truth) == ("tool_agent", "4")
    assert first.tools_kwargs == ROW["extra_info"]["tools_kwargs"]
    assert [message["role"] for message in second.prompt] == ["user", "assistant", "tool"]
    assert second.extra_info["tool_selection"] == ["calculator"]
    assert "tool_selection" not in first.extra_info


def test_two_selections_of_tools_must_agree(here: Path) -> None:
    extra = {**ROW["extra_info"], "tool_selection": ["search"]}
    write_rows([ROW | {"tools": ["calculator"], "extra_info": extra}], here / "rows.jsonl")
    with pytest.raises(DataError, match="they must agree"):
        load_tasks(here / "rows.jsonl")


def test_the_reward_tool_judges_an_answer_and_a_call_that_is_torn_is_answered() -> None:
    [tool] = load_tools({"tools": [{"class_name": "verl.tools.gsm8k_tool.Gsm8kTool", "config": {"type": "native"}}]})
    kwargs = ROW["extra_info"]["tools_kwargs"]
    call = ToolCall(name="calc_gsm8k_reward", arguments={"answer": "4"})
    [(status, text, _)] = asyncio.run(answers([tool], task(tools_kwargs=kwargs), call))
    assert status == "ok" and "4" in text
    codec = ChatCodec(tiny_tokenizer(), "hermes", [tool.tool_schema])
    whole = '<tool_call>{"name": "calc_gsm8k_reward", "arguments": {"answer": "4"}}</tool_call>'
    good, torn = (codec.parse(codec.tokenizer(text)["input_ids"]) for text in (whole, whole.replace('"4"}}', "4")))
    assert good.tool_calls[0].arguments == {"answer": "4"} and not good.errors
    assert torn.errors, "the model is told, and nothing is dropped"


MULTI_DEVICE = {
    "trainer.n_gpus_per_node=8": "set it to 1",
    f"{A}.strategy=megatron": f"set {A}.strategy=fsdp2",
}


@pytest.mark.parametrize("word", MULTI_DEVICE)
def test_what_needs_several_devices_is_one_sentence(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[word])
    [sentence] = caught.value.problems
    assert sentence.startswith(word.partition("=")[0]) and MULTI_DEVICE[word] in sentence


@pytest.mark.parametrize("word", [f"{A}.ulysses_sequence_parallel_size=4"])
def test_hints_for_memory_are_accepted_with_a_note(word: str) -> None:
    notes: list[str] = []
    load_config(overrides=[word], note=notes.append)
    assert len(notes) == 1 and word in notes[0] and "needs more memory and gives the same result" in notes[0]


ANY_VALUE = (
    *(f"{R}.calculate_log_probs", f"{R}.layered_summon", f"{R}.skip_tokenizer_init", f"{A}.calculate_entropy"),
    *(f"{A}.use_remove_padding", f"{A}.entropy_from_logits_with_chunking", f"{A}.entropy_checkpointing"),
    *("actor_rollout_ref.model.use_remove_padding", "actor_rollout_ref.model.use_fused_kernels"),
    *("data.return_raw_chat", "trainer.balance_batch", "reward_model.launch_reward_fn_async"),
    *(f"{A}.fsdp_config.forward_prefetch", f"{A}.fsdp_config.reshard_after_forward"),
)


@pytest.mark.parametrize("value", ["true", "false"])
def test_what_is_always_done_may_be_asked_for_or_not(value: str) -> None:
    load_config(overrides=[f"{key}={value}" for key in ANY_VALUE])


def test_samples_are_traced_per_worker(here: Path) -> None:
    words = [f"{R}.trace.backend=mlflow", f"{R}.trace.max_samples_per_step_per_worker=2", f"{R}.agent.num_workers=8"]
    settings = trace_of(load_config(overrides=words), RunFolder(here), tiny_tokenizer())
    assert settings is not None and settings.max_samples == 16


def test_words_of_a_fine_tuning_command() -> None:
    config = load_sft_config(
        overrides=[
            *("data.multiturn.enable=true", "data.multiturn.messages_key=talk", "data.multiturn.tools_key=toolbox"),
            *("data.train_batch_size=32", "data.micro_batch_size_per_gpu=4", "data.max_length=4096"),
            *("data.pad_mode=right", "data.use_dynamic_bsz=False", "model.partial_pretrain=some/model"),
            *("model.strategy=fsdp", "model.fsdp_config.cpu_offload=False", "model.fsdp_config.optimizer_offload=True"),
            *("optim.warmup_steps_ratio=0.1", "trainer.total_epochs=6", "trainer.max_ckpt_to_keep=2"),
            *("trainer.logger=[console,wandb]", "ulysses_sequence_parallel_size=1", "use_remove_padding=true"),
        ]
    )
    assert (config.messages_key, config.tools_key, config.model_path) == ("talk", "toolbox", "some/model")
    assert config.optim.lr_warmup_steps_ratio == 0.1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--config-path", "conf"], "name the file in it with --config-name"),
        (["mine.yaml", "--config-name", "other"], "both name a configuration"),
        (["--config-path", "conf", "--config-name", "missing"], "conf/missing.yaml does not exist"),
    ],
)
def test_the_flags_that_name_a_file(words: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["train", *words])
    assert sentence in str(result.exception)


def test_folders_to_merge_are_named_once() -> None:
    for words in ([], ["here", "--local_dir", "there"]):
        assert "rally merge FOLDER" in str(CliRunner().invoke(app, ["merge", *words]).exception)


def test_classes_of_an_installed_verl_are_told_apart(here: Path) -> None:
    base = 'Base = type("BaseTool", (), {"__module__": "verl.tools.base_tool"})'
    write(here / "theirs.py", f"{base}\nclass Tool(Base):\n    pass\n")
    with pytest.raises(RallyError, match=r"theirs.Tool derives from the installed verl"):
        load_tools({"tools": [{"class_name": "theirs.Tool"}]})
    with pytest.raises(RallyError, match=r"theirs.Tool derives from the installed verl"):
        import_loop("theirs.Tool")
