"""Secrets of the configuration or the environment never appear in responses, logs, episodes or saved files."""

import io
import json
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console
from track.track_episodes import make_episode

from rally import redact as redact_module
from rally.cli.main import main
from rally.config import Config, SftConfig, load_config, load_sft_config
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


SECRET_NAMES = [
    "GITHUB_PAT", "PGPASSWORD", "clientSecret", "accessToken", "openaiApiKey", "cookie", "passphrase", "MYSQL_PWD",
    "DB_PASS", "smtpPassword", "refresh_token", "id_token", "authToken", "githubtoken", "SLACK_BOT_TOKEN",
    "AWS_SECRET_ACCESS_KEY", "awsSecretAccessKey", "x-api-key", "Proxy-Authorization", "Set-Cookie",
    "sessionCookie", "privateKey", "private_key_1", "PASSWORD2", "userPassword", "JWT_SECRET", "SENTRY_DSN",
    "signing_key", "api_keys", "basicAuth", "API_KEY_OPENAI", "SECRET_KEY_BASE", "DB_PASSWORD_PROD", "TOKEN_GITHUB",
    "ACCESS_TOKENS", "googleCreds", "DB_PW", "passcode", "WIFI_PSK", "sessionKey", "openai_key", "serper_key",
    "AZURE_STORAGE_CONNECTION_STRING", "connectionString", "secretValue", "OAUTH_CLIENT_SECRET_V2", "LDAP_BIND_PW",
]  # fmt: skip
OTHER_NAMES = [
    "max_tokens", "tokenizer", "pad_token", "eos_token", "image_token", "token_level_rewards",
    "password_field_count", "token_env", "token_id", "secret_name", "auth_token_env", "author", "compass", "bypass",
    "stop_tokens", "new_tokens", "token_value_head", "password_file", "token_path", "cache_key", "string", "base",
    "value", "test", "live", "session_id", "pass_rate", "pattern", "PATH", "PWD", "OLDPWD", "sort_key", "public_key",
    "reward_fn_key",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRET_NAMES)
@pytest.mark.drill("security", "A secret stands under a key of any spelling", "It is in no episode and no saved file")
def test_a_secret_under_any_spelling_of_its_name_is_hidden(name: str) -> None:
    assert says_secret(name)
    tree = {
        "config": {name: "0pen-s3same-9"},
        "pin": {name: 12345678},
        "many": {name: ["0pen-s3same-8", {"a": "bcdefgh"}]},
    }
    learn_tree(tree)
    assert redact("0pen-s3same-9 and 12345678, 0pen-s3same-8 bcdefgh") == "*** and ***, *** ***"
    saved = json.dumps(redact_module.redact_tree(tree))
    assert "s3same" not in saved and "12345678" not in saved and "bcdefgh" not in saved


def test_names_of_other_things_are_no_secrets() -> None:
    assert [name for name in OTHER_NAMES if says_secret(name)] == []
    keys = [*Config.keys(), *SftConfig.keys()]
    assert len(keys) > 600 and [key for key in keys if says_secret(key)] == ["data.balance_dp_token"], "true or false"
    assert "***" not in load_sft_config().to_yaml() + load_config().to_yaml()


SHAPES = (
    "ghp_" + "a1B2" * 9,
    "github_pat_11ABCDEFG0" + "a1B2" * 12,
    "glpat-" + "a1B2-" * 4,
    "sk-proj-" + "a1B2" * 10,
    "sk-ant-api03-" + "a1B2_" * 10,
    "xoxb-123456789012-" + "a1B2" * 6,
    "AKIA" + "ABCD2345" * 2,
    "AIza" + "a1B2c" * 7,
    "hf_" + "aBcD" * 9,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    "sk_live_" + "a1B2" * 6,
    "gsk_" + "a1B2" * 13,
    "AccountKey=" + "a1B2" * 21 + "==",
    "hooks.slack.com/services/T0001/B0001/" + "a1B2" * 6,
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc=\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN OPENSSH PRIVATE KEY-----\\nb3Bl\\n-----END OPENSSH PRIVATE KEY-----",
)


@pytest.mark.parametrize("secret", SHAPES)
@pytest.mark.drill("security", "A tool prints a token that nobody configured", "Its form gives it away; it is hidden")
def test_what_has_the_form_of_a_token_is_hidden_wherever_it_stands(secret: str, tmp_path: Path) -> None:
    text = f"env: X={secret}, done"
    assert redact(text) == "env: X=***, done"
    folder = RunFolder(tmp_path).create()
    folder.log_episodes(1, [make_episode("e", extra={"output": text})])
    written = (tmp_path / "episodes" / "train_000001.jsonl").read_text(encoding="utf-8")
    assert secret[8:30] not in written and folder.read_episodes(1)[0].extra["output"] == "env: X=***, done"


def test_headers_arguments_and_variables_are_hidden() -> None:
    assert redact('{"Authorization": "Bearer abcdef12"} done') == '{"Authorization": "Bearer ***"} done'
    assert redact("authorization: Basic dXNlcjpwYXNz\nnext") == "authorization: Basic ***\nnext"
    learn_tree({"args": ["--token", "first-0ne", "--api-key=second-0ne", "DB_PASSWORD=third-0ne", "--steps=whatever"]})
    learn_tree({"env": [{"name": "SOME_TOKEN", "value": "fourth-0ne"}]})
    said = redact("first-0ne second-0ne third-0ne fourth-0ne whatever")
    assert said == "*** *** *** *** whatever"


def test_real_texts_are_left_alone(shared: Path) -> None:
    """Also those about risk-taking, desk-sized things and task-specific words, and our own documentation."""
    files = [*(shared / "data").rglob("*.jsonl"), *(Path(__file__).parents[1] / "docs").glob("*.md")]
    assert sum(file.stat().st_size for file in files) > 5_000_000
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert redact(text) == text, file


def test_credentials_in_an_address_of_the_environment_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgres://ada:sw0rdfish!@db.local/x")
    monkeypatch.setenv("SOME_TOKEN", "a/b c+d=e")
    learn_environment()
    assert redact("psql postgres://ada:sw0rdfish!@db.local/x, PGPASSWORD=sw0rdfish!") == (
        "psql postgres://***@db.local/x, PGPASSWORD=***"
    )
    assert redact("GET /?t=a%2Fb%20c%2Bd%3De") == "GET /?t=${oc.env:SOME_TOKEN}", "also as part of a URL"


def test_secrets_may_be_learnt_while_other_threads_redact() -> None:
    """A thread never sees a part of the known secrets."""
    learn_tree({"token": "the-first-secret"})
    stop, seen = threading.Event(), set[str]()

    def look() -> None:
        while not stop.is_set():
            try:
                seen.add(redact("the-first-secret"))
            except RuntimeError as problem:
                seen.add(str(problem))

    threads = [threading.Thread(target=look) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for number in range(200):
            learn_tree({"token": f"another-secret-{number}"})
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert seen == {"***"}
