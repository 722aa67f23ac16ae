"""Supervised fine-tuning on two processes gives the result of one, which can resume its checkpoints."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_cases import EASY, Paper, write_model
from transformers import AutoModelForCausalLM
from vision_cases import picture, write_vision_model

from rally.config import ConfigError, SftConfig, load_sft_config
from rally.data import write_rows
from rally.distributed import sft
from rally.recipes.arithmetic.data import conversations
from rally.runs import sft as sft_run
from rally.runs.build.run_inputs import RunError
from rally.track import RunFolder

TWO = ("trainer.n_gpus_per_node=2", "trainer.device=cpu")


def config_of(home: Path, out: Path, *words: str) -> SftConfig:
    data = [f"data.train_files={home}/train.parquet", f"data.val_files={home}/test.parquet", "data.train_batch_size=7"]
    more = [
        f"model.path={home}/model",
        "optim.lr=1e-4",
        "optim.lr_scheduler=constant",
        f"trainer.default_local_dir={out}",
        "trainer.test_freq=1",
    ]
    return load_sft_config(overrides=[*data, *more, *words])


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_two_ranks_teach_what_one_teaches(tmp_path: Path, paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    write_model(tmp_path / "model")
    for name, count in (("train", 24), ("test", 5)):
        write_rows(conversations(count, {"good": 1.0}, EASY, 0, name), tmp_path / f"{name}.parquet")
    saved = ("trainer.total_training_steps=3", "trainer.save_freq=1")
    alone = sft(config_of(tmp_path, tmp_path / "one", *saved), paper.console)
    divided = config_of(
        *(tmp_path, tmp_path / "three", "trainer.total_training_steps=3", *TWO),
        *("ulysses_sequence_parallel_size=2", "engine.fsdp_size=1", "trainer.resume_mode=resume_path"),
        f"trainer.resume_from_path={tmp_path}/one/checkpoints/global_step_1",
    )
    assert sft(divided, paper.console).steps == 3
    both = config_of(
        tmp_path, tmp_path / "two", "trainer.total_training_steps=2", "data.max_token_len_per_gpu=300", *TWO
    )
    assert sft(both, paper.console).steps == 2
    sft(config_of(tmp_path, tmp_path / "two", "trainer.total_training_steps=3"), paper.console)
    told, expected = ([row.metrics for row in RunFolder(tmp_path / name).read_metrics()] for name in ("two", "one"))
    for name in ("train/loss", "train/grad_norm", "train/tokens", "val/loss"):
        assert [one[name] for one in told] == pytest.approx([one[name] for one in expected], rel=1e-5)
    assert told[-1]["val/loss"] < told[0]["val/loss"] and alone.steps == 3
    last = "checkpoints/global_step_3/actor"
    one, *others = (AutoModelForCausalLM.from_pretrained(tmp_path / name / last) for name in ("one", "two", "three"))
    for other in others:
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("data.micro_batch_size=4", "is ambiguous with 2 GPUs; leave it out and set data.micro_batch_size_per_gpu"),
        ("model.fsdp_config.fsdp_size=3", "must divide 2, the number of GPUs; choose another size"),
        ("engine.ulysses_sequence_parallel_size=3", "must divide 2, the number of GPUs; choose another size"),
    ],
)
def test_what_is_for_one_gpu_is_one_sentence(word: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_sft_config(overrides=[*TWO, word])
    [problem] = caught.value.problems
    assert told in problem


def test_who_starts_no_ranks_says_so(tmp_path: Path) -> None:
    config = load_sft_config(overrides=TWO)
    with pytest.raises(RunError, match="which start the other processes; leave them out here"):
        sft_run.sft(config)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_two_ranks_teach_a_vision_model_as_one_does(tmp_path: Path, paper: Paper) -> None:
    """Half of the rows have an image."""
    told = [
        [{"role": "user", "content": f"{'<image>' * (i % 2)}{i}+1?"}, {"role": "assistant", "content": str(i + 1)}]
        for i in range(8)
    ]
    rows = [{"messages": said, "images": [{"bytes": picture(i)}] * (i % 2)} for i, said in enumerate(told)]
    write_rows(rows, tmp_path / "sft.parquet")
    write_vision_model(tmp_path / "model")
    found = []
    for words, run in ((("trainer.device=cpu",), sft_run.sft), (TWO, sft)):
        out = tmp_path / str(len(found))
        overrides = [f"model.path={tmp_path}/model", f"data.train_files={tmp_path}/sft.parquet", *words]
        overrides += [f"trainer.default_local_dir={out}", "data.train_batch_size=4", "trainer.total_training_steps=2"]
        run(load_sft_config(overrides=[*overrides, "optim.lr=1e-3"]), paper.console)
        found.append(load_file(next(out.rglob("model.safetensors"))))
    assert found[0].keys() == found[1].keys() and any("visual" in name for name in found[0])
    assert max(float((found[0][name] - found[1][name]).abs().max()) for name in found[0]) < 1e-4
