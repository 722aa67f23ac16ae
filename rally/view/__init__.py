"""What an agent did can be looked at: a page over run folders, served on this machine or written as one file."""

from rally.view.export import write_export
from rally.view.query import Query
from rally.view.run import Run, open_runs
from rally.view.server import create_app

__all__ = ["Query", "Run", "create_app", "open_runs", "write_export"]
