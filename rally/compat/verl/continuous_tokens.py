"""verl 0.9's interface for histories that grow by tokens, over `ChatCodec`.

A history is extended by what was sampled or by the delta of new messages. It is never encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rally.chat import ChatCodec
from rally.loops.base import LoopError
from rally.types import Message


@dataclass
class MergeResult:
    """The extended history, and how many tokens were appended. Nothing is ever removed."""

    token_ids: list[int]
    appended_token_count: int
    kind: Literal["context", "assistant"] = "context"
    inserted_token_ids: list[int] = field(default_factory=list)
    removed_prefix_token_count: int = 0


class ContinuousTokens:
    """Builds and extends the history of one episode."""

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec

    def supports_multimodal(self) -> bool:
        return False

    def build_initial_tokens(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **media: Any
    ) -> list[int]:
        """The ids of the first messages."""
        return list(self._with(tools).encode_prompt(messages))

    def merge_context_tokens(
        self,
        previous_messages: Sequence[Message],
        updated_messages: Sequence[Message],
        runtime_token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> MergeResult:
        """The history with the messages that follow `previous_messages`, and the next generation prompt. A turn that
        was cut off is closed first."""
        known = len(previous_messages)
        if list(updated_messages[:known]) != list(previous_messages):
            raise LoopError("the agent loop changed earlier messages; a history of tokens can only be continued")
        delta = self._with(tools).encode_delta(updated_messages[known:], last_id=runtime_token_ids[-1])
        return MergeResult([*runtime_token_ids, *delta], len(delta))

    merge_non_assistant_tokens = merge_context_tokens  # the name in verl 0.10

    def merge_assistant_tokens(
        self, runtime_token_ids: Sequence[int], assistant_token_ids: Sequence[int]
    ) -> MergeResult:
        """The history with a sampled turn."""
        ids = [*runtime_token_ids, *assistant_token_ids]
        return MergeResult(ids, len(assistant_token_ids), kind="assistant")

    def align_response_metadata(
        self,
        merge_result: MergeResult,
        response_mask: Sequence[int],
        response_logprobs: Sequence[float] | None = None,
        *,
        assistant_logprobs: Sequence[float] | None = None,
    ) -> tuple[list[int], list[float] | None]:
        """Mask and log-probs of the extended history: 1 and the given ones for sampled tokens, 0 for others."""
        count, sampled = merge_result.appended_token_count, merge_result.kind == "assistant"
        mask = [*response_mask, *[int(sampled)] * count]
        if response_logprobs is None:
            if assistant_logprobs is not None:
                raise LoopError("assistant_logprobs need response_logprobs; give both or neither")
            return mask, None
        added = list(assistant_logprobs or ()) if sampled else [0.0] * count
        if len(added) != count:
            raise LoopError(f"there are {count} sampled tokens but {len(added)} assistant_logprobs; give one for each")
        return mask, [*response_logprobs, *added]

    def _with(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatCodec:
        return self._codec if tools is None else self._codec.with_tools(tools)
