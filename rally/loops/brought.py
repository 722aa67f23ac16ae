"""A loop class written for verl's `AgentLoopBase` runs as it is: what such a class reaches for by `self` is here.

Its `run` asks `self.server_manager.generate(request_id=..., prompt_ids=..., sampling_params=...)`, renders with
`self.apply_chat_template` or the tokenizer, and may return the three fields `prompt_ids`, `response_ids` and
`response_mask` alone: the log-probs of what it sampled were written down when it was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from rally.images import has_images
from rally.loops.base import AgentLoopBase, EpisodeServer, LoopError
from rally.types import Message

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


class BroughtLoop(AgentLoopBase):
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
