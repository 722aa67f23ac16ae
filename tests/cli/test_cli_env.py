"""`rally env list`, `rally env make`, and `rally env try`: one episode by hand and with a model."""

import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rally.chat import tiny_tokenizer
from rally.cli.main import app
from rally.demo.training_stages import small_model
from rally.envs import EnvError, registry
from rally.envs.registry import ADAPTERS, EnvAdapter

RIDDLE = """
from rally.envs import Environment, tool_reply
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}
class Riddle(Environment):
    def __init__(self, answer="blue"):
        self.answer = answer
    def reset(self, row, seed):
        return f"Riddle {seed}: which colour?", [ADD]
    def step(self, turn):
        if turn.calls:
            return [tool_reply(call, f"sum {call.arguments['n']}") for call in turn.calls], 0.5, False, {}
        return "Right." if turn.text == self.answer else "Wrong.", float(turn.text == self.answer), True, {"tries": 1}
"""


@pytest.fixture(autouse=True)
def riddle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "riddle_env.py").write_text(RIDDLE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def test_an_episode_is_played_by_hand() -> None:
    typed = '/call add {"n": "x"}\n/call add 5\n/call add {"n": 2}\nred\n'
    played = CliRunner().invoke(
        app, ["env", "try", "riddle_env.Riddle", "--args", "answer=red", "--seed", "4"], input=typed
    )
    assert played.exit_code == 0, played.output
    for line in ("user: Riddle 4: which colour?", "bad arguments for add", "tool: sum 2", "user: Right.", "reward 1.5"):
        assert line in played.output
    left = CliRunner().invoke(app, ["env", "try", "riddle_env.Riddle"], input="")
    assert "left before the end" in left.output


def test_a_model_plays_an_episode(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    small_model(tokenizer, 0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = ["env", "try", "riddle_env.Riddle", "--model", str(tmp_path / "model"), "--tokens", "64"]
    played = CliRunner().invoke(app, arguments)
    assert played.exit_code == 0, played.output
    assert "user: Riddle 0: which colour?" in played.output and "end: " in played.output


def test_adapters_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ADAPTERS", {"aviary": EnvAdapter("no_such_package", "pip install it")})
    listed = CliRunner().invoke(app, ["env", "list"])
    assert (
        listed.exit_code == 0
        and "aviary: environments of aviary need the package no_such_package; run: pip install it" in listed.output
        and "your own" in listed.output
    )
    assert "there is no adapter" in str(CliRunner().invoke(app, ["env", "list", "nothing"]).exception)


def test_an_adapter_is_installed_into_an_environment_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def done(command: list[str]) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        (tmp_path / "made").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, int(len(commands) == 4))

    monkeypatch.setattr("rally.cli.env.subprocess.run", done)
    CliRunner().invoke(app, ["env", "make", "bfcl", "--out", str(tmp_path / "made")], catch_exceptions=False)
    venv, install = commands
    assert venv[1:] == ["-m", "venv", str(tmp_path / "made")]
    assert install[0] == str(tmp_path / "made" / "bin" / "python") and "--no-deps" in install
    assert set(ADAPTERS["bfcl"].requirements) <= set(install)
    with pytest.raises(EnvError, match="made exists already"):
        CliRunner().invoke(app, ["env", "make", "bfcl", "--out", str(tmp_path / "made")], catch_exceptions=False)
    (tmp_path / "made").rmdir()
    with pytest.raises(EnvError, match=r"pip install .* failed; its output says why"):
        CliRunner().invoke(app, ["env", "make", "bfcl", "--out", str(tmp_path / "made")], catch_exceptions=False)
    assert not (tmp_path / "made").exists(), "a part would be taken for the whole"
    with pytest.raises(EnvError, match="knows bfcl, not 'tau2'"):
        CliRunner().invoke(app, ["env", "make", "tau2", "--out", str(tmp_path / "other")], catch_exceptions=False)


@pytest.fixture
def model(tmp_path: Path) -> str:
    tokenizer = tiny_tokenizer()
    small_model(tokenizer, 0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["riddle_env.ADD"], "riddle_env has no class ADD that is a rally.envs.Environment; correct NAME"),
        ([""], "NAME is empty; `rally env list` lists the environments"),
        (["riddle_env.Riddle", "--args", "blue"], "--args blue is not of the form key=value, such as"),
        (["riddle_env.Riddle", "--args", "answer={"], "the value of --args 'answer={' cannot be read"),
        (["riddle_env.Riddle", "--args", "colour=red"], "argument 'colour'; correct --args"),
        (["riddle_env.Riddle", "--python", "/no/python"], "--python=/no/python is no program"),
        (
            ["riddle_env.Riddle", "--model", "/no/model"],
            "/no/model does not exist; give a folder, a hub name that can be reached, or a .gguf file as --model",
        ),
        (["riddle_env.Riddle", "--model", ""], "--model is empty"),
        (["riddle_env.Riddle", "--model", "model", "--tokens", "2048"], "--tokens=2048 leaves no room for a prompt"),
        (
            ["riddle_env.Riddle", "--model", "model", "--tokens", "2040"],
            "the first prompt has more than the 8 tokens that --tokens=2040 leaves for it; lower --tokens",
        ),
    ],
)
def test_messages_name_the_options_and_no_keys(words: list[str], sentence: str, model: str) -> None:
    said = str(CliRunner().invoke(app, ["env", "try", *words]).exception)
    assert sentence in said
    assert not re.search(r"\b(env|data|trainer|rollout|model|actor_rollout_ref)\.[a-z]", said), said


def test_a_short_response_leaves_room_for_the_prompt(model: str) -> None:
    played = CliRunner().invoke(app, ["env", "try", "riddle_env.Riddle", "--model", model, "--tokens", "2"])
    assert played.exit_code == 0, played.output
    assert "end: length" in played.output
