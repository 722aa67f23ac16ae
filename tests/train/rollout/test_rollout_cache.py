"""Cached episodes are not sampled again, and are scored and trained on as before."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from train_cases import TASK, Paper, episode, run_config
from vision_cases import picture

from rally.images.loading import read_image
from rally.loops import Job, Runner
from rally.runs.build.rollout import rollout_cache_dir
from rally.runs.train import train
from rally.track import RunFolder
from rally.train.rollout.rollout_cache import CachedRolloutRunner
from rally.types import Episode, ImageSpan, SamplingParams, Segment

R = "actor_rollout_ref.rollout"


def run(home: Path, folder: Path, dump: Path, *more: str) -> list[Episode]:
    config = run_config(
        home,
        folder,
        f"{R}.skip_rollout=true",
        f"{R}.skip_dump_dir={dump}",
        "data.val_files=null",
        "trainer.total_training_steps=1",
        "trainer.save_freq=-1",
        *more,
    )
    paper = Paper()
    train(config, paper.console)
    assert "which other weights may have sampled" in paper.text
    return list(RunFolder(folder).read_episodes(1))


def skipped(episodes: list[Episode]) -> list[bool]:
    return [bool(episode.extra.get("rollout_skipped")) for episode in episodes]


def test_a_second_run_takes_what_the_first_sampled(home: Path, tmp_path: Path) -> None:
    first = run(home, tmp_path / "first", tmp_path / "dump")
    again = run(home, tmp_path / "again", tmp_path / "dump", "custom_reward_function.reward_kwargs.bonus=1.0")
    assert not any(skipped(first)) and all(skipped(again)) and len(again) == 12
    assert [e.segments for e in again] == [e.segments for e in first]
    assert all(b.reward == a.reward + 1.0 for a, b in zip(first, again, strict=True)), "scored anew"
    [file] = (tmp_path / "dump").glob("default_rally/GBS3_N4_in32_out24_*/1.jsonl")  # other values give another folder
    file.write_text(file.read_text()[:-40])
    torn = run(home, tmp_path / "torn", tmp_path / "dump")
    assert skipped(torn).count(False) == 1, "what is torn is sampled again"
    assert len(file.read_text().splitlines()) == 12
    file.write_text(file.read_text().replace("What is", "What was", 1))
    assert skipped(run(home, tmp_path / "other", tmp_path / "dump")).count(False) == 1, "another question of that name"
    [row] = [row for row in RunFolder(tmp_path / "again").read_metrics() if row.step == 1]
    assert row.metrics["episodes/skipped"] == 12


@pytest.mark.drill("reliability", "Cached episodes are damaged", "They are sampled again, with a warning")
def test_damaged_episodes_of_the_cache_are_sampled_again(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = run(home, tmp_path / "first", tmp_path / "dump")
    [file] = (tmp_path / "dump").glob("*/*/1.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    digit = re.search(rb'"response_ids": ?\[(\d)', lines[1])
    assert digit
    lines[0] = bytes(len(lines[0]) - 1) + b"\n"  # as after a power cut
    lines[1] = lines[1][: digit.start(1)] + b"%d" % ((int(digit[1]) + 1) % 10) + lines[1][digit.end(1) :]
    lines[2] = b"\xff" + lines[2][1:]
    lines[3] = b"[]\n"
    file.write_bytes(b"".join(lines))
    again = run(home, tmp_path / "again", tmp_path / "dump")
    assert skipped(again).count(False) == 4 and "4 of 12 cached episodes" in caplog.text
    assert [e.id for e in again] == [e.id for e in first]
    older = json.loads(lines[4])["episode"]
    file.write_text(json.dumps(older) + "\n", encoding="utf-8")
    assert skipped(run(home, tmp_path / "older", tmp_path / "dump")).count(True) == 1, (
        "lines of older versions are read"
    )


def test_an_episode_whose_tool_was_down_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be kept out of the loss of every later run."""
    job = Job(task=TASK, episode_id="e", group="g", seed=3, step=1)
    down = replace(
        episode("e", "g", None, Segment(prompt_ids=(5,))),
        extra={"tool_outage": {"on_outage": "mask", "calls": {}, "first": "x"}},
    )

    async def sample(*_: object) -> Episode:
        return down

    monkeypatch.setattr(Runner, "episode", sample)
    runner = CachedRolloutRunner(engine=None, codec=None, toolbox=None, dump=tmp_path)  # type: ignore[arg-type]
    assert asyncio.run(runner.episode(job, SamplingParams(), None)) is down
    assert list(tmp_path.glob("*.jsonl")) == []


def test_what_another_model_or_other_prompts_sampled_is_not_taken(home: Path, tmp_path: Path) -> None:
    places = {
        rollout_cache_dir(run_config(home, tmp_path, f"{R}.skip_rollout=true", word))
        for word in (
            f"{R}.n=4",
            f"{R}.temperature=0.7",
            f"{R}.quantization=fp8",
            f"actor_rollout_ref.model.path={tmp_path}",
        )
    }
    assert len(places) == 4


def test_pictures_of_episodes_are_kept_with_them(tmp_path: Path) -> None:
    shown = read_image(picture())
    prompt = ({"role": "user", "content": [{"type": "image", "image": shown}, {"type": "text", "text": "?"}]},)
    job = Job(task=replace(TASK, prompt=prompt), episode_id="e", group="g", seed=3, step=1)
    span = ImageSpan(start=0, rows=1, columns=1, image=shown)
    held = replace(episode("e", "g", None, Segment(prompt_ids=(5,), images=(span,))), task=job.task, seed=3)

    async def sample(*_: object) -> Episode:
        return held

    def skipping_runner() -> CachedRolloutRunner:
        return CachedRolloutRunner(engine=None, codec=None, toolbox=None, dump=tmp_path)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Runner, "episode", sample)
        asyncio.run(skipping_runner().episode(job, SamplingParams(), None))
    again = asyncio.run(skipping_runner().episode(job, SamplingParams(), None))
    assert again.segments == held.segments
    assert again.segments[0].images[0].image.read() == shown.read()
