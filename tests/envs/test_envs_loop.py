"""The loop env_agent: exact tokens, rewards of turns and episodes, tools, limits, failures and deadlines."""

import asyncio
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
from loop_cases import Held, Reply, check_sampled_once, check_tiling, hold, make_job, make_runner, said, sampling_of

from rally.chat import ChatCodec
from rally.envs import EnvError, Environment, Environments, EnvSpec, EnvTurn, tool_reply
from rally.rewards.shaping import ON_TURNS, Shaping, outcome
from rally.types import StopReason, Task, ToolStatus

SEED = 11


class GuessNumber(Environment):
    """The policy guesses a number from 1 to `highest`."""

    def __init__(self, highest: int = 8) -> None:
        self.highest = highest

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[str, list[Any]]:
        self.number = random.Random(seed).randint(1, self.highest)
        return f"Guess my number from 1 to {self.highest}.", []

    def step(self, turn: EnvTurn) -> tuple[str, float, bool, dict[str, Any]]:
        if not turn.reply.isdigit():
            return "Write only a number.", -0.1, False, {}
        guess = int(turn.reply)
        if guess == self.number:
            return "Right.", 1.0, True, {"won": True}
        return "Higher." if guess < self.number else "Lower.", 0.0, False, {"won": False}


SECRET = random.Random(SEED).randint(1, 8)


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
}


class Counter(Environment):
    """Counts to `target` with the tool add. Its methods are async."""

    closed = 0

    def __init__(self, target: int = 3) -> None:
        self.target, self.total = target, 0

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        return [{"role": "system", "content": "Use add."}, {"role": "user", "content": f"Reach {self.target}."}], [ADD]

    async def step(self, turn: EnvTurn) -> Any:
        for call in turn.calls:
            self.total += call.arguments["n"]
        if not turn.calls:
            return "", float(self.total == self.target), True, {"total": self.total}
        return [tool_reply(call, f"total {self.total}") for call in turn.calls], 0.25, False, {"total": self.total}

    async def close(self) -> None:
        type(self).closed += 1


def row(label: str = "game", seed: int = SEED) -> Task:
    fields = {"env": label, "id": str(seed), "seed": seed}
    return Task(id=f"{label}:{seed}", data_source=label, prompt=(), agent_name="env_agent", row=fields)


def world(make: Callable[..., Environment], timeout: float = 20.0, **args: Any) -> Environments:
    unfinished = args.pop("unfinished_reward", None)
    return Environments([EnvSpec(label="game", make=make, args=args)], timeout, unfinished)


async def play(codec: ChatCodec, environments: Environments, *texts: Any, **settings: Any) -> Held:
    script = [Reply(said(codec, *(text if isinstance(text, tuple) else (text,)))) for text in texts]
    return await hold(make_runner(codec, script, environments=environments, **settings), row())


@pytest.mark.parametrize("name", ["tiny", "qwen2_5", "llama3_2"])
async def test_a_game_is_played_with_exact_tokens(codecs: dict[str, ChatCodec], name: str) -> None:
    wrong = "1" if SECRET > 1 else "2"
    codec = codecs[name].with_tools([])
    held = await play(codecs[name], world(GuessNumber), "I think...", wrong, str(SECRET))
    episode, segment = held.episode, held.segment
    assert (episode.stop_reason, episode.error) == (StopReason.STOP, None)
    assert held.roles == ["assistant", "user"] * 3
    check_tiling(episode)
    check_sampled_once(held)
    calls = held.engine.calls
    assert calls[1].prompt == segment.ids[: len(calls[1].prompt)], "the prompt of a turn is the history itself"
    assert "tokenization_difference" not in episode.extra
    assert episode.task.prompt == ({"role": "user", "content": "Guess my number from 1 to 8."},)
    assert segment.prompt_ids == codec.encode_prompt(episode.task.prompt)
    assert episode.reward == pytest.approx(0.9)
    assert [turn.reward for turn in episode.turns if turn.role == "user"] == [-0.1, 0.0, 1.0]
    assert episode.extra["environment"]["done"] and episode.reward_info["won"] is True


async def test_rewards_of_turns_are_not_counted_twice(tiny: ChatCodec) -> None:
    episode = (await play(tiny, world(GuessNumber), "no", str(SECRET))).episode
    assert episode.reward == pytest.approx(0.9) and outcome(episode) == pytest.approx(0.0)
    shaped = Shaping(weights={"tool_format_reward": 0.5}).apply(episode)
    assert shaped.reward_info[ON_TURNS] == pytest.approx(0.9)
    assert outcome(shaped) == pytest.approx(shaped.reward - 0.9)


async def test_a_group_gets_the_same_prompt_and_world(tiny: ChatCodec) -> None:
    runner = make_runner(tiny, [Reply(said(tiny, str(SECRET)))], environments=world(GuessNumber))
    first, second = await runner.run([make_job(row(), 0), make_job(row(), 1)], sampling_of(tiny))
    assert first.task.prompt == second.task.prompt and first.reward == second.reward == 1.0


async def test_tools_of_the_environment_are_offered_called_and_answered(tiny: ChatCodec) -> None:
    before = Counter.closed
    held = await play(tiny, world(Counter), ("", ("add", {"n": 1}), ("add", {"n": "2"})), "finished")
    episode = held.episode
    assert held.segment.prompt_ids == tiny.with_tools([ADD]).encode_prompt(episode.task.prompt)
    assert [r.response.text for r in episode.tool_results] == ["total 3", "total 3"], "2 was converted to a number"
    assert episode.reward == 1.25 and held.roles == ["assistant", "tool", "assistant", "user"]
    assert episode.stop_reason is StopReason.STOP
    check_tiling(episode)
    check_sampled_once(held)
    assert Counter.closed == before + 1


async def test_calls_that_no_tool_can_take_do_not_reach_the_environment(tiny: ChatCodec) -> None:
    mixed = ("", ("subtract", {"n": 1}), ("add", {"n": 3}))
    held = await play(tiny, world(Counter), mixed, ("", ("add", {"n": "many"})), "finished")
    statuses = [result.status for result in held.episode.tool_results]
    assert statuses == [ToolStatus.UNKNOWN_TOOL, ToolStatus.OK, ToolStatus.BAD_ARGUMENTS]
    assert held.episode.reward == 1.25, "the total is 3, and one turn was answered by the environment"
    bad = [("", ("add", {}))] * 9
    stuck = await play(tiny, world(Counter), *bad, max_tool_failures=4)
    assert stuck.episode.stop_reason is StopReason.TOOL_FAILURES and len(stuck.episode.tool_results) == 4


@pytest.mark.parametrize(
    ("settings", "reason", "reward"),
    [
        ({"max_assistant_turns": 2}, StopReason.MAX_TURNS, 0.9),  # the last turn is scored, although it cannot go on
        ({"max_assistant_turns": 1}, StopReason.MAX_TURNS, -0.1),
        ({"max_user_turns": 1}, StopReason.MAX_USER_TURNS, -0.1),
        ({"response_length": 12}, StopReason.LENGTH, -0.1),
    ],
)
async def test_limits(tiny: ChatCodec, settings: dict[str, int], reason: StopReason, reward: float) -> None:
    texts = ["no", "no", str(SECRET)] if "max_user_turns" in settings else ["no", str(SECRET)]
    held = await play(tiny, world(GuessNumber), *texts, **settings)
    finished = reward > 0
    assert held.episode.stop_reason is (StopReason.STOP if finished else reason)
    if "max_user_turns" not in settings:
        assert held.episode.reward == pytest.approx(reward)
    assert held.episode.extra["environment"]["done"] is finished


async def test_unfinished_episodes_can_have_a_reward_of_their_own(tiny: ChatCodec) -> None:
    cut = await play(tiny, world(GuessNumber, unfinished_reward=-1.0), "no", max_assistant_turns=1)
    assert cut.episode.reward == -1.0 and outcome(cut.episode) == pytest.approx(-0.9)
    whole = await play(tiny, world(GuessNumber, unfinished_reward=-1.0), str(SECRET), max_assistant_turns=1)
    assert whole.episode.reward == 1.0


class Broken(GuessNumber):
    """Fails in the way that `how` names."""

    closed: ClassVar[list[str]] = []

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "init":
            raise OSError("no disk")

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        if self.how == "reset":
            raise KeyError("row")
        prompts = {"empty": "", "assistant": [{"role": "assistant", "content": "x"}], "tools": "hi"}
        return prompts.get(self.how, "go"), ["x"] if self.how == "tools" else []

    def step(self, turn: EnvTurn) -> Any:
        if self.how == "hang":
            threading.Event().wait(1.0)
        if self.how == "step":
            raise ZeroDivisionError("oops")
        return {
            "pair": ("x", 1.0),
            "nan": ("x", float("nan"), True, {}),
            "huge": ("x", 10**5000, True, {}),
            "silent": ("", 0.0, False, {}),
            "unrewarded": ("x", None, True, {}),
            "role": ([{"role": "system", "content": "x"}], 0.0, False, {}),
            "array": ("x", np.array([1.0, 2.0]), True, {}),
            "text done": ("x", 0.0, "False", {}),
            "unasked": ([{"role": "tool", "tool_call_id": "c", "content": "x"}], 0.0, False, {}),
        }.get(self.how, ("late", 0.0, True, {}))

    def close(self) -> None:
        self.closed.append(self.how)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("init", "cannot be made from how='init': OSError: no disk"),
        ("reset", "reset of the environment game raised KeyError"),
        ("empty", "at least one"),
        ("assistant", "end with the assistant"),
        ("tools", "must be a mapping"),
        ("step", "step of the environment game raised ZeroDivisionError: oops"),
        ("hang", "did not return within 0.3 seconds"),
        ("pair", "must return \\(messages, reward, done, info\\)"),
        ("nan", "must be a finite number"),
        ("huge", "must be a finite number"),
        ("array", "a value that cannot be read: ValueError"),
        ("text done", "done='False'; it must be True or False"),
        ("silent", "nothing to answer"),
        ("unrewarded", "without ever giving a reward"),
        ("role", "must be one of user, tool"),
        ("unasked", "the turn had: none"),
    ],
)
async def test_failures_are_named_and_the_environments_not_the_policys(tiny: ChatCodec, how: str, words: str) -> None:
    Broken.closed.clear()
    timeout = 0.3 if how == "hang" else 20.0
    episode = (await play(tiny, world(Broken, timeout, how=how), "x")).episode
    assert episode.stop_reason is StopReason.ERROR and episode.reward is None
    assert episode.extra["fault"] == "infrastructure"
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(episode.error)
    sampled = how not in ("init", "reset", "empty", "assistant", "tools")
    assert any(segment.sampled for segment in episode.segments) is sampled
    if how == "hang":  # close waits for the step that still runs, in the same thread
        await asyncio.sleep(1.0)
    assert Broken.closed == ([] if how == "init" else [how])


async def test_a_deadline_of_the_turn_ends_the_episode_with_what_it_earned(tiny: ChatCodec) -> None:
    episode = (await play(tiny, world(Broken, how="hang"), "x", timeout_per_turn=0.2)).episode
    assert episode.stop_reason is StopReason.DEADLINE and episode.reward == 0.0


class Listed(GuessNumber):
    """Has two tasks of its own."""

    def tasks(self) -> Any:
        return [{"word": "zero"}, {"word": "one"}]

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        return f"{row['word']} {row['id']} {row['seed']} {row['env']}", []


def test_a_task_may_not_have_the_names_of_a_row() -> None:
    class Named(Listed):
        def tasks(self) -> Any:
            return [{"word": "zero", "id": "z"}]

    with pytest.raises(EnvError, match="have a field id, which a row has itself; rename it"):
        world(Named).tasks("game")


async def test_fixed_tasks_reach_reset_with_the_row(tiny: ChatCodec) -> None:
    held = await hold(make_runner(tiny, [], environments=world(Listed), max_assistant_turns=1), row(seed=1))
    assert held.episode.task.prompt[0]["content"] == "one 1 1 game"


async def test_thinking_is_no_reply() -> None:
    assert EnvTurn(text="<think>[1]</think> [2]").reply == "[2]"
    assert EnvTurn(text="<think>[1]").reply == ""
    assert EnvTurn(text=" plain ").reply == "plain"
