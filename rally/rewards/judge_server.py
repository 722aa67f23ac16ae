"""The server of a generative reward model, which a user's reward function asks over OpenAI's API.

The run starts it on a loopback port, or uses a running one. The function gets verl's two arguments:
`reward_router_address` (HOST:PORT) and `reward_model_tokenizer`. A server that is down makes every score an error, also
if the function itself turned the failure into a number.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from rally.engines.remote.launched_server import Port, reserve_port
from rally.engines.remote.server_api import TOKEN_VARIABLE
from rally.rewards.score import RewardError
from rally.util.subprocesses import POLL_SECONDS, ServerProcess

CHECK_SECONDS = 5.0


@dataclass(kw_only=True)
class JudgeServer:
    """A running server at `url`, or one that `command` starts on a free port."""

    url: str | None = None
    command: Callable[[int], Sequence[str]] | None = None
    log: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    start_seconds: float = 600.0

    def __post_init__(self) -> None:
        assert (self.url is None) == (self.command is not None and self.log is not None), "a URL or a command"
        self._process: ServerProcess | None = None
        self._port: Port | None = reserve_port(None) if self.url is None else None

    @property
    def address(self) -> str:
        """HOST:PORT."""
        if self._port is not None:
            return f"127.0.0.1:{self._port.number}"
        return urlsplit(self.url or "").netloc

    async def start(self) -> None:
        """Start it, and wait until it answers. Raises RewardError if it does not."""
        if self.command is not None:
            assert self._port is not None and self.log is not None
            environment = {**self.environment, TOKEN_VARIABLE: ""}  # reward functions send no token
            self._process = ServerProcess(list(self.command(self._port.number)), environment, self.log)
        deadline = time.monotonic() + (self.start_seconds if self._process else min(self.start_seconds, CHECK_SECONDS))
        while (answer := await self._models()) is not None:
            if self._process is not None and not self._process.alive:
                raise RewardError(f"the server of the reward model ended while it was starting; {self._tail()}")
            if time.monotonic() > deadline:
                waited = f" in {self.start_seconds:g} s (reward_model.server.max_start_wait_time); {self._tail()}"
                advice = waited if self._process else "; start it, or correct reward_model.server.url"
                problem = f"the server of the reward model at {self.address} does not answer ({answer})"
                raise RewardError(f"{problem}{advice}")
            await asyncio.sleep(POLL_SECONDS)

    async def _models(self) -> str | None:
        """Why the server does not list its models; None if it does."""
        try:
            async with httpx.AsyncClient(timeout=CHECK_SECONDS, trust_env=False) as client:
                answer = await client.get(f"http://{self.address}/v1/models")
        except httpx.HTTPError as problem:
            return type(problem).__name__
        return None if answer.status_code == httpx.codes.OK else f"HTTP {answer.status_code}"

    def problem(self) -> str | None:
        """Why scores of this moment cannot be trusted; None if the server runs, as far as this process can tell."""
        if self._process is None or self._process.alive:
            return None
        return f"the server of the reward model has ended; {self._tail()}"

    def _tail(self) -> str:
        return self._process.log_tail() if self._process is not None else ""

    async def close(self) -> None:
        """End the server if this run started it."""
        if self._process is not None:
            await self._process.stop()
            self._process = None
        if self._port is not None:
            self._port.lock.release()
