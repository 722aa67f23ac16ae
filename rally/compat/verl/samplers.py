"""Samplers written for verl: an iterable of row numbers over a data set, and its adapter to a run's sampler."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sized
from typing import Any


class AbstractSampler:
    """verl's sampler: `__iter__` yields row numbers of an epoch."""

    def __init__(self, data_source: Sized, data_config: Any) -> None:
        self.data_source, self.data_config = data_source, data_config

    @abstractmethod
    def __iter__(self) -> Iterator[int]: ...

    def __len__(self) -> int:
        return len(self.data_source)


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that learns from each step."""

    @abstractmethod
    def update(self, batch: Any) -> None: ...
