"""Calls the simulated user of an episode. What is started is finalized exactly once, whatever happens in between.

`Interactions` holds the simulated users of a run, `InteractionSession` is that of one episode. A user that fails or
misses its deadline during the episode raises InteractionError, so the episode is not scored: the policy is not to
blame. A failure at the end is listed in `Closing.failures`, and the episode stays valid.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic_core import to_jsonable_python

from rally.interactions.base import BaseInteraction, InteractionError
from rally.redact import redact
from rally.tools.invoke import Keywords, call, outcome_within
from rally.tools.results import clean, read_reward
from rally.tools.session import describe
from rally.types import Message, RallyError, Task, brief


class UserReply(NamedTuple):
    """The answer of a simulated user to the policy's last turn, and the score of that turn."""

    text: str
    ends: bool
    score: float | None
    info: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Closing:
    """The score of an episode by its simulated user, and what failed at its end."""

    score: float | None = None
    failures: list[str] = field(default_factory=list)


class Interactions:
    """The simulated users of a run, by name. `timeout` is in seconds, for each method call."""

    def __init__(self, users: Sequence[BaseInteraction] = (), timeout: float = 30.0) -> None:
        self.timeout = timeout
        self._users = {user.name: user for user in users}
        if len(self._users) < len(users):
            names = ", ".join(user.name for user in users)
            raise InteractionError(f"two interactions have the same name: {names}; rename one")

    @property
    def names(self) -> list[str]:
        return list(self._users)

    @property
    def by_name(self) -> Mapping[str, BaseInteraction]:
        return self._users

    def find(self, task: Task) -> BaseInteraction | None:
        """The user that a row names in interaction_kwargs.name; None if it names none."""
        kwargs = _without_none(task.interaction_kwargs)
        name = kwargs.get("name")
        if not kwargs or (name is None and not self._users):
            return None
        known = ", ".join(self.names) or "none"
        if name is None:
            raise InteractionError(f"row {task.id} has interaction_kwargs without a name; write one of: {known}")
        if not isinstance(name, str) or name not in self._users:
            raise InteractionError(
                f"row {task.id} names the interaction {name!r}, but the interactions are: {known}; add it to the file "
                "in actor_rollout_ref.rollout.multi_turn.interaction_config_path"
            )
        return self._users[name]

    def open(self, task: Task, episode_id: str) -> InteractionSession | None:
        """A session for one episode; None if its row has no simulated user."""
        user = self.find(task)
        return None if user is None else InteractionSession(user, self.timeout, task, episode_id)


class InteractionSession:
    """The simulated user of one episode."""

    def __init__(self, user: BaseInteraction, timeout: float, task: Task, episode_id: str) -> None:
        self.user = user
        self._timeout = timeout
        self._kwargs = _without_none(task.interaction_kwargs)
        self._id = f"{episode_id}/{user.name}"
        self._begun = self._started = False

    async def start(self) -> None:
        self._begun = True  # before the call: a start that fails half way may have opened something
        start = self.user.start_interaction
        chosen = await self._call(start, self._id, **self._row(start))
        self._id = chosen if isinstance(chosen, str) else self._id
        self._started = True

    async def reply(self, messages: Sequence[Message]) -> UserReply:
        """The user's answer to the last of `messages`. The user gets its own copy of them."""
        answer = self.user.generate_response
        returned = await self._call(answer, self._id, copy.deepcopy(list(messages)), **self._row(answer))
        return _read_reply(returned, self._what(answer))

    async def close(self) -> Closing:
        """Score and finalize. Raises only CancelledError, and finalizes even then. May be called twice."""
        if not self._begun:
            return Closing()
        self._begun = False
        score: float | None = None
        failures: list[str] = []
        try:
            if self._started:
                score = _number(await self._end(self.user.calculate_score), self._what(self.user.calculate_score))
        except InteractionError as error:
            failures.append(str(error))
        finally:
            try:
                await self._end(self.user.finalize_interaction)
            except InteractionError as error:
                failures.append(str(error))
        return Closing(score=score, failures=failures)

    async def _end(self, method: Callable[..., Any]) -> Any:
        """Call a method that may or may not take the instance id."""
        takes = Keywords.of(method)
        if takes.positional:
            return await self._call(method, self._id)
        return await self._call(method, **({"instance_id": self._id} if takes.takes("instance_id") else {}))

    async def _call(self, method: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        ended = await outcome_within(call(method, *args, **keywords), self._timeout)
        if ended.late:
            raise InteractionError(
                f"{self._what(method)} did not end within {self._timeout:g} seconds; make it faster or raise "
                "multi_turn.tool_timeout"
            )
        if ended.error is not None:
            raise InteractionError(f"{self._what(method)} failed: {describe(ended.error)}") from ended.error
        return ended.value

    def _row(self, method: Callable[..., Any]) -> dict[str, Any]:
        """The row's keywords for a method. `name` is passed only to a method that takes it."""
        takes = Keywords.of(method)
        wanted = {key: value for key, value in self._kwargs.items() if key != "name" or takes.takes(key)}
        return takes.check(wanted, self._what(method))

    def _what(self, method: Callable[..., Any]) -> str:
        return f"{getattr(method, '__name__', 'a method')} of interaction {self.user.name!r}"


def _without_none(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A row's keywords without None values: Parquet fills the keys of other rows with None."""
    return {key: value for key, value in kwargs.items() if value is not None}


def _read_reply(returned: Any, what: str) -> UserReply:
    if not isinstance(returned, (tuple, list)) or len(returned) != 4:
        raise InteractionError(f"{what} returned {returned!r}; it must return (over, text, score, info), four values")
    ends, text, score, info = returned
    for ok, sentence in (
        (ends in (True, False), f"{ends!r} for whether the exchange is over; it must be True or False"),
        (isinstance(text, str), f"a text of type {type(text).__name__}; it must be a string"),
        (isinstance(info, (Mapping, type(None))), f"info of type {type(info).__name__}; it must be a dict"),
    ):
        if not ok:
            raise InteractionError(f"{what} returned {sentence}")
    kept = to_jsonable_python(dict(info or {}), fallback=str)
    return UserReply(clean(redact(text)), bool(ends), _number(score, what), kept)


def _number(score: Any, what: str) -> float | None:
    try:
        return None if score is None else read_reward(score)
    except RallyError:
        raise InteractionError(
            f"{what} returned the score {brief(score)}; it must be a finite number or None"
        ) from None
