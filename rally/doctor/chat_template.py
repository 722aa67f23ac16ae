"""Doctor checks of the tokenizer and the chat template: vocabulary size, append-only rendering and tool calls.

The first row is shown with a made-up exchange: its prompt, a reply with a tool call, the tool's response and a final
reply, every token by its mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rally.chat import ChatCodec
from rally.doctor.check_context import DoctorCase, Finding, ReportText, Status
from rally.models.untrained_tokens import KEY, advice, untrained_tokens
from rally.tools import BaseTool
from rally.tools.sample_arguments import example_of
from rally.types import Message, Task, ToolCall

TOO_LONG = 2000
ANSWER, LAST_WORD, THOUGHT = "(the tool's response)", "(the policy's final reply)", "(the policy's thinking)"


def tokenizer(case: DoctorCase) -> Iterator[Finding]:
    tokens = len(case.tokenizer)
    size = case.model_config.get_text_config().vocab_size
    if tokens > size:
        problem = f"the tokenizer has {tokens:,} tokens, but the model only {size:,}"
        yield Finding("tokenizer", "error", f"{problem}; set actor_rollout_ref.model.tokenizer_path to the model's own")
        return
    yield Finding("tokenizer", "ok", f"{tokens:,} of the model's {size:,} tokens")


def template(case: DoctorCase) -> Iterator[Finding]:
    report = case.codec.probe()
    head, *rest = report.words.splitlines()
    diff = [line for line in rest if line != report.problems]
    shown = (ReportText("note", "\n".join(diff)),) if diff else ()
    strict = case.config.rollout.multi_turn.tokenization_sanity_check_mode != "disable"
    if case.toolbox.names and report.problems:
        yield Finding("template", "warning", report.problems)
    refusal = report.refusal(
        case.config.history,
        tools=bool(case.toolbox.names),
        users=bool(case.config.rollout.multi_turn.interaction_config_path),
    )
    if refusal:
        yield Finding("template", "error", refusal)
    if report.append_only:
        yield Finding("template", "ok", head)
        return
    kept = f"multi_turn.history={case.config.history}"
    means = "keeps what was sampled" if case.config.history == "append" else "opens a new segment where it differs"
    status: Status = "ok" if case.config.history == "rerender" or not strict else "warning"
    yield Finding("template", status, f"{head} {kept} {means}; docs/chat.md says when to change it", shown)


def prompt(case: DoctorCase) -> Iterator[Finding]:
    task = case.first_task
    codec = _codec_of(case, task)
    tool = next((one for one in case.toolbox.tools if codec.tools and one.name == _name(codec.tools[0])), None)
    messages = [
        {**message, **codec.thought(THOUGHT)} if message["role"] == "assistant" else message
        for message in exchange(task, tool)
    ]
    ids, mask, _ = codec.encode_conversation(messages)
    shown = tuple(_pieces(codec, ids, mask))
    yield Finding(
        "prompt",
        "ok",
        f"{task.id} with a made-up reply: {len(ids)} tokens, of which {sum(mask)} are sampled (mask 1) and trained on",
        shown,
    )
    if tokens := untrained_tokens(str(case.config.model.path), case.tokenizer, ids):
        yield Finding("prompt", "warning", advice(tokens, case.tokenizer, KEY))
    if (
        tool is not None and codec.probe().calls_shown
    ):  # otherwise the check `template` reports that calls are not rendered
        yield _call_is_read(codec, messages)


def _codec_of(case: DoctorCase, task: Task) -> ChatCodec:
    """The codec with the tools that an episode of this row has."""
    chosen = task.extra_info.get("tool_selection")
    return case.codec if chosen is None else case.codec.with_tools(case.toolbox.schemas(chosen))


def _name(schema: dict[str, Any]) -> str:
    return str(schema["function"]["name"])


def exchange(task: Task, tool: BaseTool[Any] | None) -> list[Message]:
    """A prompt and a final reply, with a tool call between them if there is a tool."""
    if tool is None:
        return [*task.prompt, {"role": "assistant", "content": LAST_WORD}]
    call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": tool.name, "arguments": example_of(tool).arguments},
    }
    return [
        *task.prompt,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": tool.name, "tool_call_id": "call_0", "content": ANSWER},
        {"role": "assistant", "content": LAST_WORD},
    ]


def _pieces(codec: ChatCodec, ids: tuple[int, ...], mask: tuple[int, ...]) -> Iterator[ReportText]:
    first = mask.index(1)
    yield ReportText("prompt", _cut(codec.decode(ids[:first])))
    for sampled, run in groupby(zip(ids[first:], mask[first:], strict=True), key=lambda pair: pair[1]):
        yield ReportText("sampled" if sampled else "observed", codec.decode([token for token, _ in run]))


def _cut(text: str) -> str:
    half = TOO_LONG // 2
    return text if len(text) <= TOO_LONG else f"{text[:half]} ({len(text) - TOO_LONG} characters) {text[-half:]}"


def _call_is_read(codec: ChatCodec, messages: list[Message]) -> Finding:
    """Whether the rollout parses tool calls in the form in which the template renders them."""
    [message] = [m for m in messages if m.get("tool_calls")]
    wanted, ids = message["tool_calls"][0]["function"], codec.encode_assistant(message)
    name, text = codec.format.name, codec.decode(ids)
    if _has_call(codec.parse(ids).tool_calls, wanted):
        named = f"multi_turn.format=auto is {name}, which" if codec.chosen else f"multi_turn.format={name}"
        return Finding("prompt", "ok", f"{named} parses calls as the chat template renders them")
    shown = (ReportText("sampled", text),)
    if problem := codec.format_problem():
        return Finding("prompt", "error", problem, shown)
    problem = f"multi_turn.format={name} does not parse calls as the chat template renders them"
    return Finding("prompt", "warning", f"{problem}; use a template that supports tools (custom_chat_template)", shown)


def _has_call(calls: Sequence[ToolCall], wanted: dict[str, Any]) -> bool:
    return [(c.name, c.arguments) for c in calls if c.error is None] == [(wanted["name"], wanted["arguments"])]
