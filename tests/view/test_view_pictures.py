"""The viewer shows exactly the images that the policy saw, from the server and from an exported file."""

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from view_cases import served
from view_cases_pictures import picture_episode
from vision_cases import make_image, make_tokenizer, picture

from benchmarks.browser import Browser
from rally.track import RunFolder
from rally.view.page_export import write_export
from rally.view.run_data import open_runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "seen"
    folder = RunFolder(path).create()
    make_tokenizer().save_pretrained(path / "start")
    folder.save_config(f"actor_rollout_ref:\n  model:\n    path: {path / 'start'}\n")
    folder.log_episodes(1, [picture_episode(0), picture_episode(1)])
    folder.log_metrics(1, {"critic/rewards/mean": 1.0})
    return path


def get(url: str) -> tuple[int, bytes, dict[str, str]]:
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.status, answer.read(), {k.lower(): v for k, v in answer.headers.items()}
    except urllib.error.HTTPError as problem:
        return problem.code, problem.read(), {}


def test_images_are_served_by_their_hash_alone(run: Path) -> None:
    with served(run) as url:
        status, data, headers = get(f"{url}api/runs/0/images/{make_image(1).hash}")
        assert (status, data) == (200, picture(1))
        assert headers["content-type"] == "image/png" and headers["x-content-type-options"] == "nosniff"
        for name in ("..%2f..%2fconfig.yaml", "config.yaml", "0" * 32, "%2e%2e"):
            assert get(f"{url}api/runs/0/images/{name}")[0] == 404
        assert get(f"{url}api/runs/7/images/{make_image(1).hash}")[0] == 404
        _, body, _ = get(f"{url}api/runs/0/episode?id=t000001-00000-0")
        [segment] = json.loads(body)["segments"]
        assert [(s["hash"], s["rows"], s["columns"]) for s in segment["images"]] == [
            (make_image(seed).hash, 2, 3) for seed in (1, 2)
        ]


def loaded(browser: Browser) -> list[list[int]]:
    """The natural sizes of the images on the page, once they are loaded."""
    browser.wait("document.querySelectorAll('img.picture').length === 2")
    browser.evaluate("document.querySelectorAll('img.picture').forEach((one) => (one.loading = 'eager'))")
    browser.wait("[...document.querySelectorAll('img.picture')].every((one) => one.complete && one.naturalWidth > 0)")
    return browser.evaluate(
        "[...document.querySelectorAll('img.picture')].map((one) => [one.naturalWidth, one.naturalHeight])"
    )


def test_the_page_shows_them_where_they_stand(run: Path, browser: Browser) -> None:
    with served(run) as url:
        browser.open(f"{url}#/episode?id=t000001-00000-0")
        assert loaded(browser) == [[24, 16], [24, 16]]


def test_an_exported_file_holds_each_once(run: Path, tmp_path: Path, browser: Browser) -> None:
    out = write_export(open_runs([run]), tmp_path / "page.html").path
    text = out.read_text()
    assert text.count("data:image/png;base64,") == 2
    browser.open(f"file://{out}#/episode?id=t000001-00000-0")
    assert loaded(browser) == [[24, 16], [24, 16]]
