"""What files of verl's examples derive from and import behaves as in verl, and runs the user's code."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from loop_cases import Held, Reply, hold, make_runner, make_task, said
from search_cases import write_corpus

from rally.chat import ChatCodec
from rally.compat.verl.code_scores import fenced_code, prime_code, same_output
from rally.compat.verl.config_for_loops import config_for_loops
from rally.compat.verl.import_names import NAMES, VerlNameFinder, offer_verl_names
from rally.compat.verl.tools import ToolHandle, passages_to_string
from rally.config import load_config
from rally.importing import ImportFailed, import_file, import_module
from rally.loops import LoopSpec
from rally.loops.registry import import_loop
from rally.retrieval import IndexSpec, build_index
from rally.runs.build.rollout import loops_of
from rally.tools import ToolBox, function_tool, load_tools
from rally.types import ToolCall

SANDBOX = """
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.tools.base_tool import OpenAIFunctionToolSchema

class Fenced(SandboxFusionTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.shown = self.tool_schema.function.name + str(len(tool_schema.model_dump()))

    async def execute(self, instance_id, parameters, **kwargs):
        code = f"print({parameters['code']})"
        timeout, language = self.default_timeout, self.default_language
        result = await self.execution_pool.execute.remote(self.execute_code, instance_id, code, timeout, language)
        return result, None, None
"""


@pytest.fixture
def sandbox_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers as SandboxFusion does: what is printed is the code itself, and `late` is too slow."""
    asked: list[dict[str, Any]] = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            late = "late" in asked[-1]["code"]
            run = {"status": "TimeLimitExceeded" if late else "Finished", "return_code": 0, "stderr": "!"}
            text = json.dumps({"status": "Success", "run_result": {**run, "stdout": asked[-1]["code"]}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/run_code", asked
    server.shutdown()
    thread.join()


async def called(tool: Any, **arguments: Any) -> str | None:
    [result] = await ToolBox([tool]).open(make_task(), "e").run([ToolCall(name=tool.name, arguments=arguments)])
    return result.response.text


async def test_a_subclass_of_the_sandbox_tool_runs_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox_server: tuple[str, list[dict[str, Any]]]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fenced_sandbox.py").write_text(SANDBOX)
    schema = {"type": "function", "function": {"name": "run", "description": "", "parameters": {"type": "object"}}}
    url, asked = sandbox_server
    config = {"type": "native", "sandbox_fusion_url": url, "rate_limit": 2, "memory_limit_mb": 64}
    [tool] = load_tools({"tools": [{"class_name": "fenced_sandbox.Fenced", "config": config, "tool_schema": schema}]})
    assert tool.shown == "run2"  # type: ignore[attr-defined]
    assert await called(tool, code="6 * 7") == "print(6 * 7)!"
    assert await called(tool, code="late") == "no stdout here"
    assert (asked[0]["memory_limit_MB"], asked[0]["run_timeout"]) == (64, 30)


async def test_search_results_are_in_the_format_of_verl(tmp_path: Path) -> None:
    build_index(write_corpus(tmp_path / "corpus.jsonl"), tmp_path / "index", IndexSpec())
    entry = {
        "class_name": "verl.tools.search_tool.SearchTool",
        "config": {"index_path": str(tmp_path / "index"), "topk": 1},
    }
    [tool] = load_tools({"tools": [entry]}, processes=True)
    text = await called(tool, query_list=["capital of France", "capital of France"])
    passage = 'Doc 1 (Title: "Paris")\nParis is the capital of France.'
    assert json.loads(text or "") == {"result": f"{passage}\n---\n{passage}"}
    assert (
        passages_to_string([{"document": {"contents": "T\na\nb"}}] * 2)
        == "Doc 1 (Title: T)\na\nb\n\nDoc 2 (Title: T)\na\nb"
    )


LOOPS = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import ToolParser

class Counted(ToolAgentLoop):
    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        agent_data.extra_fields["called"] = [(call.name, call.arguments) for call in agent_data.tool_calls]
        return await super()._handle_processing_tools_state(agent_data)

class Misread(ToolAgentLoop):
    class Parser(ToolParser):
        async def extract_tool_calls(self, responses_ids, tools=None):
            from verl.experimental.agent_loop.tool_parser import FunctionCall
            text = self.tokenizer.decode(responses_ids)
            return text, [FunctionCall(name="double", arguments="[4")] if "double" in text else []

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tool_parser = self.Parser(self.tokenizer)

class Continued(AgentLoopBase):
    def __init__(self, *args, tools=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.tools = {tool.name: tool for tool in tools.tools}
        self.schemas = [tool.tool_schema.model_dump(exclude_unset=True) for tool in tools.tools]
        self.parser = ToolParser.get_tool_parser(self.rollout_config.multi_turn.format, self.tokenizer)

    async def run(self, sampling_params, priority=0, **kwargs):
        messages = list(kwargs["raw_prompt"])
        ids = await self.ct_build_initial_tokens(messages, tools=self.schemas)
        mask, logprobs, prompt = [], [], len(ids)
        for _ in range(2):
            said = await self.server_manager.generate("r", prompt_ids=ids, sampling_params=sampling_params)
            merged, mask, logprobs = await self.ct_merge_assistant_token(
                ids, said.token_ids, mask, logprobs, assistant_logprobs=said.log_probs
            )
            ids = merged.token_ids
            content, calls = await self.parser.extract_tool_calls(said.token_ids)
            if not calls:
                break
            import json
            tool = self.tools[calls[0].name]
            instance, _ = await tool.create(create_kwargs={})
            response, _, _ = await tool.execute(instance, json.loads(calls[0].arguments), agent_data=None)
            messages.append({"role": "assistant", "content": content})
            merged, mask, logprobs = await self.ct_merge_context_msg(
                list(messages), [*messages, {"role": "tool", "content": response.text}], ids, mask, logprobs
            )
            ids = merged.token_ids
        return AgentLoopOutput(
            prompt_ids=ids[:prompt], response_ids=ids[prompt:], response_mask=mask, response_logprobs=logprobs,
            mm_processor_kwargs={}, metrics={}, extra_fields=said.extra_fields,
        )
"""


@function_tool
def double(number: int) -> str:
    """Doubles."""
    return str(2 * number)


@pytest.mark.parametrize("name", ["Counted", "Continued", "Misread"])
async def test_loops_over_verls_states_and_continuous_tokens_train_on_what_was_sampled(
    tiny: ChatCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "state_loops.py").write_text(LOOPS)
    cls = import_loop(f"state_loops.{name}")
    cls.prepare({})
    call = '<tool_call>{"name": "double", "arguments": {"number": 4}}</tool_call>'
    script = [Reply(said(tiny, call)), Reply(said(tiny, "It is 8."))]
    runner = make_runner(tiny, script, [double], loop="mine", loops={"mine": LoopSpec(cls, {})})
    config = config_for_loops(load_config(base={"data": {}}))
    runner.run_config = lambda: config
    held: Held = await hold(runner, make_task(row={"raw_prompt": [{"role": "user", "content": "Twice 4?"}]}))
    assert held.episode.error is None
    first, second = held.engine.calls
    answer = "Error when executing tool: Expecting ',' delimiter" if name == "Misread" else "8</tool_response>"
    assert f"<tool_response>{answer}" in tiny.decode(second.prompt)
    assert second.prompt[: len(first.prompt)] == first.prompt
    sampled = [i for i, m in zip(held.segment.response_ids, held.segment.response_mask, strict=True) if m]
    assert sampled == [*first.generation.ids, *second.generation.ids]
    logprobs = [p for p, m in zip(held.segment.response_logprobs, held.segment.response_mask, strict=True) if m]
    assert logprobs == [*first.generation.logprobs, *second.generation.logprobs]
    if name == "Counted":
        assert held.episode.extra["called"] == [("double", '{"number": 4}')]


def test_options_that_are_not_set_do_not_replace_the_defaults_of_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    text = "from rally.loops import AgentLoopBase\nclass Own(AgentLoopBase):\n"
    text += "    def __init__(self, max_turns=7, stop_on_correct=None): ...\n    async def run(self, *a, **k): ...\n"
    (tmp_path / "own_defaults.py").write_text(text)
    rollout = "actor_rollout_ref.rollout"
    words = [f"{rollout}.agent_loop_class=own_defaults.Own"]
    assert loops_of(load_config(base={"data": {}}, overrides=words))["own_defaults.Own"].options == {}
    words.append(f"{rollout}.agent_loop_config.max_turns=3")
    assert loops_of(load_config(base={"data": {}}, overrides=words))["own_defaults.Own"].options == {"max_turns": 3}


def test_every_name_exists_and_a_missing_one_is_named(tmp_path: Path) -> None:
    offer_verl_names()
    for module, names in NAMES.items():
        assert all(getattr(import_module(module), name) for name in names)
    (tmp_path / "wants.py").write_text("import verl.utils.megatron_utils\n")
    with pytest.raises(ImportFailed, match=r"Rally has no counterpart of verl\.utils\.megatron_utils"):
        import_file(tmp_path / "wants.py", "reward")


def test_a_checkout_of_verl_in_the_working_directory_does_not_hide_the_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("raise ImportError('needs ray')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    finder = VerlNameFinder()
    assert finder.find_spec("verl") is not None
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert finder.find_spec("verl") is None, "an installed verl takes precedence"


@pytest.mark.parametrize(
    ("module", "text", "box", "content"),
    [
        ("math_reward", r"so \boxed{1} or \boxed{\frac{1}{2}}.", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("math_reward", r"$\boxed 7$ ok", r"\boxed 7", "7"),
        ("math_reward", "nothing", None, None),
        ("math_dapo", r"\boxed{a{b}} \boxed 7", r"\boxed{a{b}}", "a{b}"),
        ("math_dapo", r"\boxed{open", None, None),
    ],
)
def test_boxes_are_found_as_in_verl(module: str, text: str, box: str | None, content: str | None) -> None:
    score = import_module(f"verl.utils.reward_score.{module}")
    assert score.last_boxed_only_string(text) == box
    if box is not None:
        assert score.remove_boxed(box) == content


def test_programs_are_scored_in_the_sandbox() -> None:
    cases = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "8\n"]}
    text = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    assert prime_code(text, cases, continuous=True)[0] == 0.5
    named = {"fn_name": "add", "inputs": ["[1, 2]\n[3]"], "outputs": ["[1, 2, 3]"]}
    assert (
        prime_code("```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```", named)[0] is True
    )
    assert fenced_code("no block") is None and fenced_code("```\nx\n```") == "\nx\n"
    assert same_output("1.0 2\n", "1 2.0") and not same_output("1\n2", "1")


async def test_a_tool_handle_normalizes_what_a_tool_returns() -> None:
    handle = ToolHandle(double)
    instance, _ = await handle.create(create_kwargs={})
    response, reward, metrics = await handle.execute(instance, {"number": 3})
    assert (response.text, reward, metrics, handle.tool_schema.function.name) == ("6", None, {}, "double")
