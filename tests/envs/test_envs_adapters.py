"""Adapters: scores equal the package's own, scripted winners win, wrong replies are answered, seeds repeat games."""

import asyncio
import json
import random
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rally.envs import EnvError, EnvSpec, EnvTurn
from rally.envs.adapters.textarena import random_move
from rally.envs.registry import find_environment, names_of
from rally.envs.session import EnvSession, EnvStep
from rally.types import ToolCall


def opened(name: str, seed: int = 3, row: dict[str, Any] | None = None, **args: Any) -> EnvSession:
    spec = EnvSpec(label=name, make=find_environment(name), args=args)
    return EnvSession(spec, {**(row or {}), "env": name, "id": "x", "seed": seed}, seed, 60.0)


async def played(session: EnvSession, *texts: str) -> tuple[str, list[EnvStep]]:
    """The prompt, and the answers to the texts."""
    try:
        prompt = (await session.reset()).messages[-1]["content"]
        return prompt, [await session.step(EnvTurn(text=text)) for text in texts]
    finally:
        assert await session.close() == []


class TestReasoningGym:
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def package(cls) -> None:
        pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")

    @pytest.mark.parametrize("name", ["chain_sum", "leg_counting", "spell_backward", "gcd", "ab", "list_functions"])
    async def test_scores_are_those_of_the_package(self, name: str) -> None:
        import reasoning_gym

        made = reasoning_gym.create_dataset(name, size=1, seed=5)
        item = made[0]
        for answer in (item["answer"], "zzz", f"{item['answer']} or 7"):
            prompt, [step] = await played(opened(f"reasoning_gym/{name}", 5), f"So <answer>{answer}</answer>")
            if name != "list_functions":  # its items depend on the global random state
                assert item["question"] in prompt
                assert (step.reward, step.done) == (made.score_answer(str(answer), item), True)
        _, [silent] = await played(opened(f"reasoning_gym/{name}", 5), item["answer"])
        assert silent.reward == 0.0 and silent.info["problem"] == "no answer"

    async def test_answers_are_extracted_by_a_key(self) -> None:
        _, [truth] = await played(opened("reasoning_gym/gcd", 5, answer="reply"), "zzz")
        import reasoning_gym

        answer = reasoning_gym.create_dataset("gcd", size=1, seed=5)[0]["answer"]
        replies = {"reply": answer, "last_line": f"thus\n{answer}\n", "tag": f"<answer>{answer}</answer>"}
        for form, text in replies.items():
            _, [step] = await played(opened("reasoning_gym/gcd", 5, answer=form), text)
            assert step.reward == 1.0, form
        assert truth.reward == 0.0

    async def test_loose_scores_are_tightened(self) -> None:
        text = "<answer>zzz</answer>"
        _, [loose] = await played(opened("reasoning_gym/power_function"), text)
        _, [strict] = await played(opened("reasoning_gym/power_function", scoring="strict"), text)
        assert (loose.reward, strict.reward, strict.info["package_score"]) == (0.01, 0.0, 0.01)
        _, [unreadable] = await played(opened("reasoning_gym/prime_factorization"), text)
        assert unreadable.reward == 0.0 and unreadable.info["problem"].startswith("ValueError")
        with pytest.raises(EnvError, match=r"gives wrong answers 1; set env\.args\.scoring=strict"):
            await opened("reasoning_gym/game_of_life_halting").reset()
        seen = set()
        for seed in range(4):
            _, [step] = await played(opened("reasoning_gym/game_of_life_halting", seed, scoring="strict"), text)
            seen.add((step.info["package_score"], step.reward))
        assert (1.0, 0.0) in seen, "the package gives zzz 1.0 where the answer is False"

    @pytest.mark.drill("security", "An answer to reasoning-gym is a program", "It is not run; it is a wrong answer")
    async def test_answers_are_never_run_or_computed_without_bounds(self, tmp_path: Path) -> None:
        from rally.envs.adapters.answer_guard import FORMULAS, INTEGRALS, LITERALS

        program = f"__import__('pathlib').Path({str(tmp_path / 'ran')!r}).touch()"
        for name in (*LITERALS, *FORMULAS):
            for text in (program, f"[{program}]", f"[[{program}]]", "9**9**9", "(((C+1)**9+1)**9+1)**9", "(" * 5000):
                _, [step] = await played(opened(f"reasoning_gym/{name}", answer="reply"), text)
                assert step.reward is not None and step.reward < 0.1, (name, text[:40])
            assert not (tmp_path / "ran").exists(), name
        texts = {"coin_flip": "1e9999999999", "rubiks_cube": "U1000000000", "rush_hour": "A+1000000000 B-1000000000"}
        for name, text in texts.items():
            _, [step] = await played(opened(f"reasoning_gym/{name}", answer="reply", scoring="strict"), text)
            assert step.reward == 0.0, name
        for name in INTEGRALS:
            session = opened(f"reasoning_gym/{name}", answer="reply", scoring="strict")
            await session.reset()
            metadata = session._environment.entry["metadata"]  # type: ignore[union-attr]
            step = await session.step(EnvTurn(text=f"Integral({metadata['integrand']}, {metadata['variable']})"))
            assert (step.info["package_score"], step.reward) == (1.0, 0.0), "the package takes it as right"

    async def test_a_formula_is_not_compared_without_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rally.envs.adapters.reasoning_gym.MOST_SECONDS", 0.3)  # the text below takes minutes
        session = opened("reasoning_gym/simple_integration", 3, answer="reply", scoring="strict")
        await session.reset()
        name = session._environment.entry["metadata"]["variable"]  # type: ignore[union-attr]
        text = "*".join(f"(sin({i}*{name})+cos({i}*{name}))" for i in range(1, 9))
        step = await session.step(EnvTurn(text=text))
        assert step.reward == 0.0

    def test_a_limit_of_cpu_time_holds_where_exceptions_are_swallowed(self) -> None:
        from rally.envs.adapters.answer_guard import within_cpu_limit

        def stubborn() -> None:
            for _ in range(3):
                with suppress(BaseException):
                    while True:
                        pass
            while True:
                pass

        for _ in range(3):
            with pytest.raises(ValueError, match=r"within 0.2 seconds of CPU time"):
                within_cpu_limit(stubborn, 0.2)
            assert within_cpu_limit(lambda: sum(range(1000)), 60.0) == 499500
        time.sleep(0.3)  # nothing is raised later

    async def test_numbers_that_compare_with_everything_are_wrong(self) -> None:
        import reasoning_gym

        for name in ("number_sorting", "complex_arithmetic", "coin_flip"):
            for seed in (3, 4):
                truth = reasoning_gym.create_dataset(name, size=1, seed=seed)[0]["answer"]
                wrong = re.sub(r"-?[0-9.]+", "nan", truth) if name != "coin_flip" else {"1": "10"}.get(truth, "0")
                for text, reward in ((truth, 1.0), (wrong, 0.0)):
                    session = opened(f"reasoning_gym/{name}", seed, answer="reply", scoring="strict")
                    _, [step] = await played(session, text)
                    assert step.reward == reward, (name, text)
        with pytest.raises(EnvError, match=r"gives wrong answers 1; set env\.args\.scoring=strict"):
            await opened("reasoning_gym/coin_flip").reset()

    @pytest.mark.parametrize("name", ["n_queens", "string_insertion", "countdown", "simple_integration"])
    async def test_a_guarded_scorer_scores_as_the_package_does(self, name: str) -> None:
        import reasoning_gym

        item = reasoning_gym.create_dataset(name, size=1, seed=3)[0]
        known = (item["metadata"].get("valid_answers") or [item["answer"]])[0]
        written = {
            "n_queens": {known: 1.0, repr([line.split() for line in known.splitlines()]): 0.5},
            "string_insertion": {known: 1.0, repr(list(known)): 0.1},
            "countdown": {known: 1.0, f"{known} + 1": 0.05},
            "simple_integration": {known: 1.0, known.removesuffix(" + C") + " + 7": 1.0, f"2*({known})": 0.0},
        }
        for text, score in written[name].items():
            _, [step] = await played(opened(f"reasoning_gym/{name}", answer="reply"), text)
            assert step.reward == score, text

    async def test_levels_of_a_curriculum(self) -> None:
        prompts = [(await played(opened("reasoning_gym/chain_sum", level=n)))[0] for n in (0, 2)]
        assert len(prompts[1]) > len(prompts[0])
        wrong = {
            "level=99": "ends at level",
            "nothing=1": r"cannot be made from nothing=1: .*; correct env\.args",
            "min_terms=99": r"cannot be made from min_terms=99: .*; correct env\.args",
        }
        for args, words in wrong.items():
            key, _, value = args.partition("=")
            with pytest.raises(EnvError, match=words):
                await opened("reasoning_gym/chain_sum", **{key: int(value)}).reset()

    def test_all_data_sets_are_listed(self) -> None:
        assert len(names_of("reasoning_gym")) >= 100
        with pytest.raises(EnvError, match="no data set"):
            find_environment("reasoning_gym/nothing")()


class TestGymnasium:
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def package(cls) -> None:
        pytest.importorskip("gymnasium", reason="needs gymnasium")

    async def test_frozen_lake_is_won_and_lost(self) -> None:
        lake: dict[str, Any] = {"desc": ["SF", "HG"], "is_slippery": False}
        prompt, steps = await played(opened("gymnasium/FrozenLake-v1", **lake), "hm", "go [right]", "down")
        assert prompt.endswith("PF\nHG")
        assert [(s.reward, s.done) for s in steps] == [(0.0, False), (0.0, False), (1.0, True)]
        assert steps[0].messages[0]["content"] == "Reply with one of [left], [down], [right], [up]."
        assert steps[1].messages[0]["content"] == "SP\nHG"
        _, [fell] = await played(opened("gymnasium/FrozenLake-v1", **lake), "[down]")
        assert (fell.reward, fell.done) == (0.0, True)

    async def test_maps_come_from_the_seed(self) -> None:
        prompts = [(await played(opened("gymnasium/FrozenLake-v1", seed, map_size=4)))[0] for seed in (1, 1, 2)]
        assert prompts[0] == prompts[1] != prompts[2]

    @pytest.mark.parametrize("game", ["Blackjack-v1", "Taxi-v4", "CliffWalking-v1"])
    async def test_rewards_are_those_of_the_package(self, game: str) -> None:
        import gymnasium

        own: Any = gymnasium.make(game)
        own.reset(seed=9)
        session = opened(f"gymnasium/{game}", 9)
        await session.reset()
        names, rng = session._environment.actions, random.Random(0)  # type: ignore[union-attr]
        for _ in range(12):
            action = rng.randrange(len(names))
            _, reward, ended, cut, _ = own.step(action)
            step = await session.step(EnvTurn(text=f"[{names[action]}]"))
            assert (step.reward, step.done) == (reward, ended or cut)
            if step.done:
                break
        await session.close()

    def test_wrong_arguments_are_an_error_before_any_episode(self) -> None:
        for args, problem in (
            ({"is_slipery": False}, r"unexpected keyword argument 'is_slipery'.*; correct env\.args"),
            ({"map_name": "9x9"}, r"KeyError: '9x9'; correct env\.args"),
            ({"actions": ["left"]}, r"has 4 actions, not 1; correct env\.args\.actions"),
        ):
            with pytest.raises(EnvError, match=problem):
                EnvSpec(label="lake", make=find_environment("gymnasium/FrozenLake-v1"), args=args).build()

    async def test_other_games_need_a_text(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(EnvError, match="there is no text for gymnasium/CartPole-v1"):
            await opened("gymnasium/CartPole-v1").reset()
        (tmp_path / "pole_text.py").write_text("def text(env, obs, info):\n    return f'angle {obs[2]:.2f}'\n")
        monkeypatch.chdir(tmp_path)
        args = {"text": "pole_text.text", "actions": ["left", "right"]}
        prompt, [step] = await played(opened("gymnasium/CartPole-v1", **args), "[left]")
        assert "angle" in prompt and step.reward == 1.0


class TestTextArena:
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def package(cls) -> None:
        pytest.importorskip("textarena", reason="needs textarena")

    async def test_a_game_alone_is_won(self) -> None:
        session, low, high = opened("textarena/GuessTheNumber-v0", 4), 1, 20
        prompt = (await session.reset()).messages[-1]["content"]
        assert "1" in prompt and "20" in prompt
        while True:
            guess = (low + high) // 2
            step = await session.step(EnvTurn(text=f"[{guess}]"))
            if step.done:
                break
            low, high = (guess + 1, high) if "higher" in step.messages[-1]["content"].lower() else (low, guess - 1)
        await session.close()
        assert step.reward == 1.0

    async def test_the_trained_seat_gets_its_reward_against_an_opponent(self) -> None:
        rewards = set()
        for seed in range(8):
            for seat in (0, 1):
                session = opened("textarena/TicTacToe-v0", seed, seat=seat)
                await session.reset()
                free, step = [4, 0, 2, 6, 8, 1, 3, 5, 7], None
                for cell in free:
                    step = await session.step(EnvTurn(text=str(cell)))
                    if step.done:
                        break
                assert step is not None and step.done
                given = step.info["rewards"][str(seat)]
                assert step.reward == (0.0 if step.info["forfeit"] else given)
                rewards.add(step.reward)
                await session.close()
        assert {-1.0, 1.0} & rewards and rewards <= {-1.0, 0.0, 1.0}

    @pytest.mark.parametrize("moves", [["[x]", "[x]"], ["legal", "[x]", "[x]"], ["legal"] * 6])
    async def test_legal_moves_are_rewarded_by_a_key(self, moves: list[str]) -> None:
        session = opened("textarena/KuhnPoker-v0", 3, legal_reward=0.1)
        shown, rng = (await session.reset()).messages[-1]["content"], random.Random(0)
        for move in moves:
            step = await session.step(EnvTurn(text=random_move(shown, rng) if move == "legal" else move))
            if step.done:
                break
            shown = step.messages[-1]["content"]
        assert step.done and step.reward is not None
        lost, legal = moves[-1] == "[x]", step.info["legal_moves"]
        assert (step.info["invalid_move"], legal) == (lost, moves.count("legal") if lost else legal) and legal <= 6
        won = 0.0 if step.info["forfeit"] else step.info["rewards"]["0"]
        assert step.reward == pytest.approx(won + 0.1 * legal)
        await session.close()

    async def test_games_repeat_and_leave_the_global_random_state_alone(self) -> None:
        random.seed(77)
        before = random.getstate()
        sessions = [opened("textarena/KuhnPoker-v0", 5) for _ in range(3)]
        prompts = {(await session.reset()).messages[-1]["content"] for session in sessions}
        assert len(prompts) == 1
        steps = await asyncio.gather(*(session.step(EnvTurn(text="[check]")) for session in sessions))
        assert len({str(step.messages) for step in steps}) == 1, "interleaved games see their own random numbers"
        for session in sessions:
            await session.close()
        assert random.getstate() == before


class TestAviary:
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def package(cls) -> None:
        pytest.importorskip("aviary.core", reason="needs fhaviary")

    async def test_tools_are_called_and_rewarded(self, tmp_path: Path) -> None:
        rows = tmp_path / "stories.jsonl"
        rows.write_text("".join(json.dumps({"task": task}) + "\n" for task in ("cats", "dogs")))
        make = find_environment("aviary/aviary.core.DummyEnv")
        assert [row["task"] for row in make(rows=str(rows)).tasks() or ()] == ["cats", "dogs"]
        session = opened("aviary/aviary.core.DummyEnv", row={"task": "cats"}, end_immediately=True)
        reset = await session.reset()
        assert "about cats" in reset.messages[-1]["content"]
        assert "print_story" in {tool["function"]["name"] for tool in reset.tools}
        hint = await session.step(EnvTurn(text="once"))
        assert not hint.done and "print_story" in hint.messages[0]["content"]
        cast = await session.step(EnvTurn(text="", calls=(ToolCall(name="cast_int", id="c1", arguments={"x": 2.0}),)))
        assert cast.messages[0]["tool_call_id"] == "c1" and not cast.done
        told = ToolCall(name="print_story", id="c2", arguments={"story": "a b c d e"})
        end = await session.step(EnvTurn(text="", calls=(told,)))
        assert (end.reward, end.done) == (1.0, True)
        await session.close()
