"""Checks over a whole configuration, run after every key has been validated on its own."""
