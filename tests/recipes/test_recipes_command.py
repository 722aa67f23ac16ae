"""The command line lists recipes with commands that can be copied, and runs them by name."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rally.chat import tiny_tokenizer
from rally.cli.main import app
from rally.models.load import LoadError, load_tokenizer
from rally.recipes import list_recipes
from rally.types import RallyError


def rally(*words: str) -> str:
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_recipes_are_listed_with_all_their_commands_on_lines_of_their_own() -> None:
    lines = rally("recipes").splitlines()
    for recipe in list_recipes():
        assert recipe.line in lines
        assert all(f"    first: {command}" in lines for command in recipe.needs)


def test_a_recipe_without_its_data_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, made_by in (
        (("train", "--recipe", "gsm8k_tool/lora"), "rally data gsm8k --tool calculator --sft --out data/gsm8k"),
        (("sft", "--recipe", "triage"), "rally toy-model --words data/triage/words.txt --out models/triage"),
        (("eval", "--recipe", "retool"), "rally sft --recipe retool"),
    ):
        with pytest.raises(RallyError, match=made_by):
            rally(*words)
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    (tmp_path / "data" / "gsm8k" / "train.parquet").touch()
    with pytest.raises(RallyError, match=r"data/gsm8k/test\.parquet does not exist; make it with: rally data gsm8k"):
        rally("train", "--recipe", "gsm8k_tool")
    with pytest.raises(RallyError, match="both name a configuration"):
        rally("train", "my.yaml", "--recipe", "triage")


def test_a_model_that_cannot_be_had_says_how_to_fetch_it() -> None:
    with pytest.raises(LoadError, match="fetch it with `hf download no-one/no-model`"):
        load_tokenizer("no-one/no-model")


def test_what_triage_needs_is_made_by_two_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few = ("--train", "4", "--test", "2", "--clean", "2", "--mixed", "2")
    assert "articles.jsonl" in rally("data", "triage", "--out", "data/triage", *few)
    rally("toy-model", "--words", "data/triage/words.txt", "--out", "models/triage")
    made = load_tokenizer("models/triage")
    text = 'cart fails, log E4821: {"service": "cart", "incident_type": "clock_skew"}'
    assert made.decode(made(text)["input_ids"]) == text
    assert len(made(text)["input_ids"]) < len(tiny_tokenizer()(text)["input_ids"]) / 2
