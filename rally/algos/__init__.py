"""Pure tensor functions: advantages, policy losses, KL, aggregation. Imports torch and nothing else."""

from rally.algos import advantages, losses

__all__ = ["advantages", "losses"]
