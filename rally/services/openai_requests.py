"""The request bodies of OpenAI's API. A field that is not supported is rejected by name, unless it has no effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rally.chat import ChatCodec
from rally.chat.grammars import ANY_OBJECT, Constraint
from rally.chat.thinking import ThinkingError, ThinkingRequest
from rally.services.admission import Refused
from rally.types import Message, SamplingParams

MAX_CHOICES = 128
COMPLETION_TOKENS = 16  # OpenAI's default for a text completion
HARMLESS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "presence_penalty": (None, 0),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "verbosity": (None, "medium"),
}


UNSHOWN = {
    "audio": "only text is",
    "function_call": "send tool_calls, and their results with the role tool",
    "refusal": "send its text as the content",
}
"""Fields of messages that no chat template shows, so that the model would answer without them, and what to do."""


def unshown_field(message: Mapping[str, Any]) -> str | None:
    return next((name for name in UNSHOWN if message.get(name)), None)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis, which this server never adds


class SamplingRequest(BaseModel):
    """The fields that both endpoints share. `top_k`, `min_p`, `stop_token_ids`, `ignore_eos` and `return_token_ids` are
    not OpenAI's; clients send them as `extra_body`."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: int | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        """Some clients write null for every field that is not set."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    def refuse_unknown(self) -> None:
        """Raise Refused for a field that is not supported."""
        for name, value in (self.model_extra or {}).items():
            if name not in HARMLESS and not (name in NEUTRAL and value in NEUTRAL[name]):
                raise Refused(400, f"{name}={_shown(value)} is not supported; leave it out", param=name)
        if self.stream_options is not None and not self.stream:
            raise Refused(400, "stream_options needs stream=true", param="stream_options")

    def sampling(self, choice: int, max_tokens: int, stop_ids: tuple[int, ...], grammar: str = "") -> SamplingParams:
        """The sampling parameters of the `choice`-th choice. With a seed, each choice gets its own."""
        ends = () if self.ignore_eos else stop_ids
        values: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": None if self.seed is None else self.seed + choice,
        }
        return SamplingParams.of(
            {name: value for name, value in values.items() if value is not None}
            | {"max_tokens": max_tokens, "stop": self.stop or (), "stop_ids": (*self.stop_token_ids, *ends)}
            | {"grammar": grammar}
        )


class CompletionRequest(SamplingRequest):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None
    echo: bool = False

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise Refused(400, "an empty prompt cannot be continued; give at least one token", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["text"]
    text: str


class _Function(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function


class _ChatMessage(BaseModel):
    """What a chat template may be given. Other fields are passed on."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str = Field(min_length=1)
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ChatRequest(SamplingRequest):
    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = "auto"
    logprobs: bool | None = None
    top_logprobs: int = 0
    max_completion_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def variables_of(self, codec: ChatCodec) -> dict[str, Any]:
        """The template variables for what the request asks of the model's thinking."""
        wanted = ThinkingRequest(
            effort=self.reasoning_effort, thinking=self.thinking, variables=self.chat_template_kwargs
        )
        try:
            return wanted.template_variables(codec)
        except ThinkingError as problem:
            raise Refused(400, str(problem), param=problem.field) from None

    def messages_for(self, codec: ChatCodec) -> list[Message]:
        """The messages with roles of the model's template: OpenAI's `developer` is its `system`, if it has no other."""
        if codec.template_mentions("developer"):
            return self.messages
        roles = {"developer": "system"}
        return [{**one, "role": roles.get(one["role"], one["role"])} for one in self.messages]

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    def check_messages(self) -> None:
        """Raise Refused for a message that is not text, or not one of OpenAI's. A chat template would print it as
        something else, or fail."""
        for at, message in enumerate(self.messages):
            try:
                _ChatMessage.model_validate(message)
            except ValidationError as error:
                first = error.errors(include_url=False, include_context=False, include_input=False)[0]
                where = ".".join(map(str, ("messages", at, *first["loc"])))
                raise Refused(400, f"{where}: {first['msg']}", param=where) from None
            if dropped := unshown_field(message):
                where = f"messages.{at}.{dropped}"
                raise Refused(400, f"{where} is not supported; {UNSHOWN[dropped]}", param=where)

    @property
    def length_limit(self) -> int | None:
        """The maximum number of new tokens, which has two names."""
        both = {self.max_completion_tokens, self.max_tokens} - {None}
        if len(both) > 1:
            problem = "max_tokens and max_completion_tokens differ; give one of them"
            raise Refused(400, problem, param="max_completion_tokens")
        return both.pop() if both else None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        for at, tool in enumerate(self.tools or []):
            if tool.get("type", "function") != "function" or not _is_function(tool.get("function") or tool):
                problem = f"tools.{at} is not a function with a name and parameters; only such tools are supported"
                raise Refused(400, f"{problem}, so leave it out", param="tools")
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def constraint(self) -> Constraint:
        """What the reply must be: `response_format`, `tool_choice` and `parallel_tool_calls`."""
        only = self._named_tool
        forced = only is not None or self.tool_choice == "required"
        return Constraint(
            schema=self._schema,
            choice="required" if forced else "auto",
            only=only,
            parallel=self.parallel_tool_calls,
        )

    @property
    def _named_tool(self) -> str | None:
        choice = self.tool_choice
        if choice in ("auto", "none", "required", None):
            return None
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            problem = "tool_choice must be auto, none, required, or a function by its name"
            raise Refused(400, problem, param="tool_choice")
        return str(function["name"])

    @property
    def _schema(self) -> Mapping[str, Any] | None:
        """The JSON schema of the answer."""
        wanted = self.response_format or {"type": "text"}
        if wanted.get("type") == "text":
            return None
        if wanted.get("type") == "json_object":
            return ANY_OBJECT
        named = wanted.get("json_schema")
        schema = named.get("schema") if wanted.get("type") == "json_schema" and isinstance(named, dict) else None
        if not isinstance(schema, dict):
            problem = "response_format must have type text, json_object, or json_schema with json_schema.schema"
            raise Refused(400, problem, param="response_format")
        return schema


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _is_function(tool: Any) -> bool:
    """Whether the tool has the name and parameters that are needed to parse calls."""
    return (
        isinstance(tool, dict) and isinstance(tool.get("name"), str) and isinstance(tool.get("parameters") or {}, dict)
    )
