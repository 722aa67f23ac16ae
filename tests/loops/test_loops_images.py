"""Images of rows and tools reach the engine at their positions in every turn; one that cannot be shown is reported."""

from typing import Any

import pytest
from loop_cases import Reply, hold, make_runner, make_task, said
from PIL import Image as PILImage
from vision_cases import PAD, make_codec, make_image

from rally.compat.verl.agent_loops import VerlAgentLoop
from rally.images.loading import read_image
from rally.loops import AgentLoopBase, AgentLoopOutput
from rally.loops.registry import LoopSpec
from rally.tools import BaseTool, ToolBox, load_tools
from rally.track.metrics.episode_metrics import rollout_metrics
from rally.types import StopReason, ToolResponse, ToolStatus

IMAGE = make_image(1, 60, 60)
ASKED = ({"role": "user", "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": "What is it?"}]},)
ZOOM = ("image_zoom_in_tool", {"bbox_2d": [0, 0, 30, 40]})


class Show(BaseTool[Any]):
    """Returns the response it was constructed with."""

    def __init__(self, *images: Any) -> None:
        super().__init__({}, {"name": "show", "description": "Shows.", "parameters": {"type": "object"}})
        self.images = list(images)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        return ToolResponse(text="here", image=self.images)


def setting(*tools: BaseTool[Any], calls: int = 1, call: Any = ("show", {}), sees: bool = True, **settings: Any) -> Any:
    codec = make_codec(tools=ToolBox(tools).schemas())
    if not sees:
        codec = type(codec)(codec.tokenizer, tools=codec.tools)
    script = [Reply(said(codec, "look", call))] * calls
    return make_runner(codec, script, tools, sanity_check="strict", **settings)


@pytest.mark.parametrize("history", ["append", "rerender"])
async def test_a_zoomed_part_is_seen_in_the_next_turn(history: str) -> None:
    runner = setting(*load_tools({"tools": [{"name": "image_zoom_in_tool"}]}), calls=2, call=ZOOM, history=history)
    held = await hold(runner, make_task(ASKED))
    part = read_image(held.episode.tool_results[0].response.image[0])
    assert (part.width, part.height) == (30, 40) and held.episode.stop_reason is StopReason.STOP
    assert [[span.image for span in call.images] for call in held.engine.calls] == [
        [IMAGE],
        [IMAGE, part],
        [IMAGE, part, part],
    ]
    pad = runner.codec.tokenizer.convert_tokens_to_ids(PAD)
    for call in held.engine.calls:
        inside = {i for span in call.images for i in range(span.start, span.end)}
        assert {i for i, token in enumerate(call.prompt) if token == pad} == inside
    assert held.segment.images == held.engine.calls[-1].images
    assert "tokenization_difference" not in held.episode.extra
    assert rollout_metrics([held.episode])["images/mean"] == 3
    assert held.episode.turns[1].text.startswith("[image]The part [0, 0, 30, 40]")


@pytest.mark.parametrize("broken", ["no such file.png", PILImage.new("RGB", (0, 9))])
async def test_an_image_that_cannot_be_shown_is_the_tools_error(broken: Any) -> None:
    held = await hold(setting(Show(broken)), make_task(ASKED))
    [result] = held.episode.tool_results
    assert result.status is ToolStatus.ERROR and "cannot be shown" in str(result.response.text)
    assert len(held.segment.images) == 1


async def test_a_policy_for_text_reads_the_text_and_the_images_are_counted() -> None:
    held = await hold(setting(Show(PILImage.new("RGB", (30, 30))), sees=False), make_task())
    assert held.episode.stop_reason is StopReason.STOP and held.episode.turns[1].text == "here"
    metrics = rollout_metrics([held.episode])
    assert (metrics["images/mean"], metrics["images/not_shown"]) == (0, 1)


async def test_a_policy_for_text_says_that_it_cannot_see_the_question() -> None:
    held = await hold(setting(sees=False), make_task(ASKED))
    assert held.episode.stop_reason is StopReason.ERROR and "this is a text model" in str(held.episode.error)


@pytest.mark.parametrize(
    ("limits", "reason"), [({"response_length": 60}, "length"), ({"max_model_len": 120}, "context")]
)
async def test_an_image_that_does_not_fit_is_left_out_whole(limits: dict[str, int], reason: str) -> None:
    held = await hold(setting(Show(PILImage.new("RGB", (300, 300))), **limits), make_task(ASKED))
    assert held.episode.stop_reason == reason and len(held.segment.images) == 1
    assert rollout_metrics([held.episode])["images/not_shown"] == 1


async def test_a_prompt_with_images_is_not_cut() -> None:
    held = await hold(setting(prompt_length=10, truncation="left"), make_task(ASKED))
    assert "contains images, which cannot be cut" in str(held.episode.error)


class Own(AgentLoopBase):
    """A user's loop that returns plain lists, and the images with their positions."""

    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
        ids, images = self.codec.prompt(self.task.prompt)
        reply = await self.server.generate(ids, sampling_params, images=images)
        mask = [1] * len(reply.ids)
        told: dict[str, Any] = {"response_logprobs": reply.logprobs, "images": images}
        return AgentLoopOutput(prompt_ids=ids, response_ids=reply.ids, response_mask=mask, **told)


class Bare(AgentLoopBase):
    """A user's loop that returns the images without their positions."""

    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
        ids = self.codec.encode_prompt(self.task.prompt)
        pad, seen = self.codec.tokenizer.convert_tokens_to_ids(PAD), self.codec.delta(SHOWN)
        response = (pad, *seen.ids)
        mask = [1] + [0] * len(seen.ids)
        told: dict[str, Any] = {"multi_modal_data": {"images": [IMAGE, OTHER][: row_fields.get("shown", 2)]}}
        told |= {"response_logprobs": [-1.0] * len(mask)}
        return AgentLoopOutput(prompt_ids=ids, response_ids=response, response_mask=mask, **told)


class Forgetful(AgentLoopBase):
    """A user's loop that does not return its images."""

    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
        ids = self.codec.encode_prompt(self.task.prompt)
        reply = await self.server.generate(ids, sampling_params)
        return AgentLoopOutput(prompt_ids=ids, response_ids=reply.ids, response_mask=[1] * len(reply.ids))


class FromVerl(VerlAgentLoop):
    """A verl loop that treats its prompt as text."""

    async def run(self, sampling_params: dict[str, Any], **row_fields: Any) -> AgentLoopOutput:
        raise AssertionError(await self.apply_chat_template(self.task.prompt))


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [(Forgetful, "its 0 images take 0"), (FromVerl, "which is not supported in loops written for verl")],
)
async def test_a_loop_that_would_leave_the_policy_blind_is_an_error(loop: Any, sentence: str) -> None:
    held = await hold(setting(loop="own", loops={"own": LoopSpec(loop, {})}), make_task(ASKED))
    assert held.episode.stop_reason is StopReason.ERROR and sentence in str(held.episode.error)


OTHER = make_image(2, 30, 40)
SHOWN = [{"role": "tool", "content": [{"type": "image", "image": OTHER}]}]


async def test_images_without_places_are_found_by_their_placeholders() -> None:
    own = {"loop": "own", "loops": {"own": LoopSpec(Bare, {})}}
    held = await hold(setting(**own), make_task(ASKED))
    assert [span.image for span in held.segment.images] == [IMAGE, OTHER]
    first, second = held.segment.images
    start = len(held.segment.prompt_ids)
    assert first.end < start < second.start  # and not the placeholder that was sampled, at `start`
    held = await hold(setting(**own), make_task(ASKED, row={"shown": 1}))
    assert "pass the images in order" in str(held.episode.error)


async def test_a_loop_of_ones_own_hands_images_on() -> None:
    held = await hold(setting(loop="own", loops={"own": LoopSpec(Own, {})}), make_task(ASKED))
    assert held.segment.images == held.engine.calls[0].images and held.segment.images[0].image == IMAGE
