"""What is said about the memory of a model that sees is what its tower holds and what of it is trained."""

import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config
from vision_cases import FAMILIES, make_image, make_patches, make_vision_model, write_vision_model

from rally.config import Config, load_config
from rally.doctor.doctor import examine
from rally.engines.embedded import EngineSettings, memory_plan
from rally.engines.embedded.memory_plan import plan_memory, step_bytes
from rally.models.lora import LoraSettings, add_adapters
from rally.models.vision import FEATURE_CACHE_BYTES, image_features, image_parts_of
from rally.models.vision_loading import freeze_tower
from rally.models.vision_memory import vision_shape
from rally.runs.activation_estimate import activation_bytes, critic_activation_bytes, packed_tokens
from rally.runs.cost_estimate import training_costs
from rally.runs.planned_models import described_critic, size_from, size_of

A, M = "actor_rollout_ref.actor", "actor_rollout_ref.model"


def config_of(*keys: str) -> Config:
    return load_config(overrides=["data.max_prompt_length=512", "data.max_response_length=512", *keys])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4), LoraSettings(rank=4, targets=("q_proj", "qkv"))])
def test_weights_are_counted_as_the_module_has_and_trains_them(family: str, lora: LoraSettings | None) -> None:
    model = make_vision_model(family)
    described, every = size_from(model.config, lora), sum(p.numel() for p in model.parameters())
    if lora:
        add_adapters(model, lora, "base")
    assert described.parameters == every
    assert described.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_tower_is_not_trained(family: str) -> None:
    model = make_vision_model(family)
    freeze_tower(model)
    assert size_from(model.config, tower_frozen=True) == size_of(model)
    [tower] = image_parts_of(model).values()
    assert size_of(model).trained == size_of(model).parameters - sum(p.numel() for p in tower.parameters())


def test_a_tower_that_is_shown_no_image_needs_no_activations_and_no_optimizer() -> None:
    """Servers are sent only tokens, so its weights are not trained."""
    config, [tower] = make_vision_model("qwen3_vl").config, image_parts_of(make_vision_model("qwen3_vl")).values()
    served, own = config_of("actor_rollout_ref.rollout.name=vllm"), config_of()
    frozen = config_of(f"{A}.freeze_vision_tower=true")
    assert activation_bytes(served, config, 4) < activation_bytes(frozen, config, 4) < activation_bytes(own, config, 4)
    counted = size_from(config, text_only=True)
    assert counted == size_from(config, tower_frozen=True)
    assert size_from(config).trained - counted.trained == sum(p.numel() for p in tower.parameters())


def test_a_critic_of_a_vision_model_used_for_text_does_not_train_the_tower(tmp_path: Path) -> None:
    """`critic_of` freezes it then."""
    model = make_vision_model("qwen3_vl")
    model.config.save_pretrained(tmp_path)
    [tower] = image_parts_of(model).values()
    unused = sum(p.numel() for p in tower.parameters())
    for own in ((), (f"critic.model.path={tmp_path}",)):
        text, shown = (
            described_critic(
                config_of("algorithm.adv_estimator=gae", f"actor_rollout_ref.rollout.name={name}", *own),
                model.config,
                size_from(model.config, text_only=name == "vllm"),
            ).size
            for name in ("vllm", "embedded")
        )
        assert shown.trained == shown.parameters == text.parameters
        assert shown.trained - text.trained == unused > 0


def test_ranks_gather_the_whole_tower_where_images_are_shown() -> None:
    model, ranks = make_vision_model("qwen3_vl"), ("trainer.n_gpus_per_node=2", "trainer.device=cpu")
    [tower] = image_parts_of(model).values()

    def gathered(*keys: str) -> int:
        costs = training_costs(config_of(*ranks, *keys), model.config, size_of(model), 4)
        return next(cost.bytes for cost in costs if cost.what == "gathered layers")

    both = gathered() - gathered("actor_rollout_ref.rollout.name=vllm")
    assert both == 4 * sum(p.numel() for p in tower.parameters())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_those_that_torch_keeps(family: str, dtype: torch.dtype) -> None:
    model = make_vision_model(family).to(dtype)
    weights, held = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    image = make_image(width=48, height=48)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        image_features(model, [image])
    shape, patches = vision_shape(model.config), len(make_patches().of(image).pixels)
    assert shape is not None and patches == make_patches().most
    told = patches * shape.training_size(checkpointing=False) * dtype.itemsize
    assert told == pytest.approx(sum(size for size, _ in held.values()), rel=0.08)


def test_the_engine_leaves_room_for_the_largest_image_and_for_features(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_vision_model()
    text = make_vision_model().config.get_text_config()
    settings = EngineSettings(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64)
    sight = step_bytes(model.config, settings, 4, make_patches()) - step_bytes(text, settings, 4)
    shape = vision_shape(model.config)
    assert shape is not None and vision_shape(text) is None
    assert sight == FEATURE_CACHE_BYTES + 4 * (144 * shape.forward_size() + (36 + 64) * shape.features)
    assert step_bytes(model.config, settings, 4) > step_bytes(model.config, settings, 4, make_patches())
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 3 * FEATURE_CACHE_BYTES)
    assert plan_memory(model, settings).pages > 0
    monkeypatch.setattr(
        memory_plan, "free_bytes", lambda device: 2 * FEATURE_CACHE_BYTES
    )  # of which the engine may have half
    with pytest.raises(memory_plan.EngineError, match="does not fit into the 0 tokens of KV"):
        plan_memory(model, settings)


def test_the_update_holds_more_the_more_of_the_tower_it_learns() -> None:
    described = make_vision_model().config
    text = described.get_text_config()
    held = {
        what: activation_bytes(config_of(*keys), described, 4) - activation_bytes(config_of(*keys), text, 4)
        for what, keys in {
            "all": (f"{M}.enable_gradient_checkpointing=false",),
            "checkpoints": (),
            "frozen": (f"{A}.freeze_vision_tower=true",),
            "adapters": (f"{M}.lora_rank=4",),
        }.items()
    }
    assert held["all"] > held["checkpoints"] > held["frozen"] == held["adapters"] > 0


def test_the_doctor_tells_what_is_trained_of_a_model_that_sees(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "model")
    keys = [f"{M}.path={folder}", f"{A}.freeze_vision_tower=true", f"trainer.default_local_dir={tmp_path / 'run'}"]
    found = "".join(one.text for one in examine(None, keys) if one.check == "memory")
    model = make_vision_model("qwen3_vl")
    freeze_tower(model)
    size = size_of(model)
    assert re.search(rf"{size.parameters / 1e6:,.1f} million weights, {size.trained / 1e6:,.1f} million of them", found)


def test_a_critic_and_a_teacher_that_see_need_room_for_images(tmp_path: Path) -> None:
    vision = make_vision_model("qwen2_vl").config
    vision.save_pretrained(tmp_path)
    sizes = ("data.max_prompt_length=512", "data.max_response_length=512", "algorithm.adv_estimator=gae")
    served = ("actor_rollout_ref.rollout.name=vllm",)  # sends no images
    size, tokens = size_from(vision), packed_tokens(config_of(*sizes), critic=True)
    seeing, text = (critic_activation_bytes(config_of(*sizes, *keys), vision, size, 4) for keys in ((), served))
    tower = vision_shape(vision)
    assert tower is not None
    learned = tower.features + tower.patches * tower.training_size(checkpointing=True)
    assert seeing - text == tokens // 2 * learned * 4
    teacher = "distillation.teacher_models.teacher_model"
    keys = (*sizes[:2], "distillation.enabled=true", f"{teacher}.model_path={tmp_path}")
    keys = (*keys, f"{teacher}.inference.dtype=float32")
    tiny = Qwen2Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    own, asked, unseen = (activation_bytes(config_of(*given), tiny, 2) for given in (sizes[:2], keys, (*keys, *served)))
    passing = tower.features + tower.patches * tower.forward_size()
    assert asked >= packed_tokens(config_of(*keys)) // 2 * passing * 4 > own
    assert own <= unseen < asked
