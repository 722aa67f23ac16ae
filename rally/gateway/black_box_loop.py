"""The agent loop `black_box`: runs a user's agent function and makes an episode of its chat completions."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from numbers import Real
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from rally.gateway.agent_process import AgentWorkerLost, check_command, run_command
from rally.gateway.agent_runner import Agent, RunningAgent, find_agent, find_function, run_agent
from rally.loops import AgentLoopBase, AgentLoopOutput, LoopError
from rally.loops.base import EpisodeFailed, Fault, fault_of
from rally.rewards.score import plain
from rally.rewards.shaping import ON_TURNS
from rally.tools.invoke import CallEnd
from rally.types import RallyError, Segment, StopReason, brief, finite_number

if TYPE_CHECKING:
    from rally.gateway.session import GatewaySession

CANCEL_SECONDS = 1.0  # seconds for an agent to end after it was cancelled


class AgentReturn(NamedTuple):
    """The parts of an agent's return value: a reward, an answer for the reward function, and fields to record."""

    reward: float | None = None
    answer: str | None = None
    rest: dict[str, Any] | None = None


class AgentOutcome(NamedTuple):
    """How the agent ended (None: it ran out of time), and whether a thread of it is still running."""

    ended: CallEnd | None
    abandoned: bool = False


class BlackBoxAgentLoop(AgentLoopBase):
    """Calls the function named by `agent` as `agent(row, client)`, or runs the program `command`, or lets `workers` on
    other machines run theirs, one of which is lost after `worker_timeout` seconds without an answer. The gateway
    listens at `host`, an address of this machine, and `port` (0: any free port). Before a run the function named by
    `check_row` gets each row, and raises if the agent could not play it."""

    def __init__(
        self,
        agent: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        command: Sequence[str] | None = None,
        workers: bool = False,
        worker_timeout: float = 30.0,
        check_row: str | None = None,
    ) -> None:
        self._host, self._port, self._command = host, port, command
        self._workers, self._worker_timeout = workers, worker_timeout
        self._agent = agent if command is None else " ".join(check_command(command))
        if workers:
            self._agent = "of a worker"

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> None:
        super().prepare(options)
        command, agent = options.get("command"), options.get("agent")
        if options.get("workers"):
            _check_workers(options)
            _server().check_address(options.get("host", "127.0.0.1"), options["port"])
            return
        if command is not None and agent is not None:
            raise LoopError("agent_loop_config has both agent and command; set one of them")
        if command is None:
            find_agent(agent)
        elif shutil.which(check_command(command)[0]) is None:
            raise LoopError(f"there is no program {command[0]!r}; correct agent_loop_config.command")
        if options.get("check_row") is not None:
            find_function(options["check_row"], "check_row", ("row",))
        _server().check_address(options.get("host", "127.0.0.1"), options.get("port", 0))

    @classmethod
    def check_row(cls, row: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        if options.get("check_row") is not None:
            check = find_function(options["check_row"], "check_row", ("row",))
            try:
                check(copied(dict(row)))
            except Exception as problem:  # the user's own code
                if isinstance(problem, RallyError):
                    raise
                raise LoopError(f"{options['check_row']} raised {type(problem).__name__}: {problem}") from problem

    @classmethod
    def single_process(cls, options: Mapping[str, Any]) -> str | None:
        """Agents connect to one port, and every loop worker has a gateway of its own."""
        return next((name for name in ("workers", "port") if options.get(name)), None)

    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
        server = _server()
        limit = asyncio.timeout(self.context.turn_seconds(time.perf_counter()))
        session = server.GatewaySession(self.context, sampling_params, limit)
        outcome = await self._run_agent(server.gateway_at(self._host, self._port), session, limit, row_fields)
        return self._output(session, outcome)

    async def _run_agent(
        self, gateway: Any, session: GatewaySession, limit: asyncio.Timeout, row: dict[str, Any]
    ) -> AgentOutcome:
        function, agents = self._function(session, gateway), gateway.agents
        client = gateway.open(session, self.context.episode_id)
        running = RunningAgent(agents, partial(run_agent, function, copied(row), client))
        try:
            async with limit:
                return AgentOutcome(await asyncio.shield(running.ended))
        except TimeoutError:
            assert limit.expired(), "a TimeoutError of the agent is captured as its outcome"
        finally:
            gateway.close_session(client)
            if not running.ended.done():
                running.cancel()
                await asyncio.wait({running.ended}, timeout=CANCEL_SECONDS)
            if not running.ended.done():
                gateway.leave(agents)
        return AgentOutcome(None, abandoned=running.abandoned or not running.ended.done())

    def _function(self, session: GatewaySession, gateway: Any) -> Agent:
        if self._workers:
            session.set_waiting(True)
            started = partial(session.set_waiting, False)
            return partial(gateway.workers.play, lambda: session.reported, started, self._worker_timeout)
        if self._command is None:
            return find_agent(self._agent)
        return partial(run_command, check_command(self._command), lambda: session.reported)

    def _output(self, session: GatewaySession, outcome: AgentOutcome) -> AgentLoopOutput:
        try:
            reason, returned = self._meaning(session, outcome.ended)
        except Exception as failure:  # noqa: BLE001 - raised again, with what was sampled
            output = self._made(session, outcome, StopReason.ERROR, AgentReturn())
            sampled = any(segment.sampled for segment in output.segments)
            cause = failure.__cause__ if isinstance(failure, LoopError) and failure.__cause__ else failure
            refused = session.refused is not None and session.refused in str(cause)  # a request the agent made wrongly
            blameless = session.failure is not None or refused
            fault: Fault = "infrastructure" if blameless else fault_of(cause, sampled)
            raise EpisodeFailed(failure, output, fault) from cause
        return self._made(session, outcome, reason, returned)

    def _made(
        self, session: GatewaySession, outcome: AgentOutcome, reason: StopReason, returned: AgentReturn
    ) -> AgentLoopOutput:
        segments, turns = session.credits.applied(session.transcript.branches())
        if not segments and reason is StopReason.STOP:
            raise LoopError(
                f"the agent {self._agent} returned without a completion; it must send requests to client.base_url with "
                "client.api_key" + (f" (its last request was refused: {session.refused})" if session.refused else "")
            )
        first = segments[0] if segments else Segment(prompt_ids=self.codec.encode_prompt(self.task.prompt))
        counts = {**session.counts, "segments": len(segments), "abandoned": int(outcome.abandoned)}
        counts |= {"excluded_calls": session.credits.excluded} if session.credits.excluded else {}
        scored = returned.answer if returned.answer is not None else session.transcript.main_reply(self.task.prompt)
        fields = {"agent_answer": returned.answer, "scored_text": scored, "returned": plain(returned.rest)}
        return AgentLoopOutput(
            prompt_ids=first.prompt_ids,
            response_ids=first.response_ids,
            response_mask=first.response_mask,
            segments=segments or (first,),
            turns=turns,
            stop_reason=reason,
            **self._reward(session, reason, returned),
            extra_fields={"agent": counts, **{key: value for key, value in fields.items() if value is not None}},
        )

    def _reward(self, session: GatewaySession, reason: StopReason, returned: AgentReturn) -> dict[str, Any]:
        """The reward that the agent returned, and the rewards that it gave to calls."""
        total = session.credits.total
        if total is None or reason is StopReason.ERROR:
            return {"reward_score": returned.reward}
        if returned.reward is None and reason is StopReason.STOP:
            raise LoopError(
                f"the agent {self._agent} gave rewards to calls but returned no reward; return a number, 0 for no other"
            )
        earned = returned.reward or 0.0
        return {"reward_score": earned + total, "reward_info": {"score": earned + total, ON_TURNS: total}}

    def _meaning(self, session: GatewaySession, ended: CallEnd | None) -> tuple[StopReason, AgentReturn]:
        """The stop reason of the episode and the agent's return value. If the agent raises after it hit a limit, the
        reason is that limit. Any other exception of the agent, and every failure of the engine or of a worker, is
        raised."""
        if session.failure is not None:
            raise session.failure
        if ended is None and session.reported is not None:  # it reported, and did not end in time
            return session.reason, returned_by(str(self._agent), session.reported)
        if ended is None:
            return (session.reason if session.over else StopReason.DEADLINE), AgentReturn()
        if ended.error is None:
            return session.reason, returned_by(str(self._agent), ended.value)
        if session.reason is StopReason.STOP or isinstance(ended.error, AgentWorkerLost):
            problem = f"{type(ended.error).__name__}: {ended.error}"
            raise LoopError(f"the agent {self._agent} failed: {problem}") from ended.error
        return session.reason, AgentReturn()


def copied(value: Any) -> Any:
    """A copy with new containers: the episodes of a task share one row, and an agent may change its own."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


ANSWERS = ("answer", "final_answer", "final_output", "output", "response", "content", "text", "result")
"""The keys or attributes that hold an answer, in order of precedence."""


def returned_by(agent: str, value: Any) -> AgentReturn:
    """Read an agent's return value: a number is the reward, a text the answer. A dictionary, dataclass or Pydantic
    model may have `reward`, an answer under one of ANSWERS or as the last of its `messages`, and further fields to
    record. The result or message object of a framework has its answer in an attribute of ANSWERS."""
    if value is None:
        return AgentReturn()
    if isinstance(value, str):
        return AgentReturn(answer=value)
    if isinstance(value, Real):
        return AgentReturn(reward=_number(agent, value))
    fields = _fields(value)
    if fields is None:
        answer = _answer(value)
        if answer is None:
            raise LoopError(
                f"the agent {agent} returned {value!r}, which is neither a reward nor an answer; return a number, a "
                f"text, None, or an object with reward, messages or one of {', '.join(ANSWERS)}"
            )
        return AgentReturn(answer=answer)
    name = next((name for name in (*ANSWERS, "messages") if _answer(fields.get(name)) is not None), "")
    rest = {str(key): item for key, item in fields.items() if key not in ("reward", name)}
    reward = fields.get("reward")
    return AgentReturn(None if reward is None else _number(agent, reward), _answer(fields.get(name)), rest or None)


def _fields(value: Any) -> Mapping[str, Any] | None:
    """The fields of a dictionary, a dataclass, or a Pydantic model that is no message of a client library."""
    if isinstance(value, Mapping):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {name: getattr(value, name) for name in value.__dataclass_fields__ if not name.startswith("_")}
    if isinstance(value, BaseModel) and not hasattr(value, "choices"):
        return {name: getattr(value, name) for name in type(value).model_fields}
    return None


def _answer(value: Any) -> str | None:
    """The text of an answer: a text, a number, a message or the last of several messages, the completion of OpenAI's
    client, the result of an agent framework, or, for a structured answer, its JSON. None if it is none of these."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Real):
        return str(value)
    if isinstance(value, list | tuple):
        return _answer_of_list(value)
    if isinstance(value, Mapping):
        held = next((value[name] for name in ANSWERS if value.get(name) is not None), None)
        return json.dumps(plain(value), ensure_ascii=False) if held is None else _answer(held)
    choices = getattr(value, "choices", None)
    if isinstance(choices, list) and choices:
        return _answer(getattr(choices[0], "message", None))
    for name in ANSWERS:
        held = getattr(value, name, None)
        if held is not None and not callable(held):
            return _answer(held)
    return value.model_dump_json() if isinstance(value, BaseModel) else None


def _answer_of_list(parts: Sequence[Any]) -> str | None:
    """The text of the parts of a message, or of the last of several messages."""
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if texts and len(texts) == len(parts):
        return "".join(str(text) for text in texts)
    last = parts[-1] if parts else None
    is_message = (isinstance(last, Mapping) and "role" in last) or hasattr(last, "content")
    return _answer(last["content"] if isinstance(last, Mapping) else last) if is_message else None


def _number(agent: str, value: Any) -> float:
    if (number := finite_number(value)) is not None:
        return number
    raise LoopError(f"the agent {agent} returned the reward {brief(value)}; return a finite number")


def _check_workers(options: Mapping[str, Any]) -> None:
    """Refuse options with which no worker could play."""
    _server()
    from rally.gateway.worker_pool import worker_token

    if options.get("command") is not None or options.get("agent") is not None:
        raise LoopError("agent_loop_config.workers cannot be used beside agent or command; workers bring their own")
    if not options.get("port"):
        raise LoopError("agent_loop_config.workers needs agent_loop_config.port, the port that workers connect to")
    timeout = options.get("worker_timeout", 30.0)
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 5 <= timeout <= 3600:
        raise LoopError(f"agent_loop_config.worker_timeout={timeout!r}; give 5 to 3600 seconds")
    worker_token()


def _server() -> ModuleType:
    """The module that needs the packages of a web server, imported only when an agent loop is used."""
    try:
        from rally.gateway import server
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rally"):
            raise
        raise LoopError(f"the gateway needs the package {error.name}; run: pip install 'rally-rl[services]'") from None
    return server
