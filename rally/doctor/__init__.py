"""`rally doctor`: checks a run before it starts."""
