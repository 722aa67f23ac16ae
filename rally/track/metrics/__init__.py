"""Metrics as pure functions of episodes."""
