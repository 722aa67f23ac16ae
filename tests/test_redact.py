"""Secrets of the configuration or the environment never appear in responses, logs, episodes or saved files."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from track.track_episodes import make_episode

from rally import redact as redact_module
from rally.cli.main import main
from rally.config import load_config
from rally.redact import learn_environment, learn_tree, redact, redacted_json, says_secret
from rally.tools import ToolBox, ToolLimits, load_tools
from rally.track import RunConsole, RunFolder
from rally.types import Task, ToolCall

TOKEN = 'tk-"5up3r\\s3cret"-é'


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact_module, "_known", {})


def test_names_that_say_secret_and_names_that_only_sound_so() -> None:
    for name in (
        "token",
        "api_key",
        "apikey",
        "HF_TOKEN",
        "OPENAI_API_KEY",
        "AZURE_KEY",
        "Authorization",
        "db-password",
    ):
        assert says_secret(name), name
    for name in ("prompt_key", "image_key", "tokenizer_path", "token_env", "max_tokens", "keys", "tokens", "monkey"):
        assert not says_secret(name), name


TOOL = """
class Client:
    def __init__(self, api_token, base="x"):
        self.api_token = api_token

    def execute(self, how: str) -> str:
        if how == "raise":
            raise ConnectionError(f"GET /?token={self.api_token} was refused")
        return f"{'.' * 40}your token is {self.api_token}!"
"""


def client(folder: Path, value: str) -> ToolBox:
    (folder / "leaky_client.py").write_text(TOOL, encoding="utf-8")
    path = folder / "tools.yaml"
    path.write_text(f"tools: [{{class_name: leaky_client.Client, config: {{api_token: {value}}}}}]", encoding="utf-8")
    return ToolBox(load_tools(path), ToolLimits(max_response_chars=62, truncate_side="right"))


async def told(box: ToolBox, how: str) -> str:
    task = Task(id="t", data_source="d", prompt=({"role": "user", "content": "hi"},))
    (result,) = await box.open(task, "e").run([ToolCall(name="client", arguments={"how": how})])
    return result.response.text or ""


async def test_a_tool_that_blurts_out_its_token_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIENT_ACCESS", TOKEN)
    box = client(tmp_path, "'${oc.env:CLIENT_ACCESS}'")
    assert (
        await told(box, "raise") == "Error: ConnectionError: GET /?token=${oc.env:CLIENT_ACCESS} wa[9 characters cut]"
    )
    assert "5up3r" not in await told(box, "return"), "nor the half of it that is left when the answer is cut"


async def test_a_token_written_into_the_yaml_is_hidden_too(tmp_path: Path) -> None:
    box = client(tmp_path, "abcdef123456")
    assert await told(box, "raise") == "Error: ConnectionError: GET /?token=*** was refused"
    assert "***" in await told(box, "return")


def test_a_saved_configuration_hides_them_and_still_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE", TOKEN)
    monkeypatch.setenv("WORK", str(tmp_path))
    config = load_config(
        base={
            "custom_reward_function": {
                "path": None,
                "reward_kwargs": {"header": "Bearer ${oc.env:JUDGE}", "key": "k1"},
            },
            "trainer": {"default_local_dir": "${oc.env:WORK}/run"},
        }
    )
    folder = RunFolder(tmp_path).create()
    folder.save_config(config.to_yaml())
    text = (tmp_path / "config.yaml").read_text(encoding="utf-8")
    assert "5up3r" not in text and "Bearer ${oc.env:JUDGE}" in text
    assert f"default_local_dir: {tmp_path}/run" in text, "a path that exists is no secret"
    again = load_config(tmp_path / "config.yaml")
    assert again.reward_kwargs == {"header": f"Bearer {TOKEN}", "key": "***"}


def test_episodes_and_console_and_log_tell_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", TOKEN)
    learn_environment()
    folder = RunFolder(tmp_path).create()
    folder.log_episodes(1, [make_episode("e", extra={"reward_error": f"HTTP 401 for {TOKEN}"})])
    [episode] = folder.read_episodes(1)
    assert episode.extra["reward_error"] == "HTTP 401 for ${oc.env:SOME_API_KEY}"
    file = io.StringIO()
    console = RunConsole(Console(file=file, width=200))
    console.note(f"note {TOKEN}")
    console.warn_once("w", f"warning {TOKEN}")
    console.banner("run", {"key": TOKEN})
    assert "5up3r" not in file.getvalue() and file.getvalue().count("SOME_API_KEY") == 3


def test_a_mistake_is_told_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLACE", "s3cret-place")
    monkeypatch.setattr("sys.argv", ["rally", "train", "data.train_files=${oc.env:PLACE}/rows.parquet"])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert "${oc.env:PLACE}/rows.parquet" in said and "s3cret" not in said


def test_of_two_secrets_the_longer_goes_first_and_short_ones_stay() -> None:
    learn_tree(
        {
            "token": "abcdef",
            "nested": [{"secret": "abcdefghi"}, {"password": "abc"}, {"authorization": "Bearer xyzxyz"}],
        }
    )
    assert redact("abcdefghi abcdef abc xyzxyz") == "*** *** abc ***"


def test_a_password_in_an_address_is_one_and_other_addresses_are_not() -> None:
    learn_tree(
        {"tools": [{"url": "http://ada:s3cret@10.0.0.1/x"}, {"url": "http://a:b@h"}], "uri": "hdfs://me@h:1/a@b"}
    )
    said = "http://ada:s3cret@10.0.0.1/x refused s3cret, http://a:b@h did not, hdfs://me@h:1/a@b"
    assert redact(said) == "http://***@10.0.0.1/x refused ***, http://***@h did not, hdfs://me@h:1/a@b"


def test_json_that_leaves_is_json_also_when_a_secret_is_a_number_or_a_name_in_it() -> None:
    learn_tree({"password": "123456", "token": "reward"})
    value = {"reward": [123456, 0.123456, {"text": "pin 123456, reward"}], "none": None}
    assert json.loads(redacted_json(value)) == value | {"reward": [123456, 0.123456, {"text": "pin ***, ***"}]}
