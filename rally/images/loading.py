"""Loads images of rows, messages and tools as `Image` objects.

Accepted are paths, bytes, data: URLs, PIL images, and the mappings that data sets wrap around those. Nothing is fetched
from the network. Every image is decoded once, within `MAX_PIXELS`, before it is returned; a bad one raises ImageError.
"""

from __future__ import annotations

import base64
import binascii
import io
import stat
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints
from urllib.parse import unquote, urlsplit

from rally.types import Image, Message, RallyError

MAX_PIXELS = 64_000_000
"""The largest image. It protects against decompression bombs: a small file may claim to have terabytes of pixels."""

MAX_BYTES = 4 * MAX_PIXELS + (1 << 20)
"""The largest file: MAX_PIXELS uncompressed, and a header."""

MAX_CACHED = 1 << 17
BLANK_SIDE = 64  # pixels
FORMATS: tuple[str, ...] = get_args(get_type_hints(Image)["format"])
IMAGE_KEYS = ("image", "image_url", "url", "bytes", "path")
ACCEPTED = "give a path, bytes, a data: URL or a PIL image"


class ImageError(RallyError):
    """An image cannot be loaded or decoded."""


def read_image(source: Any, folder: Path | None = None) -> Image:
    """Load the image from a path, relative to `folder`, or from data."""
    while isinstance(source, Mapping):
        source = _inside(source)
    if isinstance(source, Image):
        return source
    if isinstance(source, (bytes, bytearray)):
        return _checked(bytes(source), "the image", None)
    if isinstance(source, (str, Path)):
        return _named(str(source), folder)
    if hasattr(source, "tobytes") and hasattr(source, "save"):
        return _encoded(source)
    raise ImageError(f"{type(source).__name__} is not an image; {ACCEPTED}")


def decoded(image: Image) -> Any:
    """The image as a PIL image in RGB, with transparent parts on white."""
    return _rgb(_opened(image.read(), "the image"))


@cache
def blank_image() -> Image:
    """A small white image."""
    return _encoded(load_pil().new("RGB", (BLANK_SIDE, BLANK_SIDE), "white"))


def image_parts(messages: Sequence[Message]) -> list[Image]:
    """The images of messages, in order. Paths in messages are rejected: the author of a message, such as a client of a
    server, must not choose which files of this machine are read."""
    return [_embedded(part) for part in _parts(messages) if is_image(part)]


def has_images(messages: Sequence[Message]) -> bool:
    return any(is_image(part) for part in _parts(messages))


def loaded_images(messages: Sequence[Message]) -> list[Image]:
    """The images of messages that are already loaded."""
    images = (part.get("image") for part in _parts(messages) if isinstance(part, Mapping))
    return [image for image in images if isinstance(image, Image)]


def _parts(messages: Sequence[Message]) -> Iterator[Any]:
    contents = (message.get("content") for message in messages)
    return (part for content in contents if isinstance(content, list) for part in content)


def _embedded(source: Any) -> Image:
    while isinstance(source, Mapping):
        source = _inside(source)
    if isinstance(source, (str, Path)) and not str(source).startswith("data:"):
        raise ImageError("a message names an image by its path; load it first, with rally.images.loading.read_image")
    return read_image(source)


def is_image(part: Any) -> bool:
    """Whether a part of a message's content is an image, in any of the usual forms."""
    if not isinstance(part, Mapping) or part.get("type") == "text":
        return False
    return part.get("type") in ("image", "image_url") or part.get("image") is not None


def _inside(source: Mapping[str, Any]) -> Any:
    """The image in a mapping: a part of a message, {"url": ...}, or a data set's {"bytes": ..., "path": ...}."""
    for key in IMAGE_KEYS:
        if source.get(key) is not None:
            return source[key]
    raise ImageError(f"a mapping with {', '.join(map(str, source)) or 'no keys'} has no image; {ACCEPTED}")


def _named(name: str, folder: Path | None) -> Image:
    if name.startswith("data:"):
        return _checked(_from_data_url(name), "the image of a data: URL", None)
    scheme = name.partition("://")[0] if "://" in name else ""
    if scheme not in ("", "file"):
        raise ImageError(f"images are not fetched from the network; save {name[:80]} as a file and give its path")
    try:
        path = Path(unquote(urlsplit(name).path) if scheme else name).expanduser()
        path = path if path.is_absolute() or folder is None else folder / path
        data = _file(path)
    except (OSError, ValueError, RuntimeError) as problem:  # the latter two for names that no file can have
        reason = problem.strerror if isinstance(problem, OSError) else problem
        where = str(name if folder is None or scheme else folder / name)
        raise ImageError(f"the image {where[:300]} cannot be read ({reason}); correct the path") from None
    return _checked(data, f"the image {path}", path)


def _file(path: Path) -> bytes:
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):  # reading a pipe or a device may never end
        raise ValueError("it is not a regular file")
    if facts.st_size > MAX_BYTES:
        raise ValueError(f"it has {facts.st_size} bytes, more than the {MAX_BYTES} allowed")
    return path.read_bytes()


def _from_data_url(text: str) -> bytes:
    head, comma, body = text.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError
        return base64.b64decode(body, validate=True)
    except (ValueError, binascii.Error):
        raise ImageError("the data: URL of an image must have the form data:image/png;base64,...") from None


class _Facts(NamedTuple):
    format: Any
    width: int
    height: int


_decoded_before: dict[str, _Facts] = {}
"""A cache by content: rows are built several times before a run, and decoding takes far longer than hashing."""


def _checked(data: bytes, what: str, path: Path | None) -> Image:
    name = Image.hash_of(data)
    facts = _decoded_before.get(name)
    if facts is None:
        picture = _opened(data, what)
        kind = picture.format.lower()
        facts = _Facts(kind if kind in FORMATS else "jpeg", picture.width, picture.height)  # MPO extends JPEG
        if len(_decoded_before) >= MAX_CACHED:
            _decoded_before.clear()
        _decoded_before[name] = facts
    where: dict[str, Any] = {"data": data} if path is None else {"path": str(path.resolve())}
    return Image(hash=name, **facts._asdict(), **where)


def _opened(data: bytes, what: str) -> Any:
    """A decoded PIL image. Its size is checked before decoding, which protects against decompression bombs."""
    pil = load_pil()
    try:
        picture = pil.open(io.BytesIO(data), formats=[name.upper() for name in FORMATS])
        if picture.width * picture.height > MAX_PIXELS:
            raise ImageError(f"{what} has {picture.width} x {picture.height} pixels, too many; make it smaller")
        picture.load()
    except (OSError, SyntaxError, ValueError, pil.DecompressionBombError) as problem:
        if isinstance(problem, ImageError):
            raise
        raise ImageError(f"{what} cannot be decoded ({problem}); use {', '.join(FORMATS)}") from None
    return picture


def _encoded(picture: Any) -> Image:
    """A PIL image, encoded as PNG without loss."""
    buffer = io.BytesIO()
    try:
        kept = picture if picture.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else picture.convert("RGB")
        kept.save(buffer, "PNG")
    except (OSError, SyntaxError, ValueError) as problem:  # it is empty, closed or broken
        raise ImageError(f"a PIL image cannot be used ({problem}); give one with pixels") from None
    return _checked(buffer.getvalue(), "the image", None)


def _rgb(picture: Any) -> Any:
    if picture.mode.startswith("I;16"):  # PIL would clip all but the darkest 255 shades to white
        picture = picture.point(lambda shade: shade / 256).convert("L")
    if "A" not in picture.getbands() and "transparency" not in picture.info:
        return picture.convert("RGB")
    layer = picture.convert("RGBA")
    white = load_pil().new("RGBA", layer.size, "white")
    return load_pil().alpha_composite(white, layer).convert("RGB")


def load_pil() -> Any:
    """The module PIL.Image. Raises ImageError with the install command."""
    try:
        from PIL import Image as module
    except ImportError as missing:
        raise ImageError('images need the pillow package: pip install "rally-rl[vision]"') from missing
    return module
