"""Pure tensor functions: advantages, policy losses, KL, aggregation. Imports torch and nothing else."""

from rally.algos import advantages, correction, credit, losses, returns, surrogates

__all__ = ["advantages", "correction", "credit", "losses", "returns", "surrogates"]
