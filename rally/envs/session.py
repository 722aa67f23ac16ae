"""Plays one episode of an environment: calls its methods within a deadline and checks what they return.

`Environments` holds the environments of a run, `EnvSession` is the object of one episode. Its plain methods
run one after the other in one daemon thread, because many packages are bound to the thread that made them. A method
that fails, misses its deadline or returns an invalid value raises EnvError. What was opened is closed exactly once.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from rally.data.messages import check_messages, shown
from rally.data.row_files import DataError
from rally.envs.base import EnvError, Environment, EnvTurn, MatchEnd, SeatTurn
from rally.envs.child import EnvChildFailed
from rally.redact import redact
from rally.rewards.score import plain
from rally.tools.invoke import CallEnd, outcome_within
from rally.tools.results import clean
from rally.tools.schema import Schema, ToolConfigError, openai_schema
from rally.tools.session import describe
from rally.types import Message, RallyError, Task, ToolCall, finite_number

if TYPE_CHECKING:
    from rally.envs.match import MatchTable, SeatSession


OF_THE_ROW = ("env", "id", "seed")  # the entries of every row, beside those of its task


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """An environment of a run: its label in rows and metrics, and how its objects are made."""

    label: str
    make: Callable[..., Environment]
    args: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Environment:
        try:
            environment = self.make(**self.args)
        except EnvError:
            raise
        except (Exception, SystemExit) as error:  # a user's constructor may fail in any way
            given = ", ".join(f"{key}={shown(value)}" for key, value in self.args.items()) or "no arguments"
            raise EnvError(
                f"the environment {self.label} cannot be made from {given}: {describe(error)}; correct env.args"
            ) from error
        if not isinstance(environment, Environment):
            raise EnvError(f"{self.label} made a {type(environment).__name__}; derive it from rally.envs.Environment")
        return environment


class EnvReset(NamedTuple):
    """The prompt of an episode, and the tools of its environment."""

    messages: list[Message]
    tools: list[Schema]


class EnvStep(NamedTuple):
    """The answer of an environment to one turn."""

    messages: list[Message]
    reward: float | None
    done: bool
    info: dict[str, Any]


class SeatPresence(NamedTuple):
    """What a seat calls when it begins to wait for another seat, and before it is woken. Both return at once."""

    waits: Callable[[], None] = lambda: None
    returns: Callable[[], None] = lambda: None


class Environments:
    """The environments of a run, by label. `timeout` is in seconds, for each method call. `unfinished_reward` is the
    reward of an episode that a limit ended before its environment did; None keeps what the episode earned."""

    def __init__(
        self, specs: Sequence[EnvSpec] = (), timeout: float = 30.0, unfinished_reward: float | None = None
    ) -> None:
        self.timeout, self.unfinished_reward = timeout, unfinished_reward
        self._specs = {spec.label: spec for spec in specs}
        self._tasks: dict[str, Sequence[Mapping[str, Any]] | None] = {}
        self._seats: dict[str, int] = {}
        self._matches: MatchTable | None = None

    @property
    def labels(self) -> list[str]:
        return list(self._specs)

    def tasks(self, label: str) -> Sequence[Mapping[str, Any]] | None:
        """The fixed tasks of an environment; None if its tasks are made from seeds. Read once."""
        if label not in self._tasks:
            environment = self._spec(label).build()
            try:
                found = environment.tasks()
                if found is not None and not len(found):
                    raise EnvError(f"the environment {label} has no tasks")
                if taken := sorted({*OF_THE_ROW} & {name for task in found or () for name in task}):
                    problem = f"tasks of the environment {label} have a field {taken[0]}, which a row has itself"
                    raise EnvError(f"{problem}; rename it")
            except EnvError:
                raise
            except Exception as error:  # a user's code may fail in any way
                raise EnvError(f"tasks of the environment {label} failed: {describe(error)}") from error
            self._tasks[label] = found
        return self._tasks[label]

    def same_tasks(self, label: str, other: str) -> bool:
        """Whether two labels name one environment with the same fixed tasks."""
        first, second = self._spec(label), self._spec(other)
        made = [(m.func, m.args) if isinstance(m := spec.make, partial) else (m, ()) for spec in (first, second)]
        return made[0] == made[1] and first.args == second.args and self.tasks(label) is not None

    def seats(self, label: str) -> int:
        """The number of trained seats of an environment. Read once."""
        if label not in self._seats:
            self._seats[label] = self._counted_seats(label)
        return self._seats[label]

    def _counted_seats(self, label: str) -> int:
        """Asked in a thread of its own, as in an episode: closing may hang, and only there it can be given up."""
        asked: Future[int] = Future()
        closed: Future[None] = Future()

        def ask() -> None:
            environment = None
            try:
                environment = self._spec(label).build()
                asked.set_result(environment.seats())
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                asked.set_exception(error)
            try:
                if environment is not None and not inspect.iscoroutinefunction(environment.close):
                    environment.close()
                closed.set_result(None)
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                closed.set_exception(error)

        threading.Thread(target=ask, name="rally-env", daemon=True).start()
        method, failure = "seats", asked.exception()
        if failure is None:
            if not wait([closed], self.timeout).done:
                problem = f"close of the environment {label} did not return within {self.timeout:g} seconds"
                raise EnvError(f"{problem}; make it faster, or raise env.timeout")
            method, failure = "close", closed.exception()
        if isinstance(failure, EnvError):
            raise failure
        if failure is not None:
            raise EnvError(f"{method} of the environment {label} failed: {describe(failure)}") from failure
        return asked.result()

    def open(self, task: Task, presence: SeatPresence | None = None) -> EnvSession | SeatSession:
        """A session for one episode of a row with `env` and `seed`, or for one seat of its match."""
        label, seed = task.row.get("env"), task.row.get("seed")
        if not isinstance(label, str) or not isinstance(seed, int):
            raise EnvError(f"row {task.id} has no env and seed, which the loop env_agent needs; set env.name")
        row: dict[str, Any] = {"env": label, "id": task.row.get("id", task.id), "seed": seed}
        tasks = self.tasks(label)
        if tasks is not None:
            row = {**tasks[seed], **row}
        match, seat = task.row.get("match"), task.row.get("seat")
        if match is None or seat is None:
            return EnvSession(self._spec(label), row, seed, self.timeout)
        from rally.envs.match import MatchTable

        self._matches = self._matches or MatchTable()
        game = partial(EnvSession, self._spec(label), row, seed, self.timeout)
        return self._matches.seat(match, seat, self.seats(label), game, presence or SeatPresence())

    def _spec(self, label: str) -> EnvSpec:
        if label not in self._specs:
            known = ", ".join(self._specs) or "none"
            raise EnvError(f"there is no environment {label!r} in this run, whose environments are: {known}")
        return self._specs[label]


class _EnvThread:
    """A daemon thread that runs the blocking methods of one object in order. A call that is given up still runs to its
    end there, and later ones wait for it."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = False

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[CallEnd] = loop.create_future()

        def settle(ended: CallEnd) -> None:
            if not finished.done():
                finished.set_result(ended)

        def work() -> None:
            try:
                ended = CallEnd(value=function(*args))
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                ended = CallEnd(error=error)
            with suppress(RuntimeError):  # a call that was given up may outlive the event loop
                loop.call_soon_threadsafe(settle, ended)

        if not self._started:
            threading.Thread(target=self._serve, name="rally-env", daemon=True).start()
            self._started = True
        self._work.put(work)
        ended = await finished
        if ended.error is not None:
            raise ended.error
        return ended.value

    def end(self) -> None:
        self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()


async def _finish(closing: Awaitable[None]) -> None:
    await closing


class EnvSession:
    """One episode of an environment."""

    ended: EnvStep | None = None  # set by the reset of a seat whose match ended before its first turn

    def __init__(self, spec: EnvSpec, row: Mapping[str, Any], seed: int, timeout: float) -> None:
        self.name = spec.label
        self._spec, self._row, self._seed, self._timeout = spec, row, seed, timeout
        self._thread = _EnvThread()
        self._environment: Environment | None = None
        self._tools: dict[str, Mapping[str, Any]] = {}

    @property
    def parameters(self) -> Mapping[str, Mapping[str, Any]]:
        """The parameter schema of every tool, by name."""
        return self._tools

    async def reset(self) -> EnvReset:
        environment = await self._within("__init__", self._make)
        returned = await self._within("reset", environment.reset, dict(self._row), self._seed)
        with self._reading("reset"):
            return self._checked_reset(returned)

    def _checked_reset(self, returned: Any) -> EnvReset:
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise self._invalid("reset", f"returned {shown(returned)}; it must return (messages, tools)")
        messages, tools = returned
        try:
            prompt = check_messages(self._listed("reset", messages), "the messages of reset")
            schemas = [openai_schema(tool, "the tools of reset") for tool in tools or ()]
        except (DataError, ToolConfigError) as error:
            raise self._invalid("reset", f"returned an invalid value: {error}") from None
        if prompt[-1]["role"] == "assistant":
            raise self._invalid("reset", "returned messages that end with the assistant; end with user or tool")
        self._allow(schemas)
        return EnvReset([self._text_only("reset", message) for message in prompt], schemas)

    async def step(self, turn: EnvTurn) -> EnvStep:
        assert self._environment is not None, "reset comes first"
        returned = await self._within("step", self._environment.step, turn)
        with self._reading("step"):
            return self._checked_step(returned, self._environment.added_tools, turn)

    def _checked_step(self, returned: Any, added_tools: Sequence[Mapping[str, Any]], turn: EnvTurn) -> EnvStep:
        if not isinstance(returned, tuple) or len(returned) != 4:
            raise self._invalid("step", f"returned {shown(returned)}; it must return (messages, reward, done, info)")
        observed, reward, done, info = returned
        if not isinstance(info or {}, Mapping):
            raise self._invalid("step", f"returned the info {shown(info)}; it must be a mapping")
        messages = [self._text_only("step", message) for message in self._listed("step", observed)]
        try:
            self._allow([openai_schema(tool, "added_tools") for tool in added_tools])
        except ToolConfigError as error:
            raise self._invalid("step", f"added an invalid tool: {error}") from None
        step = EnvStep(messages, self._number(reward), self._flag(done), plain(dict(info or {})))
        if not step.done:
            self._check_answers(messages, turn.calls)
        return step

    def _allow(self, schemas: Sequence[Schema]) -> None:
        """Accept calls of the tools."""
        loose = self._environment is not None and self._environment.arguments_as_written
        for schema in schemas:
            function = schema["function"]
            self._tools[function["name"]] = {} if loose else function["parameters"]

    async def start(self) -> SeatTurn:
        """Start a match."""
        environment = await self._within("__init__", self._make)
        returned = await self._within("start", environment.start, dict(self._row), self._seed)
        with self._reading("start"):
            turn = self._checked_turn("start", returned)
        if isinstance(turn, MatchEnd):
            raise self._invalid("start", "ended the match before anyone had a turn")
        return turn

    async def play(self, turn: EnvTurn) -> SeatTurn | MatchEnd:
        """Play a turn of a match."""
        assert self._environment is not None, "start comes first"
        returned = await self._within("play", self._environment.play, turn)
        with self._reading("play"):
            return self._checked_turn("play", returned)

    def _checked_turn(self, name: str, returned: Any) -> SeatTurn | MatchEnd:
        if isinstance(returned, SeatTurn):
            messages = [self._text_only("step", message) for message in self._listed(name, returned.observation)]
            if not messages:
                raise self._invalid(name, f"returned no message for the seat {returned.seat}, which plays next")
            if not isinstance(returned.seat, int):
                raise self._invalid(name, f"gave a turn to the seat {shown(returned.seat)}; seats are numbers from 0")
            return SeatTurn(seat=returned.seat, observation=messages)
        if not isinstance(returned, MatchEnd):
            raise self._invalid(name, f"returned {shown(returned)}; it must return a SeatTurn or a MatchEnd")
        rewards = {seat: self._number(reward) for seat, reward in returned.rewards.items()}
        if None in rewards.values():
            raise self._invalid(name, f"returned the rewards {shown(returned.rewards)}; give each seat a number")
        return MatchEnd(
            rewards={seat: reward for seat, reward in rewards.items() if reward is not None},
            info={seat: plain(dict(info)) for seat, info in returned.info.items()},
            texts={seat: clean(redact(text)) for seat, text in returned.texts.items()},
        )

    async def close(self, failed: bool = False) -> list[str]:
        """Close the environment. Returns what failed; the episode stays valid. Raises only CancelledError. `failed`
        matters only for a seat of a match."""
        try:
            if self._environment is not None and inspect.iscoroutinefunction(self._environment.close):
                await self._within("close", self._environment.close)
            else:
                await self._within("close", self._close_blocking)
        except EnvError as error:
            return [str(error)]
        finally:
            self._thread.end()
        return []

    def _make(self) -> Environment:
        self._environment = self._spec.build()
        return self._environment

    def _close_blocking(self) -> None:
        """Runs in the thread, after a construction that was given up, so that its object is closed too. Nothing of that
        object has run in the event loop yet."""
        if self._environment is not None and inspect.isawaitable(closing := self._environment.close()):
            asyncio.run(_finish(closing))

    async def _within(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        work = method(*args) if inspect.iscoroutinefunction(method) else self._thread.run(method, *args)
        ended = await outcome_within(work, self._timeout)
        if ended.late:
            raise self._invalid(
                name, f"did not return within {self._timeout:g} seconds; make it faster, or raise env.timeout"
            )
        if isinstance(ended.error, EnvError):
            raise ended.error
        if ended.error is not None:
            # The text of an error from another process begins with the type that it had there.
            raised = str(ended.error) if isinstance(ended.error, EnvChildFailed) else describe(ended.error)
            raise self._invalid(name, f"raised {raised}") from ended.error
        return ended.value

    def _listed(self, name: str, observed: Any) -> list[Message]:
        if isinstance(observed, str):
            return [{"role": "user", "content": observed}] if observed else []
        if not isinstance(observed, Sequence) or not all(isinstance(message, Mapping) for message in observed):
            raise self._invalid(name, f"returned the messages {shown(observed)}; return a text or a list of messages")
        return [dict(message) for message in observed]

    def _text_only(self, name: str, message: Message) -> Message:
        """The message with its text cleaned and without known secrets."""
        roles = ("user", "tool") if name == "step" else ("system", "user", "assistant", "tool")
        if message.get("role") not in roles or not isinstance(message.get("content"), str):
            problem = f"returned the message {shown(message)}; its role must be one of {', '.join(roles)}"
            raise self._invalid(name, f"{problem}, and its content a text")
        return {**message, "content": clean(redact(message["content"]))}

    def _number(self, reward: Any) -> float | None:
        if reward is None:
            return None
        number = reward.item() if hasattr(reward, "item") else reward  # numpy and torch
        if (finite := finite_number(number)) is None:
            raise self._invalid("step", f"returned the reward {shown(reward)}; it must be a finite number or None")
        return finite

    def _flag(self, done: Any) -> bool:
        flag = done.item() if hasattr(done, "item") else done
        if not isinstance(flag, bool) and flag not in (0, 1):  # bool("False") would end the episode
            raise self._invalid("step", f"returned done={shown(done)}; it must be True or False")
        return bool(flag)

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """A returned value that cannot be read is a failure of the environment, never the fault of the policy."""
        try:
            yield
        except RallyError:
            raise
        except Exception as error:  # a user's objects may fail in any way
            raise self._invalid(name, f"returned a value that cannot be read: {describe(error)}") from error

    def _check_answers(self, messages: Sequence[Message], calls: Sequence[ToolCall]) -> None:
        """Every call has exactly one answer, and there is something for the policy to answer."""
        answered = [message.get("tool_call_id") for message in messages if message["role"] == "tool"]
        if sorted(map(str, answered)) != sorted(call.id for call in calls):
            wanted = ", ".join(f"{call.name} ({call.id})" for call in calls) or "none"
            raise self._invalid(
                "step",
                f"answered the calls {', '.join(map(str, answered)) or 'none'}, but the turn had: {wanted}; return one "
                "rally.envs.tool_reply(call, text) per call",
            )
        if not messages:
            raise self._invalid("step", "returned no message and done=False, so the policy has nothing to answer")

    def _invalid(self, name: str, problem: str) -> EnvError:
        return EnvError(f"{name} of the environment {self.name} {problem}")
