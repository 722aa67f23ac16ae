"""verl's ToolAgentLoop for subclasses: the state machine whose steps they override, with its data and tool parser.

The agent loop `tool_agent` of a run is `rally.loops.ToolAgentLoop`; this one runs only where user code derives from
verl's class. As in verl, every call gets an instance of its tool, and malformed calls are not answered. Unlike in verl,
all calls of a turn run, under the deadlines and limits of the run, and a simulated user is finalized.
"""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

from pydantic import BaseModel

from rally.chat import ChatCodec
from rally.compat.verl.agent_loops import VerlAgentLoop, VerlLoopOutput, simple_timer
from rally.compat.verl.tools import ToolHandle
from rally.loops.base import AgentLoopOutput, LoopError
from rally.types import Message, ToolCall, ToolResponse

Parser = TypeVar("Parser", bound="type[ToolParser]")


class FunctionCall(BaseModel):
    """A tool call; `arguments` is JSON text."""

    arguments: str
    name: str
    tool_call_id: str | None = None


class ToolParser:
    """Reads tool calls from sampled tokens. A user's subclass is registered by name; other names are Rally's."""

    registry: ClassVar[dict[str, type[ToolParser]]] = {}

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end a generation, beyond those of the run, which already end it after a call."""
        return []

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """The text outside of the calls, and the calls."""

    @classmethod
    def register(cls, name: str) -> Callable[[Parser], Parser]:
        def add(subclass: Parser) -> Parser:
            cls.registry[name] = subclass
            return subclass

        return add

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        known = cls.registry.get(name)
        return CodecToolParser(tokenizer, name) if known is None else known(tokenizer)


class CodecToolParser(ToolParser):
    """Rally's parser of a format. The text keeps special tokens, as verl's does; malformed calls stay in it."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        super().__init__(tokenizer)
        self._codec = _codec(tokenizer, name)

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        schemas = [schema.model_dump(exclude_none=True) for schema in tools or ()]
        codec = self._codec.with_tools(schemas) if schemas else self._codec
        parsed = codec.parse(tuple(responses_ids))
        if not parsed.tool_calls:
            return self.tokenizer.decode(list(responses_ids)), []
        calls = [
            FunctionCall(name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False))
            for call in parsed.tool_calls
            if call.error is None
        ]
        return parsed.content, calls


@lru_cache(maxsize=8)
def _codec(tokenizer: Any, name: str) -> ChatCodec:
    return ChatCodec(tokenizer, name)


class AgentState(Enum):
    """The states of the loop."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


class AgentData:
    """The state of one episode. The arguments are those of verl 0.6 to 0.9, by name."""

    def __init__(
        self,
        messages: list[dict[str, Any]],
        image_data: Any = None,
        *,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        metrics: dict[str, Any] | None = None,
        request_id: str = "",
        tools_kwargs: dict[str, Any] | None = None,
        interaction: Any = None,
        interaction_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.messages = messages
        self.image_data, self.video_data, self.audio_data = image_data, video_data, audio_data
        self.mm_processor_kwargs = mm_processor_kwargs or {}
        self.mm_processor_output = None
        self.metrics = {} if metrics is None else metrics
        self.request_id = request_id
        self.tools_kwargs = tools_kwargs or {}
        self.interaction, self.interaction_kwargs = interaction, interaction_kwargs or {}
        self.prompt_ids: list[int] = []
        self.response_ids: list[int] = []
        self.response_mask: list[int] = []
        self.response_logprobs: list[float] = []
        self.turn_scores: list[float] = []
        self.tool_rewards: list[float] = []
        self.user_turns = self.assistant_turns = 0
        self.tool_calls: list[FunctionCall] = []
        self.routed_experts = None
        self.extra_fields: dict[str, Any] = {}


class VerlSingleTurnLoop(VerlAgentLoop):
    """Rally's counterpart of verl's SingleTurnAgentLoop, for subclasses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prompt_length, self.response_length = (
            self.rollout_config.prompt_length,
            self.rollout_config.response_length,
        )

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        await self.process_vision_info(messages)
        prompt_ids = await self.ct_build_initial_tokens(messages)
        metrics: dict[str, float] = {}
        with simple_timer("generate_sequences", metrics):
            output = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
            )
        ids = output.token_ids[: self.response_length]
        return VerlLoopOutput(
            prompt_ids=prompt_ids, response_ids=ids, response_mask=[1] * len(ids), num_turns=2, metrics=metrics
        )


class VerlToolLoop(VerlAgentLoop):
    """Rally's counterpart of verl's ToolAgentLoop, for subclasses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        multi_turn = self.rollout_config.multi_turn
        self.max_user_turns, self.max_assistant_turns = multi_turn.max_user_turns, multi_turn.max_assistant_turns
        self.max_parallel_calls = multi_turn.max_parallel_calls
        self.max_tool_response_length = multi_turn.max_tool_response_length
        self.tool_response_truncate_side = multi_turn.tool_response_truncate_side
        self.prompt_length, self.response_length = (
            self.rollout_config.prompt_length,
            self.rollout_config.response_length,
        )
        toolbox = self.context.toolbox
        self.tools = {tool.name: ToolHandle(tool) for tool in toolbox.tools}
        self.tool_schemas = toolbox.schemas()
        self.tool_parser_name = self.context.codec.format.name
        self.tool_parser = ToolParser.get_tool_parser(self.tool_parser_name, self.tokenizer)
        self.interaction_config_file = multi_turn.interaction_config_path
        self.interaction_map = dict(self.context.interactions.by_name)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        media = await self.process_vision_info(list(kwargs["raw_prompt"]))
        agent_data = AgentData(
            messages=list(kwargs["raw_prompt"]),
            image_data=media.get("images"),
            request_id=uuid4().hex,
            tools_kwargs=kwargs.get("tools_kwargs") or {},
            **await self._begin_interaction(kwargs),
        )
        state = AgentState.PENDING
        try:
            while state != AgentState.TERMINATED:
                state = await self._next_state(state, agent_data, sampling_params)
        finally:
            if agent_data.interaction is not None:
                await agent_data.interaction.finalize_interaction(self.context.episode_id)
        count = len(agent_data.response_mask)
        split, end = len(agent_data.prompt_ids) - count, self.response_length
        return VerlLoopOutput(
            prompt_ids=agent_data.prompt_ids[:split],
            response_ids=agent_data.prompt_ids[split:][:end],
            response_mask=agent_data.response_mask[:end],
            response_logprobs=agent_data.response_logprobs[:end] or None,
            num_turns=agent_data.user_turns + agent_data.assistant_turns + 1,
            metrics=agent_data.metrics,
            extra_fields={
                **agent_data.extra_fields,
                "turn_scores": agent_data.turn_scores,
                "tool_rewards": agent_data.tool_rewards,
            },
        )

    async def _next_state(
        self, state: AgentState, agent_data: AgentData, sampling_params: dict[str, Any]
    ) -> AgentState:
        if state == AgentState.PENDING:
            return await self._handle_pending_state(agent_data, sampling_params)
        if state == AgentState.GENERATING:
            return await self._handle_generating_state(agent_data, sampling_params)
        if state == AgentState.PROCESSING_TOOLS:
            return await self._handle_processing_tools_state(agent_data)
        if state == AgentState.INTERACTING:
            return await self._handle_interacting_state(agent_data)
        raise LoopError(f"{type(self).__name__} is in the unknown state {state!r}; return an AgentState")

    async def _begin_interaction(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if not self.interaction_config_file:
            return {}
        chosen = row["extra_info"].get("interaction_kwargs") or {}
        if chosen.get("name") not in self.interaction_map:
            known = ", ".join(self.interaction_map)
            raise LoopError(f"interaction_kwargs.name is {chosen.get('name')!r}; the simulated users are {known}")
        interaction = self.interaction_map[chosen["name"]]
        await interaction.start_interaction(self.context.episode_id, **chosen)
        return {"interaction": interaction, "interaction_kwargs": chosen}

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        agent_data.prompt_ids = await self.ct_build_initial_tokens(agent_data.messages, tools=self.tool_schemas)
        return AgentState.GENERATING

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        with simple_timer("generate_sequences", agent_data.metrics):
            output = await self.server_manager.generate(
                request_id=agent_data.request_id, prompt_ids=agent_data.prompt_ids, sampling_params=sampling_params
            )
        agent_data.assistant_turns += 1
        agent_data.response_ids = output.token_ids
        agent_data.prompt_ids = agent_data.prompt_ids + output.token_ids
        agent_data.response_mask += [1] * len(output.token_ids)
        agent_data.response_logprobs += output.log_probs or []
        if self._is_over(agent_data, ignore_termination):
            return AgentState.TERMINATED
        _, agent_data.tool_calls = await self.tool_parser.extract_tool_calls(output.token_ids)
        spoken = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        agent_data.messages.append({"role": "assistant", "content": spoken})
        if agent_data.tool_calls:
            return AgentState.PROCESSING_TOOLS
        return AgentState.INTERACTING if self.interaction_config_file else AgentState.TERMINATED

    def _is_over(self, agent_data: AgentData, ignore_length: bool) -> bool:
        if not ignore_length and len(agent_data.response_mask) >= self.response_length:
            return True
        turns = (
            (self.max_assistant_turns, agent_data.assistant_turns),
            (self.max_user_turns, agent_data.user_turns),
        )
        return any(limit and count >= limit for limit, count in turns)

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        calls = (self._call_tool(call, agent_data.tools_kwargs, agent_data) for call in agent_data.tool_calls)
        with simple_timer("tool_calls", agent_data.metrics):
            answers = await asyncio.gather(*calls)
        messages: list[Message] = []
        for response, reward, _ in answers:
            if response.image or response.video:
                raise LoopError(f"a tool returned images or videos to {type(self).__name__}, which takes only text")
            messages.append({"role": "tool", "content": response.text or ""})
            if reward is not None:
                agent_data.tool_rewards.append(reward)
        return await self._observe(agent_data, messages, cut=True)

    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        over, reply, score, _ = await agent_data.interaction.generate_response(
            self.context.episode_id, agent_data.messages, **agent_data.interaction_kwargs
        )
        if score is not None:
            agent_data.turn_scores.append(score)
        state = await self._observe(agent_data, [{"role": "user", "content": reply}], cut=False)
        return AgentState.TERMINATED if over else state

    async def _observe(self, agent_data: AgentData, messages: list[Message], cut: bool) -> AgentState:
        """Append messages. With `cut`, messages that do not fit end the episode and are left out."""
        agent_data.messages.extend(messages)
        ids = self.context.codec.encode_delta(messages, last_id=agent_data.prompt_ids[-1])
        if cut and len(agent_data.response_mask) + len(ids) >= self.response_length:
            return AgentState.TERMINATED
        agent_data.prompt_ids = [*agent_data.prompt_ids, *ids]
        agent_data.response_mask += [0] * len(ids)
        agent_data.response_logprobs += [0.0] * len(ids) if agent_data.response_logprobs else []
        agent_data.user_turns += 1
        return AgentState.GENERATING

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: dict[str, Any], agent_data: AgentData
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Run one call under the limits of the run. Arguments of a user's parser that are no JSON object are a mistake
        of the policy, which is answered as in verl: an error of the episode would bias its group."""
        try:
            arguments = json.loads(tool_call.arguments)
            if not isinstance(arguments, dict):
                raise ValueError(f"the arguments are of type {type(arguments).__name__} and no object")
        except ValueError as problem:
            return ToolResponse(text=f"Error when executing tool: {problem}"), 0.0, {}
        session = self.context.toolbox.open(self.context.task, self.context.episode_id)
        call = ToolCall(name=tool_call.name, arguments=arguments, raw=tool_call.arguments)
        try:
            [result] = await session.run([call])
        finally:
            await session.close()
        return result.response, result.reward, result.metrics


def format_gpt_oss_tool_response_manually(tool_response: str, tool_call_name: str) -> str:
    """A tool response as gpt-oss reads it."""
    return f"<|start|>functions.{tool_call_name} to=assistant<|channel|>commentary<|message|>{tool_response}<|end|>"


def add_generation_prompt_for_gpt_oss(message_content: str) -> str:
    return f"{message_content}<|start|>assistant"


def build_gpt_oss_tool_response_text(messages: Sequence[Message], tool_call_names: Sequence[str]) -> str:
    """The tool responses and the generation prompt of gpt-oss."""
    pairs = zip(messages, tool_call_names, strict=True)
    texts = (format_gpt_oss_tool_response_manually(message["content"], name) for message, name in pairs)
    return add_generation_prompt_for_gpt_oss("".join(texts))
