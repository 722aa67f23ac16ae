"""The console of commands, with the progress bars and advice of libraries switched off."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rally.track import RunConsole


def quiet_console() -> RunConsole:
    """The console of a run. Call it before the libraries are imported, which read these settings once."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_DISABLE_PROGRESS_BARS", "1")
    from rally.track import RunConsole

    return RunConsole()
