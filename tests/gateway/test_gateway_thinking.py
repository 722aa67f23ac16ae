"""An agent that asks for more or less thinking: the recorded tokens follow the template with its variables."""

import asyncio
from typing import Any

import httpx
from loop_cases import Reply, hold, make_runner, make_task, said

from rally.chat import ChatCodec, tiny_tokenizer
from rally.gateway import AgentClient, BlackBoxAgentLoop
from rally.loops import LoopSpec
from rally.types import Episode

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}-{% endif %}{% endif %}"
)
ASK = [{"role": "user", "content": "What is 2+2?"}]
CODEC = ChatCodec(tiny_tokenizer(), "hermes", chat_template=TEMPLATE)
_efforts: list[dict[str, Any]] = []


def run(row: dict[str, Any], client: AgentClient) -> str:
    """One conversation of several turns, each with its own fields."""
    messages = list(ASK)
    for fields in _efforts:
        body = {"model": "m", "messages": messages, **fields}
        answer = httpx.post(
            f"{client.base_url}/chat/completions", json=body, headers={"Authorization": f"Bearer {client.api_key}"}
        )
        if answer.status_code != 200:
            return str(answer.json()["error"]["message"])
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Sure?"}]
    return "over"


def played(*efforts: dict[str, Any]) -> Episode:
    _efforts[:] = efforts
    script = [Reply(said(CODEC, word)) for word in ("four", "yes", "no", "so")]
    loops = {"black_box": LoopSpec(BlackBoxAgentLoop, {"agent": f"{__name__}:run"})}
    runner = make_runner(CODEC, script, loops=loops, loop="black_box")
    return asyncio.run(hold(runner, make_task(ASK, row={"raw_prompt": ASK}))).episode


def texts(episode: Episode) -> list[str]:
    return [CODEC.decode(segment.ids) for segment in episode.segments]


def test_every_turn_of_a_segment_follows_the_template_with_the_variables() -> None:
    (plain,) = texts(played({}, {}))
    (same,) = texts(played({"reasoning_effort": "none"}, {"reasoning_effort": "none"}))
    assert same == plain.replace("assistant\n", "assistant\n-") != plain


def test_another_value_starts_a_segment_that_is_rendered_with_it() -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    episode = played({}, {}, off)
    first, second = texts(episode)
    sure = {"role": "user", "content": "Sure?"}
    said_before = [*ASK, {"role": "assistant", "content": "four"}, sure, {"role": "assistant", "content": "yes"}, sure]
    rendered = CODEC.with_variables({"enable_thinking": False}).encode_prompt(said_before)
    assert "-" not in first and episode.segments[1].prompt_ids == rendered
    assert second.endswith("assistant\n-no<|im_end|>") and episode.extra["agent"]["rewritten"] == 1


def test_what_the_template_cannot_express_is_refused_and_the_episode_goes_on() -> None:
    episode = played({}, {"reasoning_effort": "high"})
    assert "can only switch thinking on or off" in episode.extra["agent_answer"]
    assert episode.extra["agent"]["refused"] == 1 and len(episode.segments) == 1
