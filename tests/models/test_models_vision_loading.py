"""A model that sees is loaded whole, adapted where asked, trains with its tower frozen or not, and is saved so that it
can see again."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_models import make_model
from train_cases import Paper
from vision_cases import (
    FAMILIES,
    OTHERS,
    make_codec,
    make_config,
    make_image,
    make_patches,
    make_processor,
    make_tokenizer,
    make_vision_model,
    picture,
    write_vision_model,
)

from rally.config import load_config, load_sft_config
from rally.data import write_rows
from rally.doctor.doctor import examine
from rally.models import attention
from rally.models.lora import LoraSettings, add_adapters
from rally.models.vision import image_features, patches_of
from rally.models.vision_loading import VisionError, share_patches
from rally.recipes.geometry import data as geometry
from rally.runs import build
from rally.runs import sft as sft_run
from rally.sft.training import SftSettings, conversation_row, sft_step
from rally.train.checkpoint.merge import merge
from rally.train.checkpoint.store import CheckpointStore
from rally.train.forward import logprobs as forward
from rally.train.packing import Row, pack
from rally.train.policy import OptimizerSettings, Policy
from rally.types import RallyError, Segment

ASKED = [{"role": "user", "content": [{"type": "image", "image": make_image(1, 48, 48)}]}]


def saved(folder: Path, family: str = "qwen2_5_vl") -> Path:
    return write_vision_model(folder, family)


def config_of(folder: Path, *overrides: str):
    return load_config(overrides=[f"actor_rollout_ref.model.path={folder}", *overrides])


def learn(policy: Policy, steps: int = 1) -> float:
    codec = make_codec()
    settings = SftSettings(batch_size=1)
    attention.install(policy.model)
    rows = []
    for seed, answer in ((1, "a"), (2, "b")):
        asked = [{"type": "image", "image": make_image(seed)}, {"type": "text", "text": "a or b?"}]
        told = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        rows.append(conversation_row(codec, told, settings))
    for _ in range(steps):
        found = sft_step(policy, rows, settings)
    return found["train/loss"]


def test_a_model_learns_what_only_the_image_tells() -> None:
    policy = Policy(make_vision_model(), OptimizerSettings(lr=5e-3), 20)
    assert learn(policy, 20) < 0.1  # the two questions are the same but for their images


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_sees_again(tmp_path: Path, family: str) -> None:
    config = config_of(saved(tmp_path / "model", family), "data.mm_processor_kwargs.max_pixels=576")
    model = build.model_of(config)
    codec = build.codec_of(config, build.tokenizer_of(config), build.toolbox_of(config))
    assert codec.patches is patches_of(model)  # what is counted is what is seen
    assert codec.prompt(ASKED).images[0].rows == 3  # not 6: max_pixels was heard
    store = CheckpointStore(tmp_path / "checkpoints", warn=print)
    folder = store.save(1, Policy(model, OptimizerSettings(), 1), make_tokenizer())
    again = config_of(folder / "actor")
    codec = build.codec_of(again, build.tokenizer_of(again), build.toolbox_of(again))
    assert codec.prompt(ASKED).images[0].rows == 3
    for (name, was), now in zip(model.named_parameters(), build.model_of(again).parameters(), strict=True):
        assert torch.equal(was, now), name


@pytest.mark.parametrize("family", OTHERS)
def test_a_folder_of_every_family_sees(tmp_path: Path, family: str) -> None:
    model = build.model_of(config_of(saved(tmp_path / "model", family)))
    folder = CheckpointStore(tmp_path, warn=print).save(
        1, Policy(model, OptimizerSettings(), 1), make_tokenizer(family)
    )
    config = config_of(folder / "actor")
    again = build.model_of(config)
    codec = build.codec_of(config, build.tokenizer_of(config), build.toolbox_of(config))
    [span] = codec.prompt(ASKED).images
    assert codec.patches.tokens(span.image) == make_patches(family).tokens(span.image)
    with torch.no_grad():
        ours, theirs = (
            image_features(one, [span.image, make_image(2)]).first_VC for one in (make_vision_model(family), again)
        )
    assert torch.equal(ours, theirs) and len(ours) == sum(
        map(len, map(codec.patches.tokens, (span.image, make_image(2))))
    )
    assert float((ours[: len(ours) // 3] - ours[-(len(ours) // 3) :]).abs().max()) > 1e-3


@pytest.mark.parametrize(("family", "mark"), [("internvl", "<img>"), ("mistral3", "[IMG_BREAK]")])
def test_a_tokenizer_without_a_mark_of_the_family_is_refused(tmp_path: Path, family: str, mark: str) -> None:
    saved(tmp_path, family)
    for file in tmp_path.glob("*token*.json"):
        file.write_text(file.read_text().replace(mark, "<other>"))
    with pytest.raises(VisionError, match=f"need the token {re.escape(mark)}"):
        build.patches_of(config_of(tmp_path))


@pytest.mark.parametrize("frozen", [False, True])
def test_the_tower_is_trained_unless_it_is_frozen(tmp_path: Path, frozen: bool) -> None:
    config = config_of(saved(tmp_path), f"actor_rollout_ref.actor.freeze_vision_tower={frozen}")
    model = build.model_of(config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learn(Policy(model, OptimizerSettings(lr=1e-2), 4))
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert any("language_model" in name for name in changed)
    assert any("visual" in name for name in changed) is not frozen


def test_lora_adapts_the_language_unless_told_otherwise() -> None:
    default, less, told = make_vision_model(), make_vision_model(), make_vision_model()
    add_adapters(default, LoraSettings(rank=2), "base")
    add_adapters(less, LoraSettings(rank=2, excluded=("q_proj", "mlp.up_proj")), "base")
    add_adapters(told, LoraSettings(rank=2, targets=("qkv", "q_proj")), "base")
    adapted = [name for name, _ in default.named_parameters() if "lora_" in name]
    assert adapted and not any("visual" in name for name in adapted)
    left_out = {name for name in adapted if "q_proj" in name or "up_proj" in name}
    assert left_out and {name for name, _ in less.named_parameters() if "lora_" in name} == set(adapted) - left_out
    assert any("visual" in name for name, _ in told.named_parameters() if "lora_" in name)


def test_a_critic_that_cannot_look_as_the_policy_does_is_refused() -> None:
    finer = make_vision_model()
    finer.config.vision_config.patch_size = 2
    for critic in (finer, make_model()):
        with pytest.raises(VisionError, match="does not take images as the policy does"):
            share_patches(critic, make_patches(), "critic.model.path")


def test_adapters_are_merged_into_a_folder_that_sees(tmp_path: Path) -> None:
    config = config_of(saved(tmp_path / "model"), "actor_rollout_ref.model.lora_rank=2")
    model = build.model_of(config)
    policy = Policy(model, OptimizerSettings(lr=1e-2), 3)
    learn(policy, 3)
    folder = CheckpointStore(tmp_path / "checkpoints", warn=print).save(1, policy, make_tokenizer())
    whole = config_of(merge(folder).folder)
    codec = build.codec_of(whole, build.tokenizer_of(whole), build.toolbox_of(whole))
    [row] = [Row.of(Segment(prompt_ids=p.ids, images=p.images), 0) for p in [codec.prompt(ASKED)]]
    row = replace(row, ids=(*row.ids, 5), sampled=(len(row.ids),), logprobs=(0.0,))
    plain = build.model_of(whole)
    attention.install(plain)
    ours, theirs = (forward.token_logprobs(m, pack([row], m.device)).logp_M for m in (model, plain))
    assert float((ours - theirs).detach().abs()) < 1e-4


def test_supervised_fine_tuning_learns_from_rows_with_images(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "noise"}]
    rows = [{"messages": messages, "images": [{"bytes": picture(seed)}]} for seed in range(4)]
    write_rows(rows, tmp_path / "sft.parquet")
    overrides = [f"model.path={saved(tmp_path / 'model')}", f"data.train_files={tmp_path / 'sft.parquet'}"]
    overrides += ["data.train_batch_size=2", "trainer.total_training_steps=3", f"trainer.default_local_dir={tmp_path}"]
    config = load_sft_config(overrides=overrides)
    paper = Paper()
    sft_run.show(config, paper.console)
    assert "<|image_pad|>" in paper.text and sft_run.check(config, paper.console)
    assert sft_run.sft(config, paper.console).steps == 3


def test_the_doctor_finds_a_model_that_sees_well(tmp_path: Path) -> None:
    write_rows(geometry.rows(2, 0, "train"), tmp_path / "train.parquet")
    given = {"train_files": tmp_path / "train.parquet", "max_prompt_length": 1024, "train_batch_size": 2}
    overrides = [
        f"actor_rollout_ref.model.path={saved(tmp_path / 'model')}",
        *(f"data.{k}={v}" for k, v in given.items()),
    ]
    overrides += ["actor_rollout_ref.actor.ppo_mini_batch_size=2", f"trainer.default_local_dir={tmp_path / 'run'}"]
    found = list(examine(None, overrides))
    assert not [one for one in found if one.status == "error"], found
    assert "full forward" in "".join(one.text for one in found)


@pytest.mark.parametrize("option", ["maxpixels=64", "patch_size=2"])
def test_an_option_that_would_be_passed_over_or_break_the_tower_is_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(VisionError, match="is not a known option; use one of min_pixels, max_pixels"):
        build.patches_of(config_of(saved(tmp_path), f"data.mm_processor_kwargs.{option}"))


def test_an_option_of_another_family_is_refused_and_its_own_is_heard(tmp_path: Path) -> None:
    saved(tmp_path, "internvl")
    with pytest.raises(VisionError, match=r"max_pixels is not an option of GotOcr2ImageProcessorPil; leave it out"):
        build.patches_of(config_of(tmp_path, "data.mm_processor_kwargs.max_pixels=64"))
    wide = make_image(3, 60, 20)
    patches = [build.patches_of(config_of(tmp_path, f"data.mm_processor_kwargs.max_patches={n}")) for n in (1, 3)]
    assert [len(one.tokens(wide)) for one in patches] == [4 + 2, 4 * 4 + 2]


def test_what_a_model_for_text_cannot_do_is_said(tmp_path: Path) -> None:
    from small_models import make_model

    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(VisionError, match="has no vision tower"):
        build.model_of(config_of(tmp_path, "actor_rollout_ref.actor.freeze_vision_tower=true"))
    with pytest.raises(VisionError, match="mm_processor_kwargs is set, but the model is text-only"):
        build.patches_of(config_of(tmp_path, "data.mm_processor_kwargs.max_pixels=64"))


def test_a_folder_without_a_processor_is_used_for_text_and_says_what_is_missing(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    config = config_of(tmp_path)
    model = build.model_of(config)
    assert patches_of(model) is None and not any(p.requires_grad for p in model.base_model.visual.parameters())
    codec = build.codec_of(config, build.tokenizer_of(config), build.toolbox_of(config))
    with pytest.raises(RallyError, match=r"used for text here: .* without preprocessor_config\.json in its folder"):
        codec.prompt(ASKED)
    with pytest.raises(RallyError, match=r"must contain preprocessor_config\.json"):
        build.patches_of(config_of(tmp_path, "data.mm_processor_kwargs.max_pixels=576"))


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("suffix", ["", "Fast"])
def test_the_class_names_of_published_folders_are_understood(tmp_path: Path, family: str, suffix: str) -> None:
    make_tokenizer(family).save_pretrained(tmp_path)
    make_config(family).save_pretrained(tmp_path)
    stored = json.loads(make_processor(family).to_json_string())
    kind = stored["image_processor_type"].removesuffix("Pil").removesuffix("Fast")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**stored, "image_processor_type": kind + suffix}))
    patches = build.patches_of(config_of(tmp_path))
    assert patches.tokens(make_image(1)) == make_patches(family).tokens(make_image(1))
