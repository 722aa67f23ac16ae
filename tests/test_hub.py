"""Without a network a hub name resolves at once, from the disk or with one error sentence; a slow hub is waited for."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants
from small_models import make_model

from rally import hub
from rally.hub import is_name, on_disk_alone, why_unreachable
from rally.models.load import LoadError, load_model, load_model_config, load_tokenizer
from rally.retrieval.encoder import Encoder, EncoderSettings
from rally.retrieval.hits import RetrievalError

Point = Callable[[int], None]


@pytest.fixture
def point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Point]:
    """Sets the address of the hub, for an online client with an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def to(port: int) -> None:
        there = f"http://127.0.0.1:{port}"
        monkeypatch.setattr(constants, "ENDPOINT", there)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{there}/{{repo_id}}/resolve/main/{{filename}}")
        hub._tried.cache_clear()

    yield to
    hub._tried.cache_clear()


@pytest.fixture
def nobody(point: Point) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    point(port)


@contextmanager
def answering(seconds: float) -> Iterator[tuple[int, list[bytes]]]:
    """A slow hub without any repository; it records its requests."""
    asked: list[bytes] = []

    def serve(server: socket.socket) -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                asked.append(client.recv(65536))
                time.sleep(seconds)
                client.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        yield server.getsockname()[1], asked
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize("load", [load_model, load_model_config, load_tokenizer])
def test_without_a_network_a_name_is_one_sentence_at_once(
    load: Callable[[str], object], caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    with caplog.at_level(logging.INFO), pytest.raises(LoadError) as caught:
        load("no-one/no-model")
    told = "it is not on this machine, and 127.0.0.1 cannot be reached: [Errno 111] Connection refused"
    assert told in str(caught.value) and "fetch it with `hf download no-one/no-model`" in str(caught.value)
    assert time.monotonic() - began < 30 and not caplog.records


@pytest.mark.usefixtures("nobody")
def test_the_encoder_of_an_index_too() -> None:
    began = time.monotonic()
    with pytest.raises(RetrievalError, match="the encoder no-one/no-encoder cannot be loaded"):
        Encoder("no-one/no-encoder", EncoderSettings(), "cpu")
    assert time.monotonic() - began < 30


@pytest.mark.usefixtures("nobody")
def test_what_was_fetched_before_is_found_without_a_network(tmp_path: Path) -> None:
    commit = "0" * 40
    repository = tmp_path / "cache" / "models--some-one--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit, encoding="ascii")
    make_model().save_pretrained(repository / "snapshots" / commit)
    began = time.monotonic()
    assert load_model("some-one/model").config.hidden_size == 96
    assert time.monotonic() - began < 30


def test_a_hub_that_drops_whoever_knocks_is_given_up(point: Point, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "CONNECT_SECONDS", 0.3)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:  # the first fills the backlog, and the system accepts no other
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        point(full.getsockname()[1])
        assert "timed out" in str(why_unreachable())
        assert on_disk_alone("some-one/model") == {"local_files_only": True}
        for one in waiting:
            one.close()


def test_a_hub_that_answers_slowly_is_asked_for_the_files(point: Point, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.1)
    with answering(0.4) as (port, asked):
        point(port)
        assert on_disk_alone("some-one/model") == {}
        with pytest.raises(LoadError) as caught:
            load_model_config("some-one/model")
        assert any(b"/some-one/model/" in request for request in asked)
        assert "cannot be reached" not in str(caught.value)


def test_it_is_asked_once_for_a_name_and_not_at_all_for_a_file_or_offline(
    point: Point, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with answering(0.0) as (port, asked):
        point(port)
        for path in ("models/mine", "/nowhere", "./a/b", "a/b/c", "model.gguf"):
            assert on_disk_alone(path) == {}
        assert not asked
        assert on_disk_alone("some-one/model") == on_disk_alone("gpt2") == {}
        assert len(asked) == 1
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        point(port)
        assert on_disk_alone("some-one/model") == {}
        assert len(asked) == 1


@pytest.mark.parametrize("path", ["~/model", "../model", "a b/c", "", "a/b/c", "file.gguf", "dir/file.gguf"])
def test_what_can_be_no_name(path: str) -> None:
    assert not is_name(path)
