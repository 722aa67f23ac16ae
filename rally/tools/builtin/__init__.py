"""The tools that Rally brings along."""
