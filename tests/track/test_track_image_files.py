"""Images of episodes are stored once each in the run folder and read back unchanged; other files are out of reach."""

import base64
from dataclasses import replace
from pathlib import Path

import pytest
from view_cases_pictures import picture_episode
from vision_cases import make_image, picture

from rally.track import RunFolder, conversation_text
from rally.track.metrics.episode_metrics import rollout_metrics
from rally.track.run_folder.folder import ImageFolder
from rally.types import ImageGone, ToolResponse


def test_an_image_is_stored_once_and_read_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path).create()
    episodes = [picture_episode(n) for n in range(3)]
    folder.log_episodes(1, episodes)
    files = sorted(file.name for file in (tmp_path / "images").iterdir())
    assert files == sorted(f"{make_image(seed).hash}.png" for seed in (1, 2))
    text = (tmp_path / "episodes" / "train_000001.jsonl").read_text()
    assert base64.b64encode(picture(1)).decode()[:40] not in text and len(text) < 20_000
    back = folder.read_episodes(1)
    assert back == episodes
    shown = back[0].segments[0].images[0].image
    assert shown.read() == picture(1) and back[0].task.prompt[0]["content"][0]["image"].read() == picture(1)
    assert back[0].tool_results[0].response.image[0].read() == picture(2)


def test_a_file_that_was_tampered_with_is_no_image_of_the_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path).create()
    folder.log_episodes(1, [picture_episode(0)])
    next((tmp_path / "images").glob(f"{make_image(1).hash}*")).write_bytes(picture(3))
    with pytest.raises(ImageGone, match="has changed"):
        folder.read_episodes(1)[0].segments[0].images[0].image.read()


@pytest.mark.parametrize("name", ["../config.yaml", "..%2f", "", "a" * 31, "A" * 32, "a" * 32, "/etc/passwd", "*"])
def test_only_a_hash_finds_a_file(tmp_path: Path, name: str) -> None:
    RunFolder(tmp_path).create().log_episodes(1, [picture_episode(0)])
    (tmp_path / "images" / "notes.txt").write_text("mine")
    assert ImageFolder(tmp_path).find(name) is None
    assert ImageFolder(tmp_path).find(make_image(1).hash) is not None


def test_what_was_shown_and_what_was_not_is_counted() -> None:
    seen = picture_episode(0)
    blind = replace(seen, segments=tuple(replace(s, images=s.images[:1]) for s in seen.segments))
    metrics = rollout_metrics([seen, blind])
    assert (metrics["images/mean"], metrics["images/max"], metrics["images/not_shown"]) == (1.5, 2, 1)
    assert metrics["images/tokens/mean"] == 9.0
    assert not any(name.startswith("images") for name in rollout_metrics([picture_episode(0, images=False)]))
    assert ToolResponse(image=[make_image(1)]).image == [make_image(1)]


def test_a_person_reads_the_size_of_an_image_and_not_its_tokens() -> None:
    text = conversation_text(picture_episode(0), lambda ids: " ".join(map(str, ids))).plain
    first, second = picture_episode(0).segments[0].images
    told = [f"[image, {span.rows} x {span.columns} tokens]" for span in (first, second)]
    assert [text.count(line) for line in told] == [told.count(line) for line in told]
    pad = picture_episode(0).segments[0].ids[first.start]
    assert f"{pad} {pad}" not in text
