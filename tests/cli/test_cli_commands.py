"""Common mistakes on the command line and errors of the operating system give one sentence and exit code 2."""

import errno
import sys
from pathlib import Path

import pytest

from rally import __version__
from rally.cli.main import main
from rally.cli.os_errors import os_error_message
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
