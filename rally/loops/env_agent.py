"""The agent loop `env_agent`: the policy plays an environment, which writes the prompt, the answers and the reward.

Every complete turn goes to the environment, also the last one before a limit of turns, so that it is scored. Calls that
no tool can take are answered by the loop; the environment sees only the others. The tokens are those of `tool_agent`:
sampled ids are kept, and the answers are appended as the codec's deltas.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rally.chat import Parsed
from rally.engines import LockstepEngine
from rally.envs import EnvError, EnvTurn
from rally.envs.session import EnvStep, SeatPresence
from rally.loops.base import AgentLoopOutput, EpisodeFailed
from rally.loops.multi_turn import MultiTurnLoop, uncancelled
from rally.loops.registry import register
from rally.rewards.shaping import ON_TURNS
from rally.tools.session import CallOutcome, checked_arguments
from rally.types import Message, StopReason, ToolCall, ToolResponse, ToolResult, ToolStatus


@register("env_agent")
class EnvAgentLoop(MultiTurnLoop):
    """Plays one episode of the row's environment."""

    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
        self.session = self.context.environments.open(self.task, self._presence())
        self.prompt: list[Message] = []
        self.rewards: list[float] = []
        self.info: list[dict[str, Any]] = []
        self.close_failures: list[str] = []
        self.done, self.hinted, self.env_seconds = False, 0, 0.0
        reason: StopReason | None = None
        try:
            reason = await self._reset() or await self._converse(sampling_params)
            if self.done and not self.rewards:
                raise EnvError(f"the environment {self.session.name} ended the episode without ever giving a reward")
        except EnvError as failure:
            if not self.prompt:
                raise
            raise EpisodeFailed(failure, self._output(StopReason.ERROR), "infrastructure") from failure
        finally:
            await uncancelled(self._close(failed=reason is None))
        return self._output(reason)

    def _presence(self) -> SeatPresence:
        """An engine in lockstep must not wait for a seat that waits for another seat."""
        engine, name = self.server.engine, self.context.episode_id
        if not isinstance(engine, LockstepEngine):
            return SeatPresence()
        return SeatPresence(partial(engine.dismiss, name), partial(engine.expect, name))

    async def _reset(self) -> StopReason | None:
        """Let the environment write the prompt. A match may end before the seat has a turn."""
        started = time.perf_counter()
        self.prompt, tools = await self.session.reset()
        self.env_seconds += time.perf_counter() - started
        self.begin_exchange(self.codec.with_tools(tools), replace(self.task, prompt=tuple(self.prompt)))
        ended = self.session.ended
        if ended is None:
            return None
        self.done = True
        self.info.append(ended.info)
        self.rewards += [] if ended.reward is None else [ended.reward]
        return StopReason.STOP

    async def _close(self, failed: bool) -> None:
        self.close_failures = await self.session.close(failed)

    async def _turn(self, sampling_params: dict[str, Any]) -> StopReason | None:
        limit, parsed = await self._assistant_turn(sampling_params)
        return limit if parsed is None else await self._answered(parsed, limit)

    async def _answered(self, parsed: Parsed, limit: StopReason | None) -> StopReason | None:
        """Let the environment answer a turn, and append what it says unless the episode is over."""
        started = time.perf_counter()
        hints = self._hints(parsed.tool_calls)
        calls = tuple(call for call in hints if isinstance(call, ToolCall))
        step = EnvStep([], None, False, {})
        if calls or not hints:
            try:
                step = await self.session.step(EnvTurn(text=parsed.text, calls=calls))
            finally:
                self.env_seconds += time.perf_counter() - started
            self.info.append(step.info)
        self.rewards += [] if step.reward is None else [step.reward]
        self.hinted = 0 if calls or not hints else self.hinted + 1
        results, messages = _in_order(hints, step.messages)
        if step.done or limit is not None:
            self.done = step.done
            text = "\n".join(message["content"] for message in messages)
            self.exchange.add_closing(text, step.reward, started, "tool" if results else "user", results)
            return StopReason.STOP if step.done else limit
        reason = self.exchange.add_observed(
            messages,
            results,
            closed=parsed.closed,
            rerender=self.settings.history == "rerender",
            started=started,
            score=step.reward,
        )
        most = self.settings.max_tool_failures
        return StopReason.TOOL_FAILURES if most and self.hinted >= most else reason

    def _hints(self, calls: Sequence[ToolCall]) -> list[ToolCall | ToolResult]:
        """Each call with converted arguments, or the answer to a call that no tool can take."""
        checked: list[ToolCall | ToolResult] = []
        for call in calls:
            arguments = checked_arguments(call, self.session.parameters)
            if isinstance(arguments, CallOutcome):
                checked.append(ToolResult(call=call, status=arguments.status, response=arguments.answer.response))
            else:
                checked.append(replace(call, arguments=arguments))
        return checked

    def _reward(self, reason: StopReason) -> float | None:
        """The sum of the turns' rewards, or the reward of an unfinished episode. None for a failed one."""
        if reason is StopReason.ERROR:
            return None
        unfinished = self.context.environments.unfinished_reward
        return sum(self.rewards) if self.done or unfinished is None else unfinished

    def _output(self, reason: StopReason) -> AgentLoopOutput:
        exchange, reward = self.exchange, self._reward(reason)
        extra: dict[str, Any] = {
            "environment": {"name": self.session.name, "done": self.done, "info": self.info},
            "timings": {"generate": self.server.seconds, "tools": self.env_seconds},
        }
        if self.close_failures:
            extra["environment"]["failures"] = self.close_failures
        if difference := self.tokenization_difference(reason):
            extra["tokenization_difference"] = difference
        numbers = {k: v for k, v in (self.info[-1] if self.info else {}).items() if isinstance(v, bool | int | float)}
        earned = {ON_TURNS: sum(self.rewards)} if self.rewards else {}
        return AgentLoopOutput(
            prompt_ids=exchange.segment.prompt_ids,
            response_ids=exchange.segment.response_ids,
            response_mask=exchange.segment.response_mask,
            segments=tuple(exchange.segments),
            turns=tuple(exchange.turns),
            stop_reason=reason,
            reward_score=reward,
            reward_info={**numbers, **earned, "score": reward, "done": self.done},
            prompt_messages=self.prompt,
            extra_fields=extra,
        )


def _in_order(
    calls: Sequence[ToolCall | ToolResult], observed: Sequence[Message]
) -> tuple[list[ToolResult], list[Message]]:
    """The results of the calls, and all messages: the answers in the order of the calls, then the others."""
    answers = {message["tool_call_id"]: message for message in observed if message.get("tool_call_id")}
    results: list[ToolResult] = []
    for call in calls:
        if isinstance(call, ToolResult):
            results.append(call)
        elif call.id in answers:  # an environment that is done need not answer
            response = ToolResponse(text=answers[call.id]["content"])
            results.append(ToolResult(call=call, status=ToolStatus.OK, response=response))
    told: list[Message] = [
        {"role": "tool", "name": r.call.name, "tool_call_id": r.call.id, "content": r.response.text or ""}
        for r in results
    ]
    return results, [*told, *(message for message in observed if not message.get("tool_call_id"))]
