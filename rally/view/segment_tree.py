"""Which segment of an episode continues which, from their tokens alone.

The segments of an episode are a forest: a branch continues a turn of another segment, a history that was rendered again
or edited begins like another segment, several samples share a prompt, and a sub-agent begins anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["branch", "rewritten", "prompt"]


class Continued(NamedTuple):
    """The segment that another one continues, and the tokens from the start that both have.

    branch: the whole prompt is the history of that segment up to a turn. rewritten: its whole prompt is there, but what
    follows is not all as it was. prompt: both have the same prompt."""

    segment: int
    shared: int
    kind: Kind


def continued_segments(segments: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Continued | None]:
    """For each segment, given as its prompt and response ids, the one that it continues; None if it begins anew. The
    relation has no cycles: a segment continues one with a shorter prompt, or an earlier one with the same."""
    whole = [[*prompt, *response] for prompt, response in segments]
    prompts = [list(prompt) for prompt, _ in segments]
    return [_continued(at, prompts, whole) for at in range(len(prompts))]


def _continued(at: int, prompts: Sequence[list[int]], whole: Sequence[list[int]]) -> Continued | None:
    own = prompts[at]
    found: list[Continued] = []
    for other, prompt in enumerate(prompts):
        if not 0 < len(prompt) < len(own) or own[: len(prompt)] != prompt:
            continue
        shared = _common(own, whole[other], len(prompt))
        found.append(Continued(other, shared, "branch" if shared == len(own) else "rewritten"))
    if found and max(one.shared for one in found) == len(own):
        return max(found, key=lambda one: one.shared)
    twin = next((other for other in range(at) if prompts[other] == own), None)
    if twin is not None:
        return Continued(twin, len(own), "prompt")
    return max(found, key=lambda one: (one.shared, one.segment), default=None)


def _common(a: Sequence[int], b: Sequence[int], start: int) -> int:
    """The number of equal tokens at the beginning of both, of which the first `start` are known to be."""
    at = start
    for one, other in zip(a[start:], b[start:], strict=False):
        if one != other:
            break
        at += 1
    return at
