"""Adds what needs a forward of its own to finished completions: log-probabilities of an echoed prompt, and
alternatives.

The engine keeps neither of them while it samples. So the module's own forward over prompt and sampled tokens computes
them afterwards, between two steps of the engine, with the same weights: a request during which the weights changed is
refused. Tokens of a prompt are scored at temperature 1, sampled ones at the request's temperature. The log-probability
of a sampled token stays the one that was recorded when it was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rally.engines.base import PromptLogprobs
from rally.services.admission import Admission, Refused, SamplingAsk
from rally.services.openai_responses import Decode, Json
from rally.types import Generation

MAX_ALTERNATIVES = 20  # OpenAI's limit for a chat
NOTHING_SAMPLED = Generation(ids=(), logprobs=(), finish="length")


def check_alternatives(count: int, param: str, *, stream: bool, grammar: str = "") -> None:
    """Refuse alternatives that cannot be given."""
    problem = ""
    if not 0 <= count <= MAX_ALTERNATIVES:
        problem = f"{param}={count} alternatives; ask for 0 to {MAX_ALTERNATIVES}"
    elif count and stream:
        problem = f"{param}={count} is computed after the answer, so it cannot be streamed; leave stream out"
    elif count and grammar:
        problem = (
            f"{param}={count} cannot be given under a response_format or a forced tool call; leave one of them out"
        )
    if problem:
        raise Refused(400, problem, param=param)


class Alternative(NamedTuple):
    """A token and its log-probability."""

    id: int
    logprob: float


class TokenScore(NamedTuple):
    """A token, its log-probability (None for the first of a prompt), and the likeliest tokens in its place."""

    id: int
    logprob: float | None
    alternatives: tuple[Alternative, ...] = ()


class TokenScorer:
    """Scores the tokens of finished requests."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def scores(
        self, ask: SamplingAsk, generation: Generation, *, prompt: bool, alternatives: int
    ) -> list[TokenScore]:
        """The scores of the sampled tokens and, with `prompt`, of the prompt before them."""
        engine = self._admission.served.engine
        version, ids = engine.weight_version, [*ask.prompt_ids, *generation.ids]
        first, tempered = len(ask.prompt_ids), ask.params.temperature or 1.0
        begin = 0 if prompt else first
        scores: list[TokenScore] = []
        if prompt:
            end = len(ids) if alternatives and tempered == 1 else first
            scores = [TokenScore(ids[0], None), *await self._between(ids[:end], 1, alternatives)]
        if alternatives:  # what is not scored yet
            scores += await self._between(ids, begin + len(scores), alternatives, tempered)
        scores += [TokenScore(i, None) for i in ids[begin + len(scores) :]]
        if engine.weight_version != version or any(span.version != version for span in generation.spans):
            raise Refused(503, "the engine loaded new weights meanwhile; try again", code="aborted", retry_after=1)
        own = [_recorded(one, value) for one, value in zip(scores[first - begin :], generation.logprobs, strict=True)]
        return [*scores[: first - begin], *own]

    async def _between(
        self, ids: Sequence[int], start: int, alternatives: int, temperature: float = 1.0
    ) -> list[TokenScore]:
        if start >= len(ids):
            return []
        found: PromptLogprobs = await self._admission.prompt_logprobs(ids, start, alternatives, temperature)
        tops = zip(found.top_ids, found.top_logprobs, strict=True)
        return [
            TokenScore(token, logprob, tuple(map(Alternative, *top)))
            for token, logprob, top in zip(ids[start:], found.logprobs, tops, strict=True)
        ]


def _recorded(score: TokenScore, logprob: float) -> TokenScore:
    """The score of a sampled token with the log-probability that was recorded."""
    own = tuple(Alternative(i, logprob if i == score.id else other) for i, other in score.alternatives)
    return TokenScore(score.id, logprob, own)


def completion_logprobs(scores: Sequence[TokenScore], offsets: Sequence[int], decode: Decode) -> Json:
    """The `logprobs` of a text completion. The token itself is always among its alternatives, as in OpenAI's API."""
    return {
        "tokens": [decode([one.id]) for one in scores],
        "token_logprobs": [one.logprob for one in scores],
        "top_logprobs": [_by_text(one, decode) for one in scores] if any(s.alternatives for s in scores) else None,
        "text_offset": list(offsets),
    }


def _by_text(score: TokenScore, decode: Decode) -> dict[str, float] | None:
    """The alternatives by their text, likeliest first. A second token with the same text, such as another part of a
    character, is written as token_id:NUMBER."""
    if score.logprob is None:
        return None
    found: dict[str, float] = {}
    for token, logprob in dict.fromkeys((*score.alternatives, Alternative(score.id, score.logprob))):
        text = decode([token])
        found[text if text not in found else f"token_id:{token}"] = logprob
    return found


def chat_alternatives(score: TokenScore, decode: Decode) -> list[Json]:
    """The `top_logprobs` of a token of a chat completion."""
    texts = [(decode([one.id]), one.logprob) for one in score.alternatives]
    return [{"token": t, "logprob": p, "bytes": None if "\ufffd" in t else list(t.encode())} for t, p in texts]


class EchoedPrompt(NamedTuple):
    """The text of a prompt, and where each of its tokens begins in it."""

    text: str
    offsets: list[int]


def token_offsets(ids: Sequence[int], decode: Decode) -> list[int]:
    """Where each token begins in the decoded text. Tokens of one character begin where the character does. Only the
    last few tokens are decoded for each."""
    offsets, length, anchor, read = [], 0, 0, 0
    for end in range(1, len(ids) + 1):
        offsets.append(length)
        before, text = decode(ids[anchor:read]), decode(ids[anchor:end])
        if not text.endswith("\ufffd"):
            length += len(text) - len(before)
            anchor, read = read, end
    return offsets


def echoed_choice(
    choice: Json, prompt: EchoedPrompt, begins: Sequence[int], scores: Sequence[TokenScore] | None, decode: Decode
) -> Json:
    """A choice with its prompt before it. `begins` are the offsets of its own tokens, and `scores` those of both, if
    they are asked for."""
    whole = {**choice, "text": prompt.text + choice["text"]}
    if scores is None:
        return whole
    own = [len(prompt.text) + min(at, len(choice["text"])) for at in begins]  # a stop string may be cut off
    return {**whole, "logprobs": completion_logprobs(scores, [*prompt.offsets, *own], decode)}
