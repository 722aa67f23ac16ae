"""Pure functions that score a solution text against a ground truth."""

from rally.scoring import arithmetic, exact_match, gsm8k, math_answers

__all__ = ["arithmetic", "exact_match", "gsm8k", "math_answers"]
