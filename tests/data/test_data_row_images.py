"""Images of rows are placed where the messages show them, in both notations; every mismatch is an error."""

from pathlib import Path
from typing import Any

import pytest
from vision_cases import make_image, picture

from rally.data import DataError, load_tasks
from rally.data.conversations import load_conversations
from rally.data.row_files import write_rows
from rally.types import Image


def row(content: Any, **more: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": content}]
    return {"data_source": "geometry", "prompt": prompt, "reward_model": {"ground_truth": "1"}, **more}


def load(tmp_path: Path, *rows: dict[str, Any], suffix: str = "parquet", **options: Any) -> Any:
    write_rows(list(rows), tmp_path / f"train.{suffix}")
    return load_tasks(tmp_path / f"train.{suffix}", **options)


def shown(task: Any) -> list[Any]:
    content = task.prompt[0]["content"]
    return [part.get("text", part.get("image")) for part in content]


ONE, TWO = make_image(1), make_image(2)


def test_placeholders_take_the_images_of_the_column_in_order(tmp_path: Path) -> None:
    column = [{"bytes": picture(1), "path": None}, {"bytes": picture(2), "path": "x.png"}]
    [task] = load(tmp_path, row("<image>What is <image>?", images=column))
    assert shown(task) == [ONE, "What is ", TWO, "?"]
    assert task.row["images"] == [ONE, TWO] and task.row["raw_prompt"][0]["content"][0]["image"] == ONE


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_parts_with_paths_count_from_the_file(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(picture(1))
    content = [{"type": "image", "image": "pictures/a.png"}, {"type": "text", "text": "How long is AB?"}]
    [task] = load(tmp_path, row(content), suffix=suffix)
    assert shown(task) == [ONE, "How long is AB?"]


def test_a_part_with_a_path_is_not_bare(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(1))
    content = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "and <image>"}]
    [task] = load(tmp_path, row(content, images=[{"bytes": picture(2)}]))
    assert shown(task) == [ONE, "and ", TWO]


def test_a_bare_part_takes_the_next_image_and_the_column_may_have_another_name(tmp_path: Path) -> None:
    content = [{"type": "image"}, {"type": "text", "text": "and <image>"}]
    (tmp_path / "b.png").write_bytes(picture(2))
    [task] = load(tmp_path, row(content, pictures=[{"bytes": picture(1)}, {"path": "b.png"}]), image_key="pictures")
    assert shown(task) == [ONE, "and ", TWO]


def test_text_stays_text(tmp_path: Path) -> None:
    rows = [row("write <image> tags"), row([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]
    assert [t.prompt[0]["content"] for t in load(tmp_path, *rows, suffix="jsonl")] == ["write <image> tags", "ab"]


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (row("no place", images=[{"path": "a.png"}]), "prompt has 0 <image> placeholders but images has 1 images"),
        (
            row("<image><image>", images=[{"path": "a.png"}]),
            "prompt has 2 <image> placeholders but images has 1 images",
        ),
        (row([{"type": "image"}]), "prompt has 1 <image> placeholders but images has 0 images"),
        (row("<image>", images=[{"path": "gone.png"}]), "images[0]: the image"),
        (row([{"type": "image", "image": "https://x.org/a.png"}]), "not fetched from the network"),
        (row("a", videos=[{"path": "a.mp4"}]), "only images are supported"),
        (row([{"type": "video", "video": "a.mp4"}]), "prompt[0].content[0] is"),
        (row([]), "it must be one string, or a list"),
    ],
)
def test_a_row_whose_images_do_not_fit_is_named(tmp_path: Path, bad: dict[str, Any], sentence: str) -> None:
    (tmp_path / "a.png").write_bytes(picture(1))
    with pytest.raises(DataError) as raised:
        load(tmp_path, bad, suffix="jsonl")
    assert sentence in str(raised.value) and "row 0" in str(raised.value)


def test_only_what_the_policy_is_shown_holds_images(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}]
    with pytest.raises(DataError, match="the assistant writes text"):
        load(tmp_path, {**row("a"), "prompt": [*prompt, {"role": "user", "content": "b"}]}, suffix="jsonl")


def test_conversations_to_imitate_hold_images_too(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "An <image> of noise."}]
    write_rows([{"messages": messages, "images": [{"bytes": picture(1)}]}], tmp_path / "sft.parquet")
    [conversation] = load_conversations(tmp_path / "sft.parquet")
    first, last = conversation.messages
    assert isinstance(first["content"][0]["image"], Image) and last["content"] == "An <image> of noise."
