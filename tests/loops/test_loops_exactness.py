"""Sampled ids are never encoded again, have mask 1, and are the prefix of the next turn's prompt."""

import asyncio
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from loop_cases import (
    Held,
    Reply,
    Talker,
    asking,
    check_sampled_once,
    check_tiling,
    hold,
    make_runner,
    make_task,
    said,
    spoken,
    tool_messages,
)

from rally.chat import ChatCodec
from rally.interactions import Interactions
from rally.tools import FunctionTool, function_tool
from rally.types import StopReason, ToolStatus

LIGHT = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
ALL = ["tiny", "qwen2_5", "qwen3", "llama3_2"]
APPEND_ONLY = [("tiny", 3), ("qwen2_5", 3), ("llama3_2", 1)]  # Llama's template rejects parallel calls

LETTERS = "abz019 \n\t.,:;'\"{}[]()<>/\\|=#_-é漢日🙂\u00a0\u2028"
plain = st.text(LETTERS, max_size=25)
edges = st.sampled_from(["", " ", "\n\nx", "x\n", "</think>", '{"a": 1}', "\x85x", "e\u0301", "👩‍👩‍👧"])
texts = plain | edges
control = st.sampled_from(["<|im_end|>", "<|im_start|>user\nhi", "</tool_response>", "<|eot_id|>", "<tool_call>"])
answers = st.lists(texts | st.tuples(texts, control, texts).map("".join), min_size=1, max_size=6)
arguments = st.one_of(
    st.tuples(st.just("calculator"), st.fixed_dictionaries({"expression": texts})),
    st.tuples(st.just("search"), st.fixed_dictionaries({"query": texts | st.just("a </tool_call> b")})),
    st.just(("nowhere", {"x": 1})),
    st.just(("search", {"quarry": "x"})),
)
questions = st.tuples(st.lists(texts, max_size=1), texts).map(
    lambda drawn: [
        *({"role": "system", "content": text} for text in drawn[0]),
        {"role": "user", "content": drawn[1] or "Why?"},
    ]
)
BROKEN = ["<tool_call>calc(2+3", '<tool_call>{"name": </tool_call>', "</tool_call>", '{"name": "x", "parameters": [']


def tools_saying(texts_to_say: Sequence[str]) -> list[FunctionTool]:
    """Two tools that return the given texts, one after the other."""
    supply = itertools.cycle(texts_to_say)

    async def calculator(expression: str) -> str:
        return next(supply)

    async def search(query: str) -> str:
        return next(supply)

    return [function_tool(calculator), function_tool(search)]


def converse(
    codec: ChatCodec,
    question: Any,
    script: Sequence[Reply],
    said_by_tools: Sequence[str],
    said_by_user: Sequence[str] = (),
    **kw: Any,
) -> Held:
    """An exchange with tools or, if `said_by_user` is not empty, with a user who sends these texts turn by turn."""
    users = Interactions([Talker(*said_by_user)])
    limits = {"max_tool_failures": 0, "max_repeated_calls": 0}
    runner = make_runner(codec, script, tools_saying(said_by_tools), interactions=users, **limits, **kw)
    held = asyncio.run(hold(runner, asking(prompt=question) if said_by_user else make_task(question)))
    assert held.episode.error is None
    return held


@dataclass(frozen=True)
class Wild:
    """A turn as a policy might sample it: pieces, each tokenized alone, with or without the end-of-turn token."""

    pieces: tuple[Any, ...]
    closed: bool

    def reply(self, codec: ChatCodec) -> Reply:
        ids = [token for piece in self.pieces for token in self._tokens(codec, piece)]
        ids = [token for token in ids if token not in codec.stop_ids]
        return Reply((*ids, codec.end_of_turn) if self.closed or not ids else tuple(ids))

    @staticmethod
    def _tokens(codec: ChatCodec, piece: Any) -> list[int]:
        if isinstance(piece, int):  # vocabularies are padded: the tokenizer may not know an id
            return [piece % (len(codec.tokenizer) + 200)]
        if isinstance(piece, tuple):
            key = "parameters" if codec.format.name == "llama3_json" else "arguments"
            text = json.dumps({"name": piece[0], key: piece[1]})
            piece = f"{text}\n" if key == "parameters" else f"<tool_call>{text}</tool_call>"
        tokens: list[int] = codec.tokenizer.encode(piece, add_special_tokens=False)
        return tokens


pieces = st.one_of(arguments, arguments, texts, st.sampled_from(BROKEN), st.integers(0, 10**6))
wild_turns = st.builds(Wild, st.lists(pieces, max_size=5).map(tuple), st.booleans())


@pytest.mark.parametrize("name", ALL)
def test_every_turn_begins_with_all_that_was_sampled(codecs: dict[str, ChatCodec], name: str) -> None:
    codec = codecs[name]
    longest = 0
    calling = Wild((("calculator", {"expression": "1+1"}),), closed=True)

    @LIGHT
    @example(
        [{"role": "user", "content": "Why?"}], [calling] * 4, ["2"], []
    )  # random draws alone may give only short exchanges
    @example([{"role": "user", "content": "Why?"}], [calling, Wild(("so",), closed=False)], ["2"], ["And?"] * 3)
    @given(questions, st.lists(wild_turns, min_size=1, max_size=8), answers, st.lists(texts, max_size=3))
    def check(question: Any, turns: list[Wild], said_by_tools: list[str], said_by_user: list[str]) -> None:
        nonlocal longest
        held = converse(codec, question, [turn.reply(codec) for turn in turns], said_by_tools, said_by_user)
        calls, segment = held.engine.calls, held.segment
        longest = max(longest, len(calls))
        assert calls[0].prompt == segment.prompt_ids == codec.encode_prompt(question)
        ids, mask, logprobs = list(segment.prompt_ids), [], []
        for number, call in enumerate(calls):
            observed = call.prompt[len(ids) :]
            assert list(call.prompt) == [*ids, *observed], "the history was changed"
            if number:
                closed = ids[-1] == codec.end_of_turn
                assert (observed[0] == codec.end_of_turn) is not closed, "every turn is ended, and ended once"
            ids += [*observed, *call.generation.ids]
            mask += [0] * len(observed) + [1] * len(call.generation.ids)
            logprobs += [0.0] * len(observed) + list(call.generation.logprobs)
        assert held.episode.stop_reason is StopReason.STOP
        assert list(segment.ids) == ids
        assert list(segment.response_mask) == mask
        assert list(segment.response_logprobs) == logprobs
        check_tiling(held.episode)
        check_sampled_once(held)

    check()
    assert longest >= 3, "the conversations were not long enough to prove anything"


def canonical_turns(max_calls: int) -> st.SearchStrategy[list[dict[str, Any]]]:
    """0 to 7 turns that call tools; the plain answer that ends the exchange is the engine's own."""
    calls = st.lists(arguments, min_size=1, max_size=max_calls)
    turn = st.tuples(texts, calls).map(lambda drawn: spoken(drawn[0], *drawn[1]))
    return st.lists(turn, max_size=7)


def merges(codec: ChatCodec, messages: Sequence[dict[str, Any]]) -> bool:
    """Whether a reply begins with a newline, which a full rendering merges into one token with the prompt's."""
    replies = (codec.decode(codec.encode_assistant(m)) for m in messages if m["role"] == "assistant")
    return any(re.match(r"\s*[\r\n]", reply) for reply in replies)


@pytest.mark.parametrize(("name", "max_calls"), APPEND_ONLY)
def test_canonical_turns_make_the_templates_own_rendering(
    codecs: dict[str, ChatCodec], name: str, max_calls: int
) -> None:
    codec = codecs[name]
    assert codec.probe().append_only

    @LIGHT
    @given(questions, canonical_turns(max_calls), answers)
    def check(question: Any, replies: list[dict[str, Any]], said_by_tools: list[str]) -> None:
        held = converse(codec, question, [Reply(codec.encode_assistant(m)) for m in replies], said_by_tools)
        observed = [tool_messages(turn) for turn in held.episode.turns if turn.role == "tool"]
        assert len(observed) == len(replies)
        messages = list(question)
        for call, reply, results in zip(held.engine.calls, replies, observed, strict=False):
            same(call.prompt, codec.render(messages, generation_prompt=True), messages)
            messages += [reply, *results]
        same(held.engine.calls[-1].prompt, codec.render(messages, generation_prompt=True), messages)
        messages.append(spoken("done"))
        whole = codec.render(messages, generation_prompt=False)
        last_end = len(whole) - whole[::-1].index(codec.end_of_turn)
        same(held.segment.ids, whole[:last_end], messages)

    def same(grown: tuple[int, ...], rendered: tuple[int, ...], messages: Sequence[dict[str, Any]]) -> None:
        assert codec.decode(grown) == codec.decode(rendered)
        if not merges(codec, messages):
            assert grown == rendered

    check()


@pytest.mark.parametrize("name", [name for name, _ in APPEND_ONLY])
def test_a_users_turns_make_the_templates_own_rendering(codecs: dict[str, ChatCodec], name: str) -> None:
    codec, question = codecs[name], [{"role": "user", "content": "Why?"}]

    @LIGHT
    @given(st.lists(plain.map(lambda text: f"x{text}x"), min_size=1, max_size=4))
    def check(words: list[str]) -> None:
        replies = [spoken(f"about {word}") for word in words]
        held = converse(codec, question, [Reply(codec.encode_assistant(m)) for m in replies], ["-"], words)
        messages = list(question)
        for call, reply, word in zip(held.engine.calls, replies, words, strict=False):
            assert call.prompt == codec.render(messages, generation_prompt=True)
            messages += [reply, {"role": "user", "content": word}]
        assert held.engine.calls[-1].prompt == codec.render(messages, generation_prompt=True)
        assert "tokenization_difference" not in held.episode.extra
        assert [turn.text for turn in held.episode.turns if turn.role == "user"] == [*words, "enough"]
        check_tiling(held.episode)
        check_sampled_once(held)

    check()


thoughts = st.text("abz01 \n.é漢", max_size=20)
THINKING = ["<think>\n{}\n</think>\n\n", "<think>{}</think>", "<think>\n{}", "{}", "\n<think>\n\n</think>{}"]
thinking_turns = st.tuples(st.sampled_from(THINKING), thoughts, st.lists(arguments, min_size=1, max_size=2))


def thinking_reply(codec: ChatCodec, drawn: tuple[str, str, list[tuple[str, dict[str, Any]]]]) -> Reply:
    """A turn that thinks, in the template's format or another, before it calls tools."""
    shape, thought, calls = drawn
    text = shape.format(thought)
    if shape == THINKING[0]:
        return Reply(said(codec, text, *calls))
    written = "".join(f"\n<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)
    return Reply((*codec.tokenizer.encode(text + written, add_special_tokens=False), codec.end_of_turn))


def test_qwen3_thinking_is_kept_as_it_was_sampled(codecs: dict[str, ChatCodec]) -> None:
    codec = codecs["qwen3"]

    @LIGHT
    @given(st.lists(thinking_turns, min_size=1, max_size=5), answers)
    def check(turns: list[Any], said_by_tools: list[str]) -> None:
        script = [thinking_reply(codec, turn) for turn in turns]
        held = converse(codec, [{"role": "user", "content": "Why?"}], script, said_by_tools, history="append")
        assert len(held.episode.segments) == 1
        assert held.segment.ids == held.engine.calls[-1].prompt + held.engine.calls[-1].generation.ids
        check_tiling(held.episode)
        check_sampled_once(held)

    check()


def check_rerendered(held: Held, question: Sequence[dict[str, Any]], codec: ChatCodec) -> None:
    """The engine always received the template's rendering; a segment ends exactly where the rendering diverges."""
    known: tuple[int, ...] = ()
    messages = list(question)
    prompts, observed = [], [tool_messages(turn) for turn in held.episode.turns if turn.role == "tool"]
    for call, results in itertools.zip_longest(held.engine.calls, observed, fillvalue=[]):
        full = codec.rerender(messages).ids
        assert call.prompt == full
        if not known or full[: len(known)] != known:
            prompts.append(full)
        known = full + call.generation.ids
        messages += [codec.message(codec.parse(call.generation.ids)), *results]
    assert [segment.prompt_ids for segment in held.episode.segments] == prompts
    assert held.episode.segments[-1].ids == known


def test_qwen3_rerendering_opens_a_segment_exactly_where_the_template_breaks_with_it(
    codecs: dict[str, ChatCodec],
) -> None:
    codec, question = codecs["qwen3"], [{"role": "user", "content": "Why?"}]

    @LIGHT
    @given(st.lists(thinking_turns, min_size=1, max_size=5), answers)
    def check(turns: list[Any], said_by_tools: list[str]) -> None:
        script = [thinking_reply(codec, turn) for turn in turns]
        held = converse(codec, question, script, said_by_tools, history="rerender")
        check_rerendered(held, question, codec)
        check_tiling(held.episode)
        check_sampled_once(held)

    check()


@pytest.mark.parametrize(("shape", "segments"), [(THINKING[0], 1), (THINKING[1], 2)])
def test_qwen3_rerendering_of_kept_and_of_reshaped_thinking(
    codecs: dict[str, ChatCodec], shape: str, segments: int
) -> None:
    codec, question = codecs["qwen3"], [{"role": "user", "content": "Why?"}]
    calls = [("calculator", {"expression": "1+1"})]
    held = converse(codec, question, [thinking_reply(codec, (shape, "so", calls))], ["2"], history="rerender")
    assert len(held.episode.segments) == segments
    assert held.episode.stop_reason is StopReason.STOP
    check_rerendered(held, question, codec)
    check_sampled_once(held)


@pytest.mark.parametrize(("history", "segments"), [("append", 1), ("rerender", 3)])
def test_qwen3_thinking_before_a_users_turn(codecs: dict[str, ChatCodec], history: str, segments: int) -> None:
    """The template drops thinking once a user has spoken: rerendering follows it, appending keeps what was sampled."""
    codec, question = codecs["qwen3"], [{"role": "user", "content": "Why?"}]
    script = [thinking_reply(codec, (THINKING[0], "so", []))] * 2
    held = converse(codec, question, script, ["-"], ["And?", "Really?"], history=history)
    assert len(held.episode.segments) == segments
    messages = list(question)
    for call, word in zip(held.engine.calls, ["And?", "Really?", ""], strict=True):
        shown = "so" in codec.decode(call.prompt).partition("Why?")[2]
        assert shown is (history == "append" and len(messages) > 1)
        if history == "rerender":
            assert call.prompt == codec.rerender(messages).ids
        said_now = codec.message(codec.parse(call.generation.ids))
        messages += [said_now, {"role": "user", "content": word}]
    check_tiling(held.episode)
    check_sampled_once(held)


def test_llama_parallel_calls_are_kept_though_its_template_refuses_them(codecs: dict[str, ChatCodec]) -> None:
    """The template cannot render two parsed calls of one turn; what was sampled is compared as text, and agrees."""
    codec = codecs["llama3_2"]
    both = Wild((("calculator", {"expression": "1"}), ("search", {"query": "2"})), closed=True)
    question = [{"role": "user", "content": "Why?"}]
    held = converse(codec, question, [both.reply(codec)], ["one", "two"], sanity_check="ignore_strippable")
    assert [r.response.text for r in held.episode.tool_results] == ["one", "two"]
    assert "tokenization_difference" not in held.episode.extra
    check_sampled_once(held)


def test_a_policy_that_writes_badly_is_no_tokenization_difference(codecs: dict[str, ChatCodec]) -> None:
    codec = codecs["qwen2_5"]
    text = '<tool_call>\n{"name": "calculator", "argum\n</tool_call>'
    broken = codec.tokenizer.encode(text, add_special_tokens=False)
    held = converse(codec, [{"role": "user", "content": "Why?"}], [Reply((*broken, codec.end_of_turn))], ["-"])
    assert [r.status for r in held.episode.tool_results] == [ToolStatus.MALFORMED]
    assert "tokenization_difference" not in held.episode.extra


def test_another_tokenization_of_the_same_words_is_no_difference(codecs: dict[str, ChatCodec]) -> None:
    codec = codecs["qwen2_5"]
    letters = [codec.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "hello"]
    assert codec.tokenizer.encode("hello", add_special_tokens=False) != letters
    held = converse(codec, [{"role": "user", "content": "Why?"}], [Reply((*letters, codec.end_of_turn))], ["-"])
    assert held.segment.response_ids == (*letters, codec.end_of_turn)
    assert "tokenization_difference" not in held.episode.extra
