"""Sampling and scoring the episodes of one step."""
