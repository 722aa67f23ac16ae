"""The independent scorer reads real run folders, and ignores the text of tool responses."""

import json
from pathlib import Path

from benchmarks.score_gsm8k import score
from rally.track import RunFolder
from rally.types import Episode, Segment, StopReason, Task, ToolCall, ToolResponse, ToolResult, ToolStatus, Turn

QUESTIONS = {"How many apples?": "3+4=<<3+4=7>>7\n#### 7", "How many dollars?": "#### 1,200", "Who knows?": "#### -2"}


def episode(name: str, question: str, texts: list[str], statuses: list[ToolStatus]) -> Episode:
    call = ToolCall(name="calculator", arguments={"expression": "3+4"})
    response = ToolResponse(text="#### 1200")
    turns: list[Turn] = []
    for text, status in zip(texts, [*statuses, None], strict=True):
        turns.append(Turn(role="assistant", text=text, tool_calls=(call,) if status else ()))
        if status:
            result = ToolResult(call=call, status=status, response=response)
            turns.append(Turn(role="tool", text="#### 1200", tool_results=(result,)))
    task = Task(id=name, data_source="openai/gsm8k", prompt=({"role": "user", "content": question},))
    return Episode(
        id=name,
        group=name,
        task=task,
        stop_reason=StopReason.STOP,
        segments=(Segment(prompt_ids=(1,)),),
        turns=tuple(turns),
    )


def test_it_counts_what_the_policy_wrote(tmp_path: Path) -> None:
    test = tmp_path / "test.jsonl"
    lines = (json.dumps({"question": q, "answer": a}) for q, a in QUESTIONS.items())
    test.write_text("\n".join(lines), encoding="utf-8")
    apples, dollars, _ = QUESTIONS
    ok, error = ToolStatus.OK, ToolStatus.ERROR
    folder = RunFolder(tmp_path / "run").create()
    folder.log_episodes(
        10,
        [
            episode("a", apples, ["Let me see.", "#### 7.0"], [ok]),
            episode("b", apples, ["#### 8, or was it 7"], []),
            episode("c", dollars, ["I ask.", "Again.", "It is done."], [ok, error]),
        ],
        validate=True,
    )
    report = score(sorted((tmp_path / "run" / "episodes").glob("val_*.jsonl")), test)
    assert (report.problems, report.missing, report.episodes) == (3, 1, 3)
    assert report.strict == (1 / 2 + 0) / 3, "the tool's #### 1200 is not the policy's"
    assert report.flexible == (2 / 2 + 0) / 3
    assert (report.calls, report.good_calls, report.calling) == (1.0, 2 / 3, 2 / 3)
