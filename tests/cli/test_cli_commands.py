"""Common mistakes on the command line and errors of the operating system give one sentence and exit code 2."""

import errno
import re
import sys
from pathlib import Path

import pytest
from search_cases import free_port

from rally import __version__
from rally.chat import tiny_tokenizer
from rally.cli.config_args import written_as
from rally.cli.main import main
from rally.cli.os_errors import os_error_message
from rally.cli.serve import _options
from rally.demo.training_stages import small_model
from rally.engines import EmbeddedEngine, EngineError, EngineSettings
from rally.retrieval import IndexSpec, RetrievalError
from rally.types import RallyError


def said(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    monkeypatch.setattr(sys, "argv", ["rally", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    told = capsys.readouterr()
    return told.err if code else told.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "--trainer.seed=3"], "there is no option --trainer.seed=3; write a key without dashes"),
        (["eval", "-n", "3"], "there is no option -n; --help lists the options"),
        (["sft", "--dry-runn"], "there is no option --dry-runn; --help lists the options"),
        (["doctor", "--trainer.seed=3"], "there is no option --trainer.seed=3; write a key without dashes"),
    ],
)
def test_a_key_with_dashes_is_told_how_keys_are_written(
    words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(words, monkeypatch, capsys) == f"rally: {sentence}\n"


def test_the_version_is_an_option_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(["--version"], monkeypatch, capsys, code=0) == f"rally {__version__}\n"


def test_control_characters_that_a_message_quotes_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*given: object, **named: object) -> None:
        raise RallyError("the environment raised ValueError: \x1b[2J\x9b31m")

    monkeypatch.setattr(sys.modules["rally.cli.main"], "app", fails)
    assert said(["env", "list"], monkeypatch, capsys) == "rally: the environment raised ValueError: \\x1b[2J\\x9b31m\n"


def test_a_place_that_cannot_be_written_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    told = said(["data", "arithmetic", "--out", str(tmp_path / "file" / "x")], monkeypatch, capsys)
    assert told == f"rally: {tmp_path}/file/x: Not a directory; choose another folder: a part of that path is a file\n"


def test_a_file_where_a_folder_should_be_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    told = said(["data", "arithmetic", "--out", str(tmp_path / "file")], monkeypatch, capsys)
    assert told == f"rally: {tmp_path}/file: File exists; choose another name: the path already exists\n"


def test_what_is_no_configuration_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "train.parquet"
    rows.write_bytes(b"PAR1\x80\x00")
    assert said(["train", str(tmp_path)], monkeypatch, capsys) == (
        f"rally: {tmp_path} is a folder; name the YAML file in it.\n"
    )
    (tmp_path / "config.yaml").touch()
    assert f"in it, such as {tmp_path / 'config.yaml'}." in said(["train", str(tmp_path)], monkeypatch, capsys)
    told = said(["train", str(rows)], monkeypatch, capsys)
    assert f"{rows} is not UTF-8 text, as a YAML file must be; pass rows as data.train_files=" in told
    told = said(["train", "trainer.seed", "=", "3"], monkeypatch, capsys)
    assert told.endswith("nor key=value; write a key and its value as one word, without spaces\n")


def test_a_full_disk_is_told_with_what_to_do_and_a_bug_keeps_its_traceback() -> None:
    told = os_error_message(OSError(errno.ENOSPC, "No space left on device", "runs/mine/metrics.jsonl"))
    assert told is not None and told.startswith("runs/mine/metrics.jsonl: No space left on device; free space")
    assert os_error_message(OSError("a library's own")) is None
    assert os_error_message(FileNotFoundError(errno.ENOENT, "No such file or directory", "x")) is None


@pytest.mark.parametrize("how", ["atomic", "append"])
def test_a_disk_that_fills_up_names_the_file(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rally.util import atomic_files, jsonl

    def full(path: Path, *args: object, **kwargs: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match=r"No space left on device: .*x\.jsonl"):
        if how == "atomic":
            atomic_files.write_atomic(tmp_path / "x.jsonl", "text")
        else:
            jsonl.StepLines(tmp_path / "x.jsonl").append({"step": 1})


MODEL = "no-one/no-model"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("data index CORPUS -o OUT --encoder x", "so --encoder has no effect; use --kind dense or hybrid"),
        ("data index CORPUS -o OUT --max-length 3", "so --max-length has no effect; use --kind dense or hybrid"),
        ("data index CORPUS -o OUT --query-prefix x", "so --query-prefix has no effect"),
        ("data index CORPUS -o OUT --device warp", "--device=warp is not a device; choose auto, cpu"),
        ("data index CORPUS -o OUT --kind dense --encoder . --pooling x", "--pooling must be one of mean, cls"),
        ("data index CORPUS -o OUT --kind dense --encoder /no/such", "name the folder of an encoder, or a hub name"),
        ("serve retrieval INDEX --device warp --port PORT", "--device=warp is not a device"),
        (f"serve engine {MODEL} --in-flight abort", "--in-flight=abort has no effect where weights are never replaced"),
        (f"serve engine {MODEL} --mm-processor-kwargs 1", "--mm-processor-kwargs=1 has no effect without --image-pro"),
        (
            "serve engine /no/model --port PORT",
            "/no/model does not exist; give a folder, a hub name that can be reached, or a .gguf file as MODEL",
        ),
        ("run gsm8k_tool --model /no/model", "--model=/no/model does not exist; name a folder or a hub name"),
        ("run gsm8k_tool --source /no/rows", "--source=/no/rows does not exist; name a folder, or leave it out"),
        ("toy-model -o OUT --words BYTES", "is not UTF-8 text"),
        ("toy-model -o CORPUS", "choose another name: the path already exists"),
    ],
)
def test_messages_name_what_the_user_wrote(
    line: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "out"
    corpus.write_text('{"title": "a", "text": "words"}\n', encoding="utf-8")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    names = {"CORPUS": corpus, "OUT": out, "BYTES": tmp_path / "bytes", "PORT": free_port(), "INDEX": tmp_path}
    told = said([str(names.get(word, word)) for word in line.split()], monkeypatch, capsys)
    assert sentence in told and not out.exists()


def test_a_word_index_has_no_use_for_a_device(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match=r"so --device has no effect; use --kind dense or hybrid"):
        IndexSpec(device="cuda")


def test_routes_are_named_as_the_option() -> None:
    model = small_model(tiny_tokenizer(), 0)
    with pytest.raises(EngineError, match="leave --return-routes out"):
        EmbeddedEngine(model, EngineSettings(return_routes=True, option_names=_options()))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("set env.args.depth, env.arguments and my.env.args", "set --args.depth, env.arguments and my.env.args"),
        ("nothing of it", "nothing of it"),
    ],
)
def test_keys_are_replaced_as_whole_words(text: str, named: str) -> None:
    class Mistake(RallyError):
        exit_code = 3

    with pytest.raises(RallyError, match=re.escape(named)) as caught, written_as({"env.args": "--args"}):
        raise Mistake(text)
    assert caught.value.exit_code == 3
