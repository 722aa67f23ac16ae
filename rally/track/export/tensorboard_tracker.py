"""Writes metrics as TensorBoard event files. After a resume, each step appears once."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rally.track.export.delivery import DeliveryLedger, PositionedMetrics
from rally.track.export.settings import TrackerRun


class EventFiles:
    """Event files in a folder of this run under TENSORBOARD_DIR, or tensorboard/ in the run folder."""

    def __init__(self, place: TrackerRun, ledger: DeliveryLedger) -> None:
        folder = _folder_of(place).absolute()
        kept = min(ledger.through, place.after) if ledger.id == str(folder) else -1
        self.where = f"tensorboard --logdir {folder}"
        self._folder, self._place = folder, place
        self._writer = self._begun_at(kept + 1)
        ledger.begin(str(folder), kept)

    def send(self, item: PositionedMetrics) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in item.metrics.items()]
        try:
            self._writer.add_event(Event(wall_time=item.at, step=item.position, summary=Summary(value=values)))
            self._writer.flush()
        except OSError:
            # A failed writer does not recover, and its file may end in a partial record.
            with suppress(OSError):
                self._writer.close()
            self._writer = self._begun_at(item.position)
            raise

    def close(self, ok: bool) -> None:
        self._writer.close()

    def _begun_at(self, step: int) -> EventFileWriter:
        """A new event file that starts at a step."""
        writer = EventFileWriter(str(self._folder))
        # A session start makes readers discard this and later steps of earlier files.
        start = SessionLog(status=SessionLog.START)
        writer.add_event(Event(wall_time=time.time(), step=step, session_log=start))
        text = _text("config", f"```yaml\n{self._place.config_text()}```")
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=[text])))
        writer.flush()
        return writer


def _folder_of(place: TrackerRun) -> Path:
    """The folder of this run. Runs may share a TENSORBOARD_DIR, in which each folder is one run."""
    shared = os.environ.get("TENSORBOARD_DIR")
    return Path(shared) / place.project / place.name if shared else place.folder / "tensorboard"


def _text(tag: str, text: str) -> Summary.Value:
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=TensorShapeProto())
    return Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)
