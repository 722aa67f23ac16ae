"""The helpers of the training tests, and a folder with a tiny model, rows and a reward function."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from train_cases import home, paper

__all__ = ["home", "paper"]
