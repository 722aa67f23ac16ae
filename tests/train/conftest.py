"""A folder with a tiny model, rows and a reward function, made once and only read."""

from train_cases import home, paper

__all__ = ["home", "paper"]
