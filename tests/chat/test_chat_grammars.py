"""Grammars of turns: what is sampled under them is read back as the calls or the answer that was asked for."""

import json
import random
from typing import Any

import numpy as np
import pytest

from rally.chat import ChatCodec, tiny_tokenizer
from rally.chat.formats.registry import FORMATS
from rally.chat.grammars import MAX_SCHEMA, Constraint, ConstraintError, call_frame, grammar_of
from rally.chat.tiny_tokenizer import CHAT_TEMPLATE, END, template_tokenizer
from rally.models.token_masks import GrammarError, Grammars

pytest.importorskip("llguidance")
TOKENIZER = tiny_tokenizer()
BYTES = template_tokenizer(CHAT_TEMPLATE, eos=END)  # it can write the marks of every format


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("add", a={"type": "integer", "minimum": 1, "maximum": 9}), tool("ask", yes={"type": "boolean"})]
CODEC = ChatCodec(TOKENIZER, "hermes", TOOLS)
GRAMMARS = Grammars(TOKENIZER, len(TOKENIZER), CODEC.stop_ids)
BYTE_GRAMMARS = Grammars(BYTES, len(BYTES), ChatCodec(BYTES, "hermes").stop_ids)


def sampled(codec: ChatCodec, constraint: Constraint, seed: int, grammars: Grammars = GRAMMARS) -> tuple[int, ...]:
    """Random tokens, each uniform over those that the grammar allows."""
    state, rng, ids = grammars.state(grammar_of(constraint, codec)), random.Random(seed), list[int]()
    while not state.ended and len(ids) < 5000:
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(state.mask(), np.uint8), bitorder="little"))
        ids.append(int(rng.choice(allowed.tolist())))
        state.consume(ids[-1])
    assert state.ended
    return tuple(ids)


def test_a_required_call_is_a_call_and_a_named_one_is_that_call() -> None:
    several = 0
    for seed in range(20):
        calls = CODEC.parse(sampled(CODEC, Constraint(choice="required"), seed)).tool_calls
        assert calls and all(call.error is None and call.name in ("add", "ask") for call in calls)
        several += len(calls) > 1
        (one,) = CODEC.parse(sampled(CODEC, Constraint(choice="required", parallel=False), seed)).tool_calls
        assert one.error is None
        (named,) = CODEC.parse(sampled(CODEC, Constraint(choice="required", only="add"), seed)).tool_calls
        assert named.name == "add" and 1 <= named.arguments["a"] <= 9
    assert several, "a turn may have several calls"


def test_without_parallel_calls_a_turn_is_text_or_one_call() -> None:
    state = GRAMMARS.state(grammar_of(Constraint(parallel=False), CODEC))
    call = '<tool_call>{"name": "add", "arguments": {"a": 5}}</tool_call>'
    for token in TOKENIZER.encode(f"so\n{call}"):
        assert not state.ended
        state.consume(token)
    assert state.ended, "nothing may follow the call"
    with pytest.raises(GrammarError):
        broken = GRAMMARS.state(grammar_of(Constraint(parallel=False), CODEC))
        for token in TOKENIZER.encode('<tool_call>{"name": "other"'):
            broken.consume(token)
    for seed in range(5):
        calls = CODEC.parse(sampled(CODEC, Constraint(parallel=False), seed)).tool_calls
        assert sum(call.error is None for call in calls) <= 1  # random text may hold a stray closing mark


def test_an_answer_with_a_schema_may_be_a_call_where_tools_are_offered() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "null"}}, "required": ["n"], "additionalProperties": False}
    texts = set()
    for seed in range(20):
        parsed = CODEC.parse(sampled(CODEC, Constraint(schema=schema), seed))
        texts.add("call" if parsed.tool_calls else parsed.text)
    assert texts == {"call", '{"n": null}'}
    assert json.loads(CODEC.parse(sampled(CODEC.with_tools([]), Constraint(schema=schema), 0)).text) == {"n": None}


@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one.marks or name == "llama3_json"])
def test_every_format_enforces_calls_that_it_reads_or_refuses(name: str) -> None:
    codec = ChatCodec(BYTES, name, TOOLS)
    if call_frame(codec, "add") is None:
        with pytest.raises(ConstraintError, match="as one JSON object"):
            grammar_of(Constraint(choice="required"), codec)
        return
    for seed in range(3):
        calls = codec.parse(sampled(codec, Constraint(choice="required"), seed, BYTE_GRAMMARS)).tool_calls
        good = [call for call in calls if call.error is None]
        assert good and all(call.name in ("add", "ask") and len(call.arguments) == 1 for call in good), calls


def test_what_cannot_be_enforced_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConstraintError, match="names other, which is not among the tools"):
        grammar_of(Constraint(choice="required", only="other"), CODEC)
    with pytest.raises(ConstraintError, match="tool_choice=required needs tools"):
        grammar_of(Constraint(choice="required"), CODEC.with_tools([]))
    with pytest.raises(ConstraintError, match="no mark that begins a call"):
        grammar_of(Constraint(parallel=False), ChatCodec(TOKENIZER, "llama3_json", TOOLS))
    with pytest.raises(ConstraintError, match="are the most; shorten it"):
        grammar_of(Constraint(schema={"description": "x" * MAX_SCHEMA}), CODEC)
    assert grammar_of(Constraint(), CODEC) == grammar_of(Constraint(parallel=False), CODEC.with_tools([])) == ""
