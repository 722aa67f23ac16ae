"""The zoom tool shows exactly the requested part of the row's image, or explains the error."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as PILImage
from vision_cases import make_image

from rally.images.loading import decoded, read_image
from rally.tools import ToolBox, load_tools
from rally.tools.builtin.image_zoom import MIN_SIDE, usable_box
from rally.tools.schema import ToolConfigError
from rally.types import Image, Task, ToolCall, ToolResult, ToolStatus

NAME = "image_zoom_in_tool"
WIDE = make_image(4, 200, 100)


async def zoom(arguments: dict[str, Any], *images: Image, **create: Any) -> ToolResult:
    parts = [{"type": "image", "image": image} for image in images]
    prompt = ({"role": "user", "content": [*parts, {"type": "text", "text": "?"}]},)
    task = Task(id="t", data_source="x", prompt=prompt, tools_kwargs={NAME: {"create_kwargs": create}})
    box = ToolBox(load_tools({"tools": [{"class_name": "verl.tools.image_zoom_in_tool.ImageZoomInTool"}]}))
    session = box.open(task, "episode")
    [result] = await session.run([ToolCall(name=NAME, arguments=arguments)])
    await session.close()
    assert not session.trouble
    return result


async def test_the_part_is_the_part() -> None:
    result = await zoom({"bbox_2d": [20, 30, 120, 90], "label": "the corner"}, WIDE)
    [part] = result.response.image or ()
    assert (result.status, result.reward) == (ToolStatus.OK, 0.0)
    assert part.tobytes() == decoded(WIDE).crop((20, 30, 120, 90)).tobytes()
    assert "[20, 30, 120, 90]" in str(result.response.text) and "the corner" in str(result.response.text)


async def test_the_row_may_name_another_image() -> None:
    red = PILImage.new("RGB", (60, 60), "red")
    result = await zoom({"bbox_2d": [0, 0, 30, 30]}, WIDE, image=red)
    [part] = result.response.image or ()
    assert part.getpixel((5, 5)) == (255, 0, 0)
    assert read_image(part).width == 30


@pytest.mark.parametrize("bad", [[50, 50, 20, 90], [300, 0, 400, 90], [0, 0, 0, 0]])
async def test_a_box_that_shows_nothing_costs_and_is_explained(bad: list[int]) -> None:
    result = await zoom({"bbox_2d": bad}, WIDE)
    assert (result.status, result.reward, result.response.image) == (ToolStatus.ERROR, -0.05, None)
    assert "200 x 100 pixels" in str(result.response.text)


async def test_arguments_and_rows_that_do_not_fit_are_told() -> None:
    assert "four numbers" in str((await zoom({"bbox_2d": [1, 2, 3]}, WIDE)).response.text)
    assert (await zoom({"bbox_2d": "here"}, WIDE)).status is ToolStatus.BAD_ARGUMENTS
    parts = load_tools({"tools": [{"name": NAME}]})
    task = Task(id="t", data_source="x", prompt=({"role": "user", "content": "?"},))
    session = ToolBox(parts).open(task, "e")
    [result] = await session.run([ToolCall(name=NAME, arguments={"bbox_2d": [0, 0, 9, 9]})])
    assert result.status is ToolStatus.UNAVAILABLE and "needs an image" in str(result.response.text)
    with pytest.raises(ToolConfigError, match="num_wrkers"):
        load_tools({"tools": [{"name": NAME, "config": {"num_wrkers": 2}}]})


numbers = st.floats(-1e4, 1e4) | st.integers(-50, 500)


@given(st.lists(numbers, min_size=4, max_size=4), st.integers(1, 500), st.integers(1, 500))
def test_a_part_is_inside_the_image_and_large_enough(given_box: list[float], width: int, height: int) -> None:
    box = usable_box(given_box, width, height)
    if isinstance(box, str):
        return
    left, top, right, bottom = box
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    assert right - left >= min(MIN_SIDE, width) and bottom - top >= min(MIN_SIDE, height)
    wanted = [max(0.0, given_box[0]), max(0.0, given_box[1]), min(width, given_box[2]), min(height, given_box[3])]
    assert left <= wanted[0] and top <= wanted[1] and right >= wanted[2] and bottom >= wanted[3]


async def test_an_answer_to_a_geometry_problem_is_judged() -> None:
    [tool] = load_tools({"tools": [{"class_name": "verl.tools.geo3k_tool.Geo3kTool"}]})
    create = {"calc_geo3k_reward": {"create_kwargs": {"ground_truth": "45"}}}
    task = Task(id="t", data_source="x", prompt=({"role": "user", "content": "?"},), tools_kwargs=create)
    session = ToolBox([tool]).open(task, "e")
    calls = [ToolCall(name="calc_geo3k_reward", arguments={"answer": text}) for text in ("44", r"\boxed{45}")]
    results = [(await session.run([call]))[0] for call in calls]
    assert [(r.metrics["correct"], r.reward) for r in results] == [(False, -0.05), (True, 0.0)]
    assert await session.close() == {"calc_geo3k_reward": 1.0}
