"""Whatever an agent does with its conversations, each sampled token is recorded once, after the ids that preceded
it."""

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from gateway_cases import held_by
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_cases import calculator, check_tiling, said, tiny_codec

from rally.chat import ChatCodec
from rally.chat.tiny_tokenizer import template_tokenizer
from rally.gateway.transcript import ChatHistory, Draft, MessageError, Transcript
from rally.services.admission import SamplingAsk
from rally.services.openai_responses import ChatShape, CompletionResponse, ResponseOptions
from rally.types import Episode, Generation, SamplingParams, Segment, StopReason, WeightSpan

CODEC = tiny_codec([calculator])
TOOLS = CODEC.tools
PARAMS = SamplingParams(stop_ids=CODEC.stop_ids)
WISHES = ResponseOptions(model="m", logprobs=False, token_ids=False, usage_in_stream=False, choices=1)
Message = dict[str, Any]


def plain(message: Message) -> Message:
    return message


def parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message.get("content") or ""}]}


def emptied(message: Message) -> Message:
    nothing = {"refusal": None, "annotations": [], "audio": None, "provider_specific_fields": {"refusal": None}}
    return {**nothing, **message, "content": message.get("content") or ""}


def spelled(message: Message) -> Message:
    """The arguments with other white space and key order, the assistant with a name and without surrounding spaces."""
    if message["role"] != "assistant":
        return message
    calls = copy.deepcopy(message.get("tool_calls") or [])
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1, ensure_ascii=False)
    return {**message, "name": "me", "content": (message["content"] or "").strip(), "tool_calls": calls}


REWRITINGS: list[Callable[[Message], Message]] = [plain, parts, emptied, spelled]
words = st.sampled_from(["yes", "no ", " so\n", "1 2", ""])
calls = st.lists(st.sampled_from([{"expression": "1"}, {"expression": "2", "digits": 3.0}]), max_size=2)
steps = st.tuples(
    st.integers(-1, 6),  # which conversation continues, counted from the latest; -1 is a new one
    words,  # what is observed
    words,  # what is sampled
    calls,
    st.sampled_from(REWRITINGS),
    st.sampled_from(["goes on", "goes on", "goes on", "edits", "leaves the tools out"]),
    st.integers(0, 2),  # how many others begin before it ends
)


@dataclass
class Node:
    """A conversation that ends with a sampled message, as the agent holds it and as the engine knows it."""

    messages: list[Message]
    ids: tuple[int, ...]
    offered: bool


@dataclass
class Play:
    """A scripted agent with several concurrent conversations, and its transcript."""

    transcript: Transcript = field(default_factory=lambda: Transcript(CODEC, "append", 0.0))
    nodes: list[Node] = field(default_factory=list)
    given: list[tuple[tuple[int, ...], Generation]] = field(default_factory=list)
    waiting: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    numbers: Any = field(default_factory=itertools.count)

    def step(self, at: int, observed: str, reply: str, made: Any, rewrite: Any, manner: str, wait: int) -> None:
        node = self.nodes[-1 - at % len(self.nodes)] if self.nodes and at >= 0 else None
        messages, offered, known = self._asked(node, observed, manner)
        draft = self.transcript.draft(ChatHistory.of([rewrite(m) for m in messages], TOOLS if offered else []))
        assert (draft.after is not None) == known, (messages, manner)
        if node is not None and known:
            equals = [n.ids for n in self.nodes if same(n, node)]
            assert any(draft.ids[: len(ids)] == ids for ids in equals), "what was sampled was encoded again"
            if any("tool_calls" in m for m in node.messages):
                assert draft.ids[: len(node.ids)] == node.ids, "call ids tell equal words apart"
        elif not known:
            assert draft.ids == CODEC.with_tools(TOOLS if offered else []).encode_prompt(draft.conversation.messages)
        hold = self.transcript.reserved(draft)
        hold.__enter__()
        ends = [("calculator", arguments) for arguments in made] if offered else []
        ids = said(CODEC, reply, *ends)
        self.waiting = [(left - 1, end) for left, end in self.waiting]
        self.waiting.append((wait, lambda: self._end(draft, hold, messages, offered, ids)))
        self.settle(0)

    def _asked(self, node: Node | None, text: str, manner: str) -> tuple[list[Message], bool, bool]:
        if node is None:
            return [{"role": "user", "content": f"Why {text}?"}], True, False
        messages = list(node.messages)
        if manner == "edits":
            messages[0] = {**messages[0], "content": f"Why not {next(self.numbers)}?"}
        issued = node.messages[-1].get("tool_calls") or []
        later = [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in issued]
        offered = node.offered and manner != "leaves the tools out"
        known = manner == "goes on" or (manner == "leaves the tools out" and not node.offered)
        return [*messages, *(later or [{"role": "user", "content": text}])], offered, known

    def _end(self, draft: Draft, hold: Any, messages: list[Message], offered: bool, ids: tuple[int, ...]) -> None:
        logprobs = tuple(-(1 + next(self.numbers)) / 4096 for _ in ids)
        generation = Generation(ids=ids, logprobs=logprobs, finish="stop", spans=(WeightSpan(1, 0, len(ids)),))
        shape = ChatShape(CODEC.with_tools(TOOLS if offered else []), offered)
        message = CompletionResponse(shape, WISHES, [SamplingAsk(draft.ids, PARAMS)]).whole([generation])["choices"][0][
            "message"
        ]
        hold.__exit__(None, None, None)
        self.given.append((draft.ids, generation))
        self.nodes.append(Node([*messages, message], draft.ids + ids, offered))
        self.transcript.add(draft, generation, message, 0.0)

    def settle(self, most: int) -> None:
        ready = [end for left, end in self.waiting if left <= most]
        self.waiting = [(left, end) for left, end in self.waiting if left > most]
        for end in ready:
            end()


def same(one: Node, other: Node) -> bool:
    keys = [ChatHistory.of(n.messages, TOOLS if n.offered else []).keys[-1] for n in (one, other)]
    return keys[0] == keys[1]


def place_of(segments: tuple[Segment, ...], logprob: float) -> tuple[int, int]:
    """The only position of a sampled token, identified by its logprob."""
    (found,) = [
        (number, at)
        for number, segment in enumerate(segments)
        for at, (value, mask) in enumerate(zip(segment.response_logprobs, segment.response_mask, strict=True))
        if mask and value == logprob
    ]
    return found


@settings(max_examples=60)
@given(st.lists(steps, min_size=1, max_size=12))
def test_trees_of_conversations_lose_no_token_and_train_none_twice(drawn: list[Any]) -> None:
    play = Play()
    for step in drawn:
        play.step(*step)
    play.settle(10**9)
    segments, turns = play.transcript.parts()
    assert sum(s.sampled for s in segments) == sum(len(generation.ids) for _, generation in play.given)
    for prompt, generation in play.given:
        number, at = place_of(segments, generation.logprobs[0])
        segment, end = segments[number], at + len(generation.ids)
        assert segment.prompt_ids + segment.response_ids[:at] == prompt
        assert segment.response_ids[at:end] == generation.ids
        assert segment.response_logprobs[at:end] == generation.logprobs
        assert WeightSpan(1, at, end) in segment.spans
    check_tiling(Episode(id="e", task=None, group="g", stop_reason=StopReason.STOP, segments=segments, turns=turns))  # type: ignore[arg-type]
    assert [turn.segment for turn in turns] == sorted(turn.segment for turn in turns)


def test_call_ids_tell_replies_of_the_same_words_apart() -> None:
    play = Play()
    for at in (-1, -1, 0):  # the same reply twice, then the second one continues
        play.step(at, "yes", "so", [{"expression": "1"}], plain, "goes on", 0)
    segments, _ = play.transcript.parts()
    first, second, third = (place_of(segments, generation.logprobs[0])[0] for _, generation in play.given)
    assert third == second != first


ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
CALL = {"id": "a", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "1", "n": 2}'}}
REPLY: Message = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def edited(**function: str) -> Message:
    return {**REPLY, "tool_calls": [{**CALL, "function": {**CALL["function"], **function}}]}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        ([*ASKED, REPLY], True),
        ([{**ASKED[0], "role": "developer"}, ASKED[1], REPLY], True),
        ([*ASKED, {**REPLY, "content": "", "refusal": None, "function_call": None}], True),
        ([*ASKED, {**REPLY, "tool_calls": [{**CALL, "id": "other"}]}], True),
        ([*ASKED, edited(arguments='{"n":2.0,"expression":"1"}')], True),
        ([*ASKED, edited(arguments='{"n": 2, "expression": "1 "}')], False),
        ([*ASKED, edited(arguments='{"n": true, "expression": "1"}')], False),
        ([*ASKED, edited(arguments='{"n": 2, "expression": "1"')], False),
        ([*ASKED, edited(name="search")], False),
        ([*ASKED, {**REPLY, "tool_calls": [CALL, CALL]}], False),
        ([*ASKED, {**REPLY, "content": "Well"}], False),
        ([*ASKED, {**REPLY, "reasoning_content": "I cannot."}], False),
        ([{**ASKED[0], "content": "Be brief. "}, ASKED[1], REPLY], False),
        ([ASKED[1], ASKED[0], REPLY], False),
        ([ASKED[1], REPLY], False),
    ],
)
def test_usual_rewriting_is_seen_through_and_changed_words_are_not(other: list[Message], equal: bool) -> None:
    assert (ChatHistory.of(other, TOOLS).keys[-1] == ChatHistory.of([*ASKED, REPLY], TOOLS).keys[-1]) is equal
    assert ChatHistory.of(other, TOOLS).keys[-1] != ChatHistory.of(other).keys[-1], "other tools are another talk"


@pytest.mark.parametrize(
    "message",
    [
        {"content": "x"},
        {"role": "user", "content": 3},
        {"role": "assistant", "tool_calls": [{"id": "a"}]},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
    ],
)
def test_a_message_that_is_none_is_refused(message: Message) -> None:
    with pytest.raises(MessageError):
        ChatHistory.of([message])


def test_branches_sub_agents_and_going_on_over_http() -> None:
    held = held_by("two_heads", tiny_codec())
    right, sub, left = held.episode.segments  # in the order they ended
    assert right.prompt_ids == left.prompt_ids + left.response_ids[: len(right.prompt_ids) - len(left.prompt_ids)]
    assert [turn.segment for turn in held.episode.turns] == [0, 0, 1, 2, 2, 2, 2, 2]
    assert [s.sampled for s in (right, sub, left)] == [n * sub.sampled for n in (1, 1, 3)]
    counts = held.episode.extra["agent"]
    assert (counts["segments"], counts["branches"], counts["rewritten"]) == (3, 1, 0)
    check_tiling(held.episode)
    tokens = sorted(
        pair for s in held.episode.segments for pair in zip(s.response_logprobs, s.response_mask, strict=True)
    )
    assert [p for p, mask in tokens if mask] == sorted(
        p for call in held.engine.calls for p in call.generation.logprobs
    )


def test_an_answer_has_the_id_that_the_policy_wrote() -> None:
    """Agents get ids of their own; a template of Mistral's prints those of the policy."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
        "{{ eos_token }}{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}"
        "[/TOOL_RESULTS]{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
    )
    codec = ChatCodec(template_tokenizer(source, "</s>"), "auto", TOOLS)
    transcript = Transcript(codec, "append", 0.0)
    asked = [{"role": "user", "content": "What is 1+1?"}]
    written = '[TOOL_CALLS]calculator[CALL_ID]z9Y8x7W6v[ARGS]{"expression": "1+1"}</s>'
    ids = tuple(codec.tokenizer.encode(written, add_special_tokens=False))
    call: Message = {"id": "call_of_the_agent", "type": "function"}
    call["function"] = {"name": "calculator", "arguments": '{"expression": "1+1"}'}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    draft = transcript.draft(ChatHistory.of(asked, TOOLS))
    transcript.add(draft, Generation(ids=ids, logprobs=(0.0,) * len(ids), finish="stop"), answer, 0.0)
    result = {"role": "tool", "tool_call_id": "call_of_the_agent", "content": "2"}
    following = transcript.draft(ChatHistory.of([*asked, answer, result], TOOLS))
    assert codec.decode(following.observed) == "[TOOL_RESULTS]z9Y8x7W6v[TOOL_CONTENT]2[/TOOL_RESULTS]"


def test_arguments_that_are_nested_too_deeply_stay_text() -> None:
    deep = "[" * 100_000
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": deep}}
    history = ChatHistory.of([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert history.messages[0]["tool_calls"][0]["function"]["arguments"] == deep
    assert CODEC.encode_prompt([{"role": "user", "content": "x"}, *history.messages])
