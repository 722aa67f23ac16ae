"""OpenEnv: a real server and the adapter in a process of its own. RALLY_OPENENV_PYTHON names a python with openenv."""

import asyncio
import json
import os
import random
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rally.envs import EnvError, EnvSession, EnvSpec, EnvTurn
from rally.envs.child import ChildEnvironment

PYTHON = os.environ.get("RALLY_OPENENV_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="RALLY_OPENENV_PYTHON names no python with openenv")
SERVER = """
import random, sys, uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Guess(Action):
    text: str
class Told(Observation):
    text: str = ""
class GuessEnv(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self._state = State(episode_id="x", step_count=0)
    def reset(self, seed=None, episode_id=None, **kw):
        self.number = random.Random(seed).randint(1, 8)
        return Told(text=f"Guess from 1 to 8. {seed}", done=False, reward=None)
    def step(self, action, timeout_s=None, **kw):
        guess = int(action.text)
        if guess == self.number:
            return Told(text="Right.", done=True, reward=1.0)
        return Told(text="Higher." if guess < self.number else "Lower.", done=False, reward=0.0)
    @property
    def state(self):
        return self._state
app = create_app(GuessEnv, Guess, Told, env_name="guess", max_concurrent_envs=8)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    script: Path = tmp_path_factory.mktemp("openenv") / "server.py"
    script.write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([PYTHON, str(script), str(port)])
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, "the server ended"
            asyncio.run(asyncio.sleep(0.1))
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def opened(seed: int, **args: Any) -> EnvSession:
    def make(**given: Any) -> ChildEnvironment:
        return ChildEnvironment(PYTHON, "openenv/server", **given)

    return EnvSession(
        EnvSpec(label="guess", make=make, args=args), {"env": "guess", "id": "1", "seed": seed}, seed, 60.0
    )


async def won(session: EnvSession, seed: int) -> list[tuple[float | None, bool]]:
    prompt = (await session.reset()).messages[0]["content"]
    assert prompt == f"Play.\n\nGuess from 1 to 8. {seed}"
    number, ends = random.Random(seed).randint(1, 8), []
    for guess in ({1, 8} - {number}).pop(), number:
        step = await session.step(EnvTurn(text=str(guess)))
        ends.append((step.reward, step.done))
    assert await session.close() == []
    return ends


async def test_sessions_are_apart_and_rewards_are_the_servers(url: str) -> None:
    args = {"base_url": url, "action": "text", "observation": "text", "instruction": "Play."}
    played = await asyncio.gather(*(won(opened(seed, **args), seed) for seed in range(4)))
    assert played == [[(0.0, False), (1.0, True)]] * 4


async def test_json_actions_and_mistakes(url: str) -> None:
    session = opened(1, base_url=url)
    assert (await session.reset()).messages[0]["content"].startswith('{"text": ')
    hint = await session.step(EnvTurn(text="five"))
    assert hint.messages[0]["content"] == "Reply with one JSON object." and not hint.done
    for wrong in ("[" * 5000, '{"word": "1"}', '{"text": 1}'):
        answered = await session.step(EnvTurn(text=wrong))
        assert not answered.done and answered.info == {"valid": False}, wrong[:20]
    assert "does not fit" in answered.messages[0]["content"]
    right = json.dumps({"text": str(random.Random(1).randint(1, 8))})
    step = await session.step(EnvTurn(text=right))
    assert (step.reward, step.done) == (1.0, True)
    await session.close()
    with pytest.raises(EnvError, match="no field words, only"):
        await opened(1, base_url=url, observation="words").reset()
    with pytest.raises(EnvError, match=r"set env\.args\.base_url"):
        await opened(1).reset()
