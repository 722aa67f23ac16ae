"""Pure functions that score a solution text against a ground truth."""

from rally.scoring import arithmetic, exact_match, gsm8k, math_answers, verl_scores

__all__ = ["arithmetic", "exact_match", "gsm8k", "math_answers", "verl_scores"]
