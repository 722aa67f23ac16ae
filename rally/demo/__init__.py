"""`rally demo` and the curriculum that makes its agent."""
