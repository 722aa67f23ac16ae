"""Requests to the viewer: which are allowed, what they return, and the content policy for the browser."""

import json
import shutil
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tokenizers import Tokenizer
from view_cases import served, write_run

from rally.chat import ChatCodec, tiny_tokenizer
from rally.types import RallyError
from rally.view.run_data import open_runs
from rally.view.server import create_app
from rally.view.token_text import Decode, find_tokenizer, pieces


@pytest.mark.drill("security", "A web page reaches `rally view` under another host name", "Refused")
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost@evil.example", ""]
)
@pytest.mark.parametrize("path", ["", "page/app.js", "api/state"])
def test_a_foreign_host_is_refused(address: str, host: str, path: str) -> None:
    answer = httpx.get(address + path, headers={"host": host})
    assert answer.status_code == 403 and "small" not in answer.text


@pytest.mark.parametrize("host", ["localhost", "localhost:1234", "127.0.0.1:9", "[::1]:80", "[::1]"])
def test_this_machine_is_let_in_by_all_of_its_names(address: str, host: str) -> None:
    assert httpx.get(address + "api/state", headers={"host": host}).json()["runs"][0]["name"] == "small"


@pytest.mark.drill("security", "Paths outside the run folder in `rally view`", "Refused")
@pytest.mark.parametrize(
    "path",
    [
        "page/../server.py", "page/..%2fserver.py", "page/%2e%2e/%2e%2e/cli.py", "page//etc/passwd", "page/__init__.py",
        "page/..%5c..%5cserver.py", "api/runs/../../etc/passwd", "api/runs/1/metrics", "api/runs/-1/metrics",
        "api/runs/0/episode?id=../../../etc/passwd", "api/runs/0/episode?id=%2Fetc%2Fpasswd", "api/runs/x/rows",
    ],
)  # fmt: skip
def test_nothing_but_the_page_and_the_runs_can_be_had(address: str, path: str) -> None:
    """Sent raw, since a client library would normalise the dots."""
    url = httpx.URL(address).copy_with(raw_path=b"/" + path.encode())
    answer = httpx.get(url)
    assert answer.status_code == 404 and "root:" not in answer.text and "def " not in answer.text


def test_the_browser_may_run_and_load_nothing_of_strangers(address: str) -> None:
    for path in ("", "api/state", "page/style.css", "nothing"):
        headers = httpx.get(address + path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers


@pytest.mark.drill("security", "Requests that would change something in `rally view`", "Refused")
def test_it_only_shows(address: str) -> None:
    assert httpx.post(address + "api/state").status_code == 405
    answer = httpx.get(address + "api/runs/0/rows?sort=nothing")
    assert answer.status_code == 400 and "cannot sort by nothing" in answer.json()["error"]


@pytest.mark.drill("security", "`rally view` without its token", "Refused")
def test_with_a_token_only_its_bearer_is_let_in(run_path: Path) -> None:
    with served(run_path, token="s3cret") as url:
        assert httpx.get(url).status_code == 401
        assert httpx.get(url + "?token=wrong").status_code == 401
        assert httpx.get(url, headers={"cookie": "rally_view=wrong"}).status_code == 401
        with httpx.Client(follow_redirects=True) as client:
            assert "<main" in client.get(url + "?token=s3cret").text
            assert client.get(url + "api/state", headers={"host": "gpu-7:8640"}).status_code == 200


@pytest.mark.parametrize("token", ["a+b/c=", "пароль", "a;b c"])
def test_any_token_and_any_foreign_cookie_will_do(run_path: Path, token: str) -> None:
    foreign = 'a={"x":1}; x@y=1; '
    with served(run_path, token=token) as url:
        welcome = httpx.get(url + "?token=" + quote(token, safe=""))
        assert welcome.status_code == 303
        kept = welcome.headers["set-cookie"].split(";")[0]
        assert httpx.get(url, headers={"cookie": foreign + kept}).status_code == 200
        assert httpx.get(url, headers={"cookie": foreign + "rally_view=wrong"}).status_code == 401


def test_an_index_that_is_gone_is_said_in_words(tmp_path: Path) -> None:
    [run] = open_runs([write_run(tmp_path / "run")])
    run.index.path.unlink()
    client = TestClient(create_app([run]), base_url="http://localhost")  # without its lifespan the index is not rebuilt
    answer = client.get("/api/runs/0/facets")
    assert answer.status_code == 503 and "the index cannot be read now" in answer.json()["error"]


def test_an_episode_has_the_text_and_the_advantage_of_every_token(run_path: Path) -> None:
    [run] = open_runs([run_path])
    run.indexer.catch_up()
    shown = run.episode("t000002-00001-1")
    [segment] = shown["segments"]
    assert len(segment["response_text"]) == len(segment["response_ids"])
    decoded = ChatCodec(tiny_tokenizer()).decode(segment["response_ids"])
    assert "".join(segment["response_text"]) == decoded
    assert segment["advantages"][0][0] == -0.71
    assert shown["seed"] == str(2**62 + 1), "a script's numbers are too short for it"
    json.dumps(shown, allow_nan=False)


def test_a_run_from_elsewhere_is_read_with_the_tokenizer_that_is_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "config.yaml").write_text("actor_rollout_ref: {model: {path: /nowhere}}")
    shutil.rmtree(path / "checkpoints", ignore_errors=True)
    tiny_tokenizer().save_pretrained(tmp_path / "named")
    [bare], [named] = open_runs([path]), open_runs([path], str(tmp_path / "named"))
    bare.indexer.catch_up()
    note = bare.episode("t000002-00001-1")["note"]
    assert note.startswith("No tokenizer was found at /nowhere") and "--tokenizer" in note
    [segment] = named.episode("t000002-00001-1")["segments"]
    assert "".join(segment["response_text"]) == ChatCodec(tiny_tokenizer()).decode(segment["response_ids"])
    with pytest.raises(RallyError, match=r"--tokenizer /nowhere has no tokenizer; name a model folder"):
        open_runs([path], "/nowhere")


@pytest.fixture(scope="module")
def qwen(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decode, Tokenizer]:
    """The decoder of a run that names this tokenizer, and the tokenizer itself."""
    place, run = shared / "tokenizers/qwen2_5", tmp_path_factory.mktemp("qwen")
    (run / "config.yaml").write_text(f"actor_rollout_ref: {{model: {{path: {place}}}}}")
    decode = find_tokenizer(run).decode
    assert decode is not None
    return decode, Tokenizer.from_file(str(place / "tokenizer.json"))


@given(text=st.text(max_size=30) | st.sampled_from(["👩‍🚀 мир", "强化学习", "a\n\n  b", "🇨🇭é"]))
def test_pieces_joined_are_the_whole_text(qwen: tuple[Decode, Tokenizer], text: str) -> None:
    decode, tokenizer = qwen
    ids = tokenizer.encode(text).ids
    found = pieces(decode, ids)
    assert len(found) == len(ids) and "".join(found) == tokenizer.decode(ids, skip_special_tokens=False)


def test_without_a_tokenizer_a_sentence_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("actor_rollout_ref: {model: {path: /no/such/model}}")
    found = find_tokenizer(tmp_path)
    assert found.decode is None and "No tokenizer was found at /no/such/model" in found.note
    assert "names no model" in find_tokenizer(tmp_path / "absent").note
