"""Mechanisms that every package may use: locks, JSON lines, atomic files, child processes, threads."""
