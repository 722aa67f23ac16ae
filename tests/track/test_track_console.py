"""Console output: readable lines in a log file, progress bars on a terminal, no control characters from data."""

import io
import math
import os
import re
from itertools import count
from pathlib import Path

import pytest
from rich.console import Console
from track_episodes import NASTY, make_episode

from rally.track import RunConsole, build_sinks, conversation_text
from rally.track.console import LastingConsole
from rally.track.run_folder.folder import RunFolder
from rally.types import RallyError, StopReason, ToolCall, ToolResponse, ToolResult, ToolStatus, Turn

METRICS = {
    "critic/rewards/mean": 0.32,
    "tool/success_rate": 0.95,
    "num_turns/mean": 3.9,
    "actor/ppo_kl": 0.0012,
    "timing_s/gen": 0.61,
    "timing_s/update_actor": 0.92,
    "perf/samples_per_s": 170.06,
}


def run_console(terminal: bool = False, width: int = 100) -> tuple[RunConsole, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, highlight=False, legacy_windows=False)
    ticks = count()
    return RunConsole(console, clock=lambda: next(ticks) * 0.6), out


def test_a_log_file_reads_like_this() -> None:
    console, out = run_console()
    console.banner("rally train", {"model": "tiny", "device": "cpu"})
    with console.phase("rollout", 256) as phase:
        phase.advance(200)
        phase.advance(56)
    console.step_line(3, 40, METRICS)
    console.warn_once("kl", "kl is large")
    console.warn_once("kl", "kl is large")
    console.note("done")
    assert out.getvalue().splitlines() == [
        "rally train",
        "  model   tiny",
        "  device  cpu",
        "rollout 256/256 in 0.6 s",
        "step  3/40  reward_mean=0.320  tool_call_success=0.950  num_turns=3.90  kl=0.00120  gen=0.61s"
        "  update_actor=0.92s  samples/s=170.1",
        "warning: kl is large",
        "done",
    ]


def test_a_kl_that_rounds_to_nothing_has_no_sign() -> None:
    console, out = run_console()
    console.step_line(1, 2, {"actor/ppo_kl": -1e-9})
    console.step_line(2, 2, {"actor/ppo_kl": -1e-4})
    assert out.getvalue().splitlines() == ["step 1/2  kl=0.00000", "step 2/2  kl=-0.00010"]


def test_a_step_line_shows_what_there_is_and_validation_too() -> None:
    console, out = run_console()
    console.step_line(1, 5, {"critic/rewards/mean": math.nan, "val-core/gsm8k/acc/mean@1": 0.5, "other": 1.0})
    assert out.getvalue() == "step 1/5  reward_mean=nan  val:gsm8k/acc/mean@1=0.500\n"


def test_a_phase_that_fails_says_how_far_it_came() -> None:
    for terminal in (False, True):
        console, out = run_console(terminal)
        with pytest.raises(KeyError), console.phase("roll[red]out", 8) as phase:
            phase.advance(3)
            raise KeyError
        assert "roll[red]out 3/8 stopped after 0.6 s" in out.getvalue()


def test_a_finished_bar_leaves_nothing_and_the_cursor_is_back() -> None:
    console, out = run_console(terminal=True)
    with console.phase("rollout [red]", 4) as outer, console.phase("tools") as inner:
        outer.advance(4)
        inner.advance()
        console.note("between")
    with console.phase("update", 1) as phase:
        phase.advance()
    text = out.getvalue()
    assert "rollout [red]" in text and "between\n" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 2, "each live area hides and shows the cursor once"
    after_erasing = text.rpartition("\x1b[2K")[2]
    assert re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|\s", "", after_erasing) == "", "the last thing done is to erase the bar"


@pytest.mark.parametrize("terminal", [False, True])
def test_narrow_and_hostile_does_not_crash_and_does_not_act(terminal: bool) -> None:
    console, out = run_console(terminal, width=40)
    console.banner(NASTY, {NASTY: NASTY})
    console.note(NASTY)
    console.warn_once(NASTY, NASTY)
    console.table(NASTY, [(NASTY, NASTY), ("a", "b" * 90)])
    console.step_line(1, 10**6, METRICS | {f"val-core/{NASTY}/acc/mean@1": 1.0})
    with console.phase(NASTY, 2) as phase:
        phase.advance()
    result = ToolResult(call=ToolCall(name=NASTY), status=ToolStatus.ERROR, response=ToolResponse(text=NASTY))
    turn = Turn(role="tool", text=NASTY, tool_results=(result,))
    console.show(conversation_text(make_episode(NASTY, turns=(turn,)), lambda ids: NASTY))
    text = out.getvalue()
    assert "\x1b[31mred" not in text and "\x07" not in text and "\u202e" not in text and "\r\\x07" not in text
    assert "\\x1b[31mred" in text and "[bold]b[/bold]" in text and ":smile:" in text
    text.encode("utf-8")


def test_a_conversation_shows_tokens_by_who_wrote_them() -> None:
    text = conversation_text(make_episode(), lambda ids: "<" + ",".join(map(str, ids)) + ">")
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles["<1,2,3,4>"] == "dim"
    assert styles["<5,6,7>"] == styles["<10>"] == "green"
    assert styles["<8,9>"] == "cyan"
    assert "reward 1" in text.plain and "stop stop" in text.plain and "turns 4" in text.plain
    assert "tool calculate ok in 0.200 s" in text.plain


def test_a_conversation_shows_every_segment_and_the_error() -> None:
    segment = make_episode().segments[0]
    episode = make_episode(segments=(segment,) * 2, stop_reason=StopReason.ERROR, error="boom\x1b[0m", reward=None)
    plain = conversation_text(episode, lambda ids: f"{len(ids)} tokens ").plain
    assert re.findall(r"segment \d/\d", plain) == ["segment 1/2", "segment 2/2"]
    assert "error: boom\\x1b[0m" in plain and "reward not scored" in plain


def test_sinks_send_metrics_where_they_are_told(tmp_path: Path) -> None:
    console, out = run_console()
    folder = RunFolder(tmp_path).create()
    with build_sinks(["console"], folder, console, total_steps=9) as sinks:
        sinks.log(1, METRICS)
    assert out.getvalue().startswith("step 1/9  reward_mean=0.320")
    assert folder.read_metrics()[0].metrics == METRICS


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("swanlab", "the logger swanlab is not supported yet; use console, file, tensorboard, mlflow or wandb"),
        ("wandbb", "there is no logger named wandbb; use console, file, tensorboard, mlflow or wandb"),
    ],
)
def test_a_sink_that_cannot_be_honoured_is_an_error(tmp_path: Path, name: str, sentence: str) -> None:
    with pytest.raises(RallyError, match=re.escape(sentence)):
        build_sinks(["console", name], RunFolder(tmp_path), run_console()[0], total_steps=1)


def test_the_title_of_a_narrow_table_stays_on_one_line() -> None:
    file = io.StringIO()
    RunConsole(Console(file=file, width=80)).table("success on 200 held-out problems", [["a", "1"]])
    assert "success on 200 held-out problems" in file.getvalue()


def test_a_console_whose_reader_is_gone_falls_silent_and_nothing_else() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        console = RunConsole(LastingConsole(file=file))
        with console.phase("rollout 1/2", 1) as phase:
            console.note("nobody reads this")
            phase.advance()
        console.step_line(1, 2, {})
