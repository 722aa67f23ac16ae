"""Export of a run folder to trackers (TensorBoard, MLflow, W&B, OpenTelemetry) by a second process.

It reads what the run wrote, so training does not wait for it, nothing is lost, and a tracker that was unavailable gets
what it missed.
"""

from rally.track.export.export_process import Exporter
from rally.track.export.settings import TRACKERS, ExportSettings, TraceSettings, require_packages

__all__ = ["TRACKERS", "ExportSettings", "Exporter", "TraceSettings", "require_packages"]
