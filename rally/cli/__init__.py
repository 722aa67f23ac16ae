"""The command line: one module per command."""

from rally.cli.main import main

__all__ = ["main"]
