"""A run records the advantage of each token and the times of each phase and turn."""

import random
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_cases import Paper, episode, run_config, segment, uneven_episodes

from rally.algos.credit_assignment import CreditSettings
from rally.runs.build.trainer import record_delay
from rally.runs.train import train
from rally.track import RunFolder
from rally.track.timing import PhaseClock
from rally.train.batch import advantage_spans, build_batch, rows_of
from rally.train.packing import Row
from rally.types import Episode
from rally.util.background_threads import BackgroundWriter

BATCHED = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos=None):
    return [len(text) % 5 / 5 for text in solution_strs]
"""


@pytest.fixture(scope="module")
def run(home: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Two steps with a critic, KL in the reward and importance weights: every phase that a step can have but reward."""
    folder = tmp_path_factory.mktemp("runs") / "recorded"
    config = run_config(
        home,
        folder,
        "algorithm.adv_estimator=gae",
        "algorithm.lam=0.9",
        "algorithm.use_kl_in_reward=true",
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.total_training_steps=2",
    )
    train(config, Paper().console)
    return RunFolder(folder)


def spread_out(one: Episode, spans: tuple[tuple[tuple[float, int, int], ...], ...]) -> list[list[float | None]]:
    """Per segment, the advantage of each response token, None where there is none."""
    tokens: list[list[float | None]] = [[None] * len(s.response_ids) for s in one.segments]
    for per_token, found in zip(tokens, spans, strict=True):
        for value, start, end in found:
            assert start < end and per_token[start:end] == [None] * (end - start)
            per_token[start:end] = [value] * (end - start)
    return tokens


@given(st.lists(st.lists(st.text("so", max_size=12), max_size=3), min_size=1, max_size=4), st.randoms())
def test_every_sampled_token_and_no_other_is_in_one_span(patterns: list[list[str]], rng: random.Random) -> None:
    episodes = [episode(str(i), "g", 0.0, *(segment(rng, p) for p in each or [""])) for i, each in enumerate(patterns)]
    values = (-0.5, 0.25, 3.0)
    rows = [
        Row(**{**vars(row), "advantages": tuple(rng.choice(values) for _ in row.sampled)}) for row in rows_of(episodes)
    ]
    found = advantage_spans(episodes, rows)
    given_values = iter([a for row in rows for a in row.advantages])
    for one in episodes:
        for per_token, part, spans in zip(spread_out(one, found[one.id]), one.segments, found[one.id], strict=True):
            assert per_token == [next(given_values) if sampled else None for sampled in part.response_mask]
            assert all(a.end < b.start or a.value != b.value for a, b in pairwise(spans)), "equal neighbours are merged"


def test_a_group_has_one_number_per_unbroken_run() -> None:
    episodes = uneven_episodes()
    spans = advantage_spans(episodes, build_batch(episodes, CreditSettings()).rows)
    [[first, second]] = spans["a0"]
    assert (first.start, first.end, second.start, second.end) == (0, 4, 8, 10) and first.value == second.value != 0
    assert len(repr(first.value)) < 14, "a single-precision number has no more digits than it needs"


def test_a_critic_run_records_what_each_token_was_given(run: RunFolder) -> None:
    advantages = run.read_advantages(2)
    episodes = {e.id: e for e in run.read_episodes(2)}
    assert advantages.keys() == episodes.keys()
    told = [a for id, spans in advantages.items() for part in spread_out(episodes[id], spans) for a in part]
    mean = sum(a for a in told if a is not None) / sum(a is not None for a in told)
    [row] = [row for row in run.read_metrics() if row.step == 2]
    assert mean == pytest.approx(row.metrics["critic/advantages/mean"], abs=1e-5)
    assert max(a for a in told if a is not None) == pytest.approx(row.metrics["critic/advantages/max"], abs=1e-6)


def test_the_timeline_has_every_phase_in_order_and_no_two_at_once(run: RunFolder) -> None:
    rows = [row for row in run.read_timeline() if row.step == 2]
    order = list(dict.fromkeys(row.phase for row in rows))
    assert order[0] == "gen" and order[-1] == "save_checkpoint" and order[-2] == "testing"
    assert {"ref", "values", "update_critic", "old_log_prob", "update_actor", "update_weights"} <= set(order)
    assert all(a.start <= a.end <= b.start + 0.01 for a, b in pairwise(rows)), "the wall clock may be set meanwhile"
    [metrics] = [row.metrics for row in run.read_metrics() if row.step == 2]
    for phase in set(order) - {"save_checkpoint"}:
        seconds = sum(row.end - row.start for row in rows if row.phase == phase)
        assert metrics[f"timing_s/{phase}"] == pytest.approx(seconds, abs=1e-4)
    assert abs(rows[-1].end - time.time()) < 600


def test_a_phase_inside_another_interrupts_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path).create()
    clock, began = PhaseClock(folder, 7), time.perf_counter()
    with clock("outer"):
        with clock("inner"):
            time.sleep(0.02)
        time.sleep(0.01)
    assert [(row.step, row.phase) for row in folder.read_timeline()] == [(7, "outer"), (7, "inner"), (7, "outer")]
    assert clock.seconds["inner"] >= 0.02 and clock.seconds["outer"] >= 0.01
    assert sum(clock.seconds.values()) <= time.perf_counter() - began, "no second is counted twice"


def test_what_could_not_be_written_is_heard_of() -> None:
    def full() -> None:
        raise OSError("no space left")

    recorder, written = BackgroundWriter(), []
    for work in (lambda: written.append(1), full, lambda: written.append(2)):
        recorder.write(work)
    with pytest.raises(OSError, match="no space left"):
        recorder.wait()
    recorder.close()
    assert written == [1, 2]


def test_what_is_written_later_is_written_at_once_if_somebody_waits() -> None:
    recorder, written = BackgroundWriter(delay=1000.0), list[int]()
    for first in (1, 3):
        begun = threading.Event()
        recorder.write(lambda number=first, begun=begun: (begun.set(), written.append(number)))
        recorder.write(lambda number=first + 1: written.append(number))
        assert not begun.wait(0.05)
        recorder.wait()
        assert written == list(range(1, first + 2))
    recorder.write(lambda: written.append(5))
    recorder.close()
    assert written == [1, 2, 3, 4, 5]
    soon = BackgroundWriter(delay=0.05)
    done = threading.Event()
    soon.write(done.set)
    assert done.wait(60), "nobody waits for it"
    soon.close()
    assert [record_delay(torch.device(name)) > 0 for name in ("cpu", "cuda")] == [False, True]


def test_turns_can_be_placed_on_the_timeline(run: RunFolder) -> None:
    [gen] = [row for row in run.read_timeline() if (row.step, row.phase) == (2, "gen")]
    for one in run.read_episodes(2):
        began = one.timings["started"]
        assert gen.start - 0.01 <= began and began + one.timings["total"] <= gen.end + 0.01
        assert one.timings["score"] >= 0
        ends = 0.0
        for turn in one.turns:
            assert ends <= turn.started and turn.started + turn.seconds <= one.timings["total"]
            ends = turn.started + turn.seconds
            if turn.role == "assistant":
                assert 0 < turn.queued < turn.first_token <= turn.seconds


def test_the_engine_is_idle_for_a_share_of_the_rollout(run: RunFolder) -> None:
    for row in run.read_metrics()[1:]:
        assert 0 < row.metrics["engine/idle_share"] < 1
        assert row.metrics["engine/queue_s/p50"] <= row.metrics["engine/first_token_s/p50"]


def test_scoring_in_a_batch_is_a_phase_of_its_own(home: Path, tmp_path: Path) -> None:
    reward = tmp_path / "batched.py"
    reward.write_text(BATCHED)
    config = run_config(
        home,
        tmp_path / "run",
        f"custom_reward_function.path={reward}",
        "reward_model.reward_manager=batch",
        "trainer.total_training_steps=1",
        "data.val_files=null",
        "trainer.val_before_train=false",
    )
    train(config, Paper().console)
    phases = [row.phase for row in RunFolder(tmp_path / "run").read_timeline()]
    assert (
        phases[:3] == ["gen", "reward", "gen"]
        and "timing_s/reward" in RunFolder(tmp_path / "run").read_metrics()[-1].metrics
    )


def test_episodes_elsewhere_go_back_with_the_run_and_what_others_keep_there_stays(home: Path, tmp_path: Path) -> None:
    rollouts, out = tmp_path / "rollouts", tmp_path / "run"
    foreign = [rollouts / ".big.part", rollouts / "episodes" / ".theirs.part", rollouts / "episodes" / "test_set.jsonl"]
    foreign[1].parent.mkdir(parents=True)
    for path in foreign:
        path.touch()
    overrides = (f"trainer.rollout_data_dir={rollouts}", "trainer.save_freq=1", "data.val_files=[]")
    train(run_config(home, out, *overrides, "trainer.total_training_steps=2"), Paper().console)
    again = (*overrides, f"trainer.resume_from_path={out / 'checkpoints' / 'global_step_1'}")
    seen: list[list[int]] = []

    class Stopped(Exception):
        pass

    def stop(*given: object) -> None:
        seen.append(RunFolder(rollouts).episode_steps())
        raise Stopped

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr("rally.runs.build.trainer_of", stop)
        train(run_config(home, out, *again, "trainer.resume_mode=resume_path"), Paper().console)
    assert seen == [[1]] and RunFolder(rollouts / "rewound-1").episode_steps() == [2]
    assert all(path.exists() for path in foreign)
    assert not (rollouts / "metrics.jsonl").exists()
