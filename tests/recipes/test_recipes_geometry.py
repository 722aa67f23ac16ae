"""Questions are true of their figure, the values are only in the image, and test does not overlap with train."""

import io
import random
import re
from pathlib import Path

import pytest
from PIL import Image as PILImage
from vision_cases import picture

from rally.data import DataError, load_tasks, write_rows
from rally.recipes.geometry import data as geometry
from rally.recipes.geometry.drawing import SIDE, drawn, turned
from rally.rewards import compute_score


def test_every_answer_is_what_measuring_gives() -> None:
    found = geometry.problems(600, 3, "train")
    assert {p.name.split()[0] for p in found} == {"triangle", "parallels", "right", "inscribed", "similar", "exterior"}
    for problem in found:
        assert problem.answer == pytest.approx(problem.measured, abs=1e-6), problem.name
        assert not re.search(r"\d", problem.question), "the numbers are in the picture"


def test_turning_and_drawing_changes_no_distance_and_leaves_nothing_outside() -> None:
    for problem in geometry.problems(24, 0, "train"):
        rng = random.Random(problem.name)
        image = PILImage.open(io.BytesIO(drawn(turned(problem.figure, rng.uniform(0, 360), mirrored=True))))
        assert image.size == (SIDE, SIDE)
        left, top, right, bottom = PILImage.eval(image.convert("L"), lambda v: 255 - v).getbbox()
        assert min(left, top) >= 5 and max(right, bottom) <= SIDE - 5


def test_splits_share_no_problem_and_seeds_give_the_same_rows() -> None:
    train, test = ({p.name for p in geometry.problems(40, 1, split)} for split in geometry.SPLITS)
    assert not train & test
    rows = list(geometry.rows(5, 7, "test"))
    assert rows == list(geometry.rows(6, 7, "test"))[:5] and all(row["images"][0]["bytes"] for row in rows)
    assert {p.level for p in geometry.problems(30, 0, "train", levels=(2,))} == {2}
    with pytest.raises(DataError, match="different test problems of level 2"):
        geometry.problems(500, 0, "test", levels=(2,))


def test_rows_load_and_are_scored(tmp_path: Path) -> None:
    write_rows(geometry.rows(4, 0, "train"), tmp_path / "train.parquet")
    for task in load_tasks(tmp_path / "train.parquet"):
        assert [part["type"] for part in task.prompt[1]["content"]] == ["image", "text"]
        right = rf"<think>so</think>\boxed{{{task.ground_truth}}}"
        assert compute_score(task.data_source, right, task.ground_truth)["score"] == pytest.approx(1.0)
        assert compute_score(task.data_source, r"\boxed{-1}", task.ground_truth)["score"] == 0.0


def test_a_folder_like_geometry3k_is_converted(tmp_path: Path) -> None:
    row = {"images": [{"bytes": picture(1)}], "problem": "<image>Find x.", "answer": r"\sqrt{3}"}
    write_rows([row], tmp_path / "source" / "train.parquet")
    (tmp_path / "source" / "a.png").write_bytes(picture(2))
    write_rows([{**row, "images": [{"path": "a.png"}]}], tmp_path / "source" / "test.jsonl")
    for split, seed in (("train", 1), ("test", 2)):
        write_rows(geometry.converted(tmp_path / "source", split), tmp_path / f"{split}.parquet")
        [task] = load_tasks(tmp_path / f"{split}.parquet")
        image, text = task.prompt[1]["content"]
        assert image["image"].read() == picture(seed) and text["text"] == "Find x."
        assert (task.data_source, task.ground_truth) == ("hiyouga/geometry3k", r"\sqrt{3}")
    with pytest.raises(DataError, match="has no geometry problems"):
        list(geometry.converted(tmp_path, "validation"))
