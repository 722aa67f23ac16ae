"""Answers the chat requests of one episode with the run's engine and sampling parameters, and records them.

A request that cannot be answered is refused with a reason. Once the episode is over, for exactly one stop reason, every
request is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple, NoReturn

from rally.chat import MessageLost
from rally.chat.grammars import grammar_of
from rally.engines.base import OnTokens, SampledTokens
from rally.gateway.credit import CallCredits
from rally.gateway.transcript import ChatHistory, Draft, Transcript
from rally.loops import LoopContext, LoopError
from rally.models.token_masks import GrammarError
from rally.services.admission import Refused, SamplingAsk
from rally.services.api_translation import StreamPart
from rally.services.openai_requests import ChatRequest
from rally.services.openai_responses import CompletionResponse, Json, ResponseOptions, chat_shape
from rally.types import Generation, Message, RallyError, SamplingParams, StopReason

FINAL_SECONDS = 30.0  # seconds for an agent to return after a request was refused because the episode is over
COUNTED = (
    *("requests", "refused", "overruled", "gone", "constrained"),
    *("branches", "rewritten", "tool_calls", "malformed_calls", "tool_answers"),
)

OVER = {
    StopReason.LENGTH: "its response budget of {response_length} tokens (data.max_response_length) is used up",
    StopReason.MAX_TURNS: "it has had its {max_assistant_turns} assistant turns (multi_turn.max_assistant_turns)",
    StopReason.MAX_USER_TURNS: "it has had its {max_user_turns} tool and user turns (multi_turn.max_user_turns)",
    StopReason.CANCELLED: "the engine has aborted its request",
    StopReason.ERROR: "the engine has failed",
}


Send = Callable[[StreamPart], None]


class TurnBudget(NamedTuple):
    """How many tokens a turn may have, and the stop reason when they are used up."""

    tokens: int
    ends: StopReason


class GatewaySession:
    """The gateway's side of one episode. Requests arrive over HTTP and run in the event loop of the episode. `limit` is
    the timeout of the agent; each answer extends it by the time of another turn."""

    def __init__(self, context: LoopContext, sampling: Mapping[str, Any], limit: asyncio.Timeout) -> None:
        self._context, self._sampling, self._limit = context, sampling, limit
        check_context(context)
        self._began = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        self._requests: set[asyncio.Task[Any]] = set()
        self._over: StopReason | None = None
        self._cut: StopReason | None = None  # the limit that the last request reached
        self._closed = False
        self.failure: Exception | None = None  # of the engine
        self.refused: str | None = None  # why the last refused request was refused
        self.responses: dict[str, list[Message]] = {}  # the conversations that previous_response_id may continue
        self.transcript = Transcript(context.codec, context.settings.history, context.began)
        self.credits = CallCredits()
        self.reported: Any = None  # the result that the agent posted

    @property
    def counts(self) -> dict[str, int]:
        return {name: self.transcript.counts[name] for name in COUNTED}

    @property
    def row(self) -> dict[str, Any]:
        """The row of the episode."""
        return self._context.task.row

    @property
    def reason(self) -> StopReason:
        """The stop reason of the episode, if the agent did not run out of time."""
        return self._over or self._cut or StopReason.STOP

    @property
    def over(self) -> bool:
        return self._over is not None

    async def ask(self, request: ChatRequest) -> Json:
        """Answer a request. Callable from any event loop; cancelling it cancels the request."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._answer_request(request), self._loop))

    async def stream(self, request: ChatRequest) -> AsyncGenerator[StreamPart, None]:
        """Answer a request in parts, as they are sampled. The turn is recorded before its last chunk is sent."""
        here, parts = asyncio.get_running_loop(), asyncio.Queue[StreamPart | None]()

        def send(part: StreamPart) -> None:
            with suppress(RuntimeError):  # the gateway has stopped
                here.call_soon_threadsafe(parts.put_nowait, part)

        work = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._answer_request(request, send), self._loop))
        work.add_done_callback(lambda _: parts.put_nowait(None))
        try:
            while (part := await parts.get()) is not None:
                yield part
            yield work.result()
        finally:
            work.cancel()

    def set_waiting(self, waiting: bool) -> None:
        """While the episode waits for a worker, only the deadline of the step counts. Callable from any thread."""
        self._loop.call_soon_threadsafe(self._set_waiting, waiting)

    def _set_waiting(self, waiting: bool) -> None:
        now, ends_at = time.perf_counter(), self._context.ends_at
        self._began = now
        left = None if ends_at is None else max(0.0, ends_at - now)
        if not self._closed:
            self._give_time(left if waiting else self._context.turn_seconds(now))

    def count_tokens(self, request: ChatRequest) -> int:
        """The tokens of the request's messages, as a new prompt."""
        conversation = self._history(request)
        return len(self.transcript.codec_for(conversation).encode_prompt(conversation.messages))

    def close(self) -> None:
        """End the episode and cancel its requests."""
        self._closed = True
        for task in self._requests:
            task.cancel()

    async def _answer_request(self, request: ChatRequest, send: Send | None = None) -> Json:
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            return await self._complete(request, send)
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
            self._requests.discard(task)
            if self._over is not None and not self._requests:
                self._limit_final_seconds()

    async def _complete(self, request: ChatRequest, send: Send | None) -> Json:
        if self._closed:
            raise ended()
        self.transcript.counts["requests"] += 1
        self._check(request)
        conversation = self._history(request)
        grammar = await self._grammar(request, conversation)
        try:
            draft = self.transcript.draft(conversation)
        except MessageLost as lost:  # fails the episode even if the agent catches the error
            self.failure = lost
            raise
        budget = self._budget(draft)
        params = self._params(request, budget, grammar)
        response = self._response(request, draft, params)
        started = time.perf_counter()
        with self.transcript.reserved(draft):
            generation = await self._generate(draft, params, None if send is None else _sender(response, send))
        answer = response.whole([generation])
        self.transcript.add(draft, generation, answer["choices"][0]["message"], started)
        self.credits.note(answer["id"], draft.branch)
        if generation.finish == "abort":
            self._end(StopReason.CANCELLED)
        cut = generation.finish == "length" and len(generation.ids) >= budget.tokens
        self._cut = budget.ends if cut else None
        if self._over is None:
            self._give_time(self._context.turn_seconds(self._began))
        if send is not None:
            for part in chain[StreamPart](response.opening(), response.ending(0, generation)):
                send(part)
        return answer

    def _check(self, request: ChatRequest) -> None:
        """Refuse what is not supported. The run's sampling parameters override the request's, which is counted."""
        if self._over is not None:
            raise self._refusal(self._over)
        request.refuse_unknown()
        if request.n != 1:
            raise Refused(400, f"n must be 1, not {request.n}; send one request for each completion", param="n")
        if request.top_logprobs:
            problem = f"top_logprobs={request.top_logprobs} is not supported during a run; leave it out"
            raise Refused(400, problem, param="top_logprobs")
        requested = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        differ = any(value is not None and value != self._sampling.get(name) for name, value in requested.items())
        self.transcript.counts["overruled"] += differ or request.ignore_eos or request.seed is not None

    def _history(self, request: ChatRequest) -> ChatHistory:
        return ChatHistory.of(request.messages, request.offered_tools, request.variables_of(self._context.codec))

    def _budget(self, draft: Draft) -> TurnBudget:
        settings, transcript = self._context.settings, self.transcript
        if settings.max_assistant_turns and transcript.assistant_turns >= settings.max_assistant_turns:
            self._end(StopReason.MAX_TURNS)
        if draft.after and settings.max_user_turns and transcript.user_turns >= settings.max_user_turns:
            self._end(StopReason.MAX_USER_TURNS)
        max_model_len = self._context.server.max_model_len
        remaining = settings.response_length - transcript.used - len(draft.observed)
        window = max_model_len - len(draft.ids)
        budget = TurnBudget(min(remaining, window), StopReason.LENGTH if remaining <= window else StopReason.CONTEXT)
        if budget.tokens > 0:
            return budget
        if budget.ends is StopReason.LENGTH:
            self._end(StopReason.LENGTH)
        self._cut = StopReason.CONTEXT  # the agent may shorten its messages and go on
        raise Refused(
            400,
            f"these messages have {len(draft.ids)} tokens, and this model's maximum context length is {max_model_len} "
            "tokens including the answer; shorten them",  # litellm knows an exceeded context by these words
            param="messages",
            code="context_length_exceeded",
        )

    async def _grammar(self, request: ChatRequest, conversation: ChatHistory) -> str:
        """The grammar of the reply, which the engine can apply."""
        grammar = grammar_of(request.constraint, self.transcript.codec_for(conversation))
        if grammar:
            self.transcript.counts["constrained"] += 1
            await self._context.server.check_grammar(grammar)
        return grammar

    def _params(self, request: ChatRequest, budget: TurnBudget, grammar: str) -> SamplingParams:
        max_tokens = request.length_limit
        stop = request.stop or []
        stop = [stop] if isinstance(stop, str) else stop
        rules = self._sampling
        return SamplingParams.of(
            {
                **rules,
                "max_tokens": budget.tokens if max_tokens is None else min(max_tokens, budget.tokens),
                "stop": (*rules.get("stop", ()), *stop),
                "stop_ids": (*rules.get("stop_ids", ()), *request.stop_token_ids),
                "grammar": grammar,
            }
        )

    async def _generate(self, draft: Draft, params: SamplingParams, on_tokens: OnTokens | None) -> Generation:
        try:
            return await self._context.server.generate(draft.ids, params, on_tokens=on_tokens)
        except GrammarError:  # a schema that is too complex is the request's fault
            raise
        except Exception as failure:  # fails the episode even if the agent catches the error
            self.failure = failure
            self._over = StopReason.ERROR
            raise self._refusal(StopReason.ERROR) from failure

    def _response(self, request: ChatRequest, draft: Draft, params: SamplingParams) -> CompletionResponse:
        shape = chat_shape(self.transcript.codec_for(draft.conversation), request.constraint)
        options = ResponseOptions(
            model=request.model,
            logprobs=request.wants_logprobs,
            token_ids=request.return_token_ids,
            usage_in_stream=False,
            choices=1,
        )
        return CompletionResponse(shape, options, [SamplingAsk(draft.ids, params)])

    def _end(self, reason: StopReason) -> NoReturn:
        """End the episode: this request and all later ones are refused."""
        self._over = reason
        raise self._refusal(reason)

    def _limit_final_seconds(self) -> None:
        """The episode is over and no request is open: the agent has FINAL_SECONDS to return."""
        if not self._closed:
            at = self._limit.when()
            self._give_time(FINAL_SECONDS if at is None else min(FINAL_SECONDS, at - self._loop.time()))

    def _refusal(self, reason: StopReason) -> Refused:
        why = OVER[reason].format(**self._context.settings.__dict__)
        return Refused(410, f"this episode is over: {why}; return now", code="episode_over")

    def _give_time(self, seconds: float | None) -> None:
        if not self._limit.expired():
            self._limit.reschedule(None if seconds is None else self._loop.time() + seconds)


def _sender(response: CompletionResponse, send: Send) -> OnTokens:
    """Sends tokens as the chunks of a response."""

    def on_tokens(sampled: SampledTokens) -> None:
        for part in chain[StreamPart](response.opening(), response.pieces(0, sampled)):
            send(part)

    return on_tokens


def ended() -> Refused:
    return Refused(
        410,
        "this episode has ended, so its API key is invalid; send requests before the agent returns",
        code="episode_over",
    )


def check_context(context: LoopContext) -> None:
    """Refuse settings that only a loop with its own tools and users can apply."""
    if context.interactions.find(context.task) is not None:
        problem = f"row {context.task.id} names a simulated user, which a black_box agent cannot have"
        raise LoopError(f"{problem}; remove its interaction_kwargs")
    settings = context.settings
    unsupported = {
        "rollout.stop_on_tool_success": settings.stop_on_tool_success,
        "rollout.agent_loop_config.stop_on_correct": settings.stop_on_correct,
        "multi_turn.max_tool_response_tokens": settings.max_tool_response_tokens,
    }
    for key, value in unsupported.items():
        if value:
            raise LoopError(f"{key} cannot be applied to an agent that runs its own tools; remove it")
