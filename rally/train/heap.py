"""While a run lasts, the garbage collector walks only through what the run itself makes, and seldom.

What was loaded by then stays to the end; walking through it takes a third of a second and stops all episodes meanwhile.
And thousands of episodes at once make objects by the million of which hardly one is in a cycle: looking for cycles at
every 700 of them, as Python does by default, took a quarter of the rollout's own processor time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = (50_000, 20, 100)


@contextmanager
def settled_heap() -> Iterator[None]:
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()
