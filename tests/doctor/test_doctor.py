"""`rally doctor` finds each problem of a run, and one failed check does not stop the others."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mcp_server
import pytest
import yaml
from small_models import FAMILIES, make_model
from train_cases import run_config, run_tree
from typer.testing import CliRunner

from rally.cli.main import app
from rally.config import load_config
from rally.data import load_tasks, write_rows
from rally.doctor import doctor, environment, memory_and_time, rollout_logprobs
from rally.doctor.check_context import DoctorCase, DoctorOptions, Finding
from rally.doctor.doctor import CHECKS, Check, examine, exit_code, run_check
from rally.doctor.environment import Driver, judge_driver
from rally.models.untrained_tokens import chat_ids
from rally.runs.cost_estimate import StepTime
from rally.tools import BaseTool, ToolBox
from rally.types import RallyError

R, M = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
BUILT_IN_REWARD = "custom_reward_function={path: null}"
LOOKS = {check.name: check for check in CHECKS}


@pytest.fixture
def config_file(home: Path, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run_tree(home, tmp_path / "out")), encoding="utf-8")
    return path


@pytest.fixture
def find(home: Path, tmp_path: Path) -> Iterator[Any]:
    """The findings of one check about the small run with some keys changed."""
    cases: list[DoctorCase] = []

    def look(name: str, *overrides: str, options: DoctorOptions | None = None) -> list[Finding]:
        cases.append(DoctorCase(run_config(home, tmp_path / "out", *overrides), options))
        return list(run_check(LOOKS[name], cases[-1]))

    yield look
    for case in cases:
        case.close()


def told(findings: list[Finding], status: str) -> str:
    return "\n".join(one.text for one in findings if one.status == status)


def test_a_run_that_is_well_is_told_so_line_by_line(config_file: Path) -> None:
    findings = list(examine(config_file, [BUILT_IN_REWARD]))
    assert {one.check for one in findings} == {"config", *LOOKS, "time"}
    assert exit_code(findings) == 0, told(findings, "warning") + told(findings, "error")
    [prompt] = [one for one in findings if one.shown and one.check == "prompt"]
    kinds = [piece.kind for piece in prompt.shown]
    assert kinds == ["prompt", "sampled", "observed", "sampled"]
    assert '"6*7"' in prompt.shown[1].text and "the tool's response" in prompt.shown[2].text
    assert not (config_file.parent / "out").exists()


def test_the_exit_code_is_that_of_the_worst_line() -> None:
    lines = {status: Finding("x", status, "") for status in ("ok", "warning", "error")}  # type: ignore[arg-type]
    assert [exit_code(list(lines.values())[:n]) for n in range(4)] == [0, 0, 1, 2]


def test_the_command_prints_json_that_nothing_a_user_prints_can_spoil(
    config_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tool = tmp_path / "noisy.py"
    tool.write_text(
        "from rally.tools import function_tool\n\n@function_tool\ndef noisy(word: str) -> str:\n"
        '    """Says it."""\n    print("LOOK AT ME")\n    return word\n'
    )
    words = ["doctor", str(config_file), "--json", f"data.function_tool_path={tool}", BUILT_IN_REWARD]
    done = CliRunner().invoke(app, [*words, f"{R}.agent_loop_config.tools=[noisy]"])
    report = json.loads(done.stdout)
    assert done.exit_code == report["exit_code"] == 0 and "LOOK AT ME" in capfd.readouterr().err
    tools = [one for one in report["findings"] if one["check"] == "tools"]
    assert "noisy was called with made-up arguments" in tools[0]["text"]
    plain = CliRunner().invoke(app, [*words[:2], "nonsense.key=1"])
    assert plain.exit_code == 2 and "error   config      unknown key nonsense.key" in plain.stdout


def test_a_check_that_crashes_is_a_line_and_the_rest_still_runs(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(case: DoctorCase) -> Iterator[Finding]:
        yield Finding("tools", "ok", "so far so good")
        raise ZeroDivisionError("by a user's code")

    monkeypatch.setattr(doctor, "CHECKS", [Check("tools", crash), LOOKS["rows"]])
    findings = list(examine(config_file))
    assert "this check failed (ZeroDivisionError: by a user's code)" in told(findings, "error")
    assert "so far so good" in told(findings, "ok") and "12 training rows" in told(findings, "ok")


def test_a_configuration_with_mistakes_is_looked_at_as_far_as_it_has_a_meaning(config_file: Path) -> None:
    findings = list(examine(config_file, ["data.val_files=/no/such.parquet", f"{R}.repetition_penalty=1.1"]))
    wrong = [one.text for one in findings if one.check == "config"]
    assert any("/no/such.parquet does not exist" in text for text in wrong) and any(
        "repetition_penalty=1.1" in text for text in wrong
    )
    assert "12 training rows" in told(findings, "ok") and "there is no file /no/such.parquet" in told(findings, "error")
    assert {one.check for one in examine(None, ["data.nonsense=1"])} == {"config", "environment", "device"}
    assert "actor_rollout_ref.model.path is not set" in told(list(examine(None)), "error")


def test_what_fails_is_told_once_and_who_needs_it_says_so(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    findings = list(examine(config_file, [f"{M}.tokenizer_path={tmp_path}/empty"]))
    assert told(findings, "error").count("the tokenizer") == 1
    left_out = [one.check for one in findings if "because the tokenizer could not be loaded" in one.text]
    assert left_out == ["template", "lengths", "prompt", "policy"]
    assert {"tools", "reward", "memory"} <= {one.check for one in findings if one.status == "ok"}


def test_packages_that_are_missing_or_old_come_with_their_command(find: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = environment.metadata.version

    def version(name: str) -> str:
        if name == "peft":
            raise environment.metadata.PackageNotFoundError(name)
        return "2.0.1" if name == "torch" else real(name)

    monkeypatch.setattr(environment.metadata, "version", version)
    monkeypatch.setattr(environment.platform, "python_version", lambda: "3.9.2")
    wrong = told(find("environment", f"{M}.lora_rank=8", f"{R}.name=vllm", f"{R}.server.python=/no/python"), "error")
    assert "peft is not installed; run: pip install 'rally-rl[lora]'" in wrong
    assert "torch 2.0.1 is not >=2.11; run: pip install 'torch>=2.11'" in wrong
    assert "Python 3.9.2 is not supported" in wrong and "server.python=/no/python cannot be run" in wrong


@pytest.mark.parametrize(
    ("found", "status", "words"),
    [
        (Driver((12, 8), (12, 9), ("NVIDIA H200",)), "ok", "NVIDIA H200; torch is built for CUDA 12.8"),
        (Driver(None, None, ()), "ok", "no NVIDIA driver"),
        (Driver(None, (12, 4), ()), "error", "pip install --force-reinstall torch"),
        (Driver((13, 0), (12, 4), ()), "error", "built for CUDA 13.0, the driver supports 12.4; update the driver"),
        (Driver((12, 4), (12, 4), ()), "error", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_torch_and_the_driver_are_held_against_each_other(found: Driver, status: str, words: str) -> None:
    judged = judge_driver(found)
    assert judged.status == status and words in judged.text


def test_a_tokenizer_with_more_tokens_than_the_model_is_found(find: Any) -> None:
    assert "set actor_rollout_ref.model.tokenizer_path" in told(
        find("tokenizer", f"{M}.override_config.vocab_size=9"), "error"
    )


def test_rows_that_cannot_be_used_are_found(find: Any, home: Path, tmp_path: Path) -> None:
    assert "3 steps of 3 prompts x 4 episodes, chosen by RowSampler" in told(find("rows"), "ok")
    assert "has no extra_info.tools_kwargs" in told(find("rows", "data.need_tools_kwargs=true"), "error")
    write_rows([{"question": "no prompt"}], tmp_path / "bad.jsonl")
    assert "data_source is missing" in told(find("rows", f"data.train_files={tmp_path}/bad.jsonl"), "error")
    row = load_tasks(home / "test.parquet")[0].row
    write_rows([row | {"agent_name": "nobody"}], tmp_path / "agent.jsonl")
    assert "no agent loop called 'nobody'" in told(find("loops", f"data.train_files={tmp_path}/agent.jsonl"), "error")
    write_rows([row | {"agent_name": "rally.recipes.triage.loop.TwoRounds"}], tmp_path / "old.jsonl")
    found = find("loops", f"data.train_files={tmp_path}/old.jsonl")
    assert "make the rows again with: rally data triage" in told(found, "error")


def test_a_simulated_user_that_no_row_asks_for_is_told(find: Any, tmp_path: Path) -> None:
    users = tmp_path / "users.yaml"
    users.write_text("interaction:\n  - class_name: rally.interactions.gsm8k.Gsm8kInteraction\n    name: gsm8k\n")
    found = find("loops", f"{R}.multi_turn.interaction_config_path={users}")
    assert "uses the simulated user gsm8k" in told(found, "warning")


@pytest.mark.parametrize(
    ("keys", "status", "words"),
    [
        (["data.max_prompt_length=4"], "error", "100.0% of 12 exceed data.max_prompt_length=4; raise it to"),
        (["data.max_prompt_length=4", "data.filter_overlong_prompts=true"], "error", "filtering would leave none"),
        (["data.max_prompt_length=4", "data.truncation=left"], "warning", "would be truncated (left)"),
    ],
)
def test_prompts_that_are_too_long_are_counted(find: Any, keys: list[str], status: str, words: str) -> None:
    assert words in told(find("lengths", *keys), status)


def test_a_share_of_long_prompts_is_left_out_with_a_warning(find: Any, home: Path, tmp_path: Path) -> None:
    row = load_tasks(home / "test.parquet")[0].row
    long = row | {"prompt": [{"role": "user", "content": "What is 1+1? " * 40}]}
    write_rows([row, row, row, long], tmp_path / "mixed.jsonl")
    keys = (
        f"data.train_files={tmp_path}/mixed.jsonl",
        "data.filter_overlong_prompts=true",
        "data.max_prompt_length=200",
    )
    assert "25.0% of 4 exceed data.max_prompt_length=200 and would be left out" in told(
        find("lengths", *keys), "warning"
    )


TOOLS = '''
import time
from rally.tools import BaseTool, function_tool

@function_tool
def fails(city: str) -> str:
    """Knows no city."""
    raise KeyError(city)

@function_tool
def sleeps(city: str) -> str:
    """Takes its time."""
    time.sleep(3)
    return city
'''


def test_tools_that_do_not_answer_are_found(find: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TOOLS, encoding="utf-8")
    found = find(
        "tools",
        f"data.function_tool_path={tmp_path}/mine.py",
        f"{R}.agent_loop_config.tools=[fails, sleeps]",
        f"{R}.multi_turn.tool_timeout=0.3",
    )
    assert 'fails was called with made-up arguments {"city": "test"} and failed' in told(found, "warning")
    assert "sleeps" in told(found, "error") and "(timeout)" in told(found, "error")


def test_a_tool_that_returns_nothing_and_a_batch_larger_than_the_data_are_warned_about(
    find: Any, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "from rally.tools import function_tool\n\n@function_tool\ndef forgets(city: str) -> None:\n"
        '    """Looks a city up."""\n    city.upper()\n',
        encoding="utf-8",
    )
    found = find("tools", f"data.function_tool_path={tmp_path}/mine.py", f"{R}.agent_loop_config.tools=[forgets]")
    assert "answered null, as a function without `return` does" in told(found, "warning")
    found = find("rows", "data.train_batch_size=100", "actor_rollout_ref.actor.ppo_mini_batch_size=100")
    assert "more prompts than the 12 rows, so a step uses rows more than once" in told(found, "warning")


def test_a_server_that_is_not_there_is_an_error(find: Any, tmp_path: Path) -> None:
    url = "http://127.0.0.1:9/retrieve"
    entry = {"name": "search", "config": {"retrieval_service_url": url, "default_timeout": 0.5}}
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}), encoding="utf-8")
    keys = (f"data.tool_config_path={tmp_path}/tools.yaml", f"{R}.agent_loop_config.tools=[search]")
    found = find("tools", *keys)
    assert "search was called with its example" in told(found, "error") and "start the service it needs" in told(
        found, "error"
    )
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: no.such.Tool}]", encoding="utf-8")
    assert "there is no module 'no.such'" in told(find("tools", *keys), "error")


def test_mcp_servers_are_reached_and_their_tools_called(find: Any, tmp_path: Path) -> None:
    servers, tools = tmp_path / "servers.json", tmp_path / "tools.yaml"
    tools.write_text(f"tools: [{{type: mcp, mcp_servers_config_path: {servers}}}]")
    keys = (f"data.tool_config_path={tools}", f"{R}.agent_loop_config.tools=null")
    server = {"command": sys.executable, "args": ["-S", mcp_server.__file__, "remember", "echo"]}
    servers.write_text(json.dumps({"mcpServers": {"drill": server}}))
    found = find("tools", *keys)
    assert "echo was called with made-up arguments" in told(found, "ok")
    assert "remember was not called" in told(found, "warning"), "who says nothing may destroy"
    servers.write_text(json.dumps({"mcpServers": {"drill": {"command": "/no/such/server"}}}))
    assert "the MCP server 'drill'" in told(find("tools", *keys), "error")


def test_a_tool_that_may_destroy_something_is_not_called(home: Path, tmp_path: Path) -> None:
    class Drop(BaseTool[Any]):
        destructive = True

        def get_openai_tool_schema(self) -> dict[str, Any]:
            return {"name": "drop", "description": "", "parameters": {"type": "object", "properties": {}}}

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
            raise AssertionError("called")

    case = DoctorCase(run_config(home, tmp_path))
    case._parts["the tools"] = ToolBox([Drop()])
    assert "drop was not called" in told(list(run_check(LOOKS["tools"], case)), "warning")


FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_forgets_is_shown_with_the_place(home: Path, tmp_path: Path) -> None:
    config = run_config(home, tmp_path)
    model = config.model.model_copy(update={"custom_chat_template": FORGETFUL})
    whole = config.actor_rollout_ref.model_copy(update={"model": model})
    case = DoctorCase(config.model_copy(update={"actor_rollout_ref": whole}))
    found = list(run_check(LOOKS["template"], case))
    assert "omits the list of tools" in told(found, "warning")
    [diff] = [one for one in found if one.shown]
    assert diff.status == "warning" and "drops the thinking of earlier turns" in diff.text
    assert "template ..." in diff.shown[0].text and "a first thought" in diff.shown[0].text


def test_a_template_whose_prompt_opens_the_thinking_is_shown_with_thinking(home: Path, tmp_path: Path) -> None:
    source = (Path(__file__).parents[1] / "chat" / "templates" / "thinking_prefilled.jinja").read_text(encoding="utf-8")
    config = run_config(home, tmp_path)
    model = config.model.model_copy(update={"custom_chat_template": source})
    whole = config.actor_rollout_ref.model_copy(update={"model": model})
    case = DoctorCase(config.model_copy(update={"actor_rollout_ref": whole}))
    found = list(run_check(LOOKS["prompt"], case))
    assert "multi_turn.format=auto is qwen3_coder, which parses calls" in told(found[-1:], "ok")
    assert any("(the policy's thinking)\n</think>" in shown.text for one in found for shown in one.shown)
    assert chat_ids(case.codec), "the check of untrained tokens renders a call too"


def test_a_format_that_does_not_read_the_templates_calls_is_an_error(find: Any) -> None:
    assert "parses calls as the chat template renders them" in told(find("prompt"), "ok")
    wrong = told(find("prompt", f"{R}.multi_turn.format=qwen3_coder"), "error")
    assert "multi_turn.format=qwen3_coder does not parse calls" in wrong and "set it to hermes" in wrong


def test_a_reward_that_tells_nothing_apart_is_found(find: Any, tmp_path: Path) -> None:
    assert "scores 1, 'I do not know.' 0" in told(find("reward", BUILT_IN_REWARD), "ok")
    flat = tmp_path / "flat.py"
    flat.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n")
    key = f"custom_reward_function.path={flat}"
    assert "scores no more than a bad one" in told(find("reward", key), "warning")
    assert "'42' scores 0" in told(find("reward", key, options=DoctorOptions(answer="42")), "error")
    flat.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1 / 0\n")
    assert "ZeroDivisionError" in told(find("reward", key), "error")


def test_without_a_ground_truth_no_answer_is_made_up(find: Any, tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "1+1?"}]
    row = {"data_source": "sums", "prompt": prompt, "reward_model": {"style": "model"}, "extra_info": {"solution": "2"}}
    write_rows([row] * 3, tmp_path / "rows.parquet")
    (tmp_path / "right.py").write_text(
        "def right(completions, solution):\n"
        "    return [float(c[-1]['content'] == s) for c, s in zip(completions, solution)]\n"
    )
    keys = [
        f"data.train_files={tmp_path / 'rows.parquet'}",
        f"custom_reward_function={{path: {tmp_path / 'right.py'}, name: right}}",
        "reward_model.reward_manager=batch",
    ]
    warned = told(find("reward", *keys), "warning")
    assert "has no ground truth to score; give an answer with --answer" in warned and "None" not in warned
    assert "'2' scores 1" in told(find("reward", *keys, options=DoctorOptions(answer="2")), "ok")


def test_a_reward_that_wants_a_second_round_and_json_is_satisfied(find: Any, home: Path, tmp_path: Path) -> None:
    row = load_tasks(home / "test.parquet")[0].row
    truth = {"service": "cart", "incident_type": "clock_skew"}
    write_rows([row | {"reward_model": {"ground_truth": truth}}], tmp_path / "triage.jsonl")
    keys = (
        f"data.train_files={tmp_path}/triage.jsonl",
        "custom_reward_function.path=pkg://rally.recipes.triage.reward",
    )
    assert "scores 1, 'I do not know.' 0" in told(find("reward", *keys), "ok")


def test_rows_of_a_source_without_a_reward_are_found(find: Any, home: Path, tmp_path: Path) -> None:
    row = load_tasks(home / "test.parquet")[0].row | {"data_source": "unheard/of"}
    write_rows([row], tmp_path / "odd.jsonl")
    found = find("reward", f"data.train_files={tmp_path}/odd.jsonl", BUILT_IN_REWARD)
    assert "no reward function for data_source 'unheard/of'" in told(found, "error")


def test_rollout_and_trainer_that_disagree_are_an_error(find: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the model itself: over 24 sampled tokens" in told(find("policy"), "ok")
    monkeypatch.setattr(rollout_logprobs, "SMALL", 10)
    assert "a small random model (Qwen2ForCausalLM" in told(find("policy"), "ok")
    real = rollout_logprobs.EmbeddedEngine.generate

    async def off(*args: Any, **kwargs: Any) -> Any:
        generation = await real(*args, **kwargs)
        return replace(generation, logprobs=tuple(p - 0.5 for p in generation.logprobs))

    monkeypatch.setattr(rollout_logprobs.EmbeddedEngine, "generate", off)
    assert "the embedded engine does not support this model" in told(find("policy"), "error")


def test_a_rollout_server_that_is_not_there_is_an_error(find: Any) -> None:
    keys = (f"{R}.name=vllm", f"{R}.mode=server", f"{R}.server.url=http://127.0.0.1:9")
    found = find("policy", *keys)
    assert "the rollout server http://127.0.0.1:9 does not answer" in told(found, "error")
    assert "when its servers have started" in told(found, "ok")


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_twin_has_the_architecture_and_agrees_with_itself(family: str) -> None:
    model = make_model(family)
    twin = rollout_logprobs.small_version_of(model.config)
    assert type(twin) is type(model) and twin.num_parameters() < 1_000_000
    compared = await rollout_logprobs.compare(twin, list(range(30)), 1.0)
    assert compared.tokens == 24 and max(compared.plain, compared.packed) < 1e-4


def test_a_machine_that_is_too_small_or_too_slow_is_told(find: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find("memory", "trainer.device=auto")
    assert "H200 (131.3 GiB)" in found[-1].shown[0].text and "in all" in told(found, "ok")
    monkeypatch.setattr(memory_and_time, "step_time", lambda *given: StepTime(9000.0, 900_000.0))
    assert "use a faster machine" in told(find("memory"), "warning")
    monkeypatch.setattr(memory_and_time, "free_bytes", lambda device: 1000)
    assert "too small" in told(find("memory", "trainer.device=cpu"), "error")
    assert "too small" in told(find("memory"), "warning")


def test_load_and_doctor_read_a_configuration_the_same_way(config_file: Path) -> None:
    key = f"{R}.repetition_penalty=1.1"
    with pytest.raises(RallyError, match=r"repetition_penalty=1\.1"):
        load_config(config_file, [key])
    assert "repetition_penalty=1.1" in told(
        list(examine(config_file, [f"{R}.repetition_penalty=1.1", f"{M}.path=null"])), "error"
    )
