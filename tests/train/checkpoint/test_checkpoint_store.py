"""A checkpoint restores everything and loads anywhere; an incomplete one is skipped with a warning."""

import json
import os
from pathlib import Path

import pytest
import torch
from small_models import make_model
from train_cases import same, small_policy, uneven_episodes, weights, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from rally.chat import tiny_tokenizer
from rally.models.load import load_model
from rally.train.batch import build_batch
from rally.train.checkpoint.store import LATEST, CheckpointError, CheckpointStore, open_checkpoint
from rally.train.policy import DivergedError, Policy
from rally.train.update import UpdateSettings, update_policy

UPDATE = UpdateSettings(mini_batch_groups=2)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, warnings: list[str]) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", warn=warnings.append)


def policy_on(model: torch.nn.Module) -> Policy:
    return small_policy(model, lr=1e-2, total=8, schedule="cosine", warmup_steps=2)


def steps(policy: Policy, *seeds: int) -> None:
    for seed in seeds:
        update_policy(policy, build_batch(uneven_episodes(seed)), UPDATE)


def test_the_next_step_after_loading_is_the_same_bit_for_bit(
    store: CheckpointStore, tokenizer: PreTrainedTokenizerBase
) -> None:
    policy = policy_on(make_model())
    steps(policy, 1, 2, 3)
    store.save(3, policy, tokenizer)
    steps(policy, 4, 5)

    found = store.latest()
    assert found is not None and found.step == 3
    resumed = policy_on(load_model(str(found.actor)))
    assert not same(weights(resumed.model), weights(policy.model)), "the steps after it must have moved the weights"
    resumed.load_state(found.state())
    steps(resumed, 4, 5)
    assert same(weights(resumed.model), weights(policy.model))
    assert resumed.optimizer.param_groups[0]["lr"] == policy.optimizer.param_groups[0]["lr"]


def test_the_optimizer_is_part_of_it(store: CheckpointStore, tokenizer: PreTrainedTokenizerBase) -> None:
    """The counterpart of the test above: without the optimizer's state the next step differs."""
    policy = policy_on(make_model())
    steps(policy, 1, 2, 3)
    store.save(3, policy, tokenizer)
    steps(policy, 4)
    bare = policy_on(load_model(str(store.folder / "global_step_3" / "actor")))
    steps(bare, 4)
    assert not same(weights(bare.model), weights(policy.model))


def test_a_resumed_run_follows_its_own_learning_rate_and_schedule(
    store: CheckpointStore, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A run that ended at a learning rate of 0 and gets more steps must learn again."""
    policy = small_policy(make_model(), lr=1e-2, total=2, schedule="linear")
    steps(policy, 1, 2)
    assert policy.optimizer.param_groups[0]["lr"] == 0
    store.save(2, policy, tokenizer)
    longer = small_policy(make_model(), lr=3e-2, total=4, schedule="linear", weight_decay=0.5)
    longer.load_state(open_checkpoint(store.folder / "global_step_2").state())
    group = longer.optimizer.param_groups[0]
    assert group["lr"] == pytest.approx(1.5e-2) and group["weight_decay"] == 0.5
    steps(longer, 3)
    assert group["lr"] == pytest.approx(0.75e-2)


def test_the_actor_folder_loads_with_transformers(store: CheckpointStore, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    policy = policy_on(load_model(str(folder)))
    path = store.save(1, policy, AutoTokenizer.from_pretrained(folder))
    model = AutoModelForCausalLM.from_pretrained(path / "actor").eval()
    ids = AutoTokenizer.from_pretrained(path / "actor")("What is 2+3?", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, policy.model(input_ids=ids).logits)
    assert model.config._attn_implementation != "rally", "a file must not ask for what only Rally knows"


def test_latest_names_the_newest_for_other_programs(store: CheckpointStore, tokenizer: PreTrainedTokenizerBase) -> None:
    policy = policy_on(make_model())
    for step in (2, 10):
        store.save(step, policy, tokenizer)
    assert (store.folder / LATEST).read_text() == "10"
    found = store.latest()
    assert found is not None and found.step == 10, "10 is after 2, though not in the alphabet"


def saved(store: CheckpointStore, tokenizer: PreTrainedTokenizerBase, *numbers: int) -> Policy:
    policy = policy_on(make_model())
    for step in numbers:
        store.save(step, policy, tokenizer)
    return policy


def tear(folder: Path, how: str) -> None:
    match how:
        case "missing":
            (folder / "actor" / "model.safetensors").unlink()
        case "short":
            file = folder / "trainer.pt"
            os.truncate(file, file.stat().st_size - 1)
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "half a manifest":
            (folder / "manifest.json").write_text('{"trainer.pt": 1', encoding="utf-8")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", "actor/model.safetensors is missing"),
        ("short", "trainer.pt has"),
        ("no manifest", "it has no readable manifest.json"),
        ("half a manifest", "it has no readable manifest.json"),
    ],
)
def test_a_torn_checkpoint_is_passed_over_with_a_warning(
    store: CheckpointStore, tokenizer: PreTrainedTokenizerBase, warnings: list[str], how: str, words: str
) -> None:
    saved(store, tokenizer, 1, 2)
    assert store.latest().step == 2 and not warnings  # type: ignore[union-attr]
    torn = store.folder / "global_step_2"
    tear(torn, how)
    found = store.latest()
    assert found is not None and found.step == 1
    assert len(warnings) == 1 and str(torn) in warnings[0] and words in warnings[0]
    with pytest.raises(CheckpointError, match=f"global_step_2 cannot be used: {words}"):
        open_checkpoint(torn)


def test_a_checkpoint_whose_writing_was_cut_off_is_never_used(
    store: CheckpointStore, tokenizer: PreTrainedTokenizerBase, warnings: list[str]
) -> None:
    saved(store, tokenizer, 1, 2)
    (store.folder / "global_step_2").rename(store.folder / ".writing_global_step_2_123")
    found = store.latest()
    assert found is not None and found.step == 1
    assert len(warnings) == 1 and "interrupted" in warnings[0]
    assert not list(store.folder.glob(".writing_*"))


def test_an_empty_folder_has_no_latest(store: CheckpointStore) -> None:
    assert store.latest() is None


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.glob("global_step_*"))


def test_only_the_last_ones_are_kept(store: CheckpointStore, tokenizer: PreTrainedTokenizerBase) -> None:
    store.keep = 2
    saved(store, tokenizer, 8, 9, 10, 11)
    assert names(store) == ["global_step_10", "global_step_11"]


def test_only_the_last_critics_are_kept_though_all_checkpoints_stay(
    store: CheckpointStore, tokenizer: PreTrainedTokenizerBase, warnings: list[str]
) -> None:
    def critic(folder: Path) -> None:
        (folder / "critic").mkdir()
        (folder / "critic" / "weights").write_text("1", encoding="utf-8")

    store.keep_critics = 1
    policy = policy_on(make_model())
    for step in (1, 2, 3):
        store.save(step, policy, tokenizer, more=[critic])
        if step == 2:  # as after a kill between unregistering and deleting
            critic(store.folder / "global_step_1")
    assert names(store) == ["global_step_1", "global_step_2", "global_step_3"]
    assert [path.parent.name for path in store.folder.glob("*/critic")] == ["global_step_3"]
    held = [open_checkpoint(store.folder / name).holds("critic") for name in names(store)]
    assert held == [False, False, True] and not warnings


def test_what_was_just_written_is_kept_whatever_lies_after_it(
    store: CheckpointStore, tokenizer: PreTrainedTokenizerBase, warnings: list[str]
) -> None:
    """An incomplete checkpoint of a later step must not displace the good ones."""
    saved(store, tokenizer, 1, 3)
    tear(store.folder / "global_step_3", "missing")
    store.keep = 1
    saved(store, tokenizer, 2)
    assert names(store) == ["global_step_2", "global_step_3"]
    assert store.latest().step == 2  # type: ignore[union-attr]


def test_a_torn_checkpoint_is_replaced_by_a_whole_one_of_its_step(
    store: CheckpointStore, tokenizer: PreTrainedTokenizerBase, warnings: list[str]
) -> None:
    saved(store, tokenizer, 1)
    tear(store.folder / "global_step_1", "missing")
    saved(store, tokenizer, 1)
    assert store.latest().step == 1 and not warnings  # type: ignore[union-attr]


def test_the_manifest_lists_every_file(store: CheckpointStore, tokenizer: PreTrainedTokenizerBase) -> None:
    saved(store, tokenizer, 1)
    folder = store.folder / "global_step_1"
    listed = json.loads((folder / "manifest.json").read_text())
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {"manifest.json"}
    assert set(listed) == there and "actor/model.safetensors" in there and "actor/tokenizer.json" in there


def test_a_folder_that_is_no_checkpoint_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a checkpoint folder; its name must contain global_step_N"):
        open_checkpoint(tmp_path / "actor")


def test_a_gradient_that_is_not_finite_stops_and_leaves_the_weights() -> None:
    model = make_model()
    policy = policy_on(model)
    steps(policy, 1)
    before = weights(model)
    moments = [state["exp_avg"].clone() for state in policy.optimizer.state.values()]
    model.lm_head.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(DivergedError, match="the gradient norm is nan, so the step was not applied"):
        steps(policy, 2)
    assert same(weights(model), before)
    after = [state["exp_avg"] for state in policy.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    assert all(p.grad is None for p in model.parameters()) and not model.training


def test_a_run_set_back_does_not_find_its_later_checkpoints(
    store: CheckpointStore, tokenizer: PreTrainedTokenizerBase
) -> None:
    policy = policy_on(make_model())
    for step in (2, 4, 6):
        store.save(step, policy, tokenizer)
    assert {p.name for p in store.supersede_after(2)} == {"superseded_global_step_4", "superseded_global_step_6"}
    found = store.latest()
    assert found is not None and found.step == 2
    assert (store.folder / LATEST).read_text() == "2", "other programs read it too"
    store.supersede_after(0)
    assert store.latest() is None and not (store.folder / LATEST).exists()
