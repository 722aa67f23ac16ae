"""What a row or a tool calls an image becomes an `Image` that can be decoded, or a sentence says why not.

Taken are paths, bytes, data: addresses, PIL images, and the mappings that data sets wrap around those. Nothing is
fetched from the network. Every image has been decoded once, within `MOST_PIXELS`, before anybody is given it.
"""

from __future__ import annotations

import base64
import binascii
import io
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints
from urllib.parse import unquote, urlsplit

from rally.types import Image, Message, RallyError

MOST_PIXELS = 64_000_000
"""A few kilobytes can claim to be a picture of terabytes; no camera we know of takes more than this."""

MOST_BYTES = 4 * MOST_PIXELS + (1 << 20)
"""Of a file: so many pixels uncompressed, and a header."""

MOST_REMEMBERED = 1 << 17
FORMATS: tuple[str, ...] = get_args(get_type_hints(Image)["format"])
SAID_BY = ("image", "image_url", "url", "bytes", "path")
TAKEN = "give a path, bytes, a data: address or a PIL image"


class ImageError(RallyError):
    """Something that was to be an image and cannot be one."""


def read_image(source: Any, folder: Path | None = None) -> Image:
    """The image that `source` names or holds; a relative path counts from `folder`."""
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
    raise ImageError(f"{type(source).__name__} is no image; {TAKEN}")


def decoded(image: Image) -> Any:
    """The same as a PIL image in RGB; what is transparent is shown on white."""
    return _rgb(_opened(image.read(), "the image"))


def image_parts(messages: Sequence[Message]) -> list[Image]:
    """The images of messages, in the order in which a template shows them. A path in a message is not followed: whoever
    writes messages, a client of a server perhaps, must not choose what is read from this machine's disk."""
    return [_held(part) for part in _parts(messages) if is_image(part)]


def has_images(messages: Sequence[Message]) -> bool:
    return any(is_image(part) for part in _parts(messages))


def loaded_images(messages: Sequence[Message]) -> list[Image]:
    """Of the images of messages those that were read already."""
    found = (part.get("image") for part in _parts(messages) if isinstance(part, Mapping))
    return [image for image in found if isinstance(image, Image)]


def _parts(messages: Sequence[Message]) -> Iterator[Any]:
    contents = (message.get("content") for message in messages)
    return (part for content in contents if isinstance(content, list) for part in content)


def _held(source: Any) -> Image:
    while isinstance(source, Mapping):
        source = _inside(source)
    if isinstance(source, (str, Path)) and not str(source).startswith("data:"):
        raise ImageError("a message names an image by its path; read it first, with rally.images.loading.read_image")
    return read_image(source)


def is_image(part: Any) -> bool:
    """Whether a part of a message's content is an image, in any of the ways people write it."""
    if not isinstance(part, Mapping) or part.get("type") == "text":
        return False
    return part.get("type") in ("image", "image_url") or part.get("image") is not None


def _inside(source: Mapping[str, Any]) -> Any:
    """What a mapping says: a part of a message, {"url": ...}, or a data set's {"bytes": ..., "path": ...}."""
    for key in SAID_BY:
        if source.get(key) is not None:
            return source[key]
    raise ImageError(f"a mapping with {', '.join(map(str, source)) or 'nothing in it'} holds no image; {TAKEN}")


def _named(name: str, folder: Path | None) -> Image:
    if name.startswith("data:"):
        return _checked(_from_data_address(name), "the image of a data: address", None)
    scheme = name.partition("://")[0] if "://" in name else ""
    if scheme not in ("", "file"):
        raise ImageError(f"images are not fetched from the network; save {name[:80]} as a file and give its path")
    try:
        path = Path(unquote(urlsplit(name).path) if scheme else name).expanduser()
        path = path if path.is_absolute() or folder is None else folder / path
        data = _file(path)
    except (OSError, ValueError, RuntimeError) as problem:  # the latter two where a name holds what no file's can
        told = problem.strerror if isinstance(problem, OSError) else problem
        where = str(name if folder is None or scheme else folder / name)
        raise ImageError(f"the image {where[:300]} cannot be read ({told}); correct the path") from None
    return _checked(data, f"the image {path}", path)


def _file(path: Path) -> bytes:
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):  # reading a pipe waits for ever, reading some devices never ends
        raise ValueError("it is no ordinary file")
    if facts.st_size > MOST_BYTES:
        raise ValueError(f"it has {facts.st_size} bytes, more than any picture that is taken")
    return path.read_bytes()


def _from_data_address(text: str) -> bytes:
    head, comma, body = text.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError
        return base64.b64decode(body, validate=True)
    except (ValueError, binascii.Error):
        raise ImageError("a data: address of an image must read data:image/png;base64,...; write it so") from None


class _Facts(NamedTuple):
    format: Any
    width: int
    height: int


_decoded_before: dict[str, _Facts] = {}
"""By content: rows are built several times before a run begins, and decoding takes far longer than hashing."""


def _checked(data: bytes, what: str, path: Path | None) -> Image:
    name = Image.hash_of(data)
    facts = _decoded_before.get(name)
    if facts is None:
        picture = _opened(data, what)
        kind = picture.format.lower()
        facts = _Facts(kind if kind in FORMATS else "jpeg", picture.width, picture.height)  # MPO is JPEG and more
        if len(_decoded_before) >= MOST_REMEMBERED:
            _decoded_before.clear()
        _decoded_before[name] = facts
    where: dict[str, Any] = {"data": data} if path is None else {"path": str(path.resolve())}
    return Image(hash=name, **facts._asdict(), **where)


def _opened(data: bytes, what: str) -> Any:
    """A PIL image, decoded; the header is looked at first, since decoding is what a bomb waits for."""
    pil = load_pil()
    try:
        picture = pil.open(io.BytesIO(data), formats=[name.upper() for name in FORMATS])
        if picture.width * picture.height > MOST_PIXELS:
            raise ImageError(f"{what} has {picture.width} x {picture.height} pixels, too many; make it smaller")
        picture.load()
    except (OSError, SyntaxError, ValueError, pil.DecompressionBombError) as problem:
        if isinstance(problem, ImageError):
            raise
        raise ImageError(f"{what} cannot be decoded ({problem}); use {', '.join(FORMATS)}") from None
    return picture


def _encoded(picture: Any) -> Image:
    """A PIL image as PNG, which loses nothing of it."""
    buffer = io.BytesIO()
    try:
        kept = picture if picture.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else picture.convert("RGB")
        kept.save(buffer, "PNG")
    except (OSError, SyntaxError, ValueError) as problem:  # it is empty, closed, or was opened and is broken
        raise ImageError(f"a PIL image cannot be used ({problem}); give a picture with pixels in it") from None
    return _checked(buffer.getvalue(), "the image", None)


def _rgb(picture: Any) -> Any:
    if picture.mode.startswith("I;16"):  # of which PIL would show all but the darkest 255 shades as white
        picture = picture.point(lambda shade: shade / 256).convert("L")
    if "A" not in picture.getbands() and "transparency" not in picture.info:
        return picture.convert("RGB")
    layer = picture.convert("RGBA")
    white = load_pil().new("RGBA", layer.size, "white")
    return load_pil().alpha_composite(white, layer).convert("RGB")


def load_pil() -> Any:
    """The module PIL.Image, or a sentence that says how to get it."""
    try:
        from PIL import Image as module
    except ImportError as missing:
        raise ImageError('images need the pillow package: pip install "rally-rl[vision]"') from missing
    return module
