"""Compatibility with other frameworks."""
