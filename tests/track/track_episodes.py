"""Episodes for the tests of `rally.track`: one written by hand, and a Hypothesis strategy for any."""

from typing import Any

from hypothesis import strategies as st

from rally.types import (
    Episode,
    Segment,
    StopReason,
    Task,
    ToolAnswer,
    ToolCall,
    ToolResponse,
    ToolResult,
    ToolStatus,
    Turn,
    WeightSpan,
)

NASTY = "\x1b[31mred\x1b[0m [bold]b[/bold] <script>alert(1)</script> \u202eevil\u202c :smile: 👩‍🚀 مرحبا \ud800 \r\x07"


def make_episode(name: str = "e0", **changes: Any) -> Episode:
    """Prompt of 4 tokens; the policy samples 3, a tool response has 2, the policy samples 1."""
    call = ToolCall(name="calculate", arguments={"expression": "2+3"}, id="c0", raw="<tool_call>")
    result = ToolResult(call=call, status=ToolStatus.OK, response=ToolResponse(text="5"), seconds=0.2)
    fields: dict[str, Any] = {
        "id": name,
        "task": Task(id="t0", data_source="arithmetic", prompt=({"role": "user", "content": "2+3?"},), ground_truth=5),
        "group": "g0",
        "stop_reason": StopReason.STOP,
        "segments": (
            Segment(
                prompt_ids=(1, 2, 3, 4),
                response_ids=(5, 6, 7, 8, 9, 10),
                response_mask=(1, 1, 1, 0, 0, 1),
                response_logprobs=(-0.1, -0.2, -0.3, 0.0, 0.0, -0.4),
                spans=(WeightSpan(0, 0, 3), WeightSpan(0, 5, 6)),
            ),
        ),
        "turns": (
            Turn(role="assistant", text="call", start=0, end=3, tool_calls=(call,), finish="stop"),
            Turn(role="tool", text="5", start=3, end=5, tool_results=(result,)),
            Turn(role="assistant", text="5", start=5, end=6, finish="stop", cached_tokens=6),
        ),
        "reward": 1.0,
        "timings": {"generate": 0.5, "tools": 0.2},
    }
    return Episode(**(fields | changes))


# A broken tool can return lone surrogates, and "$" keys look like our own markers.
texts = st.text(max_size=12) | st.sampled_from([NASTY, "\ud83d\ude00", "$tuple", "中文"])
floats = st.floats(allow_nan=False) | st.sampled_from([0.1, -0.0, 5e-324])
clock = st.floats(0, 1e10)  # any clock value
scalars = st.none() | st.booleans() | st.integers() | floats | texts
keys = texts | st.integers() | st.tuples(st.integers(), texts)
open_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)
open_dicts = st.dictionaries(texts, open_values, max_size=3)
maybe_float = st.none() | floats
ids = st.integers(0, 200_000)

tool_calls = st.builds(ToolCall, name=texts, arguments=open_dicts, id=texts, raw=texts, error=st.none() | texts)
tool_responses = st.builds(ToolResponse, text=st.none() | texts, image=st.none() | st.lists(open_values, max_size=2))
tool_results = st.builds(
    ToolResult,
    call=tool_calls,
    status=st.sampled_from(ToolStatus),
    response=tool_responses,
    reward=maybe_float,
    metrics=open_dicts,
    seconds=clock,
    truncated=st.booleans(),
)
turns = st.builds(
    Turn,
    role=st.sampled_from(["assistant", "tool", "user"]),
    text=texts,
    segment=st.integers(0, 3),
    start=st.integers(0, 99),
    end=st.integers(0, 99),
    tool_calls=st.lists(tool_calls, max_size=2).map(tuple),
    tool_results=st.lists(tool_results, max_size=2).map(tuple),
    reward=maybe_float,
    finish=st.sampled_from([None, "stop", "length", "abort"]),
    cached_tokens=st.integers(0, 99),
    started=clock,
    seconds=clock,
    tool_answers=st.lists(st.builds(ToolAnswer, text=texts, call=st.none() | tool_calls), max_size=2).map(tuple),
)
tasks = st.builds(
    Task,
    id=texts,
    data_source=texts,
    prompt=st.lists(open_dicts, min_size=1, max_size=2).map(tuple),
    ground_truth=open_values,
    agent_name=st.none() | texts,
    tools_kwargs=st.dictionaries(texts, open_dicts, max_size=2),
    interaction_kwargs=open_dicts,
    extra_info=open_dicts,
    row=open_dicts,
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    tokens = draw(st.lists(st.tuples(ids, st.integers(0, 1), floats | st.just(float("-inf"))), max_size=5))
    return Segment(
        prompt_ids=tuple(draw(st.lists(ids, max_size=4))),
        response_ids=tuple(t[0] for t in tokens),
        response_mask=tuple(t[1] for t in tokens),
        response_logprobs=tuple(t[2] for t in tokens),
        spans=tuple(draw(st.lists(st.builds(WeightSpan, ids, ids, ids), max_size=2))),
    )


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    reason = draw(st.sampled_from(StopReason))
    return Episode(
        id=draw(texts),
        task=draw(tasks),
        group=draw(texts),
        stop_reason=reason,
        segments=tuple(draw(st.lists(segments(), min_size=1, max_size=2))),
        turns=tuple(draw(st.lists(turns, max_size=2))),
        reward=draw(maybe_float),
        reward_info=draw(open_dicts),
        error=draw(texts) if reason is StopReason.ERROR else None,
        step=draw(st.integers(0, 999)),
        validate=draw(st.booleans()),
        seed=draw(st.none() | st.integers()),
        timings=draw(st.dictionaries(texts, floats, max_size=2)),
        extra=draw(open_dicts),
    )
