"""A loop that speaks in messages is trained on the tokens that were sampled, not on its messages encoded again.

Such a loop writes `generate(llm_server, data)` over lists of messages, asks `llm_server.generate(prompts=[history])`
for the text of the next turn, and returns its histories. Here each episode is one such call with one prompt. A history
that goes on from what was said before extends the segment; one that was edited opens a new segment, as a template that
rewrites history does.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from rally.loops.base import AgentLoopOutput, LoopError
from rally.loops.brought import BroughtLoop, known_to_us
from rally.loops.exchange import Exchange
from rally.types import Message, Segment, StopReason

PADDING = "padding"
"""The role of messages that only bring histories to one length; nothing here needs that, so they are left out."""


@dataclass
class DataProto:
    """Rows in columns: `batch["prompt"]` has the messages of each, `non_tensor_batch` its other fields."""

    batch: dict[str, Any] = field(default_factory=dict)
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def clone(self) -> DataProto:
        return DataProto(dict(self.batch), dict(self.non_tensor_batch), dict(self.meta_info))

    def __len__(self) -> int:
        return len(next(iter(self.batch.values()), ()))


class ExchangeOver(BaseException):
    """A limit of the run ended the exchange; raised through the user's loop, which has nothing to do about it. As with
    a cancellation, code that catches every Exception must not catch it."""


class MessageServer:
    """The policy as such a loop asks it."""

    def __init__(self, loop: MessageLoop, exchange: Exchange) -> None:
        self.exchange = exchange
        self.over: StopReason | None = None
        self._loop = loop
        self._history: list[Message] = list(exchange.messages)
        self._closed = True
        self._began = time.perf_counter()
        self._one_turn = asyncio.Lock()  # a second turn that is asked for meanwhile goes on from another history

    async def generate(self, prompts: Sequence[Sequence[Message]], **sampling_params: Any) -> dict[str, list[str]]:
        """`{"text": [...]}`: the next turn of each history."""
        if any(isinstance(history, Mapping | str) for history in prompts):
            raise LoopError("llm_server.generate takes a list of histories; write prompts=[history]")
        async with self._one_turn:
            return {"text": [await self._turn(list(history), sampling_params) for history in prompts]}

    async def _turn(self, history: list[Message], sampling_params: Mapping[str, Any]) -> str:
        exchange, started = self.exchange, time.perf_counter()
        most = self._loop.settings.max_assistant_turns
        if most and exchange.count("assistant") >= most:
            self._end(StopReason.MAX_TURNS)
        self._take(history, started)
        if exchange.room <= 0:
            self._end(exchange.out_of_room())
        asked = known_to_us(sampling_params)
        params = {**asked, "max_tokens": min(exchange.room, asked.get("max_tokens", exchange.room))}
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
        if generation.finish == "length" and exchange.room <= 0:
            self._end(exchange.out_of_room())
        return parsed.text

    def finish(self, trajectory: Sequence[Message]) -> None:
        """Record what was said after the last turn that was sampled; nothing follows it, so it has no tokens."""
        said = [message for message in trajectory if message["role"] != PADDING]
        if _same(said[: len(self._history)], self._history):
            for message in said[len(self._history) :]:
                self.exchange.add_closing(str(message.get("content") or ""), None, time.perf_counter(), message["role"])

    def _take(self, history: list[Message], started: float) -> None:
        """Bring the exchange to where `history` is."""
        exchange, known = self.exchange, len(self._history)
        new = history[known:]
        goes_on = _same(history[:known], self._history)
        if goes_on and not new and not exchange.turns:
            return
        exchange.messages = list(self._history)
        if goes_on and new and exchange.turns and all(message["role"] != "assistant" for message in new):
            rerender = self._loop.settings.history == "rerender"
            reason = exchange.add_observed(new, (), closed=self._closed, rerender=rerender, started=started)
            if reason is not None:
                self._end(reason)
            return
        self._begin_again(history)

    def _begin_again(self, history: list[Message]) -> None:
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


class MessageLoop(BroughtLoop):
    """Subclass it and write `generate`; name the class in `rollout.agent_loop_class`."""

    @abstractmethod
    async def generate(self, llm_server: MessageServer, data: DataProto, **kwargs: Any) -> DataProto:
        """Hold the exchange of each prompt of `data.batch["prompt"]`; the histories go to `batch["response"]`.
        `kwargs` are the sampling parameters, to be passed on to `llm_server.generate`."""

    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
        most = self.server.engine.max_model_len
        exchange = Exchange.start(self.codec, self.task, self.settings, most, self.context.began)
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
