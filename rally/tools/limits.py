"""Defines the limits of tool calls: `ToolLimits` for all tools of a run, `CallLimits` for one tool.

tools:
  - class_name: my_tools.Lookup
    limits:
      max_concurrency: 8            # calls at a time; also spelled num_workers
      rate_limit: 20                # calls a second, with bursts of one second's worth
      max_queue: 100                # calls that may wait; further ones are rejected at once
      timeout: 5                    # seconds for a call, without its waiting; default multi_turn.tool_timeout
      adaptive_concurrency: true    # adapts between min_concurrency and max_concurrency to how the calls go
      cache: true                   # identical calls are answered from a cache of cache_size answers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rally.tools.results import TruncateSide
from rally.tools.schema import ToolConfigError, from_pydantic
from rally.util.rate_limit import RateLimiter


@dataclass(frozen=True, kw_only=True)
class ToolLimits:
    """Limits of all tools: `timeout` in seconds per call, `max_parallel` calls of one turn at a time (0: no limit),
    `max_response_chars` of a response (None: no limit)."""

    timeout: float = 30.0
    max_parallel: int = 0
    max_response_chars: int | None = None
    truncate_side: TruncateSide = "middle"

    def __post_init__(self) -> None:
        for ok, sentence in (
            (self.timeout > 0, f"the tool timeout must be more than 0 seconds, not {self.timeout}"),
            (self.max_parallel >= 0, f"max_parallel must be 0 (no limit) or more, not {self.max_parallel}"),
            (
                self.max_response_chars is None or self.max_response_chars > 0,
                f"max_response_chars must be at least 1, or None for no limit, not {self.max_response_chars}",
            ),
            (
                self.truncate_side in get_args(TruncateSide),
                f"truncate_side must be left, right or middle, not {self.truncate_side!r}",
            ),
        ):
            if not ok:
                raise ToolConfigError(sentence)


class WorkerSettings(BaseModel):
    """The concurrency keys of verl's own tools. Both numbers count concurrent calls; the smaller one applies."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_workers: int = Field(default=10, ge=1)
    rate_limit: int = Field(default=10, ge=1)
    enable_global_rate_limit: bool = True  # whether rate_limit applies

    @property
    def max_concurrency(self) -> int:
        return min(self.num_workers, self.rate_limit) if self.enable_global_rate_limit else self.num_workers


class CallLimits(BaseModel):
    """The limits of one tool. None is no limit; a `timeout` of None is that of `ToolLimits`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_concurrency: int | None = Field(default=None, ge=1)
    rate_limit: float | None = Field(default=None, gt=0)
    max_queue: int | None = Field(default=None, ge=0)
    timeout: float | None = Field(default=None, gt=0)
    adaptive_concurrency: bool = False
    min_concurrency: int = Field(default=1, ge=1)
    cache: bool = False
    cache_size: int = Field(default=1024, ge=1)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        most = self.max_concurrency
        if self.adaptive_concurrency and (most is None or most < self.min_concurrency):
            raise ValueError("adaptive_concurrency needs a max_concurrency of at least min_concurrency")
        if self.max_queue is not None and most is None and self.rate_limit is None:
            raise ValueError("max_queue needs max_concurrency or rate_limit, else nothing ever waits")
        return self

    def limiter(self) -> RateLimiter | None:
        """A new limiter with these limits; None where nothing is limited."""
        if self.max_concurrency is None and self.rate_limit is None:
            return None
        return RateLimiter(
            max_concurrency=self.max_concurrency,
            rate=self.rate_limit,
            max_queue=self.max_queue,
            min_concurrency=self.min_concurrency if self.adaptive_concurrency else None,
        )

    def _without_effect(self) -> str | None:
        """Describes a limit that is set but has no effect."""
        for name, needs in (("min_concurrency", "adaptive_concurrency"), ("cache_size", "cache")):
            if getattr(self, name) != type(self).model_fields[name].default and not getattr(self, needs):
                return f"{name} has no effect without {needs}: true; set that, or remove {name}"
        return None

    def overridden(self, overrides: Any, where: str) -> CallLimits:
        """A copy with the keys of `overrides`, the `limits` of an entry in a tool YAML."""
        if not isinstance(overrides, dict):
            raise ToolConfigError(f"{where}: limits must be a mapping, not {type(overrides).__name__}")
        if {"num_workers", "max_concurrency"} <= overrides.keys():
            raise ToolConfigError(f"{where}: limits.num_workers and limits.max_concurrency are one limit; keep one")
        named = {"max_concurrency" if key == "num_workers" else str(key): value for key, value in overrides.items()}
        unknown = sorted(named.keys() - CallLimits.model_fields.keys())
        if unknown:
            known = ", ".join(CallLimits.model_fields)
            raise ToolConfigError(f"{where}: limits has no key {unknown[0]!r}; its keys are {known}")
        try:
            limits = CallLimits.model_validate({**self.model_dump(), **named})
        except ValidationError as error:
            raise ToolConfigError(f"{where}: limits: {from_pydantic(error)}") from None
        if problem := limits._without_effect():
            raise ToolConfigError(f"{where}: limits.{problem}")
        return limits
