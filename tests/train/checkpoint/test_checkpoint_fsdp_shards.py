"""The FSDP shards that verl saves become one model that transformers loads."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from train_cases import same, weights, write_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rally.cli.main import app
from rally.train.checkpoint.merge import MergeError, merge
from rally.types import RallyError

WORLD = 2


def leave_shard(rank: int, folder: Path) -> None:
    """The file of one FSDP rank: every tensor split along its first dimension, a small one whole on each rank."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    distributed.init_process_group("gloo", rank=rank, world_size=WORLD, init_method=f"file://{folder}/meeting")
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    model = AutoModelForCausalLM.from_pretrained(folder / "huggingface")
    state = {
        name: distribute_tensor(value, mesh, [Replicate() if name == "model.norm.weight" else Shard(0)])
        for name, value in model.state_dict().items()
    }
    torch.save(state, folder / f"model_world_size_{WORLD}_rank_{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "global_step_186"
    write_model(folder / "huggingface")
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=leave_shard, args=(rank, folder)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    return folder


def test_shards_become_the_model_they_were(step: Path, tmp_path: Path) -> None:
    out = tmp_path / "whole"
    words = ["merge", "--backend", "fsdp", "--local_dir", str(step), "--target_dir", str(out)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (step / "huggingface", out))
    assert same(weights(before), weights(after))


def test_weights_may_go_into_the_folder_that_waits_for_them(step: Path, tmp_path: Path) -> None:
    copy = tmp_path / "step"
    (copy / "huggingface").mkdir(parents=True)
    for file in [*step.glob("*.pt"), *step.glob("huggingface/*")]:
        if file.suffix != ".safetensors":
            (copy / file.relative_to(step)).write_bytes(file.read_bytes())
    merged = merge(copy, copy / "huggingface")
    assert same(
        weights(AutoModelForCausalLM.from_pretrained(merged.folder)),
        weights(AutoModelForCausalLM.from_pretrained(step / "huggingface")),
    )
    assert not list(copy.glob(".writing_*"))


def test_what_is_missing_is_named(step: Path, tmp_path: Path) -> None:
    (tmp_path / "model_world_size_2_rank_0.pt").write_bytes(b"")
    with pytest.raises(MergeError, match=r"config.json is missing"):
        merge(tmp_path)
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "config.json").write_bytes((step / "huggingface" / "config.json").read_bytes())
    with pytest.raises(RallyError, match="lacks the shard of rank 1 of 2"):
        merge(tmp_path)
    (tmp_path / "model_world_size_2_rank_1.pt").write_bytes(b"")
    with pytest.raises(RallyError, match=r"rank_0.pt cannot be read"):
        merge(tmp_path)
    (tmp_path / "model_world_size_3_rank_2.pt").write_bytes(b"")
    with pytest.raises(RallyError, match=r"runs on \[2, 3\] devices"):
        merge(tmp_path)


def test_one_device_leaves_tied_weights_in_one_place(step: Path, tmp_path: Path) -> None:
    (tmp_path / "huggingface").symlink_to(step / "huggingface")
    model = AutoModelForCausalLM.from_pretrained(step / "huggingface")
    file = tmp_path / "model_world_size_1_rank_0.pt"
    torch.save(model.state_dict(), file)
    merged = merge(tmp_path, tmp_path / "whole")
    assert same(weights(AutoModelForCausalLM.from_pretrained(merged.folder)), weights(model))
    torch.save([1, 2], file)
    with pytest.raises(RallyError, match="holds no tensors by name"):
        merge(tmp_path)
    torch.save({"lm_head.weight": torch.zeros(1)}, tmp_path / "model_world_size_2_rank_0.pt")
    torch.save({"lm_tail.weight": torch.zeros(1)}, tmp_path / "model_world_size_2_rank_1.pt")
    file.unlink()
    with pytest.raises(RallyError, match="in some shards"):
        merge(tmp_path)
