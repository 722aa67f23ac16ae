"""Requests of the Responses and Messages APIs become chat requests, or are refused in words, whatever they hold."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rally.chat import ChatCodec, tiny_tokenizer
from rally.chat.tiny_tokenizer import CHAT_TEMPLATE
from rally.services.admission import Refused
from rally.services.anthropic_api import MessagesRequest
from rally.services.responses_api import ResponsesRequest
from rally.types import RallyError

words = st.sampled_from(["text", "user", "assistant", "function", "message", "function_call", "tool_use", "auto", "x"])
leaves = st.none() | st.booleans() | st.integers(-2, 9) | words
keys = st.sampled_from(
    ["type", "role", "content", "text", "name", "input", "id", "call_id", "output", "schema", "format"]
)
values = st.recursive(leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(keys, v, max_size=4), max_leaves=12)
FIELDS = {
    ResponsesRequest: ("input", "tools", "tool_choice", "text", "reasoning", "instructions", "include", "store"),
    MessagesRequest: (
        "messages",
        "tools",
        "tool_choice",
        "system",
        "stop_sequences",
        "thinking",
        "output_config",
        "context_management",
    ),
}


@pytest.mark.parametrize("kind", list(FIELDS))
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_arbitrary_bodies_are_translated_or_refused(kind: Any, data: st.DataObject) -> None:
    body: dict[str, Any] = {"model": "m", "input": "x", "messages": [{"role": "user", "content": "x"}]}
    body.pop("messages" if kind is ResponsesRequest else "input")
    body |= data.draw(st.dictionaries(st.sampled_from(FIELDS[kind]), values, max_size=3))
    try:
        request = kind.model_validate(body)
        chat = request.chat([]) if kind is ResponsesRequest else request.chat()
        _ = chat.constraint, chat.offered_tools
        chat.check_messages()
    except (ValidationError, RallyError) as refused:
        assert str(refused)


def test_a_message_and_the_calls_after_it_are_one_turn() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
    ]
    chat = ResponsesRequest.model_validate({"model": "m", "input": items, "instructions": "s"}).chat([])
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "tool", "tool"]
    assert [call["id"] for call in chat.messages[2]["tool_calls"]] == ["c1", "c2"] and chat.messages[2][
        "content"
    ] == "b"


def test_results_of_tools_come_before_the_text_of_their_message() -> None:
    use = {"type": "tool_use", "id": "u", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "u", "content": "1", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    ]
    body = {"model": "m", "max_tokens": 5, "messages": messages, "tool_choice": {"type": "tool", "name": "f"}}
    body["tools"] = [{"name": "f", "input_schema": {"type": "object"}}]
    chat = MessagesRequest.model_validate(body).chat()
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "tool", "user"]
    assert chat.constraint.only == "f" and chat.messages[2]["tool_call_id"] == "u"
    with pytest.raises(Refused, match="mcp_servers"):
        MessagesRequest.model_validate(body | {"mcp_servers": [{"url": "x"}]}).chat()


@pytest.mark.parametrize(
    "field", [{"defer_loading": True}, {"allowed_callers": ["code_execution_20250825"]}, {"input_examples": [{"x": 1}]}]
)
def test_what_a_tool_asks_for_and_does_not_get_is_refused(field: dict[str, Any]) -> None:
    ask, schema = [{"role": "user", "content": "x"}], {"type": "object", "properties": {}}
    plain = {"defer_loading": False, "allowed_callers": ["direct"], "input_examples": [], "strict": True}
    tools: list[dict[str, Any]] = [{"name": "f", "input_schema": schema, **plain}]
    assert MessagesRequest.model_validate({"model": "m", "messages": ask, "tools": tools}).chat().tools
    with pytest.raises(Refused, match=f"tools.0.{next(iter(field))} is not supported"):
        tools = [{"name": "f", "input_schema": schema, **field}]
        MessagesRequest.model_validate({"model": "m", "messages": ask, "tools": tools}).chat()
    with pytest.raises(Refused, match=f"tools.0.{next(iter(field))} is not supported"):
        tools = [{"type": "function", "name": "f", "parameters": schema, **field}]
        ResponsesRequest.model_validate({"model": "m", "input": "x", "tools": tools}).chat([])


def test_ways_of_reasoning_that_do_not_exist_here_are_refused() -> None:
    def chat(**reasoning: Any) -> Any:
        return ResponsesRequest.model_validate({"model": "m", "input": "x", "reasoning": reasoning}).chat([])

    assert chat(effort="low", summary="auto", mode="standard", context="auto").reasoning_effort == "low"
    for reasoning in ({"mode": "pro"}, {"context": "all_turns"}, {"depth": 3}):
        with pytest.raises(Refused, match=f"reasoning.{next(iter(reasoning))} is not supported"):
            chat(**reasoning)


def test_a_reply_does_not_continue_the_assistants_last_message() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}]
    request = MessagesRequest.model_validate({"model": "m", "max_tokens": 5, "messages": messages})
    with pytest.raises(Refused, match="a reply here does not continue it"):
        request.check_answerable()
    assert request.chat(), "its tokens can be counted"


CODING_AGENT = {
    "model": "m",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "Agents you may use"}],
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
"""What Claude Code sends beside its tools."""


def test_defaults_that_a_coding_agent_spells_out_ask_for_nothing() -> None:
    chat = MessagesRequest.model_validate(CODING_AGENT).chat()
    assert chat.reasoning_effort is None and [m["role"] for m in chat.messages] == ["user", "system"]
    low = MessagesRequest.model_validate({**CODING_AGENT, "output_config": {"effort": "low"}}).chat()
    assert low.reasoning_effort == "low"
    cleared = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    with pytest.raises(Refused, match="context_management would change the messages"):
        MessagesRequest.model_validate({**CODING_AGENT, "context_management": cleared}).chat()


def test_developers_are_the_system_of_a_template_that_has_no_such_role() -> None:
    items = [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}]
    body = {"model": "m", "input": items, "client_metadata": {"thread": "1"}, "reasoning": {"summary": "auto"}}
    chat = ResponsesRequest.model_validate(body).chat([])
    tokenizer = tiny_tokenizer()
    plain = ChatCodec(tokenizer, "hermes")
    assert [message["role"] for message in chat.messages_for(plain)] == ["system", "user"]
    own = ChatCodec(tokenizer, "hermes", chat_template=CHAT_TEMPLATE + "{# 'developer' #}")
    assert [message["role"] for message in chat.messages_for(own)] == ["developer", "user"]
