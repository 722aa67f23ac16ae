"""Formats metrics in the Prometheus text format (version 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Metric:
    """One metric: a value, or a value for each set of labels (`by`). The name of a counter ends in `_total`."""

    name: str
    help: str
    kind: Literal["counter", "gauge"]
    value: float | None = None
    by: Mapping[tuple[tuple[str, str], ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert (self.kind == "counter") == self.name.endswith("_total"), f"{self.name} is misnamed"

    def lines(self) -> Iterable[str]:
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} {self.kind}"
        if self.value is not None:
            yield f"{self.name} {self.value:.17g}"
        for labels, value in self.by.items():
            inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
            yield f"{self.name}{{{inside}}} {value:.17g}"


def labelled(label: str, values: Mapping[str, float]) -> dict[tuple[tuple[str, str], ...], float]:
    """Values by one label, for `Metric.by`."""
    return {((label, text),): value for text, value in values.items()}


def exposition(metrics: Iterable[Metric]) -> str:
    """The body of a response to a Prometheus scrape."""
    return "".join(f"{line}\n" for metric in metrics for line in metric.lines())


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
