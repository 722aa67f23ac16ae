"""The base class for agent loops written for verl over messages (`MessageLoop`).

They are trained on the sampled tokens; messages are never encoded again. A loop defines `generate(llm_server, data)`,
gets the text of the next turn from `llm_server.generate(prompts=[history])`, and returns its histories. Each episode is
one such call with one prompt. A history that continues the last one extends the segment; an edited history starts a new
segment.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from rally.compat.verl.agent_loops import VerlAgentLoop, sampling_keywords
from rally.loops.base import AgentLoopOutput, LoopError
from rally.loops.episode_builder import EpisodeBuilder
from rally.types import Message, Segment, StopReason

PADDING = "padding"
"""The role of messages that pad histories to equal length. They are dropped."""


@dataclass
class DataProto:
    """Rows as columns: `batch["prompt"]` has the messages of each row, `non_tensor_batch` the other fields."""

    batch: dict[str, Any] = field(default_factory=dict)
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def clone(self) -> DataProto:
        return DataProto(dict(self.batch), dict(self.non_tensor_batch), dict(self.meta_info))

    def __len__(self) -> int:
        return len(next(iter(self.batch.values()), ()))


class ExchangeOver(BaseException):
    """A limit of the run ended the episode. It is raised through the user's loop. It derives from BaseException, as
    CancelledError does, so that `except Exception` does not catch it."""


class MessageServer:
    """The policy with the interface of a message loop."""

    def __init__(self, loop: MessageLoop, exchange: EpisodeBuilder) -> None:
        self.exchange = exchange
        self.over: StopReason | None = None
        self._loop = loop
        self._history: list[Message] = list(exchange.messages)
        self._closed = True
        self._began = time.perf_counter()
        self._one_turn = asyncio.Lock()  # concurrent requests are answered one after the other

    async def generate(self, prompts: Sequence[Sequence[Message]], **sampling_params: Any) -> dict[str, list[str]]:
        """The next turn of each history, as `{"text": [...]}`."""
        if any(isinstance(history, Mapping | str) for history in prompts):
            raise LoopError("llm_server.generate takes a list of histories; write prompts=[history]")
        async with self._one_turn:
            return {"text": [await self._turn(list(history), sampling_params) for history in prompts]}

    async def _turn(self, history: list[Message], sampling_params: Mapping[str, Any]) -> str:
        exchange, started = self.exchange, time.perf_counter()
        max_turns = self._loop.settings.max_assistant_turns
        if max_turns and exchange.count("assistant") >= max_turns:
            self._end(StopReason.MAX_TURNS)
        self._take(history, started)
        if exchange.tokens_left <= 0:
            self._end(exchange.limit_reached())
        params = sampling_keywords(sampling_params)
        params["max_tokens"] = min(exchange.tokens_left, params.get("max_tokens", exchange.tokens_left))
        try:
            async with asyncio.timeout(self._loop.context.turn_seconds(self._began)) as limit:
                segment = exchange.segment
                generation = await self._loop.server.generate(segment.ids, params, images=segment.images)
        except TimeoutError:
            if not limit.expired():
                raise
            self._end(StopReason.DEADLINE)
        parsed = exchange.add_sampled(generation, started)
        self._closed = parsed.closed
        self._history = [*history, {"role": "assistant", "content": parsed.text}]
        if generation.finish == "abort":
            self._end(StopReason.CANCELLED)
        if generation.finish == "length" and exchange.tokens_left <= 0:
            self._end(exchange.limit_reached())
        return parsed.text

    def finish(self, trajectory: Sequence[Message]) -> None:
        """Record the messages after the last sampled turn. Nothing is sampled after them, so they get no tokens."""
        messages = [message for message in trajectory if message["role"] != PADDING]
        if _same(messages[: len(self._history)], self._history):
            for message in messages[len(self._history) :]:
                self.exchange.add_closing(str(message.get("content") or ""), None, time.perf_counter(), message["role"])

    def _take(self, history: list[Message], started: float) -> None:
        """Extend the episode to `history`, or start a new segment if it does not continue the last one."""
        exchange, known = self.exchange, len(self._history)
        new = history[known:]
        continues = _same(history[:known], self._history)
        if continues and not new and not exchange.turns:
            return
        exchange.messages = list(self._history)
        if continues and new and exchange.turns and all(message["role"] != "assistant" for message in new):
            rerender = self._loop.settings.history == "rerender"
            reason = exchange.add_observed(new, (), closed=self._closed, rerender=rerender, started=started)
            if reason is not None:
                self._end(reason)
            return
        self._start_segment(history)

    def _start_segment(self, history: list[Message]) -> None:
        exchange = self.exchange
        full = exchange.codec.rerender(history)
        if len(full.ids) >= exchange.max_model_len:
            self._end(StopReason.CONTEXT)
        if not exchange.segment.response_ids:
            exchange.segments.pop()
        exchange.segments.append(Segment(prompt_ids=full.ids, images=full.images))
        exchange.messages = list(history)

    def _end(self, reason: StopReason) -> NoReturn:
        self.over = reason
        raise ExchangeOver(f"the exchange is over: {reason.value}")


class MessageLoop(VerlAgentLoop):
    """A loop over messages. Subclass it, define `generate`, and name the class in `rollout.agent_loop_class`."""

    offers_all = False

    @abstractmethod
    async def generate(self, llm_server: MessageServer, data: DataProto, **kwargs: Any) -> DataProto:
        """Play the episode of each prompt in `data.batch["prompt"]` and put the histories into `batch["response"]`.
        `kwargs` are the sampling parameters to pass to `llm_server.generate`."""

    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
        max_model_len = self.server.max_model_len
        exchange = EpisodeBuilder.start(self.codec, self.task, self.settings, max_model_len, self.context.began)
        server = MessageServer(self, exchange)
        data = DataProto(
            batch={"prompt": [[dict(message) for message in self.task.prompt]]},
            non_tensor_batch={name: [value] for name, value in row_fields.items()},
        )
        try:
            returned: Any = self.generate(server, data, **sampling_params)
            server.finish(_trajectory(await returned if inspect.isawaitable(returned) else returned, self))
        except ExchangeOver:
            assert server.over is not None
        segment = exchange.segment
        return AgentLoopOutput(
            prompt_ids=segment.prompt_ids,
            response_ids=segment.response_ids,
            response_mask=segment.response_mask,
            segments=tuple(exchange.segments),
            turns=tuple(exchange.turns),
            stop_reason=server.over or StopReason.STOP,
        )


def _trajectory(returned: Any, loop: MessageLoop) -> Sequence[Message]:
    histories = returned.batch.get("response") if isinstance(returned, DataProto) else None
    if not isinstance(histories, Sequence) or len(histories) != 1:
        raise LoopError(
            f"{type(loop).__name__}.generate must return the data with one history for each prompt in batch['response']"
        )
    history: Sequence[Message] = histories[0]
    return history


def _same(history: Sequence[Message], other: Sequence[Message]) -> bool:
    return [(m["role"], m.get("content")) for m in history] == [(m["role"], m.get("content")) for m in other]
