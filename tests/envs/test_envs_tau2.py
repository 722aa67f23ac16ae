"""tau2-bench by its interface: a stand-in with the methods of AgentGymEnv. The package itself is not run here
(docs/environments.md says when it was)."""

import json
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from rally.envs import EnvError, EnvTurn
from rally.envs.registry import find_environment
from rally.types import ToolCall

TASKS = (types.SimpleNamespace(id="t1", ticket="Ticket of t1"), types.SimpleNamespace(id="t2", ticket=None))


class StandIn:
    """Creates a task by a call, then the user says goodbye."""

    def __init__(self, domain: str, task_id: str, solo_mode: bool = False, user_llm: str | None = None) -> None:
        self.task, self.made = task_id, False

    opening = "user: make {}"

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        schema = {"type": "function", "function": {"name": "create_task", "parameters": {"type": "object"}}}
        tools, task = [types.SimpleNamespace(openai_schema=schema)], next(t for t in TASKS if t.id == self.task)
        return self.opening.format(self.task), {"tools": tools, "policy": "Be kind.", "task": task}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action.startswith("{"):
            call = json.loads(action)
            self.made = call == {"name": "create_task", "arguments": {"title": self.task}}
            return f"tool: {self.made}", 0.0, False, False, {}
        return "user: bye", float(self.made), True, False, {}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gym: Any = types.ModuleType("tau2.gym.gym_agent")
    gym.AgentGymEnv = StandIn
    helpers: Any = types.ModuleType("tau2.runner.helpers")
    helpers.load_tasks = lambda domain: TASKS
    for name in ("tau2", "tau2.gym", "tau2.runner"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "tau2.runner.helpers", helpers)
    monkeypatch.setitem(sys.modules, "tau2.gym.gym_agent", gym)
    yield
    sys.modules.pop("rally.envs.adapters.tau2", None)


def test_calls_and_texts_are_actions_and_the_reward_comes_at_the_end() -> None:
    for title, reward in (("t1", 1.0), ("other", 0.0)):
        env = find_environment("tau2/mock")(task_ids=["t1", "t2"], solo_mode=True)
        tasks = env.tasks()
        assert tasks == [{"task": "t1"}, {"task": "t2"}]
        messages, tools = env.reset(tasks[0], 0)  # type: ignore[misc]
        assert [m["content"] for m in messages] == ["Be kind.", "user: make t1"]  # type: ignore[index]
        assert tools[0]["function"]["name"] == "create_task"
        call = ToolCall(name="create_task", id="c", arguments={"title": title})
        [reply], none, done, _ = env.step(EnvTurn(text="", calls=(call,)))  # type: ignore[misc]
        assert reply["role"] == "tool" and (none, done) == (None, False)  # type: ignore[index]
        _, earned, done, _ = env.step(EnvTurn(text="It is done."))  # type: ignore[misc]
        assert (earned, done) == (reward, True)
        env.close()


def test_a_user_model_is_required() -> None:
    with pytest.raises(EnvError, match=r"set env\.args\.user_llm"):
        find_environment("tau2/mock")(task_ids=["t1"])


def test_alone_the_policy_gets_the_tickets_of_the_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is no user, and the package shows no observation at first."""
    env = find_environment("tau2/mock")(solo_mode=True)
    assert env.tasks() == [{"task": "t1"}], "the other task has no ticket"
    monkeypatch.setattr(StandIn, "opening", "")
    messages, _ = env.reset({"task": "t1"}, 0)  # type: ignore[misc]
    assert messages[-1]["content"] == "Ticket of t1"  # type: ignore[index]
    with pytest.raises(EnvError, match="no ticket to solve alone"):
        env.reset({"task": "t2"}, 0)
