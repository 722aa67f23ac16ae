"""Everything that happens is written once, as it happens, to the run folder; all that is shown is read from there."""

from rally.track.console import Phase, RunConsole
from rally.track.conversation import conversation_text
from rally.track.curve import CurveFiles, write_curve
from rally.track.folder import AdvantageSpan, MetricsRow, PhaseRow, RunFolder
from rally.track.metrics import rollout_metrics
from rally.track.serialize import Opaque, episode_from_json, episode_to_json
from rally.track.sinks import MetricSink, build_sinks
from rally.track.summary import run_summary
from rally.track.tools import slow_tool
from rally.track.validation import validation_metrics

__all__ = [
    "AdvantageSpan",
    "CurveFiles",
    "MetricSink",
    "MetricsRow",
    "Opaque",
    "Phase",
    "PhaseRow",
    "RunConsole",
    "RunFolder",
    "build_sinks",
    "conversation_text",
    "episode_from_json",
    "episode_to_json",
    "rollout_metrics",
    "run_summary",
    "slow_tool",
    "validation_metrics",
    "write_curve",
]
