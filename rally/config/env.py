"""Schema of `env.*`: the environments of a run, their arguments and weights, and the seeds of their rows."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rally.config.base import AsList, Count, Float, Natural, NonNegative, Positive, Section


class EnvEntry(Section):
    name: str
    """As env.name."""
    args: dict[str, Any] = Field(default_factory=dict)
    """As env.args."""
    weight: NonNegative = 1.0
    """The share of the training rows, relative to the other entries. 0 only validates."""
    val_size: Natural | None = None
    """As env.val_size, for this environment; null takes that."""
    python: str | None = None
    """As env.python."""
    label: str | None = None
    """The name in rows and metrics; null takes the name."""


class EnvConfig(Section):
    name: str | None = None
    """The environment: an adapter and its environment (reasoning_gym/chain_sum, gymnasium/FrozenLake-v1,
    textarena/TicTacToe-v0, aviary/package.module.Class), or the dotted path of a class of your own. The rows are then
    made from seeds, and data.train_files is not needed."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment, such as env.args.max_terms=3."""
    python: str | None = None
    """The python of another environment, such as /envs/bfcl/bin/python, in whose process env.name runs. It needs Python
    3.11 and the package of the environment, not Rally. null: this process."""
    mixture: Annotated[tuple[EnvEntry, ...], AsList] = ()
    """Several environments instead of env.name: a list of {name, args, weight, label}."""
    train_size: Count = 1000
    """Training rows of all environments together, divided by their weights. Each has a seed of its own."""
    train_seed: Natural = 0
    """The first training seed of every environment. For one with tasks of its own, the number of the first task."""
    val_size: Natural = 100
    """Validation rows of each environment, with seeds that are not trained on. 0 means no validation, but for the
    entries of a mixture with a val_size of their own."""
    val_seed: Natural | None = None
    """The first validation seed. null is 1000000000, or the last val_size tasks of one with tasks of its own."""
    timeout: Positive = 30.0
    """Seconds for each call of an environment's reset, step and close. A call that takes longer fails its episode."""
    unfinished_reward: Float | None = None
    """The reward of an episode that a limit of turns, tokens or time ended before its environment did. null keeps the
    sum of the rewards of its turns."""

    @property
    def entries(self) -> tuple[EnvEntry, ...]:
        """The environments of the run; none if it has rows in files."""
        return self.mixture if self.name is None else (EnvEntry(name=self.name, args=self.args, python=self.python),)

    @property
    def val_sizes(self) -> dict[str, int]:
        """The validation rows of each environment, by label."""
        return {e.label or e.name: self.val_size if e.val_size is None else e.val_size for e in self.entries}
