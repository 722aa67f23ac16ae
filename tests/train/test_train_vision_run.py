"""A whole run with images: it trains on the images it sampled from, records them, and its episodes can be replayed."""

from pathlib import Path

import pytest
from train_cases import Paper, episode, run_config, write_reward
from vision_cases import make_codec, make_image, write_vision_model

from rally.config import load_config
from rally.data import write_rows
from rally.models.vision_loading import VisionError
from rally.recipes.geometry import data as geometry
from rally.replay.replay import Verdict, first_difference, replay
from rally.runs.train import train
from rally.track import RunFolder
from rally.train.batch import turns_of_episodes
from rally.types import Generation, RallyError, Segment

ROLLOUT = "actor_rollout_ref.rollout"
LENGTHS = ("data.max_prompt_length=1024", "data.max_response_length=12", f"{ROLLOUT}.n=2", "data.train_batch_size=2")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    write_vision_model(folder / "model")
    write_reward(folder)
    for split in geometry.SPLITS:
        write_rows(geometry.rows(2, 0, split), folder / f"{split}.parquet")
    return folder


def small(home: Path, out: Path, *overrides: str):
    size = "data.mm_processor_kwargs.max_pixels=1024"
    return run_config(home, out, *LENGTHS, size, "actor_rollout_ref.actor.ppo_mini_batch_size=2", *overrides)


def test_a_run_trains_and_its_episodes_are_replayed(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = small(home, out, "trainer.total_training_steps=2", f"{ROLLOUT}.deterministic=true")
    train(config, Paper().console)
    folder = RunFolder(out)
    rows = [row.metrics for row in folder.read_metrics() if row.step]
    assert len(rows) == 2 and all(row["images/mean"] == 1 and row["images/not_shown"] == 0 for row in rows)
    assert all(row["actor/rollout_mismatch_max"] < 1e-4 for row in rows)
    assert len(list((out / "images").iterdir())) == 4  # two training rows, two validation rows
    for validate, step in ((False, 2), (True, 2)):
        held = folder.read_episodes(step, validate)[0]
        found = replay(out, held.id, load_config(out / "config.yaml"))
        assert {finding.verdict for finding in found.findings} == {Verdict.SAME}, found


def test_another_image_in_the_same_place_is_a_departure() -> None:
    codec = make_codec()
    content = [[{"type": "image", "image": make_image(seed)}] for seed in (1, 2)]
    one, other = (codec.prompt([{"role": "user", "content": parts}]) for parts in content)
    assert one.ids == other.ids
    a, b = (Segment(prompt_ids=p.ids, images=p.images) for p in (one, other))
    apart = first_difference([a], [b])
    assert apart is not None and (apart.place, apart.writer) == (one.images[0].start, "prompt")
    assert first_difference([a], [a]) is None


def test_turns_that_were_shown_different_images_are_in_different_states() -> None:
    codec, reply = make_codec(), Generation(ids=(5,), logprobs=(-1.0,), finish="stop")
    asked, answers = codec.prompt([{"role": "user", "content": "?"}]), []
    for seed in (1, 2, 1):
        shown = codec.delta([{"role": "tool", "content": [{"type": "image", "image": make_image(seed)}]}])
        segment = Segment(prompt_ids=asked.ids).append_sampled(reply).append_observed(*shown).append_sampled(reply)
        answers.append(episode(f"e{seed}", "g", 0.0, segment))
    first, second = turns_of_episodes(answers).states_K.reshape(3, 2).T.tolist()
    assert len(set(first)) == 1 and second[0] == second[2] != second[1]


def test_servers_are_not_given_images(home: Path, tmp_path: Path) -> None:
    server = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.mode=server", f"{ROLLOUT}.server.url=http://x:1")
    with pytest.raises(VisionError, match="servers are not sent images; leave it out"):
        train(small(home, tmp_path, *server), Paper().console)
    with pytest.raises(RallyError, match=r"used for text here: over servers \(vLLM, .* with rollout\.name=embedded"):
        mini = "actor_rollout_ref.actor.ppo_mini_batch_size=2"
        train(run_config(home, tmp_path, *LENGTHS, mini, *server), Paper().console)
