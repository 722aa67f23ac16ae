"""A conversation is shown as the tokens that were trained on: what was sampled and what was observed, by the mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from rich.text import Text

from rally.track.text import number, one_line, visible
from rally.types import Episode, Segment, ToolResult

PROMPT_STYLE = "dim"
SAMPLED_STYLE = "green"
OBSERVED_STYLE = "cyan"

Decode = Callable[[Sequence[int]], str]


def conversation_text(episode: Episode, decode: Decode) -> Text:
    """The whole exchange. `decode` turns ids into text; each unbroken run of the mask is decoded in one piece."""
    text = Text()
    text.append_text(_header(episode))
    for n, segment in enumerate(episode.segments, start=1):
        if len(episode.segments) > 1:
            text.append(f"\n\nsegment {n}/{len(episode.segments)}", style="bold")
        text.append("\n\n")
        for ids, style in _runs(segment):
            text.append(visible(decode(ids)), style=style)
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


def _runs(segment: Segment) -> Iterator[tuple[Sequence[int], str]]:
    yield segment.prompt_ids, PROMPT_STYLE
    for sampled, run in groupby(
        zip(segment.response_ids, segment.response_mask, strict=True), key=lambda pair: pair[1]
    ):
        yield [token for token, _ in run], SAMPLED_STYLE if sampled else OBSERVED_STYLE


def _tool_line(result: ToolResult) -> Text:
    line = Text("\ntool ", style="dim").append(one_line(result.call.name), style="not dim bold")
    line.append(f" {result.status}", style="not dim green" if result.ok else "not dim red")
    line.append(f" in {result.seconds:.3f} s")
    return line.append(", answer cut", style="not dim yellow") if result.truncated else line
