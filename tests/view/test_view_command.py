"""The command `rally view`: the files it writes, and one error sentence for each mistake."""

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rally.cli import view
from rally.cli.main import app
from rally.cli.view import TOKEN


def run(*words: object) -> str:
    result = CliRunner().invoke(app, ["view", *map(str, words)])
    return result.output if result.exception is None else str(result.exception)


def test_an_export_says_what_it_wrote_and_left_out(run_path: Path, tmp_path: Path) -> None:
    told = run(run_path, "--export", tmp_path / "out.html", "--filter", "step=1&kind=train", "--limit", 5)
    assert "5 episodes, 25 left out" in " ".join(told.split())
    assert "5 of 30 episodes (step=1&kind=train); 25 were left out" in (tmp_path / "out.html").read_text().replace(
        "\\u0026", "&"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["/no/such/run"], "there is no run folder at /no/such/run"),
        (["PARENT"], "metrics.jsonl nor episodes/; name runs inside it, such as "),
        (["/"], "/ is not a run folder: it has neither metrics.jsonl nor episodes/"),
        (["RUN", "--filter", "step=1"], "--filter chooses what is exported"),
        (["RUN", "--export", "OUT", "--filter", "last step"], "is not of the form step=10..20&kind=val"),
        (["RUN", "--export", "OUT", "--filter", "steps=1"], "there is no filter steps"),
        (["RUN", "--host", "0.0.0.0", "--no-browser"], f"set {TOKEN} to a secret"),
    ],
)
def test_a_mistake_is_one_sentence(
    run_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    places = {"RUN": run_path, "PARENT": run_path.parent, "OUT": tmp_path / "out.html"}
    said = run(*(places.get(word, word) for word in words))
    assert told in said and not (tmp_path / "out.html").exists()


def test_the_usual_port_is_taken_unless_somebody_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(view, "PORT", port)
        assert view._free_port("127.0.0.1") != port
        with socket.create_connection(("127.0.0.1", port)) as client:
            other.accept()[0].close()  # the side that closes first stays in TIME_WAIT
            client.recv(1)
    assert view._free_port("127.0.0.1") == port


def test_a_printed_link_carries_any_token(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "a+b/c=")
    monkeypatch.setattr("rally.services.http_server.serve", lambda *_: None)
    assert "/?token=a%2Bb%2Fc%3D" in "".join(run(run_path, "--no-browser", "--port", 9).split())
