"""Recorded command lines of verl's examples: how many resolve, and by which sentence the others are refused."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rally.config import ConfigError, load_config, load_sft_config
from rally.config.checks import consistency
from rally.config.verl_script import keys_of_trainer, rally_command

APPENDED = ("trainer.n_gpus_per_node=1", "trainer.nnodes=1", "trainer.device=cpu")
ONE_GPU = "actor_rollout_ref.rollout.tensor_model_parallel_size=1"
NOT_BUILT = {
    "run_deepseek7b_llm_sandbox_fusion": "reward_model.sandbox_fusion.url=",
    "recipe/collabllm/train_rl_collabllm": "reward_model.reward_manager=collabllm goes on with each conversation",
    "recipe/low_precision/run_dapo_qwen3_moe_30b_fsdp_fp8_rollout": "rollout.quantization=fp8 is built for",
    "recipe/qat/": "fsdp_config.qat.enable=true asks for quantization-aware training",
    "recipe/collabllm/train_sft_collabllm": "is not of the form key=value",
}
"""The lines of the FSDP and SFT trainers that may be refused, by their script, and the sentence that must say why."""


@pytest.fixture
def lines(shared: Path) -> list[dict[str, Any]]:
    file = shared / "verl_lines" / "lines.jsonl"
    if not file.exists():
        pytest.skip(f"no recorded command lines of verl at {file}")
    return [json.loads(line) for line in file.read_text().splitlines()]


def filled(line: dict[str, Any], shared: Path, folder: Path, made: set[str]) -> list[str]:
    """The words with data, model and paths filled in. Code that was not recorded is an empty file, named in `made`.

    All of it but the LoRA adapter exists in verl's repositories. A configuration is checked without reading it.
    """
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
                made.add(line["script"])
            word = f"{key}={value}"
        words.append(word)
    return words


def outcome(line: dict[str, Any], shared: Path, folder: Path, made: set[str]) -> tuple[str, ...]:
    """The problems of a line; none if it resolves."""
    notes: list[str] = []
    path = None
    if line["config_name"]:
        place = (line["config_path"] or ".").replace("{VERL}", str(shared / "verl_lines" / "files" / line["release"]))
        path = Path(place) / f"{line['config_name'].removesuffix('.yaml')}.yaml"
    words = [*keys_of_trainer(line["module"]), *filled(line, shared, folder, made), *APPENDED]
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
    monkeypatch.setattr(consistency, "count_gpus", lambda _: 0)
    monkeypatch.chdir(tmp_path)
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    return tmp_path


def test_recorded_command_lines_resolve_or_are_refused_by_name(
    lines: list[dict[str, Any]], shared: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts: Counter[str] = Counter()
    made: set[str] = set()
    without_code = 0
    for line in lines:
        problems, kind = outcome(line, shared, folder, made), line["kind"]
        without_code += not problems and line["script"] in made
        counts[f"{kind}: {'refused' if problems else 'resolved'}"] += 1
        assert all(len(problem.splitlines()) == 1 and problem.endswith((".", "?")) for problem in problems)
        where = f"{line['script']}: {problems}"
        if kind in ("fsdp rl", "sft"):
            reasons = [text for script, text in NOT_BUILT.items() if script in line["script"]]
            assert not problems or (reasons and any(reasons[0] in problem for problem in problems)), where
        elif kind == "async trainers":
            assert [line["module"] in problem and "asynchronous trainer" in problem for problem in problems] == [True]
        elif kind == "other trainer" or "mindspeed" in line["module"]:
            assert [line["module"] in problem and "trainer of its own" in problem for problem in problems] == [True]
        else:
            name = "Megatron" if kind == "megatron" else "VeOmni"
            [sentence] = [problem for problem in problems if f"asks for {name}, but Rally shards with" in problem]
            assert "and say the same with " in sentence and re.search("fsdp|n_gpus_per_node", sentence), where
    resolved, refused = (
        sum(counts[f"{kind}: {how}"] for kind in ("fsdp rl", "sft")) for how in ("resolved", "refused")
    )
    report = [
        *(f"{name} {count}" for name, count in sorted(counts.items())),
        f"{resolved} of {resolved + refused} FSDP and SFT lines resolve, {without_code} of them with code that was not "
        "recorded",
    ]
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(report) + "\n")
    assert resolved >= 106


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
