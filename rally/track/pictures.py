"""An image that an episode holds is a file of the run folder, once, named by its content; what is read back is the same
image or none."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rally.images import FORMATS, loaded_images
from rally.track.serialize import image_from_json
from rally.types import Episode, Image

_NAME = re.compile(r"[0-9a-f]{32}")


class ImageFolder:
    """`images/<hash>.<format>` of a run."""

    def __init__(self, run: Path) -> None:
        self.path = run / "images"

    def save(self, episodes: Iterable[Episode]) -> None:
        """Write those that are not there yet. Each gets its name when all of it is on disk."""
        for image in {image for episode in episodes for image in images_of(episode)}:
            place = self.path / f"{image.hash}.{image.format}"
            if not place.exists():
                self.path.mkdir(exist_ok=True)
                part = place.with_name(f".{place.name}.part")
                part.write_bytes(image.read())
                os.replace(part, place)

    def find(self, name: str) -> Path | None:
        """The file of the image with this hash; a name that is no hash has none, whatever it looks like."""
        if not _NAME.fullmatch(name):
            return None
        return next((place for kind in FORMATS if (place := self.path / f"{name}.{kind}").is_file()), None)

    def hook(self, value: dict[str, Any]) -> Any:
        """For `json.loads`: what stands for an image becomes the image, whose bytes are read when somebody looks."""
        return image_from_json(value, self.path) if "$image" in value else value


def images_of(episode: Episode) -> Iterator[Image]:
    """Every image that was shown, or was to be."""
    yield from loaded_images(episode.task.prompt)
    for segment in episode.segments:
        yield from (span.image for span in segment.images)
    for result in episode.tool_results:
        yield from (image for image in result.response.image or () if isinstance(image, Image))
