"""Variables of one forward, which its layers read.

Gradient checkpointing computes layers again in another thread, where context variables are empty. `checkpoint_contexts`
gives the second forward the values of the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)
"""Whether the current forward is the second one of a checkpointed layer."""

_variables: list[ContextVar[Any]] = []


def forward_variable(name: str) -> ContextVar[Any]:
    """A new variable, None outside of forwards that set it."""
    _variables.append(ContextVar(name, default=None))
    return _variables[-1]


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of `torch.utils.checkpoint.checkpoint`."""
    return nullcontext(), _restored([variable.get() for variable in _variables])


@contextmanager
def _restored(values: list[Any]) -> Iterator[None]:
    tokens = [variable.set(value) for variable, value in zip(_variables, values, strict=True)]
    again = recomputing.set(True)
    try:
        yield
    finally:
        recomputing.reset(again)
        for variable, token in zip(_variables, tokens, strict=True):
            variable.reset(token)
