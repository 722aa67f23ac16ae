"""Everything that happens is written once, as it happens, to the run folder; all that is shown is read from there."""

from rally.track.console import Phase, RunConsole
from rally.track.conversation import conversation_text
from rally.track.curve import CurveFiles, write_curve
from rally.track.export import ExportSettings, TraceSettings
from rally.track.folder import AdvantageSpan, MetricsRow, PhaseRow, RunFolder
from rally.track.metrics import rollout_metrics
from rally.track.serialize import Opaque, episode_from_json, episode_to_json
from rally.track.sinks import MetricSink, Sinks, build_sinks
from rally.track.summary import run_summary
from rally.track.tools import tool_warnings
from rally.track.validation import validation_metrics
from rally.track.writing import sole_writer

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
    "rollout_metrics",
    "run_summary",
    "sole_writer",
    "tool_warnings",
    "validation_metrics",
    "write_curve",
]
