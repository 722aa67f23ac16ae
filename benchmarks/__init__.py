"""Guarantees: a speed that the documentation claims is measured here, against the alternative, in the same run."""
