"""The data model of Rally: frozen dataclasses that check their invariants when they are made.

The ids, mask, logprobs and images of a Segment grow together or not at all. Its mask is 1 exactly on tokens that the
policy sampled. An Episode has exactly one stop reason. This module imports nothing else from Rally.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from numbers import Real
from pathlib import Path
from typing import Any, Literal

Message = dict[str, Any]
"""One chat message in OpenAI form: role, content, and optionally tool_calls, name and tool_call_id."""


LOST_EXIT_CODE = 75
"""The exit code of a run that lost a rank or a node; the same command resumes it. (EX_TEMPFAIL of sysexits.h.)"""


class RallyError(ValueError):
    """A mistake that the user can fix. The text says what is wrong and what to do. The command line exits with
    `exit_code`."""

    exit_code = 2


class StopReason(StrEnum):
    """Why an episode ended. Every episode has exactly one reason, and each is a metric `stop/<reason>`."""

    STOP = "stop"  # the policy ended its turn without a call, or the simulated user ended the episode
    LENGTH = "length"  # the response budget (data.max_response_length) is used up
    MAX_TURNS = "max_turns"  # the assistant-turn limit
    MAX_USER_TURNS = "max_user_turns"  # the limit of user and tool turns
    CONTEXT = "context"  # the next turn does not fit into the model's context window
    TOOL_SUCCESS = "tool_success"  # stop_on_tool_success or stop_on_correct was met
    REPETITION = "repetition"  # the same tool calls, several turns in a row
    TOOL_FAILURES = "tool_failures"  # too many failed tool turns in a row
    DEADLINE = "deadline"  # a turn, the episode or the step ran out of time
    CANCELLED = "cancelled"  # the engine aborted the request
    ERROR = "error"  # the loop itself failed; Episode.error says how


class ToolStatus(StrEnum):
    """How a tool call ended. All but OK are reported to the model as text and counted."""

    OK = "ok"
    ERROR = "error"  # the tool raised or reported a failure
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"  # the server, sandbox or session of the tool failed
    REJECTED = "rejected"  # too many calls of the tool were waiting already
    BAD_ARGUMENTS = "bad_arguments"  # the arguments do not fit the tool's schema
    UNKNOWN_TOOL = "unknown_tool"
    MALFORMED = "malformed"  # the text of the call could not be parsed


HINTS = frozenset(
    {
        *(ToolStatus.MALFORMED, ToolStatus.UNKNOWN_TOOL, ToolStatus.BAD_ARGUMENTS),
        *(ToolStatus.REJECTED, ToolStatus.TIMEOUT),
    }
)
"""The statuses of calls that no tool answered: the text is Rally's own."""

TOOL_TROUBLE = ("cancelled", "abandoned", "create_errors", "calc_reward_errors", "release_errors")
"""Counters of problems besides the statuses of calls: calls cancelled by a deadline of the turn, episode or step;
abandoned threads and creations; methods that failed."""

FinishReason = Literal["stop", "length", "abort"]

TEMPERATURES = (1e-6, 1e6)
"""Beyond 0: logits divided by less than the first overflow float32; more than the second is uniform."""
MAX_STOP_IDS, MAX_STOPS, MAX_STOP_LENGTH = 1024, 64, 1024
MAX_GRAMMAR = 2**18  # characters
INT32 = 2**31 - 1
FLOAT32_MIN, FLOAT32_MAX = 1.1754943508222875e-38, 3.4028234663852886e38  # normal numbers
OnOutage = Literal["mask", "drop_group", "count"]
"""What an outage of a tool does to its episode: mask keeps it out of the loss and of its group's baseline, drop_group
drops its group, count trains on it like on any other. Later values do not undo earlier ones: see `Episode.outage`."""


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
    grammar: str = ""  # what is sampled must match it (`rally.chat.grammars`); empty: anything

    def __post_init__(self) -> None:
        """The one check of sampling parameters: every endpoint and every engine builds this class. Numbers are
        normalized, and nothing passes that float32, int64 or a server could not represent."""
        checked = {
            "temperature": _real("temperature", self.temperature),
            "top_p": _real("top_p", self.top_p),
            "min_p": _real("min_p", self.min_p),
            "top_k": _whole("top_k", self.top_k),
            "max_tokens": _whole("max_tokens", self.max_tokens),
            "seed": None if self.seed is None else _whole("seed", self.seed),
            "stop_ids": tuple(_whole("stop_ids", i) for i in _several("stop_ids", self.stop_ids, MAX_STOP_IDS)),
            "stop": _several("stop", self.stop, MAX_STOPS),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        low, high = TEMPERATURES
        if self.temperature and not low <= self.temperature <= high:
            raise RallyError(f"temperature must be 0 (greedy) or lie in [{low:g}, {high:g}], not {self.temperature:g}")
        if not 0 < self.top_p <= 1:
            raise RallyError(f"top_p must lie in (0, 1], not {self.top_p}")
        if not (self.top_k == -1 or 1 <= self.top_k <= INT32):
            raise RallyError(f"top_k must be -1 (off) or lie in [1, {INT32}], not {brief(self.top_k)}")
        if not 0 <= self.min_p < 1:
            raise RallyError(f"min_p must lie in [0, 1), not {self.min_p}")
        if not 1 <= self.max_tokens <= INT32:
            raise RallyError(f"max_tokens must lie in [1, {INT32}], not {brief(self.max_tokens)}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise RallyError(f"seed must fit into 64 bits, and {brief(self.seed)} does not")
        if self.stop_ids and not 0 <= min(self.stop_ids) <= max(self.stop_ids) <= INT32:
            raise RallyError("stop_ids must be token ids, which are 0 or more and below the size of the vocabulary")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise RallyError(f"stop must be texts of 1 to {MAX_STOP_LENGTH} characters")
        if not isinstance(self.ignore_eos, bool):
            raise RallyError(f"ignore_eos must be true or false, not {brief(self.ignore_eos)}")
        if not isinstance(self.grammar, str) or len(self.grammar) > MAX_GRAMMAR:
            raise RallyError(f"grammar must be a text of at most {MAX_GRAMMAR} characters")
        if self.grammar and self.ignore_eos:
            raise RallyError("a generation with a grammar ends where the grammar does; leave ignore_eos out")

    def greedy(self) -> SamplingParams:
        """These parameters with greedy sampling."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)

    @classmethod
    def of(cls, values: Mapping[str, Any] | SamplingParams) -> SamplingParams:
        """Parameters from a dictionary, as agent loops write it. An unknown name is an error."""
        if isinstance(values, SamplingParams):
            return values
        if not isinstance(values, Mapping):
            raise RallyError(f"sampling parameters must be a dictionary, not {brief(values)}")
        alias = {"max_new_tokens": "max_tokens", "stop_token_ids": "stop_ids"}
        named = {alias.get(str(key), str(key)): value for key, value in values.items()}
        known = cls.__dataclass_fields__
        if unknown := sorted(named.keys() - known.keys()):
            raise RallyError(f"unknown sampling parameter {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        for key in ("stop_ids", "stop"):
            if isinstance(named.get(key), (str, int)):
                named[key] = (named[key],)
        return cls(**{name: value for name, value in named.items() if value is not None})


def finite_number(value: Any) -> float | None:
    """The number as a float; None if it is none, or if no finite float represents it, as with an integer of 400
    digits."""
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _real(name: str, value: Any) -> float:
    """The value as a float that float32 represents too: finite, and 0 or not too small."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RallyError(f"{name} must be a number, not {brief(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > FLOAT32_MAX or 0 < abs(number) < FLOAT32_MIN:
        raise RallyError(f"{name} must be a number that float32 can represent, not {brief(value)}")
    return number


def _whole(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise RallyError(f"{name} must be a whole number, not {brief(value)}") from None


def _several(name: str, values: Any, most: int) -> tuple[Any, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, Set)):
        raise RallyError(f"{name} must be a list, not {brief(values)}")
    if len(values) > most:
        raise RallyError(f"{name} has {len(values)} entries; give at most {most}")
    return tuple(values)


def brief(value: Any) -> str:
    """The value for an error message, of bounded length."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


@dataclass(frozen=True)
class WeightSpan:
    """Tokens [start, end) of a generation (or of a response) were sampled under weight version `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Routes:
    """The experts that the routers of a mixture-of-experts model chose, for the first tokens of a history:
    little-endian int16 numbers [tokens, layers, experts of a token]."""

    data: bytes = field(repr=False)
    layers: int
    experts: int

    def __post_init__(self) -> None:
        assert self.layers > 0 and self.experts > 0 and len(self.data) % (2 * self.layers * self.experts) == 0

    def __len__(self) -> int:
        """How many tokens they cover."""
        return len(self.data) // (2 * self.layers * self.experts)

    def first(self, tokens: int) -> Routes:
        return Routes(self.data[: 2 * self.layers * self.experts * tokens], self.layers, self.experts)


@dataclass(frozen=True)
class ConstrainedSpan:
    """Tokens [start, end) of a generation (or of a response) were sampled under `grammar`: at each of them only some
    tokens were allowed. `masks` holds which, compressed (`rally.models.token_masks`)."""

    start: int
    end: int
    grammar: str
    masks: bytes = field(repr=False)

    def moved(self, by: int) -> ConstrainedSpan:
        return replace(self, start=self.start + by, end=self.end + by)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The result of one request to an engine. `logprobs` are under softmax(logits / temperature), unfiltered: the
    policy that is trained (temperature 1 when greedy). Under a grammar the softmax is over the tokens that it allows,
    and `constrained` records them. `sampling_logprobs` are after top-p, top-k and min-p. All times
    are seconds from the request: `queued_seconds` until the engine started it, 0 if the engine does not report it.
    `routes` are those of the prompt and all sampled tokens but the last, which was not computed; None if not asked
    for."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    sampling_logprobs: tuple[float, ...] = ()
    cached_tokens: int = 0
    spans: tuple[WeightSpan, ...] = ()
    seconds: float = 0.0
    first_token_seconds: float = 0.0
    queued_seconds: float = 0.0
    routes: Routes | None = None
    constrained: ConstrainedSpan | None = None

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.logprobs), "one logprob per sampled token"
        span = self.constrained
        assert span is None or (span.start, span.end) == (0, len(self.ids)), "a grammar covers the whole generation"
        assert not self.sampling_logprobs or len(self.sampling_logprobs) == len(self.ids)
        assert not self.spans or self.spans[-1].end == len(self.ids), "weight spans must cover the ids"


class ImageGone(RallyError):
    """The file of an image was removed or changed since the image was loaded."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Image:
    """An image, identified by its content: two are equal if their bytes are. The bytes are in `data` or in a file that
    must not change. `rally.images.loading` makes and checks images."""

    hash: str
    format: Literal["png", "jpeg", "webp", "gif", "bmp"]
    width: int
    height: int
    data: bytes | None = field(default=None, repr=False)
    path: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        assert (self.data is None) != (self.path is None), "an image has either data or a path"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    @staticmethod
    def hash_of(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()[:32]

    def read(self) -> bytes:
        """The encoded bytes. Raises ImageGone if the file has changed."""
        if self.data is not None:
            return self.data
        assert self.path is not None
        try:
            data = Path(self.path).read_bytes()
        except OSError as problem:
            raise ImageGone(f"the image {self.path} cannot be read any more ({problem.strerror}); restore it") from None
        if self.hash_of(data) != self.hash:
            raise ImageGone(f"the image {self.path} has changed since the run began; restore it, or start a new run")
        return data


@dataclass(frozen=True)
class ImageSpan:
    """The position of an image in a history: `rows` x `columns` tokens from `start` on, row by row. Only spans mark
    images: a placeholder token that the policy sampled is an ordinary token."""

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
    """One contiguous token history: a prompt, then sampled (mask 1) and observed (mask 0) tokens in order. `images` are
    the spans of its images, counted from the start of the prompt. `routes` cover the tokens before the last sampled
    one, if the engine returned them for the last generation. `constrained` are the response tokens that were sampled
    under a grammar.

    Only `append_sampled` and `append_observed` extend a segment, so ids, mask, logprobs and images stay consistent.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...] = ()
    response_mask: tuple[int, ...] = ()
    response_logprobs: tuple[float, ...] = ()
    spans: tuple[WeightSpan, ...] = ()
    images: tuple[ImageSpan, ...] = ()
    routes: Routes | None = None
    constrained: tuple[ConstrainedSpan, ...] = ()

    def __post_init__(self) -> None:
        assert self.routes is None or len(self.routes) < len(self.ids), "routes of computed tokens"
        n = len(self.response_ids)
        assert len(self.response_mask) == n and len(self.response_logprobs) == n, "ids, mask, logprobs drifted apart"
        end = 0
        for span in self.images:
            assert end <= span.start < span.end <= len(self.prompt_ids) + n, "images are in order, inside the history"
            end = span.end
            tokens = slice(max(0, span.start - len(self.prompt_ids)), max(0, end - len(self.prompt_ids)))
            assert not any(self.response_mask[tokens]), "image tokens are not sampled"
        end = 0
        for one in self.constrained:
            assert end <= one.start < one.end <= n, "constrained spans are in order, inside the response"
            assert all(self.response_mask[one.start : one.end]), "only sampled tokens are constrained"
            end = one.end

    @property
    def ids(self) -> tuple[int, ...]:
        """The whole history, which is the engine's prompt for the next turn."""
        return self.prompt_ids + self.response_ids

    @property
    def sampled(self) -> int:
        """The number of sampled tokens."""
        return sum(self.response_mask)

    def append_sampled(self, generation: Generation) -> Segment:
        start, n = len(self.response_ids), len(generation.ids)
        routes = generation.routes
        assert routes is None or len(routes) == max(0, len(self.ids) + n - 1), "one route per computed token"
        return Segment(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids + generation.ids,
            response_mask=self.response_mask + (1,) * n,
            response_logprobs=self.response_logprobs + generation.logprobs,
            spans=self.spans + tuple(WeightSpan(s.version, s.start + start, s.end + start) for s in generation.spans),
            images=self.images,
            routes=routes if n else self.routes,
            constrained=self.constrained
            + ((generation.constrained.moved(start),) if generation.constrained is not None and n else ()),
        )

    def append_observed(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> Segment:
        """The segment with tokens of a template, tool or user appended. `images` are relative to `ids`."""
        n, start = len(ids), len(self.prompt_ids) + len(self.response_ids)
        return Segment(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids + tuple(ids),
            response_mask=self.response_mask + (0,) * n,
            response_logprobs=self.response_logprobs + (0.0,) * n,
            spans=self.spans,
            images=self.images + tuple(span.moved(start) for span in images),
            routes=self.routes,
            constrained=self.constrained,
        )


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One tool call of the policy. For a malformed call, `error` is set and `arguments` is empty."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    raw: str = ""
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class ToolResponse:
    """The response of a tool to the model: text, images, or both."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def __post_init__(self) -> None:
        for name in ("image", "video"):
            if not isinstance(getattr(self, name), (list, type(None))):
                raise RallyError(f"ToolResponse.{name} must be a list, not {type(getattr(self, name)).__name__}")


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """A finished tool call: its response, status and reward. It waited `queued` seconds, then ran for `seconds`.
    `cached`: it was answered from the cache. `outage`: it failed because of the tool's infrastructure, which is not the
    policy's fault."""

    call: ToolCall
    status: ToolStatus
    response: ToolResponse
    reward: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    truncated: bool = False
    queued: float = 0.0
    cached: bool = False
    outage: bool = False

    @property
    def ok(self) -> bool:
        return self.status is ToolStatus.OK

    @property
    def is_hint(self) -> bool:
        """Whether the response is not the tool's but Rally's short message to the model. Limits on the length of tool
        responses do not apply to it, because half a hint says nothing."""
        return self.status in HINTS


@dataclass(frozen=True, kw_only=True)
class ToolAnswer:
    """A tool message of an agent behind the gateway. The agent ran the tool itself, so that status and duration are not
    known. `call` is the call that it answers; None if it names none of the last turn."""

    text: str
    call: ToolCall | None = None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of an episode. It covers the response tokens [start, end) of a segment: sampled tokens of an assistant
    turn, observed tokens of a tool or user turn. The results of calls that Rally ran are `tool_results`, the answers of
    an agent that runs its own tools are `tool_answers`.

    The turn began `started` seconds after the episode (`Episode.timings["started"]`, Unix time) and took `seconds`.
    Counted from its start, the engine began after `queued` and returned the first token after `first_token` seconds; 0
    if the engine does not report it."""

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
    tool_answers: tuple[ToolAnswer, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Task:
    """One row of the data: the prompt, the ground truth for the reward, and the keywords for tools and users. The
    prompt of a row of an environment (`row["env"]`) is empty until the environment has written it."""

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
        assert self.prompt or "env" in self.row, "a task needs at least one message"


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One complete episode. `group` identifies the episodes sampled for one prompt in one step. A `baseline` is the
    greedy episode that the others are compared with; it is recorded and not trained on."""

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
        assert (self.error is not None) == (self.stop_reason is StopReason.ERROR), "error and stop reason must agree"
        assert self.segments or self.error, "an episode without tokens must have an error"

    @property
    def num_turns(self) -> int:
        """The number of messages, with the whole prompt counted as one, as in verl."""
        return len(self.turns) + 1

    @property
    def tool_results(self) -> tuple[ToolResult, ...]:
        return tuple(r for turn in self.turns for r in turn.tool_results)

    @property
    def outage(self) -> OnOutage | None:
        """What happens to the episode because a tool was unavailable; None if none was, or if it counts anyway."""
        policy = (self.extra.get("tool_outage") or {}).get("on_outage")
        return None if policy == "count" else policy

    def scored(self, reward: float, info: Mapping[str, Any] | None = None) -> Episode:
        return replace(self, reward=float(reward), reward_info=dict(info or {}))
