"""A second process hands a run folder on to trackers (TensorBoard, MLflow, W&B, OpenTelemetry), beside the training.

It reads what the run wrote, so the training process pays for none of it, nothing can be lost on the way, and a tracker
that was away gets what it lacks when it is back.
"""

from rally.track.export.process import Exporter
from rally.track.export.settings import TRACKERS, ExportSettings, TraceSettings, require_packages

__all__ = ["TRACKERS", "ExportSettings", "Exporter", "TraceSettings", "require_packages"]
