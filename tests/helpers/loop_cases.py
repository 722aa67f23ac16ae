"""Helpers of the loop tests: an engine that returns scripted replies and records all requests, and a function to run
it."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rally.chat import ChatCodec, tiny_tokenizer
from rally.envs import Environments
from rally.interactions import BaseInteraction, Interactions
from rally.loops import Job, LoopSettings, Runner
from rally.tools import BaseTool, ToolBox, ToolLimits, function_tool
from rally.types import Episode, FinishReason, Generation, ImageSpan, SamplingParams, Segment, Task, Turn, WeightSpan


@dataclass(frozen=True)
class Reply:
    """One scripted turn; `seconds` is the engine's time for it."""

    ids: tuple[int, ...]
    finish: FinishReason = "stop"
    seconds: float = 0.0


@dataclass(frozen=True)
class Call:
    """One request as the engine saw it."""

    session: str | None
    prompt: tuple[int, ...]
    params: SamplingParams
    generation: Generation
    images: tuple[ImageSpan, ...] = ()


@dataclass
class ScriptedEngine:
    """An `Engine` that gives every session the same replies, then a plain answer. All logprobs are distinct."""

    codec: ChatCodec
    script: Sequence[Reply]
    max_model_len: int = 1_000_000
    weight_version: int = 3
    calls: list[Call] = field(default_factory=list)
    turns: Counter[str | None] = field(default_factory=Counter)
    _numbers: Any = field(default_factory=itertools.count)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> Generation:
        at = self.turns[session]
        self.turns[session] += 1
        reply = self.script[at] if at < len(self.script) else Reply(said(self.codec, "done"))
        await asyncio.sleep(reply.seconds)
        ids = reply.ids[: params.max_tokens]
        generation = Generation(
            ids=ids,
            logprobs=tuple(-(1 + next(self._numbers)) / 4096 for _ in ids),
            finish=reply.finish if len(ids) == len(reply.ids) else "length",
            spans=(WeightSpan(self.weight_version, 0, len(ids)),) if ids else (),
        )
        self.calls.append(Call(session, tuple(prompt_ids), params, generation, tuple(images)))
        return generation

    async def close(self) -> None:
        """Nothing to stop."""


class Held(NamedTuple):
    """An episode and its engine."""

    episode: Episode
    engine: ScriptedEngine

    @property
    def segment(self) -> Segment:
        (segment,) = self.episode.segments
        return segment

    @property
    def roles(self) -> list[str]:
        return [turn.role for turn in self.episode.turns]


PROMPT = ({"role": "user", "content": "What is 2+2?"},)


def make_task(prompt: Sequence[dict[str, Any]] = PROMPT, **fields: Any) -> Task:
    return Task(id="t", data_source="test", prompt=tuple(prompt), **fields)


def make_job(task: Task | None = None, number: int = 0, seed: int = 7) -> Job:
    return Job(task=task or make_task(), episode_id=f"e{number}", group="g", seed=seed)


def make_runner(
    codec: ChatCodec,
    script: Sequence[Reply] = (),
    tools: Sequence[BaseTool[Any]] = (),
    *,
    limits: ToolLimits | None = None,
    max_model_len: int = 1_000_000,
    loop: str = "tool_agent",
    loops: dict[str, Any] | None = None,
    max_retries: int = 0,
    interactions: Interactions | None = None,
    environments: Environments | None = None,
    **settings: Any,
) -> Runner:
    engine = ScriptedEngine(codec, script, max_model_len)
    chosen = LoopSettings(**{"response_length": 100_000, **settings})
    return Runner(
        engine=engine,
        codec=codec,
        toolbox=ToolBox(tools, limits),
        settings=chosen,
        default_loop=loop,
        loops=loops or {},
        max_retries=max_retries,
        interactions=interactions or Interactions(),
        environments=environments or Environments(),
    )


def sampling_of(codec: ChatCodec) -> SamplingParams:
    return SamplingParams(stop_ids=codec.stop_ids, max_tokens=64)


async def hold(runner: Runner, task: Task | None = None) -> Held:
    """Runs one episode."""
    (episode,) = await runner.run([make_job(task)], sampling_of(runner.codec))
    assert isinstance(runner.engine, ScriptedEngine)
    return Held(episode, runner.engine)


def tiny_codec(tools: Sequence[BaseTool[Any]] = (), **template_kwargs: Any) -> ChatCodec:
    return ChatCodec(tiny_tokenizer(), "hermes", ToolBox(tools).schemas(), template_kwargs=template_kwargs)


def said(codec: ChatCodec, text: str, *calls: tuple[str, dict[str, Any]]) -> tuple[int, ...]:
    """The canonical ids of a turn, its calls as the template prints them."""
    return codec.encode_assistant(spoken(text, *calls))


def spoken(text: str, *calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    functions = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": functions} if functions else {})}


def written(name: str, arguments: dict[str, Any]) -> str:
    """A Hermes call with two spaces where every template has one."""
    return f'<tool_call>{{"name":  "{name}",  "arguments":  {json.dumps(arguments)}}}</tool_call>'


def tool_messages(turn: Turn) -> list[dict[str, Any]]:
    """The messages of a tool turn."""
    return [{"role": "tool", "name": r.call.name, "content": r.response.text or ""} for r in turn.tool_results]


class Talker(BaseInteraction):
    """A simulated user with scripted replies, each worth half a point more, then `enough`; it records its inputs."""

    def __init__(self, *words: str, name: str = "talker") -> None:
        super().__init__({"name": name})
        self.words = words
        self.seen: list[list[dict[str, Any]]] = []
        self.events: list[str] = []

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.events.append(f"start {instance_id}")
        self.at = 0
        return await super().start_interaction(instance_id)

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        self.seen.append(messages)
        at, self.at = self.at, self.at + 1
        over = at >= len(self.words)
        return over, "enough" if over else self.words[at], at / 2, {"at": at}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        self.events.append("score")
        return 0.75

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.events.append(f"finalize {instance_id}")


def asking(user: str = "talker", prompt: Sequence[dict[str, Any]] = PROMPT, **kwargs: Any) -> Task:
    """A row with a simulated user."""
    return make_task(prompt, interaction_kwargs={"name": user, **kwargs})


@function_tool
async def calculator(expression: str) -> str:
    """Evaluates nothing, but says so."""
    return f"the value of {expression}"


def check_tiling(episode: Episode) -> None:
    """The turns of a segment cover its response tokens, each exactly once, and the mask agrees with their roles."""
    for number, segment in enumerate(episode.segments):
        at = 0
        for turn in (t for t in episode.turns if t.segment == number):
            assert turn.start == at <= turn.end
            assert set(segment.response_mask[at : turn.end]) <= {int(turn.role == "assistant")}
            at = turn.end
        assert at == len(segment.response_ids)


def check_sampled_once(held: Held) -> None:
    """Every sampled token is in exactly one segment, with mask 1, its own logprob and its weight version."""
    tokens = [
        (token, logprob)
        for segment in held.episode.segments
        for token, mask, logprob in zip(
            segment.response_ids, segment.response_mask, segment.response_logprobs, strict=True
        )
        if mask
    ]
    generations = [call.generation for call in held.engine.calls]
    assert tokens == [pair for g in generations for pair in zip(g.ids, g.logprobs, strict=True)]
    for segment in held.episode.segments:
        versions = [0] * len(segment.response_ids)
        for span in segment.spans:
            versions[span.start : span.end] = [span.version] * (span.end - span.start)
        assert versions == [held.engine.weight_version * mask for mask in segment.response_mask]
        observed = zip(segment.response_mask, segment.response_logprobs, strict=True)
        assert all(logprob == 0.0 for mask, logprob in observed if not mask)
