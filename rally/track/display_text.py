"""Text for terminals: conversations styled by their mask, with secrets removed and control characters made visible."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from rich.text import Text

from rally.redact import redact
from rally.types import Episode, ImageSpan, Segment, ToolResult

# Tab and newline stay. U+200D (the joiner inside emoji) stays too: it cannot move a cursor or reorder a line.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def visible(text: str) -> str:
    """`text` without known secrets and with control characters escaped; newlines and tabs are kept."""
    return _UNSAFE.sub(_escape, redact(text))


def one_line(text: str) -> str:
    """`visible(text)` on a single line."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def number(value: float) -> str:
    """A number for a table column: whole, with three decimals, or in short scientific notation."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if abs(value) >= 1e6 or abs(value) < 0.01:
        return f"{value:.3g}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


PROMPT_STYLE = "dim"
SAMPLED_STYLE = "green"
OBSERVED_STYLE = "cyan"

Decode = Callable[[Sequence[int]], str]


def conversation_text(episode: Episode, decode: Decode) -> Text:
    """The whole conversation. Each contiguous run of the mask is decoded in one piece. An image is shown by its
    size."""
    text = Text()
    text.append_text(_header(episode))
    for n, segment in enumerate(episode.segments, start=1):
        if len(episode.segments) > 1:
            text.append(f"\n\nsegment {n}/{len(episode.segments)}", style="bold")
        text.append("\n\n")
        for piece, style in _pieces(segment, decode):
            text.append(visible(piece), style=style)
    text.append("\n")
    for result in episode.tool_results:
        text.append_text(_tool_line(result))
    if episode.error is not None:
        text.append(f"\nerror: {visible(episode.error)}", style="bold red")
    return text


def _header(episode: Episode) -> Text:
    reward = "not scored" if episode.reward is None else number(episode.reward)
    facts = (("reward", reward), ("stop", str(episode.stop_reason)), ("turns", str(episode.num_turns)))
    header = Text.assemble((one_line(episode.id), "bold"))
    for name, value in facts:
        header.append(f"  {name} ", style="dim").append(value, style="not dim")
    header.append("\n")
    for name, style in (("prompt", PROMPT_STYLE), ("sampled", SAMPLED_STYLE), ("observed", OBSERVED_STYLE)):
        header.append(f"{name}  ", style=style)
    return header


def _pieces(segment: Segment, decode: Decode) -> Iterator[tuple[str, str]]:
    styles = [SAMPLED_STYLE if sampled else OBSERVED_STYLE for sampled in segment.response_mask]
    styles = [PROMPT_STYLE] * len(segment.prompt_ids) + styles
    shown: list[ImageSpan | None] = [None] * len(styles)
    for image in segment.images:
        shown[image.start : image.end] = [image] * (image.end - image.start)
    ids, at = segment.ids, 0
    for (style, span), run in groupby(zip(styles, shown, strict=True)):
        end = at + len(list(run))
        yield f"[image, {span.rows} x {span.columns} tokens]" if span else decode(ids[at:end]), style
        at = end


def _tool_line(result: ToolResult) -> Text:
    line = Text("\ntool ", style="dim").append(one_line(result.call.name), style="not dim bold")
    line.append(f" {result.status}", style="not dim green" if result.ok else "not dim red")
    line.append(f" in {result.seconds:.3f} s")
    return line.append(", answer cut", style="not dim yellow") if result.truncated else line
