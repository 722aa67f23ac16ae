"""Recorded command lines of verl's examples: how many resolve, and by which sentence the others are refused."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rally.config import ConfigError, load_config, load_sft_config
from rally.config.checks import consistency
from rally.config.verl_script import rally_command

APPENDED = ("trainer.n_gpus_per_node=1", "trainer.nnodes=1", "trainer.device=cpu")
ONE_GPU = "actor_rollout_ref.rollout.tensor_model_parallel_size=1"
NOT_BUILT = (
    *("asks for quantization-aware training", "sandbox_fusion.url="),
    *("algorithm.adv_estimator=optimal_token_baseline is not built", "algorithm.use_pf_ppo=true is not built"),
    *("bypass_mode=true switches correction off", "rollout.quantization=fp8 is not built"),
    *("reward_model.reward_manager is collabllm", "is not of the form key=value"),
)
"""Sentences by which lines of the FSDP and SFT trainers may be refused."""


@pytest.fixture
def lines(shared: Path) -> list[dict[str, Any]]:
    file = shared / "verl_lines" / "lines.jsonl"
    if not file.exists():
        pytest.skip(f"no recorded command lines of verl at {file}")
    return [json.loads(line) for line in file.read_text().splitlines()]


def filled(line: dict[str, Any], shared: Path, folder: Path) -> list[str]:
    """The words with data, model and paths filled in. Code that a line names and that was not recorded is empty."""
    names = {"TRAIN": folder / "train.parquet", "TEST": folder / "test.parquet", "MODEL": folder / "model"}
    places = {**names, "VERL": shared / "verl_lines" / "files" / line["release"], "HOME": folder, "TMP": folder}
    words = []
    for word in line["words"]:
        for name, path in places.items():
            word = word.replace(f"{{{name}}}", str(path))
        key, _, value = word.partition("=")
        if key.endswith(("path", "_dir")) and value.endswith((".py", ".yaml", "lora_adapter")):
            if not Path(value).exists():
                value = str(folder / "code" / value.lstrip("/"))
                Path(value).parent.mkdir(parents=True, exist_ok=True)
                Path(value).touch()
            word = f"{key}={value}"
        words.append(word)
    return words


def outcome(line: dict[str, Any], shared: Path, folder: Path) -> tuple[str, ...]:
    """The problems of a line; none if it resolves."""
    notes: list[str] = []
    path = None
    if line["config_name"]:
        place = (line["config_path"] or ".").replace("{VERL}", str(shared / "verl_lines" / "files" / line["release"]))
        path = Path(place) / f"{line['config_name'].removesuffix('.yaml')}.yaml"
    words = [*filled(line, shared, folder), *APPENDED]
    try:
        if rally_command(line["module"]) == "sft":
            load_sft_config(path, words, note=notes.append)
        else:
            load_config(path, [*words, ONE_GPU], note=notes.append)
    except ConfigError as error:
        return error.problems
    assert len(notes) <= 1
    return ()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(consistency, "count_gpus", lambda: 0)
    monkeypatch.chdir(tmp_path)
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    return tmp_path


def test_recorded_command_lines_resolve_or_are_refused_by_name(
    lines: list[dict[str, Any]], shared: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts: Counter[str] = Counter()
    for line in lines:
        problems, kind = outcome(line, shared, folder), line["kind"]
        counts[f"{kind}: {'refused' if problems else 'resolved'}"] += 1
        assert all(len(problem.splitlines()) == 1 and problem.endswith((".", "?")) for problem in problems)
        where = f"{line['script']}: {problems}"
        if kind in ("fsdp rl", "sft"):
            assert not problems or any(text in problem for problem in problems for text in NOT_BUILT), where
        elif kind == "megatron" and "mindspeed" not in line["module"] and "async" not in line["module"]:
            [sentence] = [problem for problem in problems if "Megatron" in problem]
            assert "fsdp" in sentence, where
        elif kind == "veomni/automodel":
            assert any("VeOmni" in problem and "fsdp" in problem for problem in problems), where
        else:
            assert "which is not built; " in problems[0], where
    resolved, refused = (
        sum(counts[f"{kind}: {how}"] for kind in ("fsdp rl", "sft")) for how in ("resolved", "refused")
    )
    report = [
        *(f"{name} {count}" for name, count in sorted(counts.items())),
        f"{resolved} of {resolved + refused} FSDP and SFT lines resolve",
    ]
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(report) + "\n")
    assert resolved >= 103


@pytest.mark.parametrize("release", ["verl-0.7/verl", "verl-0.9/verl", "verl-0.9/recipe/rep_exp"])
def test_a_full_configuration_of_verl_loads(release: str, shared: Path, folder: Path) -> None:
    [file] = (shared / "verl_lines" / "files" / release).rglob("_generated_ppo_trainer.yaml")
    model = str(folder / "model")
    set_here = (f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/test.parquet", *APPENDED, ONE_GPU)
    named = (
        f"actor_rollout_ref.model.path={model}",
        f"critic.model.path={model}",
        "actor_rollout_ref.rollout.name=vllm",
    )
    notes: list[str] = []
    config = load_config(file, [*set_here, *named], note=notes.append)
    assert config.needs_critic and config.rollout.name == "vllm" and len(notes) == 1
