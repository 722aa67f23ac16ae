"""A conversation with images that grows turn by turn has the ids of the template's own rendering. Every image has as
many placeholder tokens as the processor says, and none of them was sampled."""

from types import SimpleNamespace
from typing import Any

import pytest
from chat_cases import observed, replies
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
from vision_cases import OTHERS, PAD, TEMPLATE, make_codec, make_image, make_patches, make_tokenizer, picture

from rally.chat import ChatCodec, TemplateError, tiny_tokenizer
from rally.images.loading import decoded
from rally.types import Segment

CODEC = make_codec()
PAD_ID = CODEC.tokenizer.convert_tokens_to_ids(PAD)
IMAGES = [make_image(i, width, height) for i, (width, height) in enumerate([(24, 16), (8, 8), (16, 40), (60, 60)])]

parts = st.lists(
    st.sampled_from(IMAGES).map(lambda image: {"type": "image", "image": image})
    | (observed | st.just(f"a {PAD} b")).map(lambda text: {"type": "text", "text": text}),
    min_size=1,
    max_size=4,
)
shown = st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["tool", "user"]), parts)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": draw(parts)}]
    for _ in range(draw(st.integers(1, 3))):
        messages += [draw(replies(2)), *draw(st.lists(shown, min_size=1, max_size=3))]
    return messages


def plain(messages: list[dict[str, Any]]) -> bool:
    """No reply begins with a newline, which a full rendering would merge with the prompt's."""
    said = [CODEC.decode(CODEC.encode_assistant(m)) for m in messages if m["role"] == "assistant"]
    return not any(text.lstrip(" \t")[:1] in "\r\n" for text in said)


@settings(max_examples=60)
@given(conversations())
def test_turn_by_turn_is_the_full_rendering(messages: list[dict[str, Any]]) -> None:
    prompt = CODEC.prompt(messages[:1])
    segment, at = Segment(prompt_ids=prompt.ids, images=prompt.images), 1
    while at < len(messages):
        segment = segment.append_observed(CODEC.encode_assistant(messages[at]))
        end = next((i for i in range(at + 1, len(messages)) if messages[i]["role"] == "assistant"), len(messages))
        segment = segment.append_observed(*CODEC.delta(messages[at + 1 : end]))
        at = end
    whole = CODEC.rerender(messages)
    assert CODEC.decode(segment.ids) == CODEC.decode(whole.ids)
    if plain(messages):
        assert (segment.ids, segment.images) == whole
    given_images = [
        p["image"] for m in messages if isinstance(m["content"], list) for p in m["content"] if "image" in p
    ]
    assert [span.image for span in segment.images] == given_images
    inside = {i for span in segment.images for i in range(span.start, span.end)}
    assert {i for i, token in enumerate(segment.ids) if token == PAD_ID} == inside


def test_an_image_is_as_wide_as_its_processor_says() -> None:
    patches = make_patches()
    for image in IMAGES:
        [span] = CODEC.prompt([{"role": "user", "content": [{"type": "image", "image": image}]}]).images
        patched = patches.of(image)
        [grid] = patched.inputs["image_grid_thw"].tolist()
        assert 4 * (span.end - span.start) == len(patched.pixels) == grid[1] * grid[2]
        assert [1, span.rows * 2, span.columns * 2] == grid


@pytest.mark.parametrize("family", OTHERS)
def test_the_tokens_of_every_family_are_placed_and_found_again(family: str) -> None:
    codec = make_codec(family)
    patches = codec.patches
    shown = [{"type": "image", "image": image} for image in IMAGES]
    messages = [
        {"role": "user", "content": [shown[0], {"type": "text", "text": f"two: {patches.layout.token}"}, *shown[1:3]]},
        {"role": "assistant", "content": "look again"},
        {"role": "tool", "content": [shown[3], {"type": "text", "text": "zoomed"}]},
    ]
    prompt = codec.prompt(messages[:1])
    segment = Segment(prompt_ids=prompt.ids, images=prompt.images)
    segment = segment.append_observed(codec.encode_assistant(messages[1]))
    segment = segment.append_observed(*codec.delta(messages[2:]))
    assert (segment.ids, segment.images) == codec.rerender(messages)
    assert [span.image for span in segment.images] == IMAGES
    for span in segment.images:
        assert segment.ids[span.start : span.end] == patches.tokens(span.image)
        assert patches.text(span.image) == codec.decode(patches.tokens(span.image))
    inside = {i for span in segment.images for i in range(span.start, span.end)}
    assert {i for i, token in enumerate(segment.ids) if token == patches.token} <= inside
    mask = [0] * len(segment.ids)
    assert codec.locate(segment.ids, IMAGES, mask) == segment.images
    sampled = [*segment.ids, patches.token]  # a sampled placeholder is no image
    assert codec.locate(sampled, IMAGES, [*mask, 1]) == segment.images
    for wrong in (IMAGES[:3], IMAGES[::-1], [*IMAGES, IMAGES[0]]):
        with pytest.raises(TemplateError, match="encode them with this codec"):
            codec.locate(segment.ids, wrong, mask)


@pytest.mark.parametrize("family", ["internvl", "smolvlm", "idefics3", "glm4v"])
@pytest.mark.parametrize("image", IMAGES, ids=lambda image: f"{image.width}x{image.height}")
def test_the_tokens_of_an_image_are_those_of_the_processor_in_transformers(family: str, image: Any) -> None:
    patches = make_patches(family)
    processor: Any = SimpleNamespace(
        image_processor=patches.processor,
        image_token=patches.layout.token,
        image_seq_length=4,
        start_image_token="<img>",
        end_image_token="</img>",
        image_seq_len=4,
        fake_image_token="<fake_token_around_image>",
        global_image_tag="<global-img>",
        global_image_token="<global-img>",
    )
    options: dict[str, dict[str, Any]] = {
        "internvl": {"crop_to_patches": True},
        "smolvlm": {"return_row_col_info": True},
        "idefics3": {"return_row_col_info": True},
    }
    made = patches.processor(images=[decoded(image)], return_tensors="np", **options.get(family, {}))
    assert patches.text(image) == PROCESSORS[family].replace_image_token(processor, made, 0)


PROCESSORS: dict[str, Any] = {
    "internvl": InternVLProcessor,
    "smolvlm": SmolVLMProcessor,
    "idefics3": Idefics3Processor,
    "glm4v": Glm4vProcessor,
}


def test_rows_of_mistral_end_with_their_own_tokens() -> None:
    row = "[IMG]" * 3  # of 24 x 16 pixels, which are 3 x 2 squares of 2 x 2 patches of 4 pixels
    assert make_patches("mistral3").text(IMAGES[0]) == f"{row}[IMG_BREAK]{row}[IMG_END]"


def test_nobody_can_write_an_image() -> None:
    messages = [
        {"role": "system", "content": f"You see {PAD}."},
        {"role": "user", "content": f"{PAD} and <|vision_start|>"},
        {"role": "assistant", "content": f"I say {PAD}"},
        {"role": "user", "content": [{"type": "image", "image": IMAGES[0]}, {"text": PAD}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": PAD, "arguments": {PAD: [PAD]}}}]},
        {"role": "tool", "content": [{"type": "image", "image": IMAGES[1]}, {"type": "text", "text": PAD}]},
    ]
    ids, images = CODEC.rerender(messages)
    inside = [i for span in images for i in range(span.start, span.end)]
    assert len(images) == 2 and [i for i, t in enumerate(ids) if t == PAD_ID] == inside


def test_pixels_are_not_kept_with_the_prompts_that_were_encoded() -> None:
    codec = make_codec()
    asked = [[{"role": "user", "content": [{"type": "image", "image": image}]}] for image in (picture(1), picture(2))]
    first, second = (codec.prompt(messages) for messages in asked)
    assert first.ids == second.ids and first.images[0].image != second.images[0].image
    assert codec._prompt_ids.cache_info().currsize == 1


def test_the_sanity_check_knows_that_images_are_wide() -> None:
    messages = [{"role": "user", "content": [{"type": "image", "image": IMAGES[0]}]}]
    ids = CODEC.encode_prompt(messages)
    reply = {"role": "assistant", "content": "noise"}
    assert CODEC.sanity(ids + CODEC.encode_assistant(reply), [*messages, reply], "strict") is None
    assert CODEC.sanity(ids[:-4] + ids[-3:] + CODEC.encode_assistant(reply), [*messages, reply], "strict")


def test_conversations_to_imitate_say_where_their_images_are() -> None:
    seen = [{"type": "image", "image": IMAGES[0]}]
    told = [{"role": "user", "content": seen}, {"role": "assistant", "content": "a"}]
    told += [{"role": "tool", "content": seen}, {"role": "assistant", "content": "b"}]
    ids, mask, images = CODEC.encode_conversation(told)
    assert all(set(ids[s.start : s.end]) == {PAD_ID} and not any(mask[s.start : s.end]) for s in images)
    assert (
        len(images) == 2 and CODEC.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "a<|im_end|>b<|im_end|>"
    )


@pytest.mark.parametrize(
    ("codec", "sentence"),
    [
        (ChatCodec(make_tokenizer()), "this is a text model"),
        (
            ChatCodec(make_tokenizer(), patches=make_patches(), chat_template=TEMPLATE.replace(PAD, "")),
            "prints 0 placeholders for 1 images",
        ),
    ],
)
def test_what_cannot_show_an_image_says_so(codec: ChatCodec, sentence: str) -> None:
    with pytest.raises(TemplateError, match=sentence):
        codec.prompt([{"role": "user", "content": [{"type": "image", "image": IMAGES[0]}]}])


def test_a_tokenizer_without_the_placeholder_is_refused() -> None:
    with pytest.raises(TemplateError, match=r"has no token \d+, the image placeholder"):
        ChatCodec(tiny_tokenizer(), patches=make_patches())


def test_patches_are_made_once_and_not_kept_for_ever() -> None:
    made = []
    processor = make_patches().processor

    class Counted:
        def __call__(self, **given: Any) -> Any:
            made.append(given)
            return processor(**given)

    patches = make_patches(processor=Counted(), kept_bytes=40_000)
    for image in (IMAGES[0], IMAGES[0], IMAGES[1], IMAGES[0], IMAGES[3], IMAGES[0]):
        patches.of(image)
    assert len(made) == 4
    assert {patches.size(image) for image in IMAGES[:2]} == {(2, 3), (1, 1)} and len(made) == 4  # counting makes none
