"""Pure tensor functions: advantages, policy losses, KL, aggregation. Imports torch and nothing else."""

from rally.algos import advantages, credit_assignment, gae, losses, off_policy_correction

__all__ = ["advantages", "credit_assignment", "gae", "losses", "off_policy_correction"]
