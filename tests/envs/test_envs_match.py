"""Matches: an episode per seat with its own reward and group, waiting seats, forfeits, failures and abandoned games."""

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import pytest
from loop_cases import Reply, ScriptedEngine, check_tiling, make_runner, said, sampling_of

from rally.chat import ChatCodec
from rally.envs import EnvError, Environment, Environments, EnvSession, EnvSpec, EnvTurn, MatchEnd, SeatTurn
from rally.envs.match import MatchTable
from rally.envs.registry import find_environment
from rally.envs.rows import SeedPlan, env_tasks
from rally.envs.session import SeatPresence
from rally.loops import Runner
from rally.rewards import Score
from rally.train.batch import build_batch
from rally.train.rollout.rollout import Rollout
from rally.types import Episode, Generation, SamplingParams, StopReason


class HigherWins(Environment):
    """Two seats name a number each, in two rounds. The higher sum wins. The word boom breaks the game."""

    def seats(self) -> int:
        return 2

    def start(self, row: Mapping[str, Any], seed: int) -> SeatTurn:
        self.sums, self.turn = [0, 0], 0
        return SeatTurn(seat=0, observation="Seat 0, name a number.")

    def play(self, turn: EnvTurn) -> SeatTurn | MatchEnd:
        if turn.reply == "boom":
            raise RuntimeError("broken")
        self.sums[self.turn % 2] += int(turn.reply)
        self.turn += 1
        if self.turn == 4:
            won = float(self.sums[0] - self.sums[1])
            return MatchEnd(rewards={0: won, 1: -won}, texts={0: "Over.", 1: "Over."})
        return SeatTurn(seat=self.turn % 2, observation=f"Seat {self.turn % 2}, they said {turn.reply}.")

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[str, list[Any]]:
        return "Alone.", []

    def step(self, turn: EnvTurn) -> tuple[str, float, bool, dict[str, Any]]:
        return "", 1.0, True, {}


class SeatEngine(ScriptedEngine):
    """Gives each seat its own replies."""

    def __init__(self, codec: ChatCodec, replies: Mapping[str, list[str]]) -> None:
        super().__init__(codec, ())
        self.replies = replies

    async def generate(self, prompt_ids: Any, params: SamplingParams, *, session: Any = None, **_: Any) -> Generation:
        texts = next(texts for seat, texts in self.replies.items() if seat in str(session))
        self.script = [Reply(said(self.codec, text)) for text in texts]
        return await super().generate(prompt_ids, params, session=session)


class NoScorer:
    async def score(self, episode: Episode) -> Score:
        raise AssertionError("an environment gives the reward")


def rollout_of(codec: ChatCodec, make: Any, replies: Mapping[str, list[str]], retries: int = 0, **limits: Any) -> Any:
    environments = Environments([EnvSpec(label="game", make=make)], 20.0)
    runner: Runner = make_runner(codec, environments=environments, loop="env_agent", max_retries=retries, **limits)
    runner.engine = SeatEngine(codec, replies)
    return environments, Rollout(runner=runner, scorer=NoScorer(), seed=3)  # type: ignore[arg-type]


def episodes_of(environments: Environments, rollout: Rollout, n: int = 1) -> list[Episode]:
    tasks = env_tasks(environments, SeedPlan(weights={"game": 1.0}, train_size=1))
    jobs = rollout.jobs(list(tasks), n, step=1)
    return asyncio.run(asyncio.wait_for(rollout.runner.run(jobs, sampling_of(rollout.runner.codec)), 30))


def test_every_seat_is_an_episode_with_its_own_reward_and_group(tiny: ChatCodec) -> None:
    environments, rollout = rollout_of(tiny, HigherWins, {"seat0": ["3", "4"], "seat1": ["1", "2"]})
    episodes = episodes_of(environments, rollout, n=2)
    assert [e.id for e in episodes] == [f"t000001-00000-seat{s}-{k}" for k in (0, 1) for s in (0, 1)]
    assert [e.reward for e in episodes] == [4.0, -4.0, 4.0, -4.0]
    assert {e.group for e in episodes} == {"t000001-00000-seat0", "t000001-00000-seat1"}
    first, second = episodes[:2]
    assert [t.text for t in first.turns] == ["3", "Seat 0, they said 1.", "4", "Over."]
    assert second.task.prompt[0]["content"] == "Seat 1, they said 3." and second.task.row["seat"] == 1
    assert len({e.seed for e in episodes}) == 4
    for episode in episodes:
        check_tiling(episode)
        calls = [call for call in rollout.runner.engine.calls if call.session == episode.id]
        assert [c.prompt + c.generation.ids for c in calls][-1] == episode.segments[0].ids
    batch = build_batch(episodes)
    assert batch.num_groups == 2 and not batch.advantages_M.any(), "equal rewards within a seat have no advantage"


def test_validation_has_one_seat(tiny: ChatCodec) -> None:
    environments, rollout = rollout_of(tiny, HigherWins, {"v": ["3"]})
    tasks = env_tasks(environments, SeedPlan(weights={"game": 1.0}, train_size=1, val_size=1), validate=True)
    (job,) = rollout.jobs(list(tasks), 1, step=1, validate=True)
    assert job.task.row.keys() == {"env", "id", "seed"}
    (episode,) = asyncio.run(rollout.runner.run([job], sampling_of(tiny)))
    assert episode.reward == 1.0


def test_a_seat_that_a_limit_stops_abandons_the_match(tiny: ChatCodec) -> None:
    replies = {"seat0": ["3", "4"], "seat1": ["1", "2"]}
    environments, rollout = rollout_of(tiny, HigherWins, replies, max_assistant_turns=1)
    environments.unfinished_reward = -1.0
    first, second = episodes_of(environments, rollout)
    assert (first.stop_reason, first.reward) == (StopReason.MAX_TURNS, -1.0)
    assert (second.stop_reason, second.reward) == (StopReason.STOP, 0.0)
    assert second.extra["environment"]["info"][-1] == {"abandoned": True, "abandoned_by": 0, "seat": 1}


def test_a_failure_fails_every_seat_and_a_retry_meets_again(tiny: ChatCodec) -> None:
    environments, rollout = rollout_of(tiny, HigherWins, {"seat0": ["3", "boom"], "seat1": ["1"]})
    episodes = episodes_of(environments, rollout)
    assert [e.stop_reason for e in episodes] == [StopReason.ERROR] * 2
    assert {e.extra["fault"] for e in episodes} == {"infrastructure"}
    assert all("RuntimeError: broken" in str(e.error) for e in episodes)
    environments, rollout = rollout_of(tiny, HigherWins, {"seat0": ["3", "boom", "5", "6"], "seat1": ["1"] * 9}, 2)
    episodes = episodes_of(environments, rollout)
    assert [e.reward for e in episodes] == [9.0, -9.0] and {e.extra["attempts"] for e in episodes} == {2}


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({"rewards": {0: 1.0, 1: None}}, "give each seat a number"),
        ({"rewards": [1.0, -1.0]}, "a value that cannot be read: AttributeError"),
        ({"rewards": {0: 1.0, 1: -1.0}, "info": None}, "a value that cannot be read: AttributeError"),
    ],
)
def test_an_end_that_cannot_be_read_is_no_fault_of_the_policy(tiny: ChatCodec, end: Any, words: str) -> None:
    class Ends(HigherWins):
        def play(self, turn: EnvTurn) -> MatchEnd:
            return MatchEnd(**end)

    environments, rollout = rollout_of(tiny, Ends, {"seat0": ["3"], "seat1": ["1"]})
    for episode in episodes_of(environments, rollout):
        assert episode.reward is None and episode.extra["fault"] == "infrastructure" and words in str(episode.error)


class EndsAtOnce(HigherWins):
    def play(self, turn: EnvTurn) -> MatchEnd:
        return MatchEnd(rewards={0: -1.0, 1: 1.0})


async def test_a_seat_whose_episode_never_begins_fails_the_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rally.envs.match.ABSENT_SECONDS", 0.2)
    closed: list[int] = []

    class Closing(HigherWins):
        def close(self) -> None:
            closed.append(1)

    row = {"env": "game", "id": "1", "seed": 1}
    game = EnvSession(EnvSpec(label="game", make=Closing), row, 1, 20.0)
    table, presence = MatchTable(), SeatPresence()
    first = table.seat("match", 0, 2, lambda: game, presence)
    assert (await first.reset()).messages[0]["content"] == "Seat 0, name a number."
    async with asyncio.timeout(30):
        with pytest.raises(EnvError, match=r"seat 1 did not begin its episode within 0\.2 s"):
            await first.step(EnvTurn(text="1"))
    assert await first.close(failed=True) == [] and closed == [1], "the game is closed"
    late = table.seat("match", 1, 2, lambda: game, presence)
    with pytest.raises(EnvError, match="seat 1 did not begin"):
        await late.reset()
    assert await late.close(failed=True) == [] and closed == [1]


def test_a_seat_that_never_had_a_turn_has_a_reward_and_no_tokens(tiny: ChatCodec) -> None:
    environments, rollout = rollout_of(tiny, EndsAtOnce, {"seat0": ["3"], "seat1": []})
    first, second = episodes_of(environments, rollout, n=1)
    assert (first.reward, second.reward) == (-1.0, 1.0)
    assert second.segments[0].sampled == 0 and second.stop_reason is StopReason.STOP
    assert build_batch([first, second]).tokens_N.tolist() == [first.segments[0].sampled, 0]


class TestTextArena:
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def package(cls) -> None:
        pytest.importorskip("textarena", reason="needs textarena")

    def play(self, tiny: ChatCodec, name: str, replies: Mapping[str, list[str]], **args: Any) -> list[Episode]:
        def make(**_: Any) -> Environment:
            return find_environment(f"textarena/{name}")(opponent="self", **args)  # type: ignore[no-any-return]

        random.seed(5)
        before = random.getstate()
        episodes = episodes_of(*rollout_of(tiny, make, replies))
        assert random.getstate() == before, "the trainer's random state is its own"
        return episodes

    def test_the_scripted_winner_gets_what_the_package_gives(self, tiny: ChatCodec) -> None:
        import textarena

        replies = {"seat0": ["[0]", "[1]", "[2]"], "seat1": ["[3]", "[4]"]}
        first, second = self.play(tiny, "TicTacToe-v0", replies)
        own: Any = textarena.make("TicTacToe-v0-raw")
        state = random.getstate()
        own.reset(num_players=2, seed=0)
        for move in ("[0]", "[3]", "[1]", "[4]", "[2]"):
            own.get_observation()
            done, _ = own.step(move)
        random.setstate(state)
        rewards, _ = own.close()
        assert done and {0: first.reward, 1: second.reward} == rewards == {0: 1, 1: -1}
        assert "[Player 0] [0]" in second.task.prompt[0]["content"]

    @pytest.mark.parametrize(("key", "won"), [("exclude", 0.0), ("count", 1.0)])
    def test_a_win_by_forfeit_is_excluded_by_a_key(self, tiny: ChatCodec, key: str, won: float) -> None:
        first, second = self.play(tiny, "TicTacToe-v0", {"seat0": ["[0]"], "seat1": ["zz", "zz"]}, forfeit=key)
        assert (first.reward, second.reward) == (won, -1.0)
        assert first.extra["environment"]["info"][-1]["forfeit"] and first.reward_info["forfeit"]
        assert second.reward_info["invalid_move"] and not second.reward_info["forfeit"]

    def test_an_unknown_way_to_count_forfeits_is_refused(self) -> None:
        with pytest.raises(EnvError, match="forfeit must be one of exclude, count"):
            find_environment("textarena/TicTacToe-v0")(forfeit="x")
