"""Guarantees: `image_zoom_in_tool` shows a part of the row's image, large enough for a model to see, or says why not.

The box is in pixels of the image, [left, top, right, bottom]; what lies outside is cut off, and a part that is narrower
than `MIN_SIDE` is widened around its middle. The image is the row's `create_kwargs.image`, else the first of its
prompt. A box that cannot be used costs 0.05.
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

MIN_SIDE = 28  # pixels: one token of the models we know
MAX_RATIO = 100  # of the longer side to the shorter one
MISTAKE = -0.05
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
        self.limits = CallLimits(max_concurrency=settings.at_once)
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
            return {"success": False, "error": box}, MISTAKE, {"success": False}
        label = parameters.get("label")
        text = f"The part {list(box)} of the image{f', {label}' if label else ''}:"
        return ToolResponse(text=text, image=[decoded(image).crop(box)]), 0.0, {"success": True}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._images[instance_id]


def usable_box(given: Sequence[float], width: int, height: int) -> Box | str:
    """Whole pixels inside the image, or what is wrong."""
    size = f"the image is {width} x {height} pixels"
    if len(given) != 4:
        return f"bbox_2d must be four numbers, [left, top, right, bottom], not {len(given)}; {size}"
    left, top = max(0.0, given[0]), max(0.0, given[1])
    right, bottom = min(float(width), given[2]), min(float(height), given[3])
    if not (left < right and top < bottom):
        return f"bbox_2d must be [left, top, right, bottom] with left < right and top < bottom inside it; {size}"
    across, down = _at_least(left, right, width), _at_least(top, bottom, height)
    ratio = (across[1] - across[0]) / (down[1] - down[0])
    if max(ratio, 1 / ratio) > MAX_RATIO:
        return f"the part is more than {MAX_RATIO} times as long as wide; choose another; {size}"
    return across[0], down[0], across[1], down[1]


def _at_least(low: float, high: float, most: int) -> tuple[int, int]:
    """Widened around the middle where it is too narrow, as far as there is image."""
    first, last = int(low), min(most, -int(-high // 1))
    missing = min(MIN_SIDE, most) - (last - first)
    if missing > 0:
        first = min(max(0, first - missing // 2), most - min(MIN_SIDE, most))
        last = first + min(MIN_SIDE, most)
    return first, last
