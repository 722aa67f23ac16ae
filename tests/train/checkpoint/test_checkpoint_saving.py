"""A checkpoint written in the background holds the state at the time of the call; its failure stops the run."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import make_model
from train_cases import Paper, run_config, same, small_policy, uneven_episodes, weights
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from rally.chat import tiny_tokenizer
from rally.runs.build.run_inputs import RunError
from rally.runs.train import train
from rally.track import RunFolder
from rally.train.batch import build_batch
from rally.train.checkpoint.snapshot import copied, json_part, state_part
from rally.train.checkpoint.store import CheckpointError, CheckpointStore, damage, open_checkpoint
from rally.train.policy import Policy
from rally.train.update import UpdateSettings, update_policy

TIMEOUT = 30


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", background=True, warn=pytest.fail)


class Gate:
    """A part of a checkpoint that is written only after it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, folder: Path) -> None:
        self.reached.set()
        assert self.opened.wait(TIMEOUT)


def learn(policy: Policy, *seeds: int) -> None:
    for seed in seeds:
        update_policy(policy, build_batch(uneven_episodes(seed)), UpdateSettings(mini_batch_groups=2))


def test_training_goes_on_while_the_moment_of_saving_is_written(
    store: CheckpointStore, tokenizer: PreTrainedTokenizerBase
) -> None:
    policy, gate = small_policy(make_model(), lr=1e-2), Gate()
    learn(policy, 1)
    then = weights(policy.model)
    moments = [value["exp_avg"].clone() for value in policy.optimizer.state.values()]
    store.save(1, policy, tokenizer, more=[gate])
    assert gate.reached.wait(TIMEOUT)
    learn(policy, 2, 3)
    assert not (store.folder / "global_step_1").exists()
    gate.opened.set()
    store.wait()
    found = open_checkpoint(store.folder / "global_step_1")
    assert same(weights(AutoModelForCausalLM.from_pretrained(found.actor)), then)
    assert not same(weights(policy.model), then)
    states = found.state()["optimizer"]["state"].values()
    assert all(torch.equal(s["exp_avg"], m) for s, m in zip(states, moments, strict=True))


def test_one_checkpoint_is_written_after_the_other(store: CheckpointStore, tokenizer: PreTrainedTokenizerBase) -> None:
    policy, gate = small_policy(make_model()), Gate()
    store.save(1, policy, tokenizer, more=[gate])
    second = threading.Thread(target=lambda: store.save(2, policy, tokenizer))
    second.start()
    second.join(0.2)
    assert second.is_alive() and not list(store.folder.glob("global_step_*"))
    gate.opened.set()
    second.join(TIMEOUT)
    store.wait()
    assert sorted(p.name for p in store.folder.glob("global_step_*")) == ["global_step_1", "global_step_2"]
    assert all(damage(p) is None for p in store.folder.glob("global_step_*"))


def full_disk(folder: Path) -> None:
    raise OSError(28, "No space left on device")


def test_a_failure_is_told_at_the_next_moment(store: CheckpointStore, tokenizer: PreTrainedTokenizerBase) -> None:
    policy, gate = small_policy(make_model()), Gate()
    store.save(1, policy, tokenizer)
    store.save(2, policy, tokenizer, more=[gate, full_disk])
    store.check()  # no error yet
    gate.opened.set()
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 2 cannot be written to .*No space left"):
        store.wait()
    store.check()
    found = store.folder / "global_step_1"
    assert damage(found) is None and not (store.folder / "global_step_2").exists()


def test_a_run_whose_checkpoint_fails_stops_with_a_sentence(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, no_rows = CheckpointStore._write_parts, "data.val_files=null"

    def failing(store: CheckpointStore, target: Path, parts: Any) -> None:
        write(store, target, [*parts, full_disk] if target.name == "global_step_2" else parts)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "_write_parts", failing)
        with pytest.raises(CheckpointError, match="the checkpoint of step 2 cannot be written"):
            train(run_config(home, tmp_path, "trainer.total_training_steps=9", no_rows), Paper().console)
    paper = Paper()
    train(run_config(home, tmp_path, "trainer.total_training_steps=2", no_rows), paper.console)
    assert "global_step_1, step 1" in paper.text and "whose writing was interrupted" in paper.text


def test_what_a_resumed_run_counts_goes_on(home: Path, tmp_path: Path) -> None:
    config = run_config(home, tmp_path, "trainer.max_actor_ckpt_to_keep=2", "data.val_files=null")
    train(config, Paper().console)
    names = sorted(p.name for p in (tmp_path / "checkpoints").glob("global_step_*"))
    assert names == ["global_step_2", "global_step_3"]
    shutil.rmtree(tmp_path / "checkpoints" / "global_step_3")
    before = RunFolder(tmp_path).read_episodes(3)
    train(config, Paper().console)
    rows = RunFolder(tmp_path).read_metrics()
    assert [row.metrics["engine/weight_version"] for row in rows if row.step] == [1, 2, 3]
    versions = [{span.version for s in e.segments for span in s.spans} for e in RunFolder(tmp_path).read_episodes(3)]
    assert versions == [{span.version for s in e.segments for span in s.spans} for e in before] and {2} in versions
    with pytest.raises(RunError, match="already at step 3 of 3"):
        train(config, Paper().console)


def test_writing_before_going_on_gives_the_same_files(home: Path, tmp_path: Path) -> None:
    short = ("actor_rollout_ref.rollout.deterministic=true", "trainer.total_training_steps=1", "data.val_files=null")
    for name in ("true", "false"):
        save = f"actor_rollout_ref.actor.checkpoint.async_save={name}"
        train(run_config(home, tmp_path / name, save, *short), Paper().console)
    one, other = (tmp_path / name / "checkpoints" / "global_step_1" for name in ("true", "false"))
    listed = json.loads((one / "manifest.json").read_text())
    assert listed == json.loads((other / "manifest.json").read_text()) and "counters.json" in listed
    weight = "actor/model.safetensors"
    assert (one / weight).read_bytes() == (other / weight).read_bytes()


def test_a_checkpoint_half_removed_is_removed_without_a_word(
    store: CheckpointStore, tokenizer: PreTrainedTokenizerBase
) -> None:
    store.save(1, small_policy(make_model()), tokenizer)
    store.wait()
    half = store.folder / ".dropping_global_step_0"
    half.mkdir()
    (half / "trainer.pt").touch()
    found = store.latest()
    assert found is not None and found.step == 1 and not half.exists()


def test_more_parts_lie_beside_the_others(store: CheckpointStore, tokenizer: PreTrainedTokenizerBase) -> None:
    value = torch.ones(3)
    parts = [state_part("critic.pt", {"w": value}), json_part("kl.json", {"coef": 0.1})]
    value.zero_()
    folder = store.save(1, small_policy(make_model()), tokenizer, more=parts)
    store.wait()
    assert torch.load(folder / "critic.pt")["w"].tolist() == [1, 1, 1]
    assert json.loads((folder / "kl.json").read_text()) == {"coef": 0.1}
    (folder / "critic.pt").unlink()
    assert damage(folder) == "critic.pt is missing"


PLAIN = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
TENSORS = st.lists(st.integers(-9, 9), max_size=4).map(torch.tensor)
STATES = st.recursive(
    PLAIN | TENSORS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [t for v in inner for t in tensors_in(v)]


@settings(max_examples=30)
@given(STATES)
def test_a_copy_is_equal_and_shares_no_memory(state: Any) -> None:
    before = repr(state)
    mine = copied(state)
    assert repr(mine) == before
    for tensor in tensors_in(state):
        tensor.fill_(77)
    assert repr(mine) == before


def test_what_is_in_main_memory_is_written_from_there_if_training_waits() -> None:
    """A part of a larger tensor is copied all the same: torch would save the whole."""
    whole, large = torch.arange(6.0), torch.zeros(100)
    found = copied({"whole": whole, "part": large[:3], "tied": whole}, in_place=True)
    assert found["whole"] is whole is found["tied"]
    assert found["part"].untyped_storage().nbytes() == 12
    policy = small_policy(make_model())
    learn(policy, 1)
    state = policy.state()
    shared = copied(state, in_place=True)
    numbers = [one["exp_avg"] for one in state["optimizer"]["state"].values()]
    for mine, theirs in zip(numbers, shared["optimizer"]["state"].values(), strict=True):
        assert mine.data_ptr() == theirs["exp_avg"].data_ptr()


def test_tied_weights_are_copied_once_and_views_are_not_taken_for_each_other() -> None:
    whole = torch.arange(12.0)
    state = {"a": whole[:6], "b": whole[:6], "c": whole[6:], "d": whole[:6].view(2, 3)}
    mine = copied(state)
    assert mine["a"] is mine["b"] and mine["c"].tolist() == list(range(6, 12)) and mine["d"].shape == (2, 3)
    assert mine["a"].untyped_storage().nbytes() == 24, "not the tensor that it was a part of"
