"""Every notation of an image loads as a decodable image, or gives an error that says what to do."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PILImage
from vision_cases import picture

from rally.images.loading import MOST_BYTES, ImageError, decoded, has_images, image_parts, loaded_images, read_image
from rally.types import Image, ImageGone, ImageSpan, RallyError, Segment


def as_png(mode: str, size: tuple[int, int], colour: Any) -> bytes:
    buffer = io.BytesIO()
    PILImage.new(mode, size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def test_every_way_to_give_an_image_gives_the_same_one(tmp_path: Path) -> None:
    data = picture(1)
    (tmp_path / "a.png").write_bytes(data)
    address = "data:image/png;base64," + base64.b64encode(data).decode()
    part = {"type": "image_url", "image_url": {"url": address}}
    sources = [data, "a.png", tmp_path / "a.png", f"file://{tmp_path}/a.png", address, part]
    sources += [{"bytes": data, "path": "gone.png"}, {"path": "a.png"}, {"type": "image", "image": "a.png"}]
    images = [read_image(source, tmp_path) for source in sources]
    assert set(images) == {images[0]} and images[0].read() == data == images[1].read()
    assert (images[0].format, images[0].width, images[0].height) == ("png", 24, 16)
    assert images[1].data is None  # a file is read only when it is needed
    same = read_image(PILImage.open(io.BytesIO(data)))
    assert decoded(same).tobytes() == decoded(images[0]).tobytes()
    assert read_image(same) is same


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("https://example.org/a.png", "images are not fetched from the network"),
        ("missing.png", "missing.png cannot be read"),
        ("a\0b.png", "cannot be read"),
        (b"no picture", "cannot be decoded"),
        (picture(1)[:-40], "cannot be decoded"),
        (b"", "cannot be decoded"),
        ("data:image/png,abc", "data:image/png;base64"),
        ("data:image/png;base64,%%%", "data:image/png;base64"),
        (7, "int is no image"),
        ({"type": "image"}, "holds no image"),
        (PILImage.new("RGB", (9, 9)).crop((4, 4, 4, 8)), "cannot write empty image"),
        (PILImage.open(io.BytesIO(picture(1)[:-40])), "truncated"),
        ("/dev/zero", "it is no ordinary file"),
        ("huge.png", "more than any picture"),
        ("~nobody-of-this-name/a.png", "correct the path"),
        ("http://[", "images are not fetched"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "use png, jpeg"),
    ],
)
def test_what_is_no_image_is_refused_in_a_sentence(source: Any, sentence: str, tmp_path: Path) -> None:
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(MOST_BYTES + 1)  # a sparse file takes no disk space
    with pytest.raises(ImageError) as raised:
        read_image(source, tmp_path)
    assert sentence in str(raised.value) and isinstance(raised.value, RallyError)


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    bomb = as_png("1", (9_000, 9_000), 0)
    assert len(bomb) < 20_000
    with pytest.raises(ImageError, match="9000 x 9000 pixels, too many"):
        read_image(bomb)


def test_what_is_transparent_is_shown_on_white() -> None:
    assert decoded(read_image(as_png("RGBA", (2, 2), (255, 0, 0, 0)))).getpixel((0, 0)) == (255, 255, 255)
    assert decoded(read_image(as_png("LA", (2, 2), (0, 255)))).getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize("as_file", [True, False])
def test_sixteen_bits_are_shown_as_eight(as_file: bool) -> None:
    grey = PILImage.new("I;16", (2, 1))
    grey.putpixel((0, 0), 0x4000)
    grey.putpixel((1, 0), 0xFFFF)
    buffer = io.BytesIO()
    grey.save(buffer, "PNG")
    shown = decoded(read_image(buffer.getvalue() if as_file else grey))
    assert [shown.getpixel((x, 0)) for x in (0, 1)] == [(0x40,) * 3, (0xFF,) * 3]


def test_a_file_that_changed_or_went_is_not_taken_for_the_image(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(picture(1))
    image = read_image(path)
    path.write_bytes(picture(2))
    with pytest.raises(ImageGone, match="has changed"):
        image.read()
    path.unlink()
    with pytest.raises(ImageGone, match="cannot be read any more"):
        image.read()


def test_the_images_of_messages_in_their_order() -> None:
    one, two = read_image(picture(1)), read_image(picture(2))
    messages = [
        {"role": "user", "content": [{"type": "image", "image": one}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "see"},
        {"role": "tool", "content": [{"type": "image_url", "image_url": {"url": two}}]},
    ]
    assert image_parts(messages) == [one, two]


@pytest.mark.parametrize("part", [{"type": "image", "image": "/etc/passwd"}, {"image_url": {"url": "file:///x.png"}}])
def test_a_message_cannot_name_a_file(part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [{"type": "image", **part}]}]
    with pytest.raises(ImageError, match="read it first"):
        image_parts(messages)
    assert loaded_images(messages) == [] and has_images(messages)


def test_a_segment_keeps_its_images_in_place() -> None:
    image = read_image(picture(1))
    segment = Segment(prompt_ids=(5,) * 6, images=(ImageSpan(1, 1, 2, image),))
    longer = segment.append_observed((5, 9, 9, 9, 9, 5), [ImageSpan(1, 2, 2, image)])
    assert [(s.start, s.end) for s in longer.images] == [(1, 3), (7, 11)]
    with pytest.raises(AssertionError, match="inside the history"):
        segment.append_observed((5, 9), [ImageSpan(1, 2, 2, image)])
    with pytest.raises(AssertionError, match="nobody samples"):
        Segment(
            prompt_ids=(5,),
            response_ids=(9,),
            response_mask=(1,),
            response_logprobs=(-1.0,),
            images=(ImageSpan(1, 1, 1, image),),
        )
    assert isinstance(repr(image), str) and len(repr(image)) < 120  # never the bytes
    assert image != Image(hash="0", format="png", width=1, height=1, data=b"")
