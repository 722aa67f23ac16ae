"""The whole data model of Rally: frozen values, checked at the door.

Guarantees: a Segment's ids, mask, logprobs and images grow together or not at all, and its mask is 1 exactly on tokens
the policy sampled; an Episode ends for exactly one named reason. Nothing here imports anything of ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

Message = dict[str, Any]
"""One chat message in the OpenAI shape: role, content, and where they apply tool_calls, name."""


class RallyError(ValueError):
    """Something the user can mend. The text is one sentence that says what to do; the command line exits with 2."""


class StopReason(StrEnum):
    """Why an episode ended. Closed: every episode carries exactly one, and each is a metric `stop/<reason>`."""

    STOP = "stop"  # the policy, or its simulated user, had nothing more to ask for
    LENGTH = "length"  # the response budget (data.max_response_length) is used up
    MAX_TURNS = "max_turns"  # the assistant-turn limit
    MAX_USER_TURNS = "max_user_turns"  # the limit of user and tool turns
    CONTEXT = "context"  # what comes next does not fit the model's context window
    TOOL_SUCCESS = "tool_success"  # stop_on_tool_success or stop_on_correct was met
    REPETITION = "repetition"  # the same tool calls, several turns in a row
    TOOL_FAILURES = "tool_failures"  # too many failed tool turns in a row
    DEADLINE = "deadline"  # a turn, the episode or the step ran out of time
    CANCELLED = "cancelled"  # somebody asked for it
    ERROR = "error"  # the loop itself failed; Episode.error says how


class ToolStatus(StrEnum):
    """How a tool call ended. Everything but OK is told to the model as text and counted."""

    OK = "ok"
    ERROR = "error"  # the tool raised, or said itself that it failed
    TIMEOUT = "timeout"
    REJECTED = "rejected"  # too many calls of the tool were waiting already
    BAD_ARGUMENTS = "bad_arguments"  # arguments do not fit the tool's schema
    UNKNOWN_TOOL = "unknown_tool"
    MALFORMED = "malformed"  # the text of the call could not be parsed


TOOL_TROUBLE = ("cancelled", "abandoned", "create_errors", "calc_reward_errors", "release_errors")
"""What an episode counts beside its answered calls: those cut off by a deadline of the turn, episode or step; threads
and creations that were given up; methods that failed."""

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one generation is sampled. `temperature` 0 is greedy; `top_k` -1 and `min_p` 0 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 512
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise RallyError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise RallyError(f"top_p must lie in (0, 1], not {self.top_p}")
        if not (self.top_k == -1 or self.top_k >= 1):
            raise RallyError(f"top_k must be -1 (off) or at least 1, not {self.top_k}")
        if not 0 <= self.min_p < 1:
            raise RallyError(f"min_p must lie in [0, 1), not {self.min_p}")
        if not self.max_tokens >= 1:
            raise RallyError(f"max_tokens must be at least 1, not {self.max_tokens}")

    def greedy(self) -> SamplingParams:
        """The likeliest token each time; everything else as it is."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)

    @classmethod
    def of(cls, values: Mapping[str, Any] | SamplingParams) -> SamplingParams:
        """The same from a dictionary, as a user's agent loop writes it; an unknown name is an error."""
        if isinstance(values, SamplingParams):
            return values
        alias = {"max_new_tokens": "max_tokens", "stop_token_ids": "stop_ids"}
        named = {alias.get(k, k): v for k, v in values.items()}
        known = cls.__dataclass_fields__
        if unknown := sorted(named.keys() - known.keys()):
            raise RallyError(f"unknown sampling parameter {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        for key in ("stop_ids", "stop"):
            if key in named:
                named[key] = (named[key],) if isinstance(named[key], (str, int)) else tuple(named[key] or ())
        return cls(**named)


@dataclass(frozen=True)
class WeightSpan:
    """Tokens [start, end) of a generation (or of a response) were sampled under weight version `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What an engine sampled. `logprobs` are under softmax(logits / temperature), unfiltered: the policy the
    trainer trains (temperature 1 when greedy). `sampling_logprobs` are after top-p/top-k/min-p as well. All seconds are
    from the request on: `queued_seconds` until the engine began with it, 0 where an engine does not say."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    sampling_logprobs: tuple[float, ...] = ()
    cached_tokens: int = 0
    spans: tuple[WeightSpan, ...] = ()
    seconds: float = 0.0
    first_token_seconds: float = 0.0
    queued_seconds: float = 0.0

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.logprobs), "one logprob per sampled token"
        assert not self.sampling_logprobs or len(self.sampling_logprobs) == len(self.ids)
        assert not self.spans or self.spans[-1].end == len(self.ids), "weight spans must cover the ids"


class ImageGone(RallyError):
    """The file of an image is no longer what it was when the image was first read."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Image:
    """A picture, known by its content: two are equal exactly if their bytes are. The bytes are here or in a file that
    must still hold them when somebody looks; `rally.images.loading` makes and checks them."""

    hash: str
    format: Literal["png", "jpeg", "webp", "gif", "bmp"]
    width: int
    height: int
    data: bytes | None = field(default=None, repr=False)
    path: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        assert (self.data is None) != (self.path is None), "an image has its bytes or says where they are"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    @staticmethod
    def hash_of(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()[:32]

    def read(self) -> bytes:
        """The encoded bytes, and no others."""
        if self.data is not None:
            return self.data
        assert self.path is not None
        try:
            data = Path(self.path).read_bytes()
        except OSError as problem:
            raise ImageGone(
                f"the image {self.path} cannot be read any more ({problem.strerror}); put it back"
            ) from None
        if self.hash_of(data) != self.hash:
            raise ImageGone(f"the image {self.path} has changed since the run began; begin again, or put it back")
        return data


@dataclass(frozen=True)
class ImageSpan:
    """An image stands at `start` of a history, `rows` x `columns` tokens of it, one row after the other. That there is
    an image is said by this alone: a placeholder token that the policy sampled shows nothing."""

    start: int
    rows: int
    columns: int
    image: Image

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns

    def moved(self, by: int) -> ImageSpan:
        return replace(self, start=self.start + by)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One unbroken token history: a prompt, then what was sampled (mask 1) and observed (mask 0) in order. `images`
    say which of its tokens are pictures, counted from the beginning of the prompt.

    Only `append_sampled` and `append_observed` make a longer one, so ids, mask, logprobs and images cannot drift apart.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...] = ()
    response_mask: tuple[int, ...] = ()
    response_logprobs: tuple[float, ...] = ()
    spans: tuple[WeightSpan, ...] = ()
    images: tuple[ImageSpan, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.response_ids)
        assert len(self.response_mask) == n and len(self.response_logprobs) == n, "ids, mask, logprobs drifted apart"
        end = 0
        for span in self.images:
            assert end <= span.start < span.end <= len(self.prompt_ids) + n, "images stand in order, inside the history"
            end = span.end
            seen = slice(max(0, span.start - len(self.prompt_ids)), max(0, end - len(self.prompt_ids)))
            assert not any(self.response_mask[seen]), "nobody samples an image"

    @property
    def ids(self) -> tuple[int, ...]:
        """The whole history: exactly what the engine is given at the next turn."""
        return self.prompt_ids + self.response_ids

    @property
    def sampled(self) -> int:
        """How many tokens the policy sampled."""
        return sum(self.response_mask)

    def append_sampled(self, generation: Generation) -> Segment:
        start, n = len(self.response_ids), len(generation.ids)
        return Segment(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids + generation.ids,
            response_mask=self.response_mask + (1,) * n,
            response_logprobs=self.response_logprobs + generation.logprobs,
            spans=self.spans + tuple(WeightSpan(s.version, s.start + start, s.end + start) for s in generation.spans),
            images=self.images,
        )

    def append_observed(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> Segment:
        """With what somebody else wrote; its images are counted from its own beginning."""
        n, start = len(ids), len(self.prompt_ids) + len(self.response_ids)
        return Segment(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids + tuple(ids),
            response_mask=self.response_mask + (0,) * n,
            response_logprobs=self.response_logprobs + (0.0,) * n,
            spans=self.spans,
            images=self.images + tuple(span.moved(start) for span in images),
        )


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call the policy wrote. `error` is set, and `arguments` empty, when its text could not be understood."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    raw: str = ""
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class ToolResponse:
    """What a tool hands back to the model: text, images, or both."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def __post_init__(self) -> None:
        for name in ("image", "video"):
            if not isinstance(getattr(self, name), (list, type(None))):
                raise RallyError(f"ToolResponse.{name} must be a list, not {type(getattr(self, name)).__name__}")


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """A finished tool call: what the model is told, how it ended, what it earned and how long it took: `queued` seconds
    until it was let through, then `seconds`. `cached`: it was answered from memory."""

    call: ToolCall
    status: ToolStatus
    response: ToolResponse
    reward: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    truncated: bool = False
    queued: float = 0.0
    cached: bool = False

    @property
    def ok(self) -> bool:
        return self.status is ToolStatus.OK


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of the exchange. Assistant turns own response tokens [start, end) of a segment; so do tool and
    user turns, as observed tokens.

    It took `seconds`, from `started` seconds after the episode began (`Episode.timings["started"]`, Unix time). Of
    these, counted from its beginning, the engine began after `queued` and the first token was there after
    `first_token`; 0 where the engine does not say."""

    role: Literal["assistant", "tool", "user"]
    text: str
    segment: int = 0
    start: int = 0
    end: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    tool_results: tuple[ToolResult, ...] = ()
    reward: float | None = None
    finish: FinishReason | None = None
    cached_tokens: int = 0
    started: float = 0.0
    seconds: float = 0.0
    queued: float = 0.0
    first_token: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """One row: what the agent is asked, how its answer is judged, and what its tools are given."""

    id: str
    data_source: str
    prompt: tuple[Message, ...]
    ground_truth: Any = None
    agent_name: str | None = None
    tools_kwargs: dict[str, dict[str, Any]] = field(default_factory=dict)
    interaction_kwargs: dict[str, Any] = field(default_factory=dict)
    extra_info: dict[str, Any] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.prompt, "a task needs at least one message"


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One whole exchange. `group` ties together the episodes sampled for one prompt in one step. A `baseline` is the
    greedy one that they are compared with: it is recorded and never trained on."""

    id: str
    task: Task
    group: str
    stop_reason: StopReason
    segments: tuple[Segment, ...] = ()
    turns: tuple[Turn, ...] = ()
    reward: float | None = None
    reward_info: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    step: int = 0
    validate: bool = False
    seed: int | None = None
    baseline: bool = False
    timings: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert (self.error is not None) == (self.stop_reason is StopReason.ERROR), "an error has a reason, and only it"
        assert self.segments or self.error, "an episode without tokens must say why"

    @property
    def num_turns(self) -> int:
        """Messages exchanged, the first prompt counted as one: what users of this field call num_turns."""
        return len(self.turns) + 1

    @property
    def tool_results(self) -> tuple[ToolResult, ...]:
        return tuple(r for turn in self.turns for r in turn.tool_results)

    def scored(self, reward: float, info: Mapping[str, Any] | None = None) -> Episode:
        return replace(self, reward=float(reward), reward_info=dict(info or {}))
