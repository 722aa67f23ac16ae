"""A checkpoint of a vision-language model, used for text: it trains and samples exactly, its tower is not trained, and
it is saved whole."""

import asyncio
import copy
from pathlib import Path

import pytest
import torch
from train_cases import Paper
from transformers import AutoConfig, AutoModelForImageTextToText
from vision_cases import make_image, make_tokenizer, make_vision_model, write_vision_model

from benchmarks.architectures import VISION, sampled, small_model, trained
from rally.chat import TemplateError
from rally.config import load_config, load_sft_config
from rally.data import write_rows
from rally.models.load import load_model
from rally.models.lora import LoraSettings, add_adapters
from rally.models.vision import image_parts_of, patches_of
from rally.models.vision_loading import VisionError, auto_class
from rally.runs import build
from rally.runs import sft as sft_run
from rally.runs.planned_models import size_from
from rally.train.checkpoint.merge import merge
from rally.train.checkpoint.store import CheckpointStore
from rally.train.policy import OptimizerSettings, Policy

GROUPS = ("mistral3", "internvl", "smolvlm", "qwen3_vl_moe", "glm4v_moe", "lfm2_vl", "gemma3")


@pytest.mark.parametrize("name", [*GROUPS, "llama4"])
def test_text_trains_exactly(name: str) -> None:
    model = small_model(name + VISION)
    assert image_parts_of(model)
    verdict = trained(model, copy.deepcopy(model), checkpointing=True)
    assert verdict.outcome == "packed", verdict
    in_tower = [p for part in image_parts_of(model).values() for p in part.parameters()]
    assert in_tower and all(p.grad is None and not p.requires_grad for p in in_tower)


@pytest.mark.parametrize("backend", ["gather", "paged"])
@pytest.mark.parametrize("name", ["mistral3", "smolvlm", "lfm2_vl", "gemma3"])
def test_text_is_sampled_exactly(name: str, backend: str) -> None:
    model = small_model(name + VISION)
    verdict = asyncio.run(sampled(model, copy.deepcopy(model), backend))
    assert verdict.outcome == "exact", verdict


def saved(folder: Path, name: str) -> Path:
    """A folder whose model is of a family without support for images."""
    model = small_model(name + VISION)
    model.resize_token_embeddings(len(make_tokenizer()))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Gemma3ImageProcessor"}')
    (folder / "processor_config.json").write_text('{"processor_class": "Gemma3Processor"}')
    return folder


@pytest.mark.parametrize("name", ["gemma3", "lfm2_vl"])
def test_a_checkpoint_is_whole_and_its_tower_has_no_optimizer_state(tmp_path: Path, name: str) -> None:
    config = load_config(overrides=[f"actor_rollout_ref.model.path={saved(tmp_path / 'model', name)}"])
    model = build.model_of(config)
    assert build.patches_of(config) is None and patches_of(model) is None
    policy = Policy(model, OptimizerSettings(), 1)
    assert policy.masters and not any(key.startswith(tuple(image_parts_of(model))) for key in policy.masters)
    folder = CheckpointStore(tmp_path / "checkpoints", warn=print).save(1, policy, make_tokenizer()) / "actor"
    again = AutoModelForImageTextToText.from_pretrained(folder)
    was = load_model(str(tmp_path / "model")).state_dict()
    assert was.keys() == again.state_dict().keys()
    assert all(torch.equal(value, again.state_dict()[key].to(value.dtype)) for key, value in was.items())
    for file in ("preprocessor_config.json", "processor_config.json"):
        assert (folder / file).read_bytes() == (tmp_path / "model" / file).read_bytes()
    assert size_from(model.config).trained == sum(value.numel() for value in policy.masters.values())


def test_supervised_fine_tuning_of_text(tmp_path: Path) -> None:
    told = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "2"}]
    write_rows([{"messages": told}] * 4, tmp_path / "sft.parquet")
    overrides = [f"model.path={saved(tmp_path / 'model', 'gemma3')}", f"data.train_files={tmp_path / 'sft.parquet'}"]
    overrides += ["data.train_batch_size=2", "trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path}"]
    paper = Paper()
    assert sft_run.sft(load_sft_config(overrides=overrides), paper.console).steps == 2


def test_over_servers_a_model_that_sees_is_used_for_text(tmp_path: Path) -> None:
    config = load_config(
        overrides=[
            f"actor_rollout_ref.model.path={write_vision_model(tmp_path, 'qwen2_5_vl')}",
            "actor_rollout_ref.rollout.name=vllm",
        ]
    )
    model = build.model_of(config)
    assert patches_of(model) is None and not any(p.requires_grad for p in model.base_model.visual.parameters())
    codec = build.codec_of(config, build.tokenizer_of(config), build.toolbox_of(config))
    with pytest.raises(TemplateError, match="a vision model that is used for text here"):
        codec.prompt([{"role": "user", "content": [{"type": "image", "image": make_image(1)}]}])
    asked = config.model_copy(update={"data": config.data.model_copy(update={"mm_processor_kwargs": {"size": 1}})})
    with pytest.raises(VisionError, match="servers are not sent images"):
        build.patches_of(asked)


def test_lora_leaves_what_only_images_reach_alone() -> None:
    model = small_model("mistral3" + VISION)
    add_adapters(model, LoraSettings(rank=2), "base")
    adapted = [name for name, _ in model.named_parameters() if "lora_" in name]
    assert adapted and all("language_model" in name for name in adapted)


def test_merged_adapters_are_a_whole_vision_model(tmp_path: Path) -> None:
    path = saved(tmp_path / "model", "gemma3")
    config = load_config(overrides=[f"actor_rollout_ref.model.path={path}", "actor_rollout_ref.model.lora_rank=2"])
    model = build.model_of(config)
    folder = CheckpointStore(tmp_path, warn=print).save(1, Policy(model, OptimizerSettings(), 1), make_tokenizer())
    whole = merge(folder).folder
    was, now = (load_model(str(one)).state_dict() for one in (path, whole))
    assert all(torch.equal(value, now[key]) for key, value in was.items())
    assert (whole / "processor_config.json").read_bytes() == (path / "processor_config.json").read_bytes()


def test_text_models_are_not_loaded_as_vision_models() -> None:
    for name in ("qwen3", "gemma3_text", "mistral", "qwen3_5_text", "emu3_text_model"):
        config = AutoConfig.for_model(name)
        assert auto_class(config).__name__ == "AutoModelForCausalLM", name
    assert auto_class(make_vision_model().config).__name__ == "AutoModelForImageTextToText"
