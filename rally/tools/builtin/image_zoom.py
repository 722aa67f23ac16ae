"""The built-in `image_zoom_in_tool`: returns a crop of the row's image.

The box is [left, top, right, bottom] in pixels. It is clipped to the image, and a side shorter than `MIN_SIDE` is
widened around its middle. The image is the row's `create_kwargs.image`, or the first image of its prompt. An unusable
box is an error with a reward of -0.05.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Field, ValidationError

from rally.images.loading import decoded, read_image
from rally.tools.base import BaseTool
from rally.tools.limits import CallLimits, WorkerSettings
from rally.tools.schema import ToolConfigError, from_pydantic
from rally.types import Image, ToolResponse

MIN_SIDE = 28  # pixels: one image token of Qwen2-VL and Qwen2.5-VL
MAX_RATIO = 100  # of the longer side to the shorter one
BAD_BOX_REWARD = -0.05
Box = tuple[int, int, int, int]


class ZoomSettings(WorkerSettings):
    type: Literal["native"] = "native"
    num_workers: int = Field(default=20, ge=1)
    rate_limit: int = Field(default=50, ge=1)
    timeout: float = Field(default=30, gt=0)


class ImageZoomInTool(BaseTool[Any]):
    example: ClassVar[Mapping[str, Any] | None] = {"bbox_2d": [0, 0, 56, 56], "label": "a corner"}
    sees_images = True

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, tool_schema)
        try:
            settings = ZoomSettings.model_validate(self.config)
        except ValidationError as error:
            raise ToolConfigError(f"config of {self.name}: {from_pydantic(error)}") from None
        self.own_timeout = settings.timeout if "timeout" in self.config else None
        self.limits = CallLimits(max_concurrency=settings.max_concurrency)
        self._images: dict[str, Image] = {}

    def get_openai_tool_schema(self) -> dict[str, Any]:
        return {
            "name": "image_zoom_in_tool",
            "description": "Shows a part of the image, so that small things can be seen.",
            "parameters": {
                "type": "object",
                "properties": {
                    "bbox_2d": {
                        "type": "array",
                        "items": {"type": "number"},
                        "minItems": 4,
                        "maxItems": 4,
                        "description": "The part as [left, top, right, bottom], in pixels",
                    },
                    "label": {"type": "string", "description": "What is to be seen there"},
                },
                "required": ["bbox_2d"],
            },
        }

    async def create(
        self, instance_id: str | None = None, image: Any = None, images: Sequence[Image] = (), **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        if image is None and not images:
            raise ToolConfigError(
                f"{self.name} needs an image: in the row's prompt, or as tools_kwargs.{self.name}.create_kwargs.image"
            )
        instance_id = instance_id or str(uuid4())
        self._images[instance_id] = images[0] if image is None else read_image(image)
        return instance_id, ToolResponse()

    def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        image = self._images[instance_id]
        box = usable_box(parameters["bbox_2d"], image.width, image.height)
        if isinstance(box, str):
            return {"success": False, "error": box}, BAD_BOX_REWARD, {"success": False}
        label = parameters.get("label")
        text = f"The part {list(box)} of the image{f', {label}' if label else ''}:"
        return ToolResponse(text=text, image=[decoded(image).crop(box)]), 0.0, {"success": True}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._images[instance_id]


def usable_box(bbox: Sequence[float], width: int, height: int) -> Box | str:
    """The box in whole pixels inside the image, or a sentence that says what is wrong."""
    size = f"the image is {width} x {height} pixels"
    if len(bbox) != 4:
        return f"bbox_2d must be four numbers, [left, top, right, bottom], not {len(bbox)}; {size}"
    left, top = max(0.0, bbox[0]), max(0.0, bbox[1])
    right, bottom = min(float(width), bbox[2]), min(float(height), bbox[3])
    if not (left < right and top < bottom):
        return f"bbox_2d must be [left, top, right, bottom] with left < right and top < bottom inside it; {size}"
    across, down = _widened(left, right, width), _widened(top, bottom, height)
    ratio = (across[1] - across[0]) / (down[1] - down[0])
    if max(ratio, 1 / ratio) > MAX_RATIO:
        return f"the part is more than {MAX_RATIO} times as long as wide; choose another; {size}"
    return across[0], down[0], across[1], down[1]


def _widened(low: float, high: float, size: int) -> tuple[int, int]:
    """The interval in whole pixels, widened around its middle to MIN_SIDE as far as the image allows."""
    first, last = int(low), min(size, -int(-high // 1))
    missing = min(MIN_SIDE, size) - (last - first)
    if missing > 0:
        first = min(max(0, first - missing // 2), size - min(MIN_SIDE, size))
        last = first + min(MIN_SIDE, size)
    return first, last
