"""Defines `AgentLoopBase`, the base class of agent loops, and what a loop works with.

A loop plays one episode for one row. It calls `self.server.generate(prompt_ids, sampling_params)` (`EpisodeServer`),
which adds the stop tokens, token budget and seed of the run and measures the time. `AgentLoopOutput` is the result.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from rally.chat import ChatCodec
from rally.engines import Engine, EngineError
from rally.engines.base import NO_GRAMMAR, GrammarEngine, LocalEngine, OnTokens
from rally.envs import Environments
from rally.images.loading import read_image
from rally.interactions import Interactions
from rally.tools import ToolBox
from rally.tools.invoke import is_outage
from rally.types import (
    ConstrainedSpan,
    Generation,
    ImageSpan,
    Message,
    RallyError,
    Routes,
    SamplingParams,
    Segment,
    StopReason,
    Task,
    Turn,
    WeightSpan,
)


class LoopError(RallyError):
    """An agent loop cannot be loaded or run, or returned an invalid result."""


Fault = Literal["policy", "infrastructure"]
"""Whose fault a failed episode is: the policy's, because code of the user could not handle what it wrote, or that of
anything else."""


class EpisodeFailed(LoopError):
    """An episode failed with `failure`. `output` is what there is of it."""

    def __init__(self, failure: BaseException, output: AgentLoopOutput, fault: Fault) -> None:
        super().__init__(str(failure))
        self.failure, self.output, self.fault = failure, output, fault


def fault_of(failure: BaseException, sampled: bool) -> Fault:
    """Whose fault an exception of a loop or an agent is. The policy's, if something was sampled and the code that
    raised could not handle it: an unknown tool, malformed arguments, an answer that does not parse. Not the policy's
    are the errors of Rally's own parts (engine, template, simulated user), connections that fail, and code that names
    what does not exist."""
    if isinstance(failure, EpisodeFailed):
        return failure.fault
    blameless = isinstance(failure, RallyError | NameError | ImportError | MemoryError | asyncio.CancelledError)
    return "policy" if sampled and not blameless and not is_outage(failure) else "infrastructure"


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """The limits and stop conditions of an episode. None and 0 mean no limit."""

    prompt_length: int | None = None
    truncation: Literal["error", "left", "right", "middle"] = "error"
    response_length: int = 512
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    max_tool_response_tokens: int | None = None
    stop_on_tool_success: bool = False
    stop_on_correct: bool = False
    timeout_per_turn: float | None = None
    episode_timeout: float | None = None
    max_tool_failures: int = 3
    max_repeated_calls: int = 3
    history: Literal["append", "rerender"] = "append"
    sanity_check: Literal["strict", "ignore_strippable", "disable"] = "strict"

    def turn_seconds(self, elapsed: float) -> float | None:
        """The time limit of the next turn in seconds, `elapsed` seconds into the episode."""
        limits = [self.timeout_per_turn]
        if self.episode_timeout is not None:
            limits.append(max(0.0, self.episode_timeout - elapsed))
        return min((x for x in limits if x is not None), default=None)


@dataclass(kw_only=True)
class AgentLoopOutput:
    """The result of a loop. Only the first three fields are required."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    response_mask: Sequence[int]
    response_logprobs: Sequence[float] | None = None
    num_turns: int = 0
    reward_score: float | None = None
    reward_info: dict[str, Any] = field(default_factory=dict)
    """Numbers beside the reward, for metrics; used only with `reward_score`."""
    prompt_messages: Sequence[Message] = ()
    """The prompt as messages, if the loop and not the row wrote it."""
    turn_rewards: Sequence[float] | None = None
    multi_modal_data: Mapping[str, Any] | None = None
    images: Sequence[ImageSpan] = ()
    extra_fields: dict[str, Any] = field(default_factory=dict)
    metrics: Any = None
    """Seconds that the loop measured itself: a mapping or an object with `tool_calls`."""
    routed_experts: None = None
    """Accepted for verl loops, which pass it through. Rally's engines return None."""
    segments: tuple[Segment, ...] = ()
    turns: tuple[Turn, ...] = ()
    stop_reason: StopReason = StopReason.STOP

    def as_segments(self, codec: ChatCodec, generations: Sequence[Generation] = ()) -> tuple[Segment, ...]:
        """The segments, built from the lists if the loop returned none. Missing log-probs come from `generations`."""
        if self.segments:
            return self.segments
        if set(self.response_mask) - {0, 1}:
            raise LoopError(
                "the agent loop returned a response_mask with values other than 0 (observed) and 1 (sampled)"
            )
        self._check_length("response_mask", self.response_mask)
        logprobs = self._engine_logprobs(generations) if self.response_logprobs is None else self.response_logprobs
        self._check_length("response_logprobs", logprobs)
        return (
            Segment(
                prompt_ids=tuple(self.prompt_ids),
                response_ids=tuple(self.response_ids),
                response_mask=tuple(map(int, self.response_mask)),
                response_logprobs=tuple(logprobs),
                spans=self._engine_spans(generations),
                images=tuple(self.images) or self._located(codec),
                routes=self._engine_routes(generations),
                constrained=self._engine_constraints(generations),
            ),
        )

    def _engine_spans(self, generations: Sequence[Generation]) -> tuple[WeightSpan, ...]:
        """The weight versions of the sampled tokens; none if these are not the ones that the engine sampled."""
        places = [at for at, mask in enumerate(self.response_mask) if mask]
        known = [token for generation in generations for token in generation.ids]
        if [self.response_ids[at] for at in places] != known[: len(places)]:
            return ()
        versions = [s.version for g in generations for s in g.spans for _ in range(s.end - s.start)]
        spans: list[WeightSpan] = []
        for at, version in zip(places, versions, strict=False):
            if spans and (spans[-1].version, spans[-1].end) == (version, at):
                spans[-1] = replace(spans[-1], end=at + 1)
            else:
                spans.append(WeightSpan(version, at, at + 1))
        return tuple(spans) if len(versions) >= len(places) else ()

    def _engine_routes(self, generations: Sequence[Generation]) -> Routes | None:
        """The last generation's routes of the tokens before the last sampled one, if this history ends with what it
        sampled; tokens may be cut off at the end."""
        routes = generations[-1].routes if generations else None
        last = max((at for at, mask in enumerate(self.response_mask) if mask), default=-1)
        if routes is None or last < 0:
            return None
        ids, sampled = (*self.prompt_ids, *self.response_ids), generations[-1].ids
        start = len(routes) + 1 - len(sampled)
        end = len(self.prompt_ids) + last + 1
        return routes.first(end - 1) if start < end and ids[start:end] == sampled[: end - start] else None

    def _engine_constraints(self, generations: Sequence[Generation]) -> tuple[ConstrainedSpan, ...]:
        """The grammars of the sampled tokens. They must be those that the engine sampled, each generation whole."""
        if not any(generation.constrained for generation in generations):
            return ()
        places = [at for at, mask in enumerate(self.response_mask) if mask]
        known = [token for generation in generations for token in generation.ids]
        spans: list[ConstrainedSpan] = []
        first = 0
        for generation in generations:
            at = places[first : first + len(generation.ids)]
            whole = len(at) == len(generation.ids) and at == list(range(at[0], at[0] + len(at))) if at else False
            if generation.constrained is not None and at:
                if not whole or [self.response_ids[i] for i in places] != known[: len(places)]:
                    raise LoopError(
                        "the agent loop changed or cut tokens that were sampled under a grammar, so they cannot be "
                        "trained on; return them whole, in order"
                    )
                spans.append(generation.constrained.moved(at[0]))
            first += len(generation.ids)
        return tuple(spans)

    def _check_length(self, name: str, values: Sequence[float]) -> None:
        count = len(self.response_ids)
        if len(values) != count:
            raise LoopError(
                f"the agent loop returned {count} response_ids but {len(values)} {name} entries; they must be of equal "
                "length"
            )

    def seconds(self) -> dict[str, float]:
        """The tool seconds in `metrics`, which only the loop can measure."""
        metrics = self.metrics if isinstance(self.metrics, Mapping) else vars(self.metrics) if self.metrics else {}
        return {"tools": float(metrics["tool_calls"])} if metrics.get("tool_calls") else {}

    def _engine_logprobs(self, generations: Sequence[Generation]) -> list[float]:
        """The engine's log-probs of the masked tokens, which must be the sampled ones in order; some may be cut off
        at the end."""
        sampled = [token for token, mask in zip(self.response_ids, self.response_mask, strict=True) if mask]
        known = [token for generation in generations for token in generation.ids]
        if sampled != known[: len(sampled)]:
            raise LoopError(
                "the agent loop returned no response_logprobs, and the response_ids with response_mask 1 are not the "
                "sampled ones; return Generation.logprobs for sampled tokens and 0.0 for observed ones"
            )
        values = iter(logprob for generation in generations for logprob in generation.logprobs)
        return [next(values) if mask else 0.0 for mask in self.response_mask]

    def _located(self, codec: ChatCodec) -> tuple[ImageSpan, ...]:
        """The images of `multi_modal_data`, placed at the placeholder tokens in order."""
        media = {kind: items for kind, items in (self.multi_modal_data or {}).items() if items}
        if unknown := sorted(media.keys() - {"image", "images"}):
            raise LoopError(f"the agent loop returned multi_modal_data with {unknown[0]}; only images are supported")
        images = [read_image(image) for items in media.values() for image in items]
        ids, mask = (*self.prompt_ids, *self.response_ids), (*[0] * len(self.prompt_ids), *self.response_mask)
        return codec.locate(ids, images, mask)


class EpisodeServer:
    """The engine for one episode. Every call gets its own seed, and the time spent in generation is summed up. What was
    sampled is kept in `segments`, so that it is not lost if the loop fails."""

    def __init__(self, engine: Engine, *, defaults: SamplingParams, seed: int, session: str) -> None:
        self.engine = engine
        self.max_model_len = engine.max_model_len
        self.defaults = defaults
        self.seed = seed
        self.session = session
        self.calls = 0
        self.seconds = 0.0
        self.generations: list[Generation] = []
        self.segments: list[Segment] = []

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | SamplingParams | None = None,
        *,
        session: str | None = None,
        images: Sequence[ImageSpan] = (),
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """Sample one turn. Missing `sampling_params` come from the configuration of the run. `images` are the image
        spans of the prompt, as returned by `codec.prompt` and `codec.delta`. `on_tokens` is told of tokens as they are
        sampled, if the engine is in this process; servers send them at the end."""
        params = self._params(sampling_params, self.max_model_len - len(prompt_ids))
        began = time.perf_counter()
        try:
            keywords: dict[str, Any] = {"images": images} if images else {}  # a text engine may not take it
            if on_tokens is not None and isinstance(self.engine, LocalEngine):
                keywords["on_tokens"] = on_tokens
            generation = await self.engine.generate(prompt_ids, params, session=session or self.session, **keywords)
        except RallyError:
            raise
        except Exception as failure:  # a failed step raises anything; it must not count as the policy's fault
            raise EngineError(f"the engine failed: {type(failure).__name__}: {failure}") from failure
        else:
            self.generations.append(generation)
            self._keep(tuple(prompt_ids), tuple(images), generation)
            return generation
        finally:
            self.seconds += time.perf_counter() - began

    async def check_grammar(self, grammar: str) -> None:
        """Raises RallyError if the engine cannot apply the grammar."""
        if not isinstance(self.engine, GrammarEngine):
            raise EngineError(NO_GRAMMAR)
        await self.engine.check_grammar(grammar)

    def _keep(self, prompt: tuple[int, ...], images: tuple[ImageSpan, ...], generation: Generation) -> None:
        """Extend the segment that the prompt continues, or begin one."""
        for at in reversed(range(len(self.segments))):
            known = self.segments[at]
            if prompt[: len(known.ids)] == known.ids and images[: len(known.images)] == known.images:
                later = [span.moved(-len(known.ids)) for span in images[len(known.images) :]]
                extended = known.append_observed(prompt[len(known.ids) :], later)
                self.segments[at] = extended.append_sampled(generation)
                return
        self.segments.append(Segment(prompt_ids=prompt, images=images).append_sampled(generation))

    def _params(self, requested: Mapping[str, Any] | SamplingParams | None, tokens_left: int) -> SamplingParams:
        explicit = requested if isinstance(requested, Mapping) else requested.__dict__ if requested is not None else {}
        seed = int.from_bytes(hashlib.blake2b(f"{self.seed}/{self.calls}".encode(), digest_size=8).digest()) >> 1
        self.calls += 1
        params = SamplingParams.of({**self.defaults.__dict__, **explicit, "seed": seed})
        stop_ids = tuple(dict.fromkeys((*params.stop_ids, *self.defaults.stop_ids)))
        max_tokens = min(params.max_tokens, max(tokens_left, 1))
        if stop_ids == params.stop_ids and max_tokens == params.max_tokens:
            return params
        return replace(params, stop_ids=stop_ids, max_tokens=max_tokens)


@dataclass(frozen=True, kw_only=True)
class LoopContext:
    """What a loop works with; one per episode."""

    task: Task
    episode_id: str
    server: EpisodeServer
    codec: ChatCodec
    toolbox: ToolBox
    settings: LoopSettings
    interactions: Interactions = field(default_factory=Interactions)
    environments: Environments = field(default_factory=Environments)
    check_tokens: bool = True  # whether the episode is compared with the template's full rendering at its end
    began: float = field(default_factory=time.perf_counter)  # when the episode began
    ends_at: float | None = None  # the deadline of the step, by time.perf_counter
    run_config: Callable[[], Any] = lambda: None  # the configuration of the run, for loops written for verl

    def turn_seconds(self, began: float) -> float | None:
        """The time limit of the next turn in seconds, in an exchange that began at `began`."""
        now = time.perf_counter()
        limits = [
            self.settings.turn_seconds(now - began),
            None if self.ends_at is None else max(0.0, self.ends_at - now),
        ]
        return min((seconds for seconds in limits if seconds is not None), default=None)


class AgentLoopBase(ABC):
    """An agent loop. Subclass it, define `run`, and register it or name it in `rollout.agent_loop_class`.

    `server`, `codec`, `tokenizer`, `toolbox`, `interactions`, `settings` and `task` are set before `__init__` runs, so
    the `__init__` of a subclass takes only its own options (`rollout.agent_loop_config`) and need not call
    `super().__init__`.
    """

    context: LoopContext
    one_history: ClassVar[bool] = False
    """Whether each request of an episode continues or replaces the history of the one before. The KV cache of a run
    whose loops all say so is no larger than what its episodes can use."""

    @classmethod
    def build(cls, context: LoopContext, options: Mapping[str, Any]) -> AgentLoopBase:
        loop = cls.__new__(cls)
        loop.context = context
        try:
            loop.__init__(**options)  # type: ignore[misc]
        except TypeError as wrong:
            raise LoopError(f"{cls.__name__} cannot be made from rollout.agent_loop_config: {wrong}") from wrong
        return loop

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> None:
        """Check the options. Called once before a run, so that a mistake does not wait for the first episode."""
        try:
            inspect.signature(cls).bind(**options)
        except TypeError as wrong:
            raise LoopError(f"{cls.__name__} cannot be made from rollout.agent_loop_config: {wrong}") from wrong

    @classmethod
    def check_row(cls, row: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Raise a RallyError if every episode of the row would fail. Called for each row before a run loads weights."""
        return

    @classmethod
    def single_process(cls, options: Mapping[str, Any]) -> str | None:
        """The option with which loop workers cannot play this loop; None if they can."""
        return None

    def __init__(self, **options: Any) -> None:
        if options:
            raise LoopError(f"{type(self).__name__} takes no option {', '.join(sorted(options))} in agent_loop_config")

    @property
    def server(self) -> EpisodeServer:
        return self.context.server

    @property
    def codec(self) -> ChatCodec:
        return self.context.codec

    @property
    def tokenizer(self) -> Any:
        return self.context.codec.tokenizer

    @property
    def toolbox(self) -> ToolBox:
        return self.context.toolbox

    @property
    def interactions(self) -> Interactions:
        return self.context.interactions

    @property
    def settings(self) -> LoopSettings:
        return self.context.settings

    @property
    def task(self) -> Task:
        return self.context.task

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
        """Play the episode of one row. `row_fields` are the columns of the row."""
