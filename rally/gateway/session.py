"""One episode as its agent sees it: every completion is sampled by the run's engine, by the run's rules, and recorded.

A request is answered, or refused in a sentence: for good once the episode is over, and that has one named reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from rally.gateway.transcript import ChatHistory, Draft, Transcript
from rally.loops import LoopContext, LoopError
from rally.services.admission import Refused, SamplingAsk
from rally.services.openai_requests import ChatRequest
from rally.services.openai_responses import ChatShape, CompletionResponse, Json, ResponseOptions
from rally.types import Generation, RallyError, SamplingParams, StopReason

LAST_WORDS = 30.0  # seconds that an agent has left after it was told that its episode is over
COUNTED = (
    *("requests", "refused", "overruled", "gone"),
    *("branches", "rewritten", "tool_calls", "malformed_calls", "tool_answers"),
)

OVER = {
    StopReason.LENGTH: "its response budget of {response_length} tokens (data.max_response_length) is used up",
    StopReason.MAX_TURNS: "it has had its {max_assistant_turns} assistant turns (multi_turn.max_assistant_turns)",
    StopReason.MAX_USER_TURNS: "it has had its {max_user_turns} tool and user turns (multi_turn.max_user_turns)",
    StopReason.CANCELLED: "the engine has given its request up",
    StopReason.ERROR: "the engine has failed",
}


class TurnBudget(NamedTuple):
    """How many tokens a turn may have, and what ends it there."""

    tokens: int
    ends: StopReason


class GatewaySession:
    """What an agent asks for over HTTP comes here, into the event loop of its episode. `limit` is the time the agent
    has; each answer gives it the time of another turn."""

    def __init__(self, context: LoopContext, sampling: Mapping[str, Any], limit: asyncio.Timeout) -> None:
        self._context, self._sampling, self._limit = context, sampling, limit
        check_context(context)
        self._began = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        self._asking: set[asyncio.Task[Any]] = set()
        self._over: StopReason | None = None
        self._cut: StopReason | None = None  # the limit that the last answer, or refusal, ran into
        self._closed = False
        self.failure: Exception | None = None  # of the engine
        self.refused: str | None = None  # why, the last time
        self.transcript = Transcript(context.codec, context.settings.history, context.began)

    @property
    def counts(self) -> dict[str, int]:
        return {name: self.transcript.counts[name] for name in COUNTED}

    @property
    def reason(self) -> StopReason:
        """Why the exchange ended, if the agent ended in its own time."""
        return self._over or self._cut or StopReason.STOP

    @property
    def over(self) -> bool:
        return self._over is not None

    async def ask(self, asked: ChatRequest) -> Json:
        """From any event loop; cancelling it cancels the request."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._answered(asked), self._loop))

    def close(self) -> None:
        """The episode has ended; nobody is answered any more."""
        self._closed = True
        for task in self._asking:
            task.cancel()

    async def _answered(self, asked: ChatRequest) -> Json:
        task = asyncio.current_task()
        assert task is not None
        self._asking.add(task)
        try:
            return await self._complete(asked)
        except asyncio.CancelledError:
            if self._closed:
                raise ended() from None
            self.transcript.counts["gone"] += 1
            raise
        except RallyError as refused:
            self.refused = str(refused)
            self.transcript.counts["refused"] += 1
            raise
        finally:
            self._asking.discard(task)
            if self._over is not None and not self._asking:
                self._leave_last_words()

    async def _complete(self, asked: ChatRequest) -> Json:
        if self._closed:
            raise ended()
        self.transcript.counts["requests"] += 1
        self._check(asked)
        conversation = ChatHistory.of(asked.messages, asked.offered_tools)
        draft = self.transcript.draft(conversation)
        room = self._room(draft)
        params = self._params(asked, room)
        started = time.perf_counter()
        with self.transcript.held(draft):
            generation = await self._generate(draft, params)
        answer = self._answer(asked, draft, params, generation)
        self.transcript.add(draft, generation, answer["choices"][0]["message"], started)
        if generation.finish == "abort":
            self._end(StopReason.CANCELLED)
        cut = generation.finish == "length" and len(generation.ids) >= room.tokens
        self._cut = room.ends if cut else None
        if self._over is None:
            self._give_time(self._context.turn_seconds(self._began))
        return answer

    def _check(self, asked: ChatRequest) -> None:
        """What cannot be honoured is refused; how tokens are drawn is the run's decision, and that is counted."""
        if self._over is not None:
            raise self._refusal(self._over)
        asked.refuse_unknown()
        if asked.n != 1:
            raise Refused(
                400, f"one answer is sampled for each request, not {asked.n}; ask again for another", param="n"
            )
        wishes = {name: getattr(asked, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        differ = any(value is not None and value != self._sampling.get(name) for name, value in wishes.items())
        self.transcript.counts["overruled"] += differ or asked.ignore_eos or asked.seed is not None

    def _room(self, draft: Draft) -> TurnBudget:
        settings, transcript = self._context.settings, self.transcript
        if settings.max_assistant_turns and transcript.assistant_turns >= settings.max_assistant_turns:
            self._end(StopReason.MAX_TURNS)
        if draft.after and settings.max_user_turns and transcript.user_turns >= settings.max_user_turns:
            self._end(StopReason.MAX_USER_TURNS)
        most = self._context.server.engine.max_model_len
        budget = settings.response_length - transcript.used - len(draft.observed)
        window = most - len(draft.ids)
        room = TurnBudget(min(budget, window), StopReason.LENGTH if budget <= window else StopReason.CONTEXT)
        if room.tokens > 0:
            return room
        if room.ends is StopReason.LENGTH:
            self._end(StopReason.LENGTH)
        self._cut = StopReason.CONTEXT  # the agent may shorten its messages and go on
        told = f"these messages have {len(draft.ids)} tokens, and the context window holds {most} with the answer"
        raise Refused(400, f"{told}; shorten them", param="messages", code="context_length_exceeded")

    def _params(self, asked: ChatRequest, room: TurnBudget) -> SamplingParams:
        given = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
        words = asked.stop or []
        stop = [words] if isinstance(words, str) else words
        rules = self._sampling
        return SamplingParams.of(
            {
                **rules,
                "max_tokens": room.tokens if given is None else min(given, room.tokens),
                "stop": (*rules.get("stop", ()), *stop),
                "stop_ids": (*rules.get("stop_ids", ()), *asked.stop_token_ids),
            }
        )

    async def _generate(self, draft: Draft, params: SamplingParams) -> Generation:
        try:
            return await self._context.server.generate(draft.ids, params)
        except Exception as failure:  # the agent might hide it; it voids the episode all the same
            self.failure = failure
            self._over = StopReason.ERROR
            raise self._refusal(StopReason.ERROR) from failure

    def _answer(self, asked: ChatRequest, draft: Draft, params: SamplingParams, generation: Generation) -> Json:
        shape = ChatShape(self.transcript.codec_for(draft.conversation), bool(draft.conversation.tools))
        wishes = ResponseOptions(
            model=asked.model,
            logprobs=asked.wants_logprobs,
            token_ids=asked.return_token_ids,
            usage_in_stream=False,
            choices=1,
        )
        return CompletionResponse(shape, wishes, [SamplingAsk(draft.ids, params)]).whole([generation])

    def _end(self, reason: StopReason) -> NoReturn:
        """Nothing more is asked of the engine from now on, and the agent is told."""
        self._over = reason
        raise self._refusal(reason)

    def _leave_last_words(self) -> None:
        """The agent knows that it is over, all of it has been answered, and it has a little time to end by itself."""
        if not self._closed:
            at = self._limit.when()
            self._give_time(LAST_WORDS if at is None else min(LAST_WORDS, at - self._loop.time()))

    def _refusal(self, reason: StopReason) -> Refused:
        told = OVER[reason].format(**self._context.settings.__dict__)
        return Refused(410, f"this episode is over: {told}; return what there is", code="episode_over")

    def _give_time(self, seconds: float | None) -> None:
        if not self._limit.expired():
            self._limit.reschedule(None if seconds is None else self._loop.time() + seconds)


def ended() -> Refused:
    return Refused(
        410, "this episode has ended, and its API key with it; ask before the agent returns", code="episode_over"
    )


def check_context(context: LoopContext) -> None:
    """What only a loop that runs tools and users itself can do is refused, not left out."""
    if context.interactions.find(context.task) is not None:
        told = f"row {context.task.id} asks for a simulated user, whom an agent of your own cannot hear"
        raise LoopError(f"{told}; leave interaction_kwargs out")
    settings = context.settings
    given = {
        "rollout.stop_on_tool_success": settings.stop_on_tool_success,
        "rollout.agent_loop_config.stop_on_correct": settings.stop_on_correct,
        "multi_turn.max_tool_response_tokens": settings.max_tool_response_tokens,
    }
    for key, value in given.items():
        if value:
            raise LoopError(f"{key} cannot be kept for an agent that runs its tools itself; leave it out")
