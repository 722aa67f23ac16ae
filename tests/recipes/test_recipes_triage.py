"""Two-round triage: tools only in round 1, one reply in round 2, and only that reply is rewarded."""

import json
from pathlib import Path
from typing import Any

import pytest
from loop_cases import (
    Held,
    Reply,
    check_sampled_once,
    check_tiling,
    hold,
    make_runner,
    make_task,
    said,
    tiny_codec,
)

from rally.recipes.triage import data as triage
from rally.recipes.triage.data import TriageSizes, write_triage
from rally.recipes.triage.kb_lookup import KBLookup
from rally.recipes.triage.reward import compute_score
from rally.rewards.score_inputs import request_of
from rally.tools import ToolConfigError
from rally.types import StopReason

[INCIDENT] = triage.incidents(1, 0, "test")
VERDICT = json.dumps(INCIDENT.verdict)
LOOKUP = ("kb_lookup", {"query": INCIDENT.code})
Said = tuple[str, *tuple[Any, ...]]


@pytest.fixture(scope="module")
def articles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triage")
    write_triage(folder, TriageSizes(4, 2, 0, 0), 0)
    return folder / "articles.jsonl"


async def exchange(articles: Path, *turns: Said, **settings: Any) -> Held:
    tool = KBLookup({"articles": str(articles)})
    codec = tiny_codec([tool])
    script = [Reply(said(codec, *turn)) for turn in turns]
    runner = make_runner(codec, script, [tool], loop="rally.recipes.triage.loop.TwoRounds", **settings)
    task = make_task([{"role": "user", "content": INCIDENT.question}], ground_truth=INCIDENT.verdict)
    held = await hold(runner, task)
    check_tiling(held.episode)
    check_sampled_once(held)
    return held


def scored(held: Held) -> dict[str, float]:
    return compute_score(**request_of(held.episode))


async def test_it_is_looked_up_first_and_judged_second(articles: Path) -> None:
    held = await exchange(articles, ("", LOOKUP), ("Noted.",), (VERDICT,))
    assert held.roles == ["assistant", "tool", "assistant", "user", "assistant"]
    assert held.episode.turns[1].text == f"{INCIDENT.code}: {INCIDENT.incident_type} in {INCIDENT.service}"
    assert held.episode.turns[3].text == triage.ROUND_2
    assert held.episode.stop_reason is StopReason.STOP
    assert scored(held) == {"score": 1.0, "acc": 1.0, "json_ok": 1.0}


async def test_a_verdict_in_round_1_earns_nothing(articles: Path) -> None:
    assert scored(await exchange(articles, (VERDICT,), ("As I said.",)))["score"] == 0.0
    cut = await exchange(articles, (VERDICT,), (VERDICT,), response_length=60)
    assert cut.episode.stop_reason is StopReason.LENGTH and scored(cut)["score"] == 0.0, "round 2 did not fit"


async def test_calls_in_round_2_are_not_run(articles: Path) -> None:
    held = await exchange(articles, ("Noted.",), (VERDICT, LOOKUP))
    assert held.roles == ["assistant", "user", "assistant"] and held.episode.stop_reason is StopReason.STOP
    assert not held.episode.tool_results


async def test_round_1_that_would_never_end_is_cut_short(articles: Path) -> None:
    held = await exchange(articles, ("", LOOKUP), ("Again.", LOOKUP), (VERDICT,), max_assistant_turns=2)
    assert held.roles == ["assistant", "tool", "assistant", "user", "assistant"]
    assert scored(held)["acc"] == 1.0
    slow = await exchange(articles, ("", LOOKUP), ("Noted.",), (VERDICT,), episode_timeout=0.0)
    assert slow.episode.stop_reason is StopReason.DEADLINE and scored(slow)["score"] == 0.0


@pytest.mark.parametrize(
    ("text", "score", "json_ok"),
    [
        (json.dumps({**INCIDENT.verdict, "service": "none"}), 0.5, 1.0),
        (f"Verdict: {VERDICT}", 0.0, 0.0),
        (json.dumps({**INCIDENT.verdict, "note": "x"}), 0.0, 0.0),
        ('["service"]', 0.0, 0.0),
        ('{"service": [1], "incident_type": 2}', 0.0, 1.0),
        ("", 0.0, 0.0),
    ],
)
def test_only_the_right_json_is_rewarded(text: str, score: float, json_ok: float) -> None:
    roles = ("user", "assistant", "user", "assistant")
    info = {"last_turn": text, "messages": [{"role": role, "text": ""} for role in roles]}
    found = compute_score(triage.DATA_SOURCE, text, INCIDENT.verdict, info)
    assert (found["score"], found["json_ok"]) == (score, json_ok)


async def test_the_rarest_words_decide(articles: Path, tmp_path: Path) -> None:
    tool = KBLookup({"articles": str(articles), "topk": 2})
    text, _, metrics = await tool.execute("i", {"query": f"what of {INCIDENT.code} in cart"})
    assert text.startswith(f"{INCIDENT.code}: ") and metrics == {"articles": 2}
    assert (await tool.execute("i", {"query": "zebra"}))[0] == triage.NOTHING
    with pytest.raises(ToolConfigError, match="make it with: rally data triage --out"):
        KBLookup({"articles": str(tmp_path / "gone.jsonl")})
