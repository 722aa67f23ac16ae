"""The real `openai` client and our own client against real server processes over a tiny model."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from served_cases import CALL, NAME, QUESTION, TOOLS, EngineProcess, write_model
from small_models import full_logprobs
from transformers import AutoModelForCausalLM

from rally.chat import ChatCodec, tiny_tokenizer
from rally.engines import EngineError
from rally.engines.base import ReplicaGone
from rally.engines.remote import RallyReplica
from rally.engines.router.router import Router
from rally.engines.router.server_state import RouterSettings
from rally.types import SamplingParams

PROMPT = list(range(20, 60))
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 950, "extra_body": {"ignore_eos": True}}


class Home(NamedTuple):
    folder: Path
    server: EngineProcess
    mortal: EngineProcess


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    folder = write_model(tmp_path_factory.mktemp("model"))
    servers = [EngineProcess(folder), EngineProcess(folder)]
    try:
        for server in servers:
            server.wait_ready()
        yield Home(folder, *servers)
    finally:
        for server in servers:
            server.kill()


@pytest.fixture
def client(home: Home) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{home.server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def token_ids(choice: Any) -> list[int]:
    ids: list[int] = choice.model_extra["token_ids"]
    return ids


def test_a_completion_returns_the_sampled_ids_and_the_logprobs_of_a_full_forward(
    home: Home, client: openai.OpenAI
) -> None:
    answer = client.completions.create(
        model=NAME,
        prompt=PROMPT,
        max_tokens=24,
        logprobs=0,
        seed=5,
        temperature=0.8,
        extra_body={"return_token_ids": True},
    )
    (choice,) = answer.choices
    ids = token_ids(choice)
    assert choice.model_extra is not None and choice.model_extra["prompt_token_ids"] == PROMPT
    assert choice.logprobs is not None and answer.usage is not None
    assert answer.usage.completion_tokens == len(ids) and answer.usage.prompt_tokens == len(PROMPT)
    model = AutoModelForCausalLM.from_pretrained(home.folder)
    expected = full_logprobs(model, PROMPT + ids, len(PROMPT), temperature=0.8)
    assert choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-4)
    assert choice.text == tiny_tokenizer().decode(ids, skip_special_tokens=True)


def test_a_seed_repeats_and_choices_differ(client: openai.OpenAI) -> None:
    def texts(**how: Any) -> list[str]:
        made = client.completions.create(model=NAME, prompt=["What is 1+1?", "2"], max_tokens=12, **how)
        return [choice.text for choice in made.choices]

    both = texts(n=3, seed=1)
    assert len(both) == 6 and len(set(both)) == 6
    assert texts(n=3, seed=1) == both and texts(seed=1) == both[::3]
    assert texts(seed=2) != both[::3]


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    (whole,) = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=20, temperature=0).choices
    stop = whole.text[6:9]
    (cut,) = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=20, temperature=0, stop=stop).choices
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    pieces = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=20, temperature=0, stop=[stop], stream=True
    )
    assert "".join(piece.choices[0].text for piece in pieces) == cut.text


def test_a_chat_with_tools_renders_as_in_training_and_returns_the_call(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": QUESTION, "tools": TOOLS, "temperature": 0}
    answer = client.chat.completions.create(**asked, logprobs=True, extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    codec = ChatCodec(tiny_tokenizer(), tools=TOOLS)
    assert answer.model_extra is not None
    assert answer.model_extra["prompt_token_ids"] == list(codec.encode_prompt(QUESTION))
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) == (CALL["name"], CALL["arguments"])
    assert choice.logprobs is not None and len(choice.logprobs.content or []) == len(token_ids(choice))
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls" and streamed.message.role == "assistant"
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    turn = [*QUESTION, choice.message.model_dump(exclude_none=True)]
    followed = [*turn, {"role": "tool", "tool_call_id": call.id, "content": "36"}]
    assert client.chat.completions.create(model=NAME, messages=followed, tools=TOOLS, max_tokens=4).choices


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_streamed_answer_is_the_whole_one(client: openai.OpenAI, temperature: float) -> None:
    asked: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Tell me."}],
        "max_tokens": 60,
        "temperature": temperature,
        "seed": 3,
        "logprobs": True,
        "n": 2,
        "extra_body": {"return_token_ids": True},
    }
    whole = client.chat.completions.create(**asked)
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert pieces[-1].usage is not None and whole.usage is not None
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(pieces) > 10, "it came in pieces"
    for choice in whole.choices:
        mine = [piece.choices[0] for piece in pieces[:-1] if piece.choices[0].index == choice.index]
        assert "".join(m.delta.content or "" for m in mine) == choice.message.content
        assert [i for m in mine for i in token_ids(m)] == token_ids(choice)
        logprobs = [entry.logprob for m in mine if m.logprobs for entry in m.logprobs.content or []]
        assert choice.logprobs is not None
        assert logprobs == pytest.approx([entry.logprob for entry in choice.logprobs.content or []], abs=1e-4)
        assert [m.delta.role for m in mine].count("assistant") == 1 and mine[-1].finish_reason == choice.finish_reason


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": "other"}, openai.NotFoundError, "use 'tiny'"),
        ({"max_tokens": 5000}, openai.BadRequestError, "ask for at most 984 new tokens"),
        ({"frequency_penalty": 0.5}, openai.BadRequestError, "frequency_penalty=0.5 is not supported"),
        ({"logprobs": 30}, openai.BadRequestError, "ask for 0 to 20"),
        ({"temperature": -1}, openai.BadRequestError, "temperature must be 0"),
        ({"prompt": [5000]}, openai.BadRequestError, "outside the model's vocabulary"),
        ({"prompt": {}}, openai.BadRequestError, "prompt"),
        ({"prompt": []}, openai.BadRequestError, "an empty prompt"),
        ({"prompt": ""}, openai.BadRequestError, "an empty prompt"),
        ({"max_tokens": 5000, "stream": True}, openai.BadRequestError, "ask for at most 984 new tokens"),
    ],
)
def test_what_cannot_be_done_is_an_error_of_openai_s_kind(
    client: openai.OpenAI, change: dict[str, Any], error: type[openai.APIStatusError], words: str
) -> None:
    with pytest.raises(error) as refused:
        client.completions.create(**({"model": NAME, "prompt": PROMPT} | change))
    assert words in refused.value.message and refused.value.type == "invalid_request_error"


def test_models_and_unknown_paths(home: Home, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    answer = httpx.get(f"{home.server.url}/v2/nothing")
    assert answer.status_code == 404 and "/v2/nothing" in answer.json()["error"]["message"]


async def leaving(home: Home) -> None:
    """A client that disconnects when its request runs."""
    async with openai.AsyncOpenAI(base_url=f"{home.server.url}/v1", api_key="none") as client:
        asked = asyncio.create_task(client.completions.create(model=NAME, **LONG, n=4))
        await asyncio.to_thread(until, lambda: home.server.metrics()["rally_engine_requests"] == 4)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_request(home: Home, client: openai.OpenAI, stream: bool) -> None:
    def cancelled() -> float:
        return home.server.metrics().get('rally_engine_ended_requests_total{end="cancelled"}', 0.0)

    before = cancelled()
    if stream:
        pieces = client.completions.create(model=NAME, **LONG, n=4, stream=True)
        assert next(iter(pieces)) is not None
        pieces.close()
    else:
        asyncio.run(leaving(home))
    until(lambda: cancelled() == before + 4)
    assert home.server.metrics()["rally_engine_requests"] == 0


async def test_many_at_once_are_answered_as_each_alone(home: Home) -> None:
    async with openai.AsyncOpenAI(base_url=f"{home.server.url}/v1", api_key="none") as client:

        async def text(number: int) -> str:
            made = await client.completions.create(model=NAME, prompt=[20 + number, 40, 50], max_tokens=16, seed=number)
            return made.choices[0].text

        together = await asyncio.gather(*map(text, range(32)))
        assert together[::8] == [await text(number) for number in range(0, 32, 8)]


async def test_ids_over_the_token_protocol_are_those_of_the_engine(home: Home) -> None:
    replica = RallyReplica(home.server.url)
    params = SamplingParams(max_tokens=9, seed=4, top_p=0.9, stop_ids=(3,))
    first, second = await replica.generate(PROMPT, params), await replica.generate(PROMPT, params)
    assert first.ids == second.ids and second.cached_tokens == len(PROMPT) - 1
    assert len(first.logprobs) == len(first.sampling_logprobs) == len(first.ids)
    assert first.spans[0].version == 0 and first.spans[-1].end == len(first.ids)
    with pytest.raises(EngineError, match="ask for at most 984") as refusal:
        await replica.generate(PROMPT, SamplingParams(max_tokens=5000))
    assert not isinstance(refusal.value, ReplicaGone), "no other server would take it either"
    assert await replica.healthy()
    await replica.close()


async def test_a_server_killed_in_mid_episode_costs_its_turn_and_nothing_else(home: Home) -> None:
    settings = RouterSettings(open_after=1, health_every=0.2)
    replicas = [RallyReplica(home.server.url), RallyReplica(home.mortal.url)]
    router = Router(replicas, settings, max_model_len=1024)

    async def episode(number: int) -> list[int]:
        history = [*PROMPT, 20 + number]
        for turn in range(3):
            length = 120 if turn == 1 else 4
            params = SamplingParams(max_tokens=length, seed=100 * number + turn)
            generation = await router.generate(history, params, session=f"e{number}")
            assert len(generation.ids) == length
            history = [*history, *generation.ids, 30]
        return history

    expected = await asyncio.gather(*map(episode, range(6)))
    sampled = router.metrics()["router/sampled_tokens"]
    running = asyncio.gather(*map(episode, range(6)))
    deadline = time.monotonic() + 120
    while not home.mortal.metrics()["rally_engine_running"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    home.mortal.kill()
    assert await running == expected, "the same seeds give the same episodes on the other server"
    metrics = router.metrics()
    assert 1 <= metrics["router/failed_tries"] <= 6 and metrics["router/given_up"] == 0
    assert metrics["router/sampled_tokens"] == 2 * sampled, "nothing is counted twice"
    assert metrics["router/servers_usable"] == 1
    await router.close()
