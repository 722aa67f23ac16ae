"""Records of a run: the run folder, metrics, the console, curves, and export to trackers.

Everything is written once to the run folder; all other outputs read it from there.
"""

from rally.track.console import Phase, RunConsole
from rally.track.curve_page import CurveFiles, write_curve
from rally.track.display_text import conversation_text
from rally.track.export import ExportSettings, TraceSettings
from rally.track.metric_loggers import MetricSink, Sinks, build_sinks
from rally.track.metrics.episode_metrics import off_policy_metrics, rollout_metrics
from rally.track.metrics.tool_metrics import tool_warnings
from rally.track.metrics.validation_metrics import validation_metrics
from rally.track.run_folder.episode_json import Opaque, episode_from_json, episode_to_json
from rally.track.run_folder.folder import AdvantageSpan, MetricsRow, PhaseRow, RunFolder, sole_writer
from rally.track.run_summary import run_summary

__all__ = [
    "AdvantageSpan",
    "CurveFiles",
    "ExportSettings",
    "MetricSink",
    "MetricsRow",
    "Opaque",
    "Phase",
    "PhaseRow",
    "RunConsole",
    "RunFolder",
    "Sinks",
    "TraceSettings",
    "build_sinks",
    "conversation_text",
    "episode_from_json",
    "episode_to_json",
    "off_policy_metrics",
    "rollout_metrics",
    "run_summary",
    "sole_writer",
    "tool_warnings",
    "validation_metrics",
    "write_curve",
]
