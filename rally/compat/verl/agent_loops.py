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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, NoReturn, TypeVar

from rally.images.loading import has_images
from rally.loops.base import AgentLoopBase, AgentLoopOutput, EpisodeServer, LoopError
from rally.loops.episode_builder import EpisodeBuilder
from rally.types import Message, Segment, StopReason

F = TypeVar("F", bound=Callable[..., Any])
NOT_YET = "which loops of verl cannot yet"


class TokenOutput(NamedTuple):
    """One generation, by the names that such a loop reads."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    routed_experts: None = None
    num_preempted: int = -1


@dataclass
class AgentLoopMetrics:
    """Seconds of an exchange, as such a loop hands them back."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    num_preempted: int = -1


class ServerManager:
    """The engine under the name and with the keywords that such a loop uses. Whatever its `request_id`, an episode
    stays where its history is cached."""

    def __init__(self, server: EpisodeServer) -> None:
        self._server = server

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
    ) -> TokenOutput:
        if image_data or video_data:
            raise LoopError(f"the agent loop sends image_data or video_data, {NOT_YET}; leave it out")
        said = await self._server.generate(prompt_ids, known_to_us(sampling_params))
        return TokenOutput(list(said.ids), list(said.logprobs), "aborted" if said.finish == "abort" else "completed")


class VerlAgentLoop(AgentLoopBase):
    """What a loop class written for verl derives from."""

    processor: None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        if args:
            raise LoopError(
                f"{type(self).__name__}.__init__ is given options by name alone; take **kwargs and pass them on"
            )
        super().__init__(**options)

    @cached_property
    def config(self) -> Any:
        """All keys of the run, `config.actor_rollout_ref.rollout.response_length` and the like."""
        return self.context.run_config

    @cached_property
    def server_manager(self) -> ServerManager:
        return ServerManager(self.server)

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def process_vision_info(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The images and videos of the messages by kind: none."""
        if has_images(messages):
            raise LoopError(f"the prompt holds images, {NOT_YET}; use the tool loop, or leave them out")
        return {}

    async def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """The ids of the first messages or, with `remove_system_prompt`, of those that follow a sampled turn."""
        if images or videos or has_images(messages):
            raise LoopError(f"the agent loop renders images or videos, {NOT_YET}; leave them out")
        codec = self.codec if tools is None else self.codec.with_tools(tools)
        return list(codec.encode_delta(messages) if remove_system_prompt else codec.encode_prompt(messages))


def known_to_us(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters by our names, without those that say what is always so: log-probs come back, nothing is
    penalised."""
    always = {"logprobs": (True, 0, 1), "repetition_penalty": (1.0,)}
    told = {key: value for key, value in sampling_params.items() if value not in always.get(key, ())}
    return {"max_tokens" if key == "max_new_tokens" else key: value for key, value in told.items()}


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Adds the seconds spent inside to `timing_raw[name]`."""
    began = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - began


def rollout_trace_op(function: F) -> F:
    """The function itself: every turn and call of an episode is recorded anyway (rollout.trace sends it on)."""
    return function


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

    def __init__(self, loop: MessageLoop, exchange: EpisodeBuilder) -> None:
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
        if exchange.tokens_left <= 0:
            self._end(exchange.limit_reached())
        asked = known_to_us(sampling_params)
        params = {**asked, "max_tokens": min(exchange.tokens_left, asked.get("max_tokens", exchange.tokens_left))}
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


class MessageLoop(VerlAgentLoop):
    """Subclass it and write `generate`; name the class in `rollout.agent_loop_class`."""

    @abstractmethod
    async def generate(self, llm_server: MessageServer, data: DataProto, **kwargs: Any) -> DataProto:
        """Hold the exchange of each prompt of `data.batch["prompt"]`; the histories go to `batch["response"]`.
        `kwargs` are the sampling parameters, to be passed on to `llm_server.generate`."""

    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
        most = self.server.engine.max_model_len
        exchange = EpisodeBuilder.start(self.codec, self.task, self.settings, most, self.context.began)
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
