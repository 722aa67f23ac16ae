"""Grammars, images and experts of tokens over Rally's own servers, such as the engines of ranks: the bits that the
embedded engine returns in one process."""

import asyncio
import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedModel
from vision_cases import make_codec, make_image, make_vision_model

from benchmarks.architectures import small_model
from benchmarks.constrained_decoding import tiny_model
from rally.chat import tiny_tokenizer
from rally.engines import EmbeddedEngine, EngineSettings
from rally.engines.base import EngineError, ReplicaGone
from rally.engines.remote import ClientSettings, Rally, RankReplica, ServerReplica, Vllm
from rally.engines.remote.server_api import GenerationRequest, HttpCall
from rally.engines.remote.token_protocol import images_to_wire
from rally.engines.router.router import Router
from rally.models.token_masks import GrammarError, Grammars, compressed
from rally.runs.build.rank_engines import RankEngine
from rally.types import Generation, SamplingParams

SETTINGS = EngineSettings(max_model_len=128, max_num_seqs=4, deterministic=True, isolated=True)
LOOSE = 'start: "[" /[0-9]/ ("," /[0-9]/)* "]"'
END = tiny_tokenizer().eos_token_id
MODEL = tiny_model(len(tiny_tokenizer()) + 4)


def engine_of(model: PreTrainedModel, settings: EngineSettings = SETTINGS, ends: tuple[int, ...] = (END,)) -> Any:
    grammars = Grammars(tiny_tokenizer(), model.config.get_text_config().vocab_size, ends)
    return EmbeddedEngine(model, settings, num_pages=64, grammars=grammars)


@contextmanager
def rank_of(engine: EmbeddedEngine, settings: ClientSettings | None = None) -> Iterator[Router]:
    """The engine as that of a rank, behind a router."""
    rank = RankEngine(engine, tiny_tokenizer(), "127.0.0.1", "secret")
    replica = RankReplica(1, f"http://127.0.0.1:{rank.port}", settings or ClientSettings(), "secret")
    replica.loaded(0)
    try:
        yield Router([replica], max_model_len=128)
    finally:
        rank.close()


def told(generation: Generation) -> Generation:
    """Without times."""
    return replace(generation, seconds=0.0, first_token_seconds=0.0, queued_seconds=0.0)


def asked(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=12, seed=seed, stop_ids=(END,), grammar=LOOSE, **more)


async def test_a_rank_samples_under_a_grammar_as_one_process_does() -> None:
    pytest.importorskip("llguidance")
    requests = [asked(seed, temperature=0.7 + seed / 4) for seed in range(4)]
    here = engine_of(MODEL)
    expected = [told(await here.generate([5, 6, 7], one)) for one in requests]
    await here.close()
    with rank_of(engine_of(MODEL)) as router:
        found = await asyncio.gather(*(router.generate([5, 6, 7], one) for one in requests))
        await router.close()
    assert [told(one) for one in found] == expected
    assert {len(one.ids) for one in expected} != {1} and all(one.constrained for one in expected)
    assert all(one.constrained.masks != b"" and one.constrained.grammar == LOOSE for one in found if one.constrained)


async def test_a_grammar_that_cannot_be_applied_is_the_request_s_fault() -> None:
    pytest.importorskip("llguidance")
    with rank_of(engine_of(MODEL)) as router:
        with pytest.raises(GrammarError, match=r"^the schema cannot be applied"):
            await router.generate([5], replace(asked(1), grammar="start: nothing_like_this"))
        assert router.metrics()["router/in_flight"] == 0
        assert (await router.generate([5], asked(1))).constrained is not None, "the engine goes on"
        await router.close()
    with rank_of(engine_of(MODEL, ends=(3, END))) as router:
        with pytest.raises(EngineError, match=r"with the tokens .*, and stop_ids has no 3; add them"):
            await router.generate([5], asked(1))
        await router.close()


async def test_a_rank_returns_the_experts_that_one_process_returns() -> None:
    model, params = small_model("qwen3_moe"), SamplingParams(max_tokens=5, seed=3)
    settings = replace(SETTINGS, return_routes=True)
    here = EmbeddedEngine(model, settings, num_pages=64)
    expected = told(await here.generate([5, 6, 7], params))
    chosen = expected.routes
    await here.close()
    assert chosen is not None and len(chosen) == 3 + len(expected.ids) - 1
    engine = EmbeddedEngine(model, settings, num_pages=64)
    with rank_of(engine, ClientSettings(route_experts=chosen.experts)) as router:
        assert told(await router.generate([5, 6, 7], params)) == expected
        await router.close()
    silent = EmbeddedEngine(model, SETTINGS, num_pages=64)
    with rank_of(silent, ClientSettings(route_experts=chosen.experts)) as router:
        with pytest.raises(ReplicaGone, match=r"returned no expert choices; start it with .*--return-routes"):
            await router.generate([5, 6, 7], params)
        await router.close()


async def test_a_rank_is_shown_the_images_that_one_process_is_shown() -> None:
    model, codec = make_vision_model("qwen3_vl"), make_codec("qwen3_vl")
    parts = [{"type": "image", "image": make_image(1, 24, 24)}, {"type": "text", "text": "What is it?"}]
    prompt = codec.prompt([{"role": "user", "content": parts}])
    params = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
    here = EmbeddedEngine(model, SETTINGS, num_pages=64)
    expected = told(await here.generate(prompt.ids, params, images=prompt.images))
    other = replace(prompt.images[0], image=make_image(2, 24, 24))
    blind = told(await here.generate(prompt.ids, params, images=[other]))
    await here.close()
    assert blind.logprobs != expected.logprobs, "the image matters"
    with rank_of(EmbeddedEngine(model, SETTINGS, num_pages=64)) as router:
        assert told(await router.generate(prompt.ids, params, images=prompt.images)) == expected
        [wire] = images_to_wire(prompt.images)
        body = {"prompt_ids": list(prompt.ids), "sampling": {"max_tokens": 2}}
        for change, words in (
            ({"hash": "0" * 32}, "another hash than its bytes"),
            ({"data": "?"}, "cannot be read"),
            ({"data": base64.b64encode(b"no image").decode()}, "cannot be decoded"),
            ({"start": 10_000}, "outside of the prompt"),
            ({"rows": 9}, "has a span of 9 x"),
        ):
            with pytest.raises(EngineError, match=words):
                [replica] = router.replicas
                await replica.call(HttpCall("/generate", {**body, "images": [wire | change]}), 60.0)  # type: ignore[attr-defined]
        await router.close()
    with pytest.raises(EngineError, match="vLLM and SGLang are sent only tokens"):
        await served_by_vllm().generate(prompt.ids, params, images=prompt.images)
    with pytest.raises(EngineError, match="vLLM and SGLang do not return which tokens were allowed"):
        await served_by_vllm().generate([5], asked(1))


def served_by_vllm() -> ServerReplica:
    return ServerReplica("http://127.0.0.1:9", Vllm())


ANSWER = {"ids": [9, 10], "logprobs": [-0.1, -0.2], "finish": "stop", "spans": [[0, 0, 2]]} | dict.fromkeys(
    ("cached_tokens", "queued_seconds", "first_token_seconds", "sampling_logprobs")
)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "did not return which tokens the grammar allowed"),
        ({"masks": "?"}, "masks of a grammar cannot be read"),
        ({"masks": "eJwDAAAAAAE="}, "masks of a grammar cannot be read"),
        ({"masks": "Z2FyYmFnZSE="}, "masks of a grammar cannot be read"),
        ({"masks": "eJxjZGBgYARidiD+DwABRQEJ"}, "masks of a grammar cannot be read"),
    ],
)
def test_an_answer_without_its_masks_is_not_used(more: dict[str, Any], words: str) -> None:
    request = GenerationRequest(id="a", prompt_ids=(1,), params=asked(1), before=0, after=0, salt="")
    with pytest.raises(ReplicaGone, match=words):
        Rally().generation(ANSWER | more, request)


def test_masks_must_be_of_the_sampled_tokens() -> None:
    request = GenerationRequest(id="a", prompt_ids=(1,), params=asked(1), before=0, after=0, salt="")

    def answer(*masks: int) -> dict[str, Any]:
        bits = [mask.to_bytes(4, "little") for mask in masks]
        return ANSWER | {"masks": base64.b64encode(compressed(bits)).decode()}

    heard = Rally().generation(answer(1 << 9, 1 << 10 | 1 << 9), request)
    assert heard.constrained is not None and (heard.constrained.start, heard.constrained.end) == (0, 2)
    with pytest.raises(ReplicaGone, match="masks of 1 tokens for 2 sampled"):
        Rally().generation(answer(1 << 9), request)
    with pytest.raises(ReplicaGone, match="sampled a token that its mask does not allow"):
        Rally().generation(answer(1 << 9, 1 << 9), request)
