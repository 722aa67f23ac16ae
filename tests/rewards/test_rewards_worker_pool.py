"""Whatever a reward function does in its worker, the result is a Score, and other episodes get theirs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rally import StopReason
from rally.rewards import RewardError, RewardSpec, Score, Scorer

# One function with many behaviours, selected by the ground truth.
MOODS = """
    import asyncio, ctypes, faulthandler, os, re, signal, sys, time

    calls = 0

    def alarmed(signum, frame):
        raise TimeoutError("my own alarm")

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, base=0.0):
        global calls
        calls += 1
        match ground_truth:
            case "number": return base + 1
            case "dict": return {"score": 0.5, "acc": True, "calls": calls}
            case "pid": return {"score": 1, "pid": os.getpid()}
            case "raise": return {}["missing"]
            case "sys.exit": sys.exit("enough")
            case "sleep": time.sleep(60)
            case "regex": re.match(r"(a|a)*b", "a" * 60)
            case "disarmed": faulthandler.cancel_dump_traceback_later(); time.sleep(60)
            case "brief": time.sleep(0.3); return 1
            case "exit": print("about to go", flush=True); os._exit(3)
            case "segfault": ctypes.string_at(0)
            case "print":
                print("to stdout"); os.write(1, b"to fd 1\\n"); os.system("echo from a child")
                return 1
            case "long": print("x" * 300_000 + "THE END"); return {"score": 1, "big": "y" * 300_000}
            case "input": return {"score": 1, "read": sys.stdin.read()}
            case "nan": return float("nan")
            case "none": return None
            case "alarm":
                signal.signal(signal.SIGALRM, alarmed)
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                time.sleep(60)
            case "forgotten": signal.signal(signal.SIGALRM, signal.SIG_DFL); signal.setitimer(0, 0.05); return 1
            case "async": return gently(solution_str)

    async def gently(text):
        await asyncio.sleep(0.01)
        return {"score": 1, "loop": id(asyncio.get_running_loop())}
"""


async def score_all(path: str, make_episode: Any, moods: list[str], *, workers: int = 1, timeout: float = 20) -> Any:
    async with Scorer(RewardSpec(path=path), workers, timeout) as scorer:
        return [await scorer.score(make_episode(truth=mood)) for mood in moods]


async def score_one(path: str, make_episode: Any, mood: str, timeout: float = 20) -> Score:
    """The score; also checks that the next episode gets its own."""
    score, after = await score_all(path, make_episode, [mood, "number"], timeout=timeout)
    assert after.reward == 1.0
    return score


async def test_numbers_and_dicts(write_reward: Any, make_episode: Any) -> None:
    number, mapping = await score_all(write_reward(MOODS), make_episode, ["number", "dict"])
    assert (number.reward, number.info, number.error) == (1.0, {"score": 1.0}, None)
    assert (mapping.reward, mapping.info) == (0.5, {"score": 0.5, "acc": True, "calls": 2})


async def test_async_functions_keep_one_event_loop(write_reward: Any, make_episode: Any) -> None:
    first, second = await score_all(write_reward(MOODS), make_episode, ["async", "async"])
    assert first.reward == 1.0 and first.seconds >= 0.01
    assert first.info["loop"] == second.info["loop"]


async def test_reward_kwargs_arrive(write_reward: Any, make_episode: Any) -> None:
    async with Scorer(RewardSpec(path=write_reward(MOODS), kwargs={"base": 2.5}), 1, 20) as scorer:
        assert (await scorer.score(make_episode(truth="number"))).reward == 3.5


@pytest.mark.parametrize(
    ("mood", "words"),
    [
        ("raise", ["KeyError: 'missing'", "my_reward.py, line"]),
        ("sys.exit", ["SystemExit: enough"]),
        ("nan", ["returned nan"]),
        ("none", ["returned None; return a number"]),
        ("alarm", ["TimeoutError: my own alarm"]),
        ("exit", ["ended with exit code 3", "about to go"]),
        ("segfault", ["killed by SIGSEGV (exit code -11)"]),
    ],
)
async def test_a_failure_is_a_named_error_and_never_a_zero(
    mood: str, words: list[str], write_reward: Any, make_episode: Any
) -> None:
    score = await score_one(write_reward(MOODS), make_episode, mood)
    assert score.reward is None and score.error is not None
    assert all(word in score.error for word in words), score.error


@pytest.mark.parametrize("mood", ["sleep", "regex"])
async def test_a_hanging_function_is_ended_at_its_deadline(mood: str, write_reward: Any, make_episode: Any) -> None:
    score = await score_one(write_reward(MOODS), make_episode, mood, timeout=0.5)
    assert score.error is not None and score.error.startswith("timed out after 0.5s at ")
    assert 0.5 <= score.seconds < 60


async def test_a_function_that_disarms_the_deadline_is_killed_from_outside(
    write_reward: Any, make_episode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rally.rewards.worker_pool.GRACE_SECONDS", 0.2)
    score = await score_one(write_reward(MOODS), make_episode, "disarmed", timeout=0.5)
    assert score.error == "timed out after 0.5s"


async def test_the_others_go_on_while_one_hangs(write_reward: Any, make_episode: Any) -> None:
    async with Scorer(RewardSpec(path=write_reward(MOODS)), 2, 4.0) as scorer:
        hanging = asyncio.create_task(scorer.score(make_episode(truth="sleep")))
        others = await asyncio.gather(*(scorer.score(make_episode(truth="number")) for _ in range(20)))
        assert not hanging.done()
        assert {score.reward for score in others} == {1.0}
        assert (await hanging).error is not None


async def test_waiting_in_the_queue_is_not_counted(write_reward: Any, make_episode: Any) -> None:
    async with Scorer(RewardSpec(path=write_reward(MOODS)), 1, 2.0) as scorer:
        scores = await asyncio.gather(*(scorer.score(make_episode(truth="brief")) for _ in range(8)))
    assert [score.error for score in scores] == [None] * 8, "all wait longer than one may take"
    assert all(score.seconds >= 0.3 for score in scores)


async def test_a_blocked_event_loop_is_not_counted(write_reward: Any, make_episode: Any) -> None:
    async with Scorer(RewardSpec(path=write_reward(MOODS)), 1, 1.5) as scorer:
        pending = asyncio.create_task(scorer.score(make_episode(truth="brief")))
        await asyncio.sleep(0)
        time.sleep(2.0)  # a training step that does not yield
        assert (await pending).reward == 1.0


async def test_prints_do_not_disturb_the_answers(write_reward: Any, make_episode: Any) -> None:
    printing, silent = await score_all(write_reward(MOODS), make_episode, ["print", "number"])
    assert printing.reward == 1.0 and silent.reward == 1.0
    assert sorted(printing.printed.splitlines()) == ["from a child", "to fd 1", "to stdout"]
    assert silent.printed == ""


async def test_long_texts_go_both_ways(write_reward: Any, make_episode: Any) -> None:
    async with Scorer(RewardSpec(path=write_reward(MOODS)), 1, 20) as scorer:
        score = await scorer.score(make_episode("z" * 500_000, truth="long"))
    assert score.reward == 1.0 and len(score.info["big"]) == 300_000
    assert score.printed.endswith("THE END") and len(score.printed) < 20_000


async def test_a_function_that_reads_stdin_reads_nothing(write_reward: Any, make_episode: Any) -> None:
    assert (await score_one(write_reward(MOODS), make_episode, "input")).info["read"] == ""


async def test_a_forgotten_alarm_harms_nobody(write_reward: Any, make_episode: Any) -> None:
    scores = await score_all(write_reward(MOODS), make_episode, ["pid", "forgotten", "brief", "pid"])
    assert [score.reward for score in scores] == [1.0] * 4
    assert scores[0].info["pid"] == scores[3].info["pid"]


OURS = "from rally.rewards import compute_score"


@pytest.mark.parametrize("source", [None, OURS], ids=["in this process", "in workers"])
async def test_many_at_once(source: str | None, write_reward: Any, make_episode: Any) -> None:
    async with Scorer(RewardSpec(path=source and write_reward(source)), 2, 20) as scorer:
        episodes = [make_episode(f"#### {i}", truth=str(i - i % 3)) for i in range(300)]
        start = time.monotonic()
        scores = await asyncio.gather(*(scorer.score(episode) for episode in episodes))
        assert time.monotonic() - start < 30  # about 0.1 s; the rest is for a busy machine
    assert [score.reward for score in scores] == [float(i % 3 == 0) for i in range(300)]


async def test_an_unknown_data_source_is_an_error_of_its_episode(make_episode: Any) -> None:
    async with Scorer(RewardSpec(), 1, 20) as scorer:
        score = await scorer.score(make_episode(source="my/task"))
    assert score.error is not None and score.error.startswith("no reward function for data_source 'my/task'")


async def test_a_failed_episode_is_not_scored_as_if_it_had_answered_nothing(make_episode: Any) -> None:
    async with Scorer(RewardSpec(), 1, 20) as scorer:
        score = await scorer.score(make_episode(stop_reason=StopReason.ERROR, error="the engine went away"))
    assert score.reward is None and score.error is not None and "the engine went away" in score.error


async def test_a_cancelled_wait_leaves_the_worker_usable(write_reward: Any, make_episode: Any) -> None:
    async with Scorer(RewardSpec(path=write_reward(MOODS)), 1, 20) as scorer:
        waiting = asyncio.create_task(scorer.score(make_episode(truth="brief")))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await scorer.score(make_episode(truth="number"))).info == {"score": 1.0}


def test_one_scorer_serves_several_event_loops(write_reward: Any, make_episode: Any) -> None:
    scorer = Scorer(RewardSpec(path=write_reward(OURS)), 1, 20)
    for _ in range(2):
        assert asyncio.run(scorer.score(make_episode())).reward == 1.0
    asyncio.run(scorer.close())


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("def other(): ...", "has no function compute_score"),
        ("def compute_score(prompt): ...", "cannot be called with data_source"),
        ("raise RuntimeError('no key')", "cannot be imported (RuntimeError: no key)"),
        ("import os; os._exit(5)", "could not load"),
    ],
)
async def test_a_function_that_cannot_be_used_shows_at_start(source: str, sentence: str, write_reward: Any) -> None:
    with pytest.raises(RewardError) as raised:
        async with Scorer(RewardSpec(path=write_reward(source)), 1, 20):
            pass
    assert sentence in str(raised.value)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(RewardError, match=r"reward\.num_workers must be at least 1"):
        Scorer(RewardSpec(), 0, 20)
    with pytest.raises(RewardError, match=r"reward\.timeout must be more than 0"):
        Scorer(RewardSpec(), 1, 0)
