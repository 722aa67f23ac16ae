"""Whatever happens to a file of a run or of its inputs, the answer is one sentence, or a recovery with a warning."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from train_cases import Paper, run_config, run_tree, write_model

from rally.cli.main import main
from rally.cli.os_errors import os_error_message
from rally.config import load_config, load_sft_config
from rally.loops.registry import load_loop_config
from rally.models.load import load_model
from rally.replay.replay import find_episode
from rally.runs.dry_run import dry_run
from rally.runs.train import train
from rally.track import RunFolder, run_summary, write_curve
from rally.types import RallyError
from rally.view.run_data import RunData, open_runs

NO_VALIDATION = ("data.val_files=null", "trainer.val_before_train=false")
DEEP_YAML = (b"a: " + b"[" * 500 + b"]" * 500, b"".join(b" " * n + b"a:\n" for n in range(500)), b"a: &a [*a]")


@pytest.fixture(scope="module")
def finished(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(run_config(home, folder, "trainer.total_training_steps=2", *NO_VALIDATION), Paper().console)
    write_curve(folder)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def damages(path: Path) -> Iterator[str]:
    """Each kind of damage to a file, in turn; the file is as it was afterwards."""
    content, half = path.read_bytes(), path.stat().st_size // 2
    flipped = bytearray(content)
    flipped[half] ^= 4
    cases = {
        "half": content[:half],
        "empty": b"",
        "zeros": bytes(len(content)),
        "zeros at the end": content[:half] + bytes(len(content) - half),
        "a list": b"[]\n",
        "null": b"null\n",
        "a number": b"3\n",
        "a list in a line": b"[1]\n",
        "an object": b"{}\n",
        "other fields": b'{"step": 1, "id": 3, "segments": 4, "x": {"y": []}}\n{"step": true}\n',
        "no text": b"\xff\xfe\x80" + content,
        "nested deeply": b"[" * 20_000,
        "a flipped bit": bytes(flipped),
        **{f"deep {n}": text for n, text in enumerate(DEEP_YAML)},
    }
    for name, damaged in cases.items():
        path.write_bytes(damaged)
        yield name
    path.unlink()
    yield "missing"
    path.unlink(missing_ok=True)  # a reader may have made it again
    path.mkdir()
    yield "a folder"
    path.rmdir()
    path.write_bytes(content)


def look(data: RunData) -> None:
    """Ask for everything that the page of the viewer shows."""
    try:
        data.indexer.catch_up()
        data.state(), data.metrics(), data.facets(), data.timeline(1)
        for row in data.rows({"count": "1"})["rows"][::6]:
            data.episode(row["id"] if isinstance(row, dict) else row[0])
    finally:
        data.indexer.close()


@pytest.mark.drill("reliability", "Any file of a run folder is damaged", "Every reader answers with one sentence")
@pytest.mark.parametrize(
    "name",
    [
        *("config.yaml", "versions.json", "metrics.jsonl", "timeline.jsonl"),
        *("episodes/train_000001.jsonl", "advantages/train_000001.jsonl", ".view.sqlite"),
    ],
)
def test_readers_of_a_run_folder_answer_with_a_sentence(run: Path, name: str) -> None:
    for data in open_runs([run]):
        look(data)
    folder = RunFolder(run)
    readers: dict[str, list[Callable[[], object]]] = {
        "config.yaml": [lambda: load_config(run / "config.yaml")],
        "versions.json": [folder.changed_versions],
        "metrics.jsonl": [folder.read_metrics, lambda: run_summary(run), lambda: write_curve(run)],
        "timeline.jsonl": [folder.read_timeline],
        "episodes/train_000001.jsonl": [lambda: find_episode(folder, "t000001-00000-0")],
        "advantages/train_000001.jsonl": [lambda: folder.read_advantages(1)],
        ".view.sqlite": [],
    }
    for damage in damages(run / name):
        for read in (lambda: [look(data) for data in open_runs([run])], *readers[name]):
            try:
                read()
            except RallyError as error:
                assert len(str(error)) < 1000, damage
            except OSError as error:
                assert os_error_message(error), "the command line explains it"
            except Exception as error:  # noqa: BLE001 - that is the test
                pytest.fail(f"{name} with {damage}: {error!r}")
        for index in run.glob(".view.sqlite*") if name != ".view.sqlite" else ():
            index.unlink()


@pytest.mark.drill("reliability", "A power loss leaves NUL bytes in metrics.jsonl", "They are removed, with a warning")
def test_nul_bytes_of_a_power_loss_are_removed(home: Path, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("metrics.jsonl", "timeline.jsonl"):
        content = (run / name).read_bytes()
        first, _, rest = content.partition(b"\n")
        (run / name).write_bytes(first + b"\n" + bytes(50) + b"\n" + bytes(9) + rest + bytes(4096))
    train(run_config(home, run, "trainer.total_training_steps=3", *NO_VALIDATION), Paper().console)
    assert [row.step for row in RunFolder(run).read_metrics()] == [1, 2, 3]
    assert "NUL bytes of a power loss from" in caplog.text


def test_a_run_folder_that_was_moved_goes_on(home: Path, run: Path, tmp_path: Path) -> None:
    moved = run.rename(tmp_path / "elsewhere")
    paper = Paper()
    train(run_config(home, moved, "trainer.total_training_steps=3", *NO_VALIDATION), paper.console)
    assert f"resuming from {moved / 'checkpoints' / 'global_step_2'}" in paper.text
    for data in open_runs([moved]):
        look(data)
    find_episode(RunFolder(moved), "t000001-00000-0")


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command that must fail writes; anything but a sentence and exit code 2 fails the test."""
    monkeypatch.setattr("sys.argv", ["rally", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("content", ["[]", "null", "3", "{}"])
def test_a_manifest_of_another_type_is_a_sentence(
    run: Path, content: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        (run / "checkpoints" / f"global_step_{step}" / "manifest.json").write_text(content)
    overrides = [f"trainer.default_local_dir={run}", "trainer.total_training_steps=3"]
    text = said(monkeypatch, capsys, "train", str(run / "config.yaml"), *overrides)
    assert "rally: the checkpoint" in text and "no readable manifest.json" in text and "Traceback" not in text


@pytest.mark.parametrize("content", DEEP_YAML)
def test_yaml_that_is_nested_too_deeply_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "deep.yaml"
    path.write_bytes(content)
    for read in (load_config, load_sft_config, load_loop_config):
        with pytest.raises(RallyError):
            read(path)
    for override in (f"a={'[' * 500}{']' * 500}", f"{'a.' * 500}a=1"):
        with pytest.raises(RallyError) as error:
            load_config(overrides=[override])
        assert len(str(error.value)) < 300


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl", "tools.yaml", "users.yaml", "template.jinja"])
@pytest.mark.drill("reliability", "An input file is damaged", "The run does not start; one sentence")
def test_damaged_inputs_are_a_sentence(home: Path, tmp_path: Path, name: str) -> None:
    tree = run_tree(home, tmp_path / "run")
    tree["data"].pop("val_files")
    rollout = tree["actor_rollout_ref"]["rollout"]
    rollout.pop("agent_loop_config")
    for file in ("train.parquet", "model/chat_template.jinja"):
        shutil.copy(home / file, tmp_path / Path(file).name)
    (tmp_path / "chat_template.jinja").rename(tmp_path / "template.jinja")
    row = {"data_source": "d", "prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "1"}}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "tools.yaml").write_text("tools: [{name: calculator}]\n")
    (tmp_path / "users.yaml").write_text("interaction: [{name: gsm8k}]\n")
    tree["data"]["train_files"] = str(tmp_path / ("train.jsonl" if name == "train.jsonl" else "train.parquet"))
    tree["actor_rollout_ref"]["model"]["custom_chat_template"] = str(tmp_path / "template.jinja")
    rollout["multi_turn"] = {"enable": True, "tool_config_path": str(tmp_path / "tools.yaml")}
    if name == "users.yaml":
        rollout["multi_turn"]["interaction_config_path"] = str(tmp_path / name)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    refused = 0
    for damage in damages(tmp_path / name):
        try:
            dry_run(load_config(tmp_path / "config.yaml"), Paper().console)
        except RallyError:
            refused += 1
        except Exception as error:  # noqa: BLE001 - that is the test
            pytest.fail(f"{name} with {damage}: {error!r}")
    assert refused > 10


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
def test_damaged_files_of_a_model_are_a_sentence(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "model")
    for damage in damages(folder / name):
        try:
            load_model(str(folder))
        except RallyError as error:
            assert "\n" not in str(error)
        except Exception as error:  # noqa: BLE001 - that is the test
            pytest.fail(f"{name} with {damage}: {error!r}")
