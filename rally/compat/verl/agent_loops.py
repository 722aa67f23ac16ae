"""The base class for agent loops written for verl over tokens (`VerlAgentLoop`), and the helpers that they import.

They are trained on the sampled tokens, which are never encoded again.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

from rally.compat.verl.continuous_tokens import ContinuousTokens, MergeResult
from rally.compat.verl.tools import ToolHandle
from rally.data.tasks import FileRows
from rally.images.loading import has_images
from rally.loops.base import AgentLoopBase, AgentLoopOutput, EpisodeServer, LoopContext, LoopError
from rally.loops.episode_builder import cut_prompt
from rally.types import Message

F = TypeVar("F", bound=Callable[..., Any])
NOT_SUPPORTED = "which is not supported in loops written for verl"


@dataclass
class TokenOutput:
    """One generation, with verl's field names."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None
    routed_experts: None = None
    num_preempted: int = -1
    extra_fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class AgentLoopMetrics:
    """The seconds of an episode, as a loop reports them."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    num_preempted: int = -1
    compute_score: float = 0.0


@dataclass(kw_only=True)
class VerlLoopOutput(AgentLoopOutput):
    """The result of a loop, with the fields that loops of verl 0.9 pass on and that are empty without videos."""

    mm_processor_kwargs: Any = None
    mm_processor_output: Any = None


@dataclass
class DictConfigWrap:
    """A configuration, as a loop's constructor gets it."""

    config: Any


@dataclass
class ToolListWrap:
    """The tools of the run, as a loop's constructor gets them in verl 0.9."""

    tools: list[ToolHandle]


class NoSuchRequest(LoopError, AttributeError):
    """A loop uses a method of a server manager that only a recipe of verl has."""


class ServerManager:
    """The engine with verl's interface. `request_id` is ignored: an episode always uses the server that caches its
    history."""

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
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        mm_processor_output: Any = None,
        priority: int = 0,
    ) -> TokenOutput:
        if image_data or video_data or audio_data:
            raise LoopError(f"the agent loop sends image_data, video_data or audio_data, {NOT_SUPPORTED}; remove it")
        generation = await self._server.generate(prompt_ids, sampling_keywords(sampling_params))
        stop_reason = "aborted" if generation.finish == "abort" else "completed"
        return TokenOutput(list(generation.ids), list(generation.logprobs), stop_reason)

    def __getattr__(self, name: str) -> Any:
        raise NoSuchRequest(f"the agent loop uses server_manager.{name}, {NOT_SUPPORTED}; use server_manager.generate")


class VerlAgentLoop(AgentLoopBase):
    """Rally's counterpart of verl's AgentLoopBase. A subclass may assign all attributes but `context`."""

    processor: Any = None
    _class_initialized = False
    offers_all = True
    """Whether `**kwargs` of a constructor get all that verl passes, which they hand on to `super().__init__`."""

    @classmethod
    def build(cls, context: LoopContext, options: Mapping[str, Any]) -> AgentLoopBase:
        config = context.run_config()
        made: dict[str, Callable[[], Any]] = {
            "trainer_config": lambda: DictConfigWrap(config),
            "server_manager": lambda: ServerManager(context.server),
            "tokenizer": lambda: verl_tokenizer(context.codec.tokenizer),
            "processor": lambda: None,
            "dataset_cls": lambda: FileRows,
            "dataset_config": lambda: DictConfigWrap(getattr(config, "data", None)),
            "data_config": lambda: DictConfigWrap(getattr(config, "data", None)),
            "tools": lambda: ToolListWrap([ToolHandle(tool) for tool in context.toolbox.tools]),
        }
        offered = {name: made[name]() for name in cls._taken(made) if name not in options}
        return super().build(context, {**offered, **options})

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> None:
        cls._class_initialized = False  # of an earlier run in this process
        names = dict.fromkeys(ARGUMENTS)
        super().prepare({**{name: None for name in cls._taken(names) if name not in options}, **options})

    @classmethod
    def _taken(cls, offered: Mapping[str, Any]) -> list[str]:
        """The names of `offered` that the constructor takes."""
        parameters = inspect.signature(cls.__init__).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        return [name for name in offered if name in parameters or (takes_any and cls.offers_all)]

    def __init__(
        self,
        trainer_config: Any = None,
        server_manager: Any = None,
        tokenizer: Any = None,
        processor: Any = None,
        dataset_cls: Any = None,
        dataset_config: Any = None,
        data_config: Any = None,
        tools: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if self.config is not None:
            self.init_class(config=self.config, tokenizer=self.tokenizer, processor=self.processor)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        """Loops of verl 0.6 override it to set attributes of the class."""
        cls._class_initialized = True

    @cached_property
    def config(self) -> Any:
        """The configuration of the run, such as `config.actor_rollout_ref.rollout.response_length`."""
        return self.context.run_config()

    @cached_property
    def rollout_config(self) -> Any:
        return self.config.actor_rollout_ref.rollout

    @cached_property
    def data_config(self) -> Any:
        return self.config.data

    @cached_property
    def apply_chat_template_kwargs(self) -> Any:
        return self.data_config.get("apply_chat_template_kwargs") or {}

    @cached_property
    def tokenizer(self) -> Any:  # type: ignore[override]
        return verl_tokenizer(self.context.codec.tokenizer)

    @cached_property
    def dataset_cls(self) -> Any:
        return FileRows

    @cached_property
    def server_manager(self) -> ServerManager:
        return ServerManager(self.context.server)

    @cached_property
    def continuous_token_builder(self) -> ContinuousTokens:
        return ContinuousTokens(self.context.codec)

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def process_vision_info(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The images and videos of the messages, which is always none."""
        if has_images(messages):
            raise LoopError(f"the prompt contains images, {NOT_SUPPORTED}; use the tool loop, or remove them")
        return {}

    async def process_multi_modal_info(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The name of process_vision_info in verl 0.9."""
        return await self.process_vision_info(messages)

    def _get_mm_processor_kwargs(self, audio_data: Any = None) -> dict[str, Any]:
        return {}

    def _assert_mm_supported(self, has_multi_modal: bool) -> None:
        if has_multi_modal:
            raise LoopError(f"the agent loop renders images, videos or audio, {NOT_SUPPORTED}; remove them")

    @staticmethod
    def build_sglang_video_payload(videos: Any, mm_inputs: Any) -> None:
        """There is no video to prepare."""

    async def ct_build_initial_tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        audios: Any = None,
        mm_inputs_out: Any = None,
    ) -> list[int]:
        """The ids of the first messages. Where they exceed the prompt length, data.truncation decides."""
        self._assert_mm_supported(bool(images or videos or audios) or has_images(messages))
        codec, settings = self.context.codec, self.context.settings
        full = (codec if tools is None else codec.with_tools(tools)).prompt(messages)
        return list(cut_prompt(full, settings.prompt_length, settings.truncation))

    async def ct_merge_context_msg(
        self,
        previous_messages: Sequence[Message],
        updated_messages: Sequence[Message],
        runtime_token_ids: Sequence[int],
        response_mask: Sequence[int],
        response_logprobs: Sequence[float] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """The history, mask and log-probs, with the tool or user messages that follow the last turn."""
        builder = self.continuous_token_builder
        merged = builder.merge_context_tokens(previous_messages, updated_messages, runtime_token_ids, tools=tools)
        return merged, *builder.align_response_metadata(merged, response_mask, response_logprobs)

    ct_merge_non_assistant_msg = ct_merge_context_msg  # the name in verl 0.10

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: Sequence[int],
        assistant_token_ids: Sequence[int],
        response_mask: Sequence[int],
        response_logprobs: Sequence[float] | None = None,
        assistant_logprobs: Sequence[float] | None = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """The history, mask and log-probs, with a sampled turn."""
        builder = self.continuous_token_builder
        merged = builder.merge_assistant_tokens(runtime_token_ids, assistant_token_ids)
        aligned = builder.align_response_metadata(
            merged, response_mask, response_logprobs, assistant_logprobs=assistant_logprobs
        )
        return merged, *aligned

    async def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """The ids of the first messages or, with `remove_system_prompt`, of messages after a sampled turn."""
        if images or videos or has_images(messages):
            raise LoopError(f"the agent loop renders images or videos, {NOT_SUPPORTED}; remove them")
        codec = self.context.codec if tools is None else self.context.codec.with_tools(tools)
        if not remove_system_prompt:
            return list(codec.encode_prompt(messages))
        sampled = self.context.server.generations
        last_id = sampled[-1].ids[-1] if sampled and sampled[-1].ids else None
        return list(codec.encode_delta(messages, last_id=last_id))


ARGUMENTS = tuple(inspect.signature(VerlAgentLoop.__init__).parameters)[1:-1]


@lru_cache(maxsize=4)
def verl_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer, whose `apply_chat_template` returns a list of ids as in transformers 4, which verl's loops use."""
    copied = copy.copy(tokenizer)
    copied.apply_chat_template = partial(tokenizer.apply_chat_template, return_dict=False)
    return copied


def sampling_keywords(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters by Rally's names, without those that restate a fixed behaviour (log-probs are always returned,
    repetition is never penalized)."""
    fixed = {"logprobs": (True, 0, 1), "repetition_penalty": (1.0,)}
    effective = {key: value for key, value in sampling_params.items() if value not in fixed.get(key, ())}
    renamed = {"max_new_tokens": "max_tokens", "stop_token_ids": "stop_ids"}
    return {
        renamed.get(key, key): value for key, value in effective.items() if (key, value) != ("stop_token_ids", None)
    }


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Adds the seconds of the block to `timing_raw[name]`."""
    began = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - began


def rollout_trace_op(function: F) -> F:
    """Returns the function unchanged: every turn and call of an episode is recorded anyway (see rollout.trace)."""
    return function
