"""A console for commands on which only we speak: the libraries' own progress bars and advice are switched off."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rally.track import RunConsole


def quiet_console() -> RunConsole:
    """The console of a run; must be asked for before the libraries are imported, which read these once."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_DISABLE_PROGRESS_BARS", "1")
    from rally.track import RunConsole

    return RunConsole()
