"""Compatibility layers for code written for other frameworks."""
