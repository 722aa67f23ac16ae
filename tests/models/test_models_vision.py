"""The engine's results on images equal the module's own forward: chunked, cached or computed again."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import make_model
from vision_cases import FAMILIES, MORE, OTHERS, full_logprobs, make_codec, make_image, make_vision_model

from rally.engines import EngineError
from rally.engines.embedded.core import EngineCore
from rally.engines.embedded.request_slots import Request
from rally.engines.embedded.settings import EngineSettings
from rally.models.vision import image_features, rope_of
from rally.types import ImageSpan, SamplingParams, Segment

SAMPLING = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)


def make_core(model, backend="gather", num_pages=64, **settings) -> EngineCore:
    settings = {"max_model_len": 320, "max_num_seqs": 8, "page_size": 8, "max_num_batched_tokens": 96, **settings}
    return EngineCore(model, EngineSettings(backend=backend, **settings), num_pages=num_pages)


def run(core: EngineCore, *requests: Request) -> None:
    steps = itertools.count()
    while any(r.finish is None for r in requests):
        core.step()
        assert next(steps) < 500


def ask(core: EngineCore, segment: Segment, params: SamplingParams = SAMPLING) -> Segment:
    request = core.add(segment.ids, params, images=segment.images)
    run(core, request)
    return segment.append_sampled(request.result())


def asked(codec, *images, text="What is this?") -> Segment:
    parts = [{"type": "image", "image": image} for image in images]
    prompt = codec.prompt([{"role": "user", "content": [{"type": "text", "text": "See "}, *parts, *words(text)]}])
    return Segment(prompt_ids=prompt.ids, images=prompt.images)


def words(text):
    return [{"type": "text", "text": text}]


def answered(codec, segment: Segment, *images) -> Segment:
    parts = [{"type": "image", "image": image} for image in images]
    return segment.append_observed(*codec.delta([{"role": "tool", "name": "zoom", "content": [*parts, *words("ok")]}]))


def error(model, segment: Segment) -> float:
    expected = full_logprobs(model, segment.ids, len(segment.prompt_ids), segment.images)
    pairs = zip(expected, segment.response_logprobs, segment.response_mask, strict=True)
    return max(abs(a - b) for a, b, sampled in pairs if sampled)


@pytest.mark.parametrize(
    ("family", "backend"),
    [*((f, b) for f in FAMILIES + OTHERS for b in ("gather", "paged")), *((f, "paged") for f in MORE)],
)
def test_logprobs_of_a_multi_turn_episode_are_those_of_the_full_forward(family: str, backend: str) -> None:
    model, codec = make_vision_model(family), make_codec(family)
    core = make_core(model, backend, max_num_batched_tokens=7)  # images are split into several chunks
    segment = ask(core, asked(codec, make_image(1), make_image(2, 40, 20)))
    segment = ask(core, answered(codec, segment, make_image(3, 16, 32)))
    segment = ask(core, answered(codec, segment))
    assert len(segment.images) == 3
    assert error(model, segment) < 1e-5


@pytest.mark.parametrize("backend", ["gather", "paged"])
def test_two_images_of_one_size_never_share_a_prefix_and_one_image_does(backend: str) -> None:
    model, codec = make_vision_model(), make_codec()
    core = make_core(model, backend)
    one, other = asked(codec, make_image(1, 40, 40)), asked(codec, make_image(2, 40, 40))
    assert one.ids == other.ids
    first = core.add(one.ids, SAMPLING, images=one.images)
    run(core, first)
    stranger, twin = (core.add(s.ids, SAMPLING, images=s.images) for s in (other, one))
    run(core, stranger, twin)
    assert stranger.cached_tokens <= one.images[0].start
    assert twin.cached_tokens > one.images[0].end
    for segment, request in ((one, first), (other, stranger), (one, twin)):
        assert error(model, segment.append_sampled(request.result())) < 1e-5


def test_preempted_requests_and_a_full_batch_see_their_own_images() -> None:
    model, codec = make_vision_model("qwen3_vl"), make_codec()
    core = make_core(model, "paged", num_pages=26, max_num_batched_tokens=24)
    segments = [asked(codec, make_image(i, 24, 16 + 8 * (i % 2)), text=f"No {i}") for i in range(5)]
    long = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    requests = [core.add(s.ids, long, images=s.images) for s in segments]
    run(core, *requests)
    assert core.scheduler.preemptions > 0
    for segment, request in zip(segments, requests, strict=True):
        assert error(model, segment.append_sampled(request.result())) < 1e-5


@pytest.mark.parametrize("family", OTHERS)
def test_log_probabilities_depend_on_the_image(family: str) -> None:
    model, codec = make_vision_model(family), make_codec(family)
    one, other = (asked(codec, make_image(seed, 24, 24)) for seed in (1, 2))
    assert one.ids == other.ids
    seen = [full_logprobs(model, s.ids, len(s.ids) - 5, s.images) for s in (one, other)]
    assert max(abs(a - b) for a, b in zip(*seen, strict=True)) > 1e-3  # else the tests above would compare nothing


def test_new_weights_look_again() -> None:
    model, codec = make_vision_model(), make_codec()
    core = make_core(model)
    segment = asked(codec, make_image(1))
    ask(core, segment)
    with torch.no_grad():
        model.base_model.visual.patch_embed.proj.weight.mul_(1.5)
    core.commit_weights()
    assert error(model, ask(core, segment)) < 1e-5


def test_a_placeholder_that_was_sampled_is_a_token_and_no_image() -> None:
    """A sampled placeholder can neither take the position of an image nor shift anything."""
    model, codec = make_vision_model(), make_codec()
    pad = codec.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    with torch.no_grad():
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.config.text_config.vocab_size))
        model.lm_head.bias[pad] = 50.0
    core = make_core(model)
    segment = ask(core, asked(codec, make_image(1)))
    assert set(segment.response_ids) == {pad} and len(segment.images) == 1
    later = ask(core, answered(codec, segment, make_image(2)))
    assert [span.image for span in later.images] == [make_image(1), make_image(2)]
    assert error(model, later) < 1e-5


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(1, 5)), max_size=4), st.integers(1, 5))
def test_positions_are_those_of_the_module(shapes: list[tuple[int, int, int]], tail: int) -> None:
    spans, at = [], 0
    for gap, rows, columns in shapes:
        at += gap + (1 if spans else 0)  # the module reads two adjacent images as one
        spans.append(ImageSpan(at, rows, columns, IMAGE))
        at = spans[-1].end
    length = at + tail
    kinds = torch.zeros((1, length), dtype=torch.int)
    for span in spans:
        kinds[0, span.start : span.end] = 1
    grids = torch.tensor([[1, s.rows * 2, s.columns * 2] for s in spans]).view(-1, 3)
    expected, delta = MODEL.model.get_rope_index(torch.zeros((1, length), dtype=torch.long), kinds, grids)
    rope = rope_of(length, spans)
    assert (rope.positions_3L == expected[:, 0].numpy()).all() and rope.shift == delta.item()
    assert (rope_of(length + 7, spans).between(length, length + 7) == rope.between(length, length + 7)).all()


def test_a_model_for_text_and_a_wrong_place_are_refused_in_a_sentence() -> None:
    segment = asked(make_codec(), make_image(1))
    with pytest.raises(EngineError, match="text-only"):
        make_core(make_model()).add([1] * len(segment.ids), SAMPLING, images=segment.images)
    moved = [span.moved(len(segment.ids)) for span in segment.images]
    with pytest.raises(EngineError, match="outside"):
        make_core(make_vision_model()).add(segment.ids, SAMPLING, images=moved)


MODEL, IMAGE = make_vision_model(), make_image()


def test_features_of_all_images_may_be_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = make_vision_model("qwen3_vl"), [make_image(1), make_image(2, 40, 20)]
    expected = image_features(model, images)
    find = model.base_model.get_image_features

    def joined(*arguments, **named):
        found = find(*arguments, **named)
        found.pooler_output = torch.cat(tuple(found.pooler_output))
        found.deepstack_features = [torch.cat(tuple(one)) for one in found.deepstack_features]
        return found

    monkeypatch.setattr(model.base_model, "get_image_features", joined)
    told = image_features(model, images)
    assert len(told.deep_VC) > 0 and torch.equal(told.first_VC, expected.first_VC)
    assert all(map(torch.equal, told.deep_VC, expected.deep_VC))
