"""The curve page is self-contained, shows the values of the run and is safe to open; the summary has the same
values."""

import importlib.util
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from rally.track import RunFolder, run_summary, write_curve
from rally.types import RallyError

HOSTILE = '</script><script>alert(1)</script>"><img src=x onerror=alert(1)> $\\frac{ \x1b[31m مرحبا 👩‍🚀'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = RunFolder(tmp_path / "my-run").create()
    folder.log_metrics(0, {"val-core/gsm8k/acc/mean@1/greedy": 0.125})
    for step, reward in enumerate((0.2341, math.nan, 0.8765), start=1):
        folder.log_metrics(
            step,
            {
                "critic/rewards/mean": reward,
                "tool/success_rate": 0.5 + step / 10,
                "num_turns/mean": 2.0 + step,
                "timing_s/gen": 1.5,
                "timing_s/agent_loop/tool_calls/mean": 9.0,
                "stop/stop": 0.75,
                "stop/length": 0.25,
                "stop/error": 0.0,
            },
        )
    folder.log_metrics(2, {"val-core/gsm8k/acc/mean@1/greedy": 0.625, "val-core/gsm8k/acc/mean@4/sampled": 0.5})
    folder.log_metrics(3, {"val-core/gsm8k/acc/mean@1/greedy": 0.5})
    return folder.path


@pytest.fixture
def html_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a missing matplotlib, so that tests of the page need not wait for the image."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


class Page(HTMLParser):
    """Tags, attributes and the text of scripts and of everything else."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [name for name, _ in attrs if name in ("src", "href", "xlink:href", "onerror")]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text += data + "\n"


@pytest.mark.usefixtures("html_only")
def test_the_page_loads_nothing_from_anywhere(run: Path) -> None:
    text = write_curve(run).html.read_text()
    assert not re.search(r"(?:https?:)?//[a-z]|url\(|@import|fetch\(", text)
    page = Page(text)
    assert page.links == [] and not {"link", "img", "iframe"} & set(page.tags)
    assert "default-src 'none'" in text and "prefers-color-scheme: dark" in text


@pytest.mark.usefixtures("html_only")
def test_the_page_shows_the_values(run: Path) -> None:
    page = Page(write_curve(run, title="Learning to add").html.read_text())
    for shown in ("Learning to add", "Reward", "Validation", "Tool success", "Turns", "training step", "mean reward"):
        assert shown in page.text
    for value in ("0.234", "0.876", "0.625", "timing_s/gen"):
        assert value in page.text
    panels = json.loads(page.scripts[0])
    reward, validation = panels[0], panels[1]
    assert [(p["step"], p["text"]) for p in reward[0]["points"]] == [(1, "0.234"), (3, "0.876")], "nan is a gap"
    assert [s["name"] for s in validation] == ["gsm8k/acc/mean@1/greedy", "gsm8k/acc/mean@4/sampled"]
    assert page.tags.count("svg") == 4


@pytest.mark.usefixtures("html_only")
def test_higher_values_are_drawn_higher_and_inside_the_picture(run: Path) -> None:
    panels = json.loads(Page(write_curve(run).html.read_text()).scripts[0])
    first, last = panels[0][0]["points"]
    assert first["x"] < last["x"] and first["y"] > last["y"]
    points = [p for panel in panels for series in panel for p in series["points"]]
    assert all(0 <= p["x"] <= 560 and 0 <= p["y"] <= 270 for p in points)


@pytest.mark.filterwarnings("ignore:Glyph")
def test_hostile_names_stay_text(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run").create()
    folder.log_metrics(1, {"critic/rewards/mean": 1.0, f"val-core/{HOSTILE}/acc/mean@1": 0.5, HOSTILE: 2.0})
    folder.log_metrics(2, {f"val-core/{HOSTILE}b/acc/mean@1": 0.5})
    files = write_curve(folder.path, title=HOSTILE)
    text = files.html.read_text()
    page = Page(text)
    assert len(page.scripts) == 2 and "img" not in page.tags and page.links == []
    assert "\x1b" not in text and "alert(1)" in page.text
    assert json.loads(page.scripts[0])[1][0]["name"].startswith("</script>")


@pytest.mark.usefixtures("html_only")
@pytest.mark.parametrize("values", [[0.0], [-2.0, -2.0], [-0.5, 1.5], [1e-9], [123456.0, 5.0], [3.0]])
def test_any_range_can_be_drawn(tmp_path: Path, values: list[float]) -> None:
    folder = RunFolder(tmp_path / "run").create()
    for step, value in enumerate(values):
        folder.log_metrics(step, {"critic/rewards/mean": value})
    panels = json.loads(Page(write_curve(folder.path).html.read_text()).scripts[0])
    assert all(12 - 1e-6 <= p["y"] <= 228 + 1e-6 for p in panels[0][0]["points"])


def test_the_picture_is_a_png_and_is_left_out_without_matplotlib(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    png = write_curve(run).png
    assert png is not None and png.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    files = write_curve(run)
    assert files.png is None and files.html.exists()


def test_a_run_without_metrics_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path).create()
    with pytest.raises(RallyError, match="no metrics to draw yet"):
        write_curve(folder.path)
    with pytest.raises(RallyError, match="has no metrics yet"):
        run_summary(folder.path)


@pytest.mark.parametrize("width", [40, 100])
def test_the_summary_tells_what_was_learned_and_what_it_cost(run: Path, width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width).print(run_summary(run))
    text = " ".join(out.getvalue().split())
    assert "reward 0.234 -> 0.876" in text
    if width == 40:
        return  # longer cells are folded there
    assert "best gsm8k/acc/mean@1/greedy 0.625 at step 2" in text
    assert "tool success 0.600 -> 0.800" in text
    assert "stop reasons, last step stop 75%, length 25%" in text
    assert "time gen 4.5 s" in text and "tool_calls" not in text
    assert str(run) in text.replace(" ", "")
