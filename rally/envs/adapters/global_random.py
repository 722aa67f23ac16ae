"""Keeps the process-global random state of one game apart from those of other games and of the trainer."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_LOCK = threading.Lock()  # one game at a time uses the global state


class GlobalRandom:
    """The state that one game sees of `random` and `numpy.random`, which begins with its seed. Games that use the
    global state run one after the other."""

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Installs the game's state, and afterwards the state from before."""
        with _LOCK:
            outside = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(outside[0])
                np.random.set_state(outside[1])
