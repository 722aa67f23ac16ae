"""A loop worker: builds tools, loops and rewards from the run's configuration, and plays the jobs that it is sent.

`rally.train.rollout.loop_workers` starts it: python -m rally.distributed.loop_worker HOST:PORT NUMBER. It asks the
rollout servers itself. It ends when its connection to the controller ends. A thread sends heartbeats over a connection
of its own, with the time for which the event loop has been blocked: code that does not await is slow, but no failure.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rally.config import Config
from rally.engines.base import NO_GRAMMAR, EngineError, UtilizationClock
from rally.engines.remote.client import ClientSettings, ServerReplica
from rally.engines.remote.rally_api import Rally
from rally.engines.router.router import Router
from rally.engines.router.server_state import Duty, RouterSettings
from rally.loops import Job
from rally.runs.build.data import environments_of
from rally.runs.build.engines import SERVER_APIS
from rally.runs.build.models import tokenizer_of
from rally.runs.build.rollout import rollout_of, scores_in_workers
from rally.runs.build.run_inputs import RunInputs, codec_of, interactions_of, toolbox_of
from rally.track.run_folder.episode_json import Json, episode_to_json, task_from_json
from rally.track.run_folder.folder import ImageFolder, images_of
from rally.train.rollout.loop_workers import TOKEN_VARIABLE
from rally.train.rollout.rollout import Rollout
from rally.types import Episode, Generation, ImageSpan, RallyError, SamplingParams
from rally.util.frames import FrameError, frame, read_frame, write_frame

HEARTBEAT_SECONDS = 0.5


class ServerList:
    """An `Engine` over the servers that the controller names, for the worker of this number."""

    def __init__(self, plan: Json, number: int) -> None:
        self._api = SERVER_APIS[plan["server_kind"]]()
        self._settings = ClientSettings(**plan["client"])
        self._router_settings = _share(RouterSettings(**plan["router"]), plan["workers"], number)
        self._router: Router | None = None
        self._known: dict[str, ServerReplica] = {}
        self.max_model_len = int(plan["max_model_len"])
        self.requests = UtilizationClock()
        self.refresh: Callable[[], Awaitable[None]] = _no_refresh  # asks the controller for the servers as they are now

    @property
    def weight_version(self) -> int:
        return 0 if self._router is None else self._router.weight_version

    def with_decode(self, decode: Any) -> None:
        self._settings = replace(self._settings, decode=decode)

    def follow(self, servers: Json) -> None:
        """Use these servers, in the state that the controller sees them in."""
        current: dict[str, ServerReplica] = {}
        lost: set[str] = set()
        for entry in servers["servers"]:
            key = f"{entry['name']} {entry['url']}"
            replica = self._known.get(key) or _Server(entry, self._api, self._settings, lambda: self.refresh())
            replica.version, replica.serving, replica.salt = entry["version"], entry["serving"], entry["salt"]
            current[replica.name] = self._known[key] = replica
            if entry["lost"]:
                lost.add(replica.name)
        if self._router is None:
            self._router = Router(current.values(), self._router_settings, max_model_len=self.max_model_len)
        self._router.weight_version = servers["version"]
        known = {replica.name for replica in self._router.replicas}
        for replica in current.values():
            if replica.name not in known:  # one that is being started gets no request, not even for a moment
                self._router.add(replica, Duty.ON if replica.serving else Duty.AWAY)
        for name in [replica.name for replica in self._router.replicas]:
            usable, duty = name in current and current[name].serving, self._router.duty(name)
            if usable and duty is not Duty.ON:
                self._router.back(name)
            elif not usable and (name not in current or name in lost) and duty is not Duty.LOST:
                self._router.lost(name, f"{name} is lost; the controller's log says why")
            elif not usable and duty is Duty.ON:
                self._router.away(name)  # the controller restarts it

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> Generation:
        if self._router is None:
            raise EngineError("the controller has named no server yet")
        with self.requests.working():
            return await self._router.generate(prompt_ids, params, session=session, images=images)

    async def check_grammar(self, grammar: str) -> None:
        """Whether a server can compile it is found by `generate`."""
        if not self._api.applies_grammars:
            raise EngineError(NO_GRAMMAR)

    def dismiss(self, session: str) -> None:
        if self._router is not None:
            self._router.dismiss(session)

    def counts(self) -> dict[str, int]:
        """What the router has counted since this process began."""
        if self._router is None:
            return {}
        return {
            name.removeprefix("router/"): int(value)
            for name, value in self._router.metrics().items()
            if name not in GAUGES
        }

    async def close(self) -> None:
        if self._router is not None:
            await self._router.close()


def _share(router: RouterSettings, workers: int, number: int) -> RouterSettings:
    """The part of the requests at a server that one worker may have: all workers together have as many as one router,
    so that the place that it leaves to the canary stays free."""
    own = router.max_in_flight // workers + (number < router.max_in_flight % workers)
    return replace(router, max_in_flight=max(1, own))


GAUGES = (*("router/kept_rate", "router/waiting", "router/in_flight", "router/servers", "router/servers_usable"),)


async def _no_refresh() -> None:
    """For a list that does not change."""


class _Server(ServerReplica):
    """A server that the controller started or was given. It has another name at each address."""

    def __init__(
        self, entry: Mapping[str, Any], api: Any, settings: ClientSettings, refresh: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(entry["url"], api, settings)
        self.headers = dict(entry["headers"])
        self._name = f"{entry['name']} at {entry['url']}"
        self._refresh = refresh

    async def _version_now(self) -> int | None:
        """What the controller said last may be older than a response: it may have updated the server meanwhile. Rally's
        own server reports the version of every token."""
        if self.api.name != Rally.name:
            await self._refresh()
        return self.version

    @property
    def name(self) -> str:
        return self._name


class LoopWorker:
    """Plays jobs. Images travel as files of `run`, the run folder."""

    def __init__(
        self, writer: asyncio.StreamWriter, servers: ServerList, rollout: Rollout, run: Path, *, scores: bool
    ) -> None:
        self._writer, self._servers, self._rollout, self._scores = writer, servers, rollout, scores
        self._images = ImageFolder(run)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._refreshes: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count()
        servers.refresh = self._refresh

    async def _refresh(self) -> None:
        """Ask for the servers and wait for the answer."""
        number = next(self._numbers)
        answered = self._refreshes[number] = asyncio.get_running_loop().create_future()
        try:
            write_frame(self._writer, {"refresh": number})
            await answered
        finally:
            del self._refreshes[number]

    def receive(self, message: Json) -> None:
        if "servers" in message:
            self._servers.follow(message["servers"])
            answered = self._refreshes.get(message.get("refresh", -1))
            if answered is not None and not answered.done():
                answered.set_result(None)
        elif "cancel" in message:
            if (task := self._tasks.get(message["cancel"])) is not None:
                task.cancel()
        else:
            number = message["number"]
            task = self._tasks[number] = asyncio.get_running_loop().create_task(self._play(number, message))
            task.add_done_callback(lambda done: self._tasks.pop(number, None))

    async def _play(self, number: int, message: Json) -> None:
        answer: Json
        try:
            episode = await self._episode(message)
            if any(images_of(episode)):
                await asyncio.to_thread(self._images.save, [episode])
            answer = {"episode": episode_to_json(episode)}
        except RallyError as problem:
            answer = {"error": str(problem)}
        except Exception as problem:  # noqa: BLE001 - the controller reports it, whatever it is
            answer = {"error": f"a loop worker failed: {type(problem).__name__}: {problem}"}
        totals = {"counts": self._servers.counts(), "busy_seconds": self._servers.requests.seconds}
        try:
            write_frame(self._writer, {"number": number, **answer, **totals})
        except FrameError as problem:
            write_frame(self._writer, {"number": number, "error": f"the episode is too large: {problem}", **totals})
        await self._writer.drain()

    async def _episode(self, message: Json) -> Episode:
        job = Job(**{**message["job"], "task": task_from_json(self._images.restored(message["job"]["task"]))})
        left = message["seconds_left"]
        sampling = SamplingParams(**message["sampling"])
        try:
            ends_at = None if left is None else time.perf_counter() + left
            episode = await self._rollout.runner.episode(job, sampling, ends_at)
        finally:
            self._servers.dismiss(job.episode_id)
        return await self._rollout.score(episode) if self._scores else episode


class Heartbeat:
    """Sends heartbeats from a daemon thread while the process runs. `started` must be called in the event loop."""

    def __init__(self, host: str, port: int, hello: Json) -> None:
        self._address, self._hello = (host, port), {**hello, "heartbeat": True}
        self._ticked = time.monotonic()

    def started(self) -> Heartbeat:
        self._tick(asyncio.get_running_loop())
        threading.Thread(target=self._send, name="rally-heartbeat", daemon=True).start()
        return self

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticked = time.monotonic()
        loop.call_later(HEARTBEAT_SECONDS, self._tick, loop)

    def _send(self) -> None:
        while True:
            with suppress(OSError), socket.create_connection(self._address) as connection:
                connection.sendall(frame(self._hello))
                while True:
                    late = time.monotonic() - self._ticked - HEARTBEAT_SECONDS
                    connection.sendall(frame({"blocked": max(0.0, late)}))
                    time.sleep(HEARTBEAT_SECONDS)
            time.sleep(HEARTBEAT_SECONDS)  # the connection was lost; if the controller is gone, the process ends


async def work(host: str, port: int, number: int, token: str) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    hello = {"worker": number, "token": token}
    write_frame(writer, hello)
    plan = (await read_frame(reader))["plan"]
    config = Config.model_validate(plan["config"])
    servers = ServerList(plan, number)
    tokenizer, toolbox = tokenizer_of(config), toolbox_of(config)
    codec = codec_of(config, tokenizer, toolbox)
    inputs = RunInputs(tokenizer, toolbox, interactions_of(config), codec, None, None, environments_of(config))
    servers.with_decode(codec.decode)
    scores = scores_in_workers(config)
    rollout = rollout_of(config, inputs, servers, in_worker=True)
    async with rollout.scorer:
        Heartbeat(host, port, hello).started()
        write_frame(writer, {"ready": True})
        worker = LoopWorker(writer, servers, rollout, Path(plan["run"]), scores=scores)
        try:
            while True:
                worker.receive(await read_frame(reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the controller is gone
        finally:
            await servers.close()
            toolbox.close()


if __name__ == "__main__":
    address, _, port = sys.argv[1].rpartition(":")
    asyncio.run(work(address, int(port), int(sys.argv[2]), os.environ.pop(TOKEN_VARIABLE)))
