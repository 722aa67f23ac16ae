"""Compatibility with verl: import names, agent loops, reward functions, tool schemas and configuration keys."""
