"""What a person sees of an agent behind the gateway: branches, its tool messages, its own time, and its crash."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_cases import Reply, hold, make_runner, make_task, said, tiny_codec
from view_cases import go, make_episode, served

from benchmarks.browser import Browser
from rally.chat import ChatCodec, tiny_tokenizer
from rally.gateway import AgentClient, BlackBoxAgentLoop
from rally.loops import LoopSpec
from rally.tools import function_tool
from rally.track import RunFolder
from rally.track.run_folder.episode_json import episode_to_json
from rally.types import Episode, StopReason, ToolCall, ToolStatus
from rally.view.episode_rows import summarize
from rally.view.page_export import write_export
from rally.view.run_data import open_runs
from rally.view.segment_tree import Continued, continued_segments


@function_tool
def calculator(expression: str) -> str:
    """Computes.

    Args:
        expression: what to compute
    """
    return expression


CODEC = tiny_codec([calculator])
QUESTION = {"role": "user", "content": "What is 2+2?"}
BROKEN = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+'
SCRIPT = [
    said(CODEC, "", ("calculator", {"expression": "2+2"}), ("calculator", {"expression": "3+3"})),
    said(CODEC, "It is 4."),
    said(CODEC, "It is 5."),
    said(CODEC, "Better: the first."),
    CODEC.encode_assistant({"role": "assistant", "content": BROKEN}),
]


async def branching(row: Any, client: AgentClient) -> float:
    """Two answers after a tool turn, a judge that is not trained on, and a further turn after the second answer."""
    llm = client.openai()

    async def ask(messages: list[Any]) -> Any:
        return await llm.chat.completions.create(model="m", messages=messages, tools=CODEC.tools)

    await asyncio.sleep(0.05)
    first = (await ask([QUESTION])).choices[0].message
    answers = [
        {"role": "tool", "tool_call_id": call.id, "content": f"= {n}"} for n, call in enumerate(first.tool_calls)
    ]
    asked = [QUESTION, first, *answers]
    one, other = await ask(asked), await ask(asked)
    client.exclude(await ask([{"role": "user", "content": "Which is better?"}]))
    client.credit(one, 0.25)
    client.credit(other, -0.5)
    await ask([*asked, other.choices[0].message, {"role": "user", "content": "Are you sure?"}])
    return 1.0


async def crashing(row: Any, client: AgentClient) -> None:
    llm = client.openai()
    await llm.chat.completions.create(model="m", messages=[QUESTION], tools=CODEC.tools)
    raise ZeroDivisionError("its parser broke")


def played(agent: str, number: int, replies: Sequence[tuple[int, ...]] = SCRIPT) -> Episode:
    spec = LoopSpec(BlackBoxAgentLoop, {"agent": f"{__name__}:{agent}"})
    script = [Reply(ids) for ids in replies]
    runner = make_runner(CODEC, script, loops={"black_box": spec}, loop="black_box", max_retries=1)
    task = make_task(row={"prompt": [QUESTION]})
    name = f"t000001-0000{number}"
    return replace(asyncio.run(hold(runner, task)).episode, id=f"{name}-0", group=name, step=1)


@pytest.fixture(scope="module")
def branched() -> Episode:
    return played("branching", 0)


@pytest.fixture(scope="module")
def crashed() -> Episode:
    return played("crashing", 1, [SCRIPT[0]] * 2)


@pytest.fixture(scope="module")
def run(branched: Episode, crashed: Episode, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = RunFolder(tmp_path_factory.mktemp("agents") / "agents").create()
    tiny_tokenizer().save_pretrained(folder.path / "start")
    folder.save_config(f"actor_rollout_ref:\n  model:\n    path: {folder.path / 'start'}\n")
    folder.log_episodes(1, [branched, crashed])
    return folder.path


@pytest.fixture(scope="module")
def page(run: Path) -> Iterator[str]:
    with served(run) as url:
        yield url


def test_tool_messages_of_an_agent_are_recorded_with_their_calls(branched: Episode) -> None:
    told = [turn for turn in branched.turns if turn.role == "tool"]
    assert len(told) == 2 and branched.tool_results == ()
    for turn in told:
        assert [(a.text, a.call and a.call.arguments) for a in turn.tool_answers] == [
            ("= 0", {"expression": "2+2"}),
            ("= 1", {"expression": "3+3"}),
        ]


def test_the_segments_of_an_agent_are_a_tree(run: Path) -> None:
    [data] = open_runs([run])
    data.indexer.catch_up()
    segments = data.episode("t000001-00000-0")["segments"]
    main = next(n for n, one in enumerate(segments) if len(one["response_ids"]) > 20 and one["continues"] is None)
    branches = [one["continues"] for one in segments if one["continues"]]
    first_turn = len(segments[main]["prompt_ids"]) + len(SCRIPT[0])
    assert branches == [{"segment": main, "shared": first_turn, "kind": "branch"}]
    assert sum(one["continues"] is None for one in segments) == 2, "the question, and the judge"


def test_branches_are_a_tree_with_their_shared_part_once(browser: Browser, page: str) -> None:
    go(browser, page + "#/episode?id=t000001-00000-0", ".treemap")
    assert browser.text(".treemap h2") == "3 segments · 2 conversations · 1 branch"
    assert browser.evaluate("document.querySelectorAll('.treemap .node').length") == 8
    assert browser.evaluate("document.querySelectorAll('.node.excluded').length") == 1
    assert "continues segment" in browser.text(".treemap") and "after its turn 1" in browser.text(".treemap")
    asked = "[...document.querySelectorAll('.turn.prompt')].filter(t => t.innerText.includes('2+2')).length"
    assert browser.evaluate(asked) == 1, "the question is shown once"
    assert browser.text(".segment.inner .shared summary").endswith("shared tokens")
    browser.click(".segment.inner .shared summary")
    browser.wait("document.querySelector('.segment.inner .shared .tokens')?.innerText.includes('2+2')")
    rewards = browser.evaluate("[...document.querySelectorAll('.turn > header .chip')].map(c => c.innerText)")
    assert sorted(rewards) == ["excluded from training", "reward +0.250", "reward -0.500"]


async def returning(row: Any, client: AgentClient) -> float:
    """Two answers to a question, and a further turn after the first one, whose segment thus ends last."""
    llm = client.openai()

    async def ask(*messages: Any) -> Any:
        return (await llm.chat.completions.create(model="m", messages=[QUESTION, *messages])).choices[0].message

    again = {"role": "user", "content": "Are you sure?"}
    first = await ask()
    second, _ = await ask(first, again), await ask(first, again)
    await ask(first, again, second, again)
    return 1.0


def test_branches_are_compared_in_the_order_in_which_they_are_shown(browser: Browser, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run").create()
    folder.log_episodes(1, [played("returning", 0, [said(CODEC, f"Answer {n}.") for n in range(4)])])
    with served(folder.path) as url:
        go(browser, url + "#/compare?task=t", ".diff")
        texts = "[...document.querySelectorAll('.diff .cell:nth-of-type(odd) > pre')].map(s => s.innerText)"
        shown = [text for text in browser.evaluate(texts) if text.startswith("Answer")]
    assert shown == ["Answer 0.", "Answer 1.", "Answer 3.", "Answer 2."], "a branch follows what it continues"


def test_a_person_jumps_between_segments_and_turns(browser: Browser, page: str) -> None:
    go(browser, page + "#/episode?id=t000001-00000-0", ".treemap")
    browser.click(".branches button")
    assert browser.evaluate("document.activeElement.classList.contains('inner')")
    browser.press("s")
    assert browser.evaluate("document.activeElement.innerText").startswith("segment")
    browser.click(".node.excluded")
    assert "excluded from training" in browser.evaluate("document.activeElement.innerText")


def test_calls_are_cards_and_a_malformed_one_shows_what_was_written(browser: Browser, page: str) -> None:
    go(browser, page + "#/episode?id=t000001-00000-0", ".turn.tool .call")
    cards = browser.evaluate(
        "[...document.querySelector('.turn.tool').querySelectorAll('.call')].map(c => c.innerText)"
    )
    assert [card.split() for card in cards] == [
        f"calculator run by the agent arguments expression: {what} result = {n}".split()
        for n, what in enumerate(("2+2", "3+3"))
    ]
    broken = browser.evaluate(
        "Object.fromEntries([...[...document.querySelectorAll('.turn.assistant .call')].at(-1).querySelectorAll('dt')]"
        ".map(t => [t.innerText, t.nextElementSibling.innerText]))"
    )
    assert broken["written"] == BROKEN and broken["error"].startswith("Failed to decode tool call")
    assert "arguments" not in broken


def test_a_malformed_call_that_was_answered_shows_what_was_written(browser: Browser, tmp_path: Path) -> None:
    episode = make_episode(ChatCodec(tiny_tokenizer()), 1, 0, 0)
    call = ToolCall(name="", raw=BROKEN, error="Failed to decode tool call: a string is not closed")
    [result] = episode.turns[1].tool_results
    hint = replace(result.response, text=f"Error: {call.error}.")
    turn = replace(
        episode.turns[1], tool_results=(replace(result, call=call, status=ToolStatus.MALFORMED, response=hint),)
    )
    folder = RunFolder(tmp_path / "run").create()
    folder.log_episodes(1, [replace(episode, turns=(episode.turns[0], turn, episode.turns[2]))])
    with served(folder.path) as url:
        go(browser, url + f"#/episode?id={episode.id}", ".turn.tool .call")
        rows = browser.evaluate("[...document.querySelectorAll('.turn.tool dt, .turn.tool dd')].map(e => e.innerText)")
        assert rows == ["written", BROKEN, "error", call.error]


def test_a_crashed_agent_keeps_its_transcript_and_those_of_earlier_attempts(
    crashed: Episode, browser: Browser, page: str
) -> None:
    assert crashed.stop_reason is StopReason.ERROR and len(crashed.turns) == 1
    [lost] = crashed.extra["failed_attempts"]
    assert "ZeroDivisionError" in lost["error"] and lost["turns"][0]["role"] == "assistant"
    go(browser, page + "#/episode?id=t000001-00001-0", ".turn.assistant")
    assert "ZeroDivisionError: its parser broke" in browser.text(".error")
    assert "not answered" in browser.text(".turn.assistant .call")
    browser.click(".attempt summary")
    assert "2+2" in browser.text(".attempt .turn")


def test_the_time_of_an_agent_is_its_own(branched: Episode, browser: Browser, page: str) -> None:
    lanes = json.loads(summarize(json.loads(json.dumps(episode_to_json(branched)))).lanes)
    own = [(start, end) for kind, start, end in lanes if kind == "agent"]
    assert own[0][0] == 0.0 and own[0][1] >= 0.05, "from the start to its first request"
    assert {kind for kind, *_ in lanes} <= {"agent", "queue", "prefill", "decode"}
    covered = sorted((start, end) for _, start, end in lanes)
    assert all(b - a < 1e-3 for (_, a), (b, _) in pairwise(covered)), "no time is nobody's"
    go(browser, page + "#/timeline?step=1", "canvas[data-episodes='2']")
    assert "the agent by itself" in browser.text(".legend") and "agent " in browser.text(".said")


def test_environments_and_tools_have_lanes_of_their_own() -> None:
    episode = make_episode(ChatCodec(tiny_tokenizer()), 1, 0, 0)

    def kinds(extra: dict[str, Any]) -> list[str]:
        late = tuple(replace(turn, started=turn.started + 1.0) for turn in episode.turns)
        recorded = json.loads(json.dumps(episode_to_json(replace(episode, turns=late, extra=extra))))
        return sorted({kind for kind, *_ in json.loads(summarize(recorded).lanes)})

    assert kinds({}) == ["decode", "prefill", "queue", "score", "tool"]
    assert kinds({"environment": {"name": "game"}}) == ["decode", "env", "prefill", "queue", "score"]


def test_an_exported_file_has_the_tree(browser: Browser, run: Path, tmp_path: Path) -> None:
    url = write_export(open_runs([run]), tmp_path / "out.html").path.as_uri()
    go(browser, url + "#/episode?id=t000001-00000-0", ".treemap")
    assert "1 branch" in browser.text(".treemap h2")


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ([([1, 2], [3, 4])], [None]),
        ([([1, 2], [3, 4, 5]), ([1, 2, 3], [6])], [None, Continued(0, 3, "branch")]),
        ([([1, 2, 3], [6]), ([1, 2], [3, 4, 5])], [Continued(1, 3, "branch"), None]),
        ([([1, 2], [3]), ([1, 2], [4])], [None, Continued(0, 2, "prompt")]),
        ([([1, 2], [3, 4]), ([1, 2, 3, 9], [5])], [None, Continued(0, 3, "rewritten")]),
        ([([1, 2], [3]), ([1, 7], [3])], [None, None]),
    ],
)
def test_segments_continue_what_they_share(segments: Any, expected: Any) -> None:
    assert continued_segments(segments) == expected


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@given(st.lists(st.tuples(tokens, tokens), max_size=6))
def test_segments_are_a_forest_of_shared_beginnings(segments: list[tuple[list[int], list[int]]]) -> None:
    found = continued_segments(segments)
    for at, one in enumerate(found):
        seen = {at}
        while one is not None:
            assert one.segment not in seen, "no cycles"
            seen.add(one.segment)
            one = found[one.segment]
        if (own := found[at]) is not None:
            whole = [*segments[own.segment][0], *segments[own.segment][1]]
            assert whole[: own.shared] == segments[at][0][: own.shared] and own.shared > 0
            assert (own.shared == len(segments[at][0])) == (own.kind != "rewritten")
