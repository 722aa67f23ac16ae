"""Episodes that were sampled once are not sampled again, and are scored and trained on as before."""

from pathlib import Path

from train_cases import Paper, run_config

from rally.track import RunFolder
from rally.train.run import train
from rally.types import Episode

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
    train(config, Paper().console)
    return list(RunFolder(folder).read_episodes(1))


def skipped(episodes: list[Episode]) -> list[bool]:
    return [bool(episode.extra.get("rollout_skipped")) for episode in episodes]


def test_a_second_run_takes_what_the_first_sampled(home: Path, tmp_path: Path) -> None:
    first = run(home, tmp_path / "first", tmp_path / "dump")
    again = run(home, tmp_path / "again", tmp_path / "dump", "custom_reward_function.reward_kwargs.bonus=1.0")
    assert not any(skipped(first)) and all(skipped(again)) and len(again) == 12
    assert [e.segments for e in again] == [e.segments for e in first]
    assert all(b.reward == a.reward + 1.0 for a, b in zip(first, again, strict=True)), "scored anew"
    [file] = (tmp_path / "dump").glob("default_rally/GBS3_N4_in32_out24/1.jsonl")  # other numbers are another folder
    file.write_text(file.read_text()[:-40])
    torn = run(home, tmp_path / "torn", tmp_path / "dump")
    assert skipped(torn).count(False) == 1, "what is torn is sampled again"
    assert len(file.read_text().splitlines()) == 12
