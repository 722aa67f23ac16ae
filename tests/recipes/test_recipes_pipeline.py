"""`rally run` plans the stages of a recipe from its needs, runs them in order, and never runs one twice."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from recipes.recipe_cases import ADAPTERS, SMALL_TRAIN
from typer.testing import CliRunner

from rally.cli.main import app
from rally.config import load_config
from rally.recipes import RecipeError, find_recipe
from rally.recipes.pipeline import RecipeOptions, evaluations, preparation, training
from rally.track import RunFolder
from rally.types import RallyError
from rally.util.checksums import seal

NONE = RecipeOptions()


def lines(name: str, options: RecipeOptions = NONE) -> list[str]:
    return [stage.line for stage in preparation(name, options)]


def test_a_supervised_start_comes_after_its_own_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert lines("triage") == [
        "rally data triage --out data/triage",
        "rally toy-model --words data/triage/words.txt --out models/triage",
        "rally sft --recipe triage",
    ]
    assert lines("gsm8k_tool") == ["rally data gsm8k --tool calculator --sft --out data/gsm8k"]
    assert not any(stage.done for stage in preparation("triage", NONE))


def test_a_model_and_a_source_reach_every_stage_that_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = RecipeOptions(model="my/model", source="my/gsm8k")
    assert lines("gsm8k_tool/shaping", options) == [
        "rally data gsm8k --tool calculator --sft --out data/gsm8k --source my/gsm8k",
        "rally sft --recipe gsm8k_tool model.path=my/model",
    ]
    assert "--gsm8k my/gsm8k" in lines("retool", options)[0]


def test_options_without_effect_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="triage reads no data set from a source"):
        preparation("triage", RecipeOptions(source="somewhere"))
    both = RecipeOptions(model="a", overrides=("actor_rollout_ref.model.path=b",))
    with pytest.raises(RecipeError, match="both name the model"):
        preparation("gsm8k_tool", both)


def test_data_that_is_there_in_part_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / "data" / "gsm8k" / name).touch()
    assert preparation("gsm8k_tool", NONE)[0].done
    assert not preparation("gsm8k_tool/shaping", NONE)[0].done, "the supervised start reads sft.parquet too"


def test_the_supervised_start_of_another_model_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "rally" / "gsm8k_tool_sft"
    (run / "checkpoints" / "global_step_4" / "actor").mkdir(parents=True)
    (run / "config.yaml").write_text("model: {path: Qwen/Qwen2.5-Coder-1.5B-Instruct}")
    assert preparation("gsm8k_tool/shaping", NONE)[1].done
    with pytest.raises(RecipeError, match=r"supervised start of Qwen/Qwen2.5-Coder-1.5B-Instruct, not of my/model"):
        preparation("gsm8k_tool/shaping", RecipeOptions(model="my/model"))


def test_data_of_another_source_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [stage] = preparation("gsm8k_tool", RecipeOptions(source="small"))
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / "data" / "gsm8k" / name).touch()
    stage.write_record()
    assert preparation("gsm8k_tool", RecipeOptions(source="small"))[0].done
    with pytest.raises(RecipeError, match=r"data/gsm8k was made by `rally data gsm8k .* --source small`, not by"):
        preparation("gsm8k_tool", NONE)


def test_a_run_must_know_its_last_step(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    with pytest.raises(RecipeError, match=r"set trainer\.total_training_steps"):
        training("triage", RecipeOptions(overrides=("trainer.total_training_steps=null",)))


def test_adapters_are_evaluated_over_their_base(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    out = f"trainer.default_local_dir={tmp_path}"
    tiny = ("actor_rollout_ref.model.path=models/tiny", "data.max_prompt_length=3000", out)
    config = load_config(find_recipe("gsm8k_tool/lora", "train"), tiny)
    shutil.copytree(home / ADAPTERS, tmp_path / "checkpoints" / "global_step_2" / "actor")
    (tmp_path / "checkpoints" / "global_step_2" / "trainer.pt").touch()
    seal(tmp_path / "checkpoints" / "global_step_2")
    being_written = tmp_path / "checkpoints" / ".writing_global_step_3_1" / "actor"
    being_written.mkdir(parents=True)
    [stage] = evaluations("gsm8k_tool/lora", RecipeOptions(overrides=tiny))
    assert being_written.is_dir(), "the run may still be training"
    assert config.model.lora_adapter_path is not None and not stage.done
    assert f"actor_rollout_ref.model.lora_adapter_path={tmp_path}/checkpoints/global_step_2/actor" in stage.args


def test_files_of_the_user_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = RecipeOptions(overrides=("data.train_files=mine.parquet", "data.val_files=mine.parquet"))
    assert lines("gsm8k_tool", own) == []


def small_run(out: Path) -> list[str]:
    """The words of `rally run triage` at a small scale."""
    other = ("critic", "algorithm", "reward_model", "data.gen", "trainer.critic", "data.curriculum")
    return [
        "run",
        "triage",
        *(key for key in SMALL_TRAIN if not key.startswith(other)),
        f"trainer.default_local_dir={out}",
    ]


class Here:
    """A stage in this process instead of one of its own."""

    def __init__(self, command: list[str]) -> None:
        assert command[:3] == [sys.executable, "-m", "rally"]
        self.words = command[3:]

    def wait(self) -> int:
        return CliRunner().invoke(app, self.words, catch_exceptions=False).exit_code


def check_first(said: str, out: Path) -> dict[Path, int]:
    assert "training: rally train --recipe triage" in said.replace("\n", " ") and "where to look" in said
    [evaluated] = out.glob("eval/global_step_2/eval/metrics.jsonl")
    assert any("val-core" in name for name in RunFolder(evaluated.parent).read_metrics()[0].metrics)
    return {path: path.stat().st_mtime_ns for path in out.rglob("*.jsonl")}


def test_stages_run_in_order_and_not_twice(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setattr("rally.cli.run.subprocess", SimpleNamespace(Popen=Here))
    first = CliRunner().invoke(app, small_run(tmp_path), catch_exceptions=False)
    assert first.exit_code == 0, first.output
    before = check_first(first.output, tmp_path)
    second = CliRunner().invoke(app, small_run(tmp_path), catch_exceptions=False)
    assert second.exit_code == 0 and "training: already done" in second.output.replace("\n", " ")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jsonl")} == before
    with pytest.raises(RallyError, match=r"a run with other settings \(data.seed\)"):
        CliRunner().invoke(app, [*small_run(tmp_path), "data.seed=5"], catch_exceptions=False)


@pytest.mark.slow
@pytest.mark.long
def test_one_command_trains_and_evaluates_and_a_second_one_does_nothing(home: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rally", *small_run(tmp_path)]
    first = subprocess.run(command, cwd=home, capture_output=True, text=True)
    assert first.returncode == 0, first.stdout + first.stderr
    before = check_first(first.stdout, tmp_path)
    second = subprocess.run(command, cwd=home, capture_output=True, text=True)
    assert second.returncode == 0 and "training: already done" in second.stdout.replace("\n", " ")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jsonl")} == before
    other = subprocess.run([*command, "data.seed=5"], cwd=home, capture_output=True, text=True)
    assert other.returncode == 2 and "a run with other settings (data.seed)" in other.stderr


def test_a_file_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(RallyError, match="takes one recipe by its name"):
        CliRunner().invoke(app, ["run", "triage", "my.yaml"], catch_exceptions=False)
