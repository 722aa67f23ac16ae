"""Rows of the search, code and triage recipes: splits are disjoint, answers are right, prompts can be changed."""

import random
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rally.data import DataError, load_conversations, load_tasks, write_rows
from rally.recipes.gsm8k_tool import data as gsm8k
from rally.recipes.retool import data as retool
from rally.recipes.retool.data import RetoolSizes, write_retool
from rally.recipes.retool.problems import FAMILIES, Family, draw_problem, run_trusted
from rally.recipes.search_r1 import data as search_r1
from rally.recipes.search_r1.data import write_search_r1
from rally.recipes.triage import data as triage
from rally.recipes.triage.data import TriageSizes, write_triage
from rally.rewards import compute_score

SOLVED = "The answer is \\boxed{{{}}}."


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32))
def test_formula_and_program_agree(family: Family, seed: int) -> None:
    problem = draw_problem(family, random.Random(seed))
    assert run_trusted(problem.program) == str(problem.answer)
    assert 1 <= problem.level <= 5 and "{" not in problem.question.replace("{1, 2, ..., ", "")


def test_generated_rows_are_scored_and_never_shared_between_splits() -> None:
    train, test = (list(retool.rows(60, 0, split)) for split in ("train", "test"))
    asked = [{row["prompt"][-1]["content"] for row in rows} for rows in (train, test)]
    assert len(asked[0]) == len(asked[1]) == 60 and not asked[0] & asked[1]
    assert {row["extra_info"]["level"] for row in train} == {1, 2, 3, 4, 5}
    for row in (*train, *test):
        truth = row["reward_model"]["ground_truth"]
        assert compute_score(row["data_source"], SOLVED.format(truth), truth)["acc"] == 1.0
        assert compute_score(row["data_source"], SOLVED.format(int(truth) + 1), truth)["acc"] == 0.0
    assert list(retool.rows(60, 0, "train")) == train != list(retool.rows(60, 1, "train"))


def test_programs_are_really_run_and_shown_as_the_tool_shows_them(tmp_path: Path) -> None:
    write_retool(tmp_path, RetoolSizes(4, 2, 12), None, None, 0)
    for talk in load_conversations(tmp_path / "sft.parquet"):
        _, _, call, answer, last = talk.messages
        code = call["tool_calls"][0]["function"]["arguments"]["code"]
        assert run_trusted(code) == answer["content"], "what the sandbox printed"
        assert f"\\boxed{{{answer['content']}}}" in last["content"]
        assert talk.tools is not None and talk.tools[0]["function"]["name"] == "code_interpreter"
    with pytest.raises(DataError, match="check the code sandbox with"):
        list(retool.sft_rows(2, 0, lambda codes: ["bwrap: no permission"] * len(codes), []))


PASSAGES = {"A tower": "It was built by Ann (poet).", "Ann (poet)": "Born in Rome.", "B": "Nothing."}


def found(queries: list[str]) -> list[str]:
    """The passages that a search by title finds; a question finds the tower."""
    hits = [query if query in PASSAGES else "A tower" for query in queries]
    return [f'Doc 1(Title: "{title}") {PASSAGES[title]}\n' for title in hits]


def test_a_conversation_searches_only_for_what_was_read() -> None:
    titles = {"q1": ["A tower", "Ann (poet)"], "q2": ["A tower", "B"], "q3": ["A tower"], "q5": ["A tower"]}
    questions = [
        {"id": id, "question": "Where was its poet born?", "golden_answers": ["Rome"], "supporting_titles": named}
        for id, named in titles.items()
    ]
    assert [search_r1.held_out(id) for id in titles] == [False, False, False, True]
    two, one = list(search_r1.sft_rows(questions, found, [{"name": "search"}]))
    calls = [m["tool_calls"][0]["function"]["arguments"]["query"] for m in two["messages"] if m.get("tool_calls")]
    assert calls == ["Where was its poet born?", "Ann (poet)"], "B is named nowhere, so q2 would teach to guess"
    assert [m["content"] for m in two["messages"] if m["role"] == "tool"] == found(calls)
    assert two["messages"][-1]["content"] == "<answer>Rome</answer>" and len(one["messages"]) == 5
    assert two["messages"][:2] == next(search_r1.rows(questions, "train"))["prompt"]


def test_real_conversations_read_what_the_search_finds(shared: Path, tmp_path: Path) -> None:
    *_, sft = write_search_r1(tmp_path, shared / "data" / "hotpotqa", None, sft=True)
    talks = load_conversations(sft.path)
    assert len(talks) > 150, "of 246 questions"
    tests = {task.extra_info["question"] for task in load_tasks(tmp_path / "test.parquet")}
    for talk in talks:
        asked = talk.messages[1]["content"]
        assert not any(question in asked for question in tests)
        assert all(m["content"].startswith("Doc 1(Title: ") for m in talk.messages if m["role"] == "tool")


def test_aime_is_only_validated_on(shared: Path, tmp_path: Path) -> None:
    sizes = RetoolSizes(4, 2, 0)
    for split, count in (("train", 1), ("test", 3)):
        problems = [{"question": f"How many {split} {n}?", "answer": "<<1+1=2>>2\n#### 2"} for n in range(count)]
        write_rows(problems, tmp_path / "gsm8k" / f"{split}.jsonl")
    write_retool(tmp_path, sizes, tmp_path / "gsm8k", shared / "data" / "aime25", 0)
    sources = [[task.data_source for task in load_tasks(tmp_path / f"{s}.parquet")] for s in ("train", "test")]
    assert sources[0].count(retool.GSM8K_SOURCE) == 1 and retool.AIME_SOURCE not in sources[0]
    assert sources[1].count(retool.AIME_SOURCE) == 30
    assert sources[1].count(retool.GSM8K_SOURCE) == 2, "as many as are generated"


def test_gsm8k_is_downloaded_unless_a_folder_has_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[Path | None] = []
    monkeypatch.setattr(retool, "gsm8k_rows", lambda source, split: asked.append(source) or iter(()))
    write_retool(tmp_path / "out", RetoolSizes(2, 1, 0), Path("hub"), None, 0)
    (tmp_path / "hub").mkdir()
    write_retool(tmp_path / "out", RetoolSizes(2, 1, 0), Path("hub"), None, 0)
    assert asked == [None, None, Path("hub"), Path("hub")]


def test_the_real_questions_are_split_by_hash_and_searchable(shared: Path, tmp_path: Path) -> None:
    train, test, corpus = write_search_r1(tmp_path, shared / "data" / "hotpotqa", None)
    assert train.rows + test.rows == 300 and 40 < test.rows < 80 and corpus.rows == 4947
    ids = [{task.extra_info["id"] for task in load_tasks(w.path)} for w in (train, test)]
    assert not ids[0] & ids[1]
    task = load_tasks(test.path)[0]
    said = f"<answer>{task.ground_truth['target'][0]}</answer>"
    assert compute_score(task.data_source, said, task.ground_truth)["acc"] == 1.0


def test_the_prompt_can_be_replaced(tmp_path: Path) -> None:
    file = tmp_path / "prompt.yaml"
    file.write_text('system: ""\nuser: \'Say {"x": 1} to {question}\'\n')
    questions = [{"id": str(n), "question": "Why?", "golden_answers": ["so"]} for n in range(9)]
    row = next(search_r1.rows(questions, "train", search_r1.Prompt.read(file)))
    assert row["prompt"] == [{"role": "user", "content": 'Say {"x": 1} to Why?'}]
    for text, told in (
        ("user: no question", "must contain {question}"),
        ("sytem: x", "system and user"),
        ("[", "read"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=told):
            search_r1.Prompt.read(file)


def test_hotpotqa_of_the_hub_becomes_questions_and_one_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    item = {
        "id": "a",
        "question": "Why?",
        "answer": "so",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": {"title": ["T", "T"], "sent_id": [0, 1]},
        "context": {"title": ["T", "U"], "sentences": [["One.", " Two."], ["Three."]]},
    }
    hub = types.SimpleNamespace(load_dataset=lambda name, config, split: [item, {**item, "id": "b"}])
    monkeypatch.setitem(sys.modules, "datasets", hub)  # type: ignore[arg-type]
    questions, passages = search_r1.read_source(None)
    assert questions[0]["golden_answers"] == ["so"] and questions[0]["supporting_titles"] == ["T"]
    assert [p["text"] for p in passages] == ["One. Two.", "Three."]


def test_codes_that_are_tested_are_never_shown(tmp_path: Path) -> None:
    write_triage(tmp_path, TriageSizes(50, 50, 40, 40), 0)
    tested = {task.extra_info["code"] for task in load_tasks(tmp_path / "test.parquet")}
    trained = {task.extra_info["code"] for task in load_tasks(tmp_path / "train.parquet")}
    talks = list(load_conversations(tmp_path / "sft.parquet"))
    shown = " ".join(str(message.get("content")) for talk in talks for message in talk.messages)
    assert len(tested) == len(trained) == 50 and not tested & trained
    assert not [code for code in tested if code in shown]
    known = {article["title"]: article for article in triage.articles(0)}
    for incident in triage.incidents(20, 0, "test"):
        assert {k: known[incident.code][k] for k in ("service", "incident_type")} == incident.verdict
    with pytest.raises(DataError, match="ask for fewer"):
        triage.incidents(9000, 0, "test")


def test_a_gsm8k_row_tells_its_number_of_calculations(tmp_path: Path) -> None:
    answers = ["<<1+1=2>>2, then <<2*2=4>>4\n#### 4", "It is two.\nAnd two.\n#### 2"]
    write_rows([{"question": "?", "answer": answer} for answer in answers], tmp_path / "train.jsonl")
    levels = [row["extra_info"]["level"] for row in gsm8k.build(tmp_path, "agent_loop", "train")]
    assert levels == [2, 2]
