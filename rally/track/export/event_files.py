"""Metrics become TensorBoard event files: one scalar for each, and after a resume each step once."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rally.track.export.ledger import Ledger
from rally.track.export.place import Place
from rally.track.export.sources import Found


class EventFiles:
    """Event files under TENSORBOARD_DIR, or tensorboard/ in the run folder."""

    def __init__(self, place: Place, ledger: Ledger) -> None:
        folder = Path(os.environ.get("TENSORBOARD_DIR") or place.folder / "tensorboard").absolute()
        kept = min(ledger.through, place.after) if ledger.id == str(folder) else -1
        self.where = f"tensorboard --logdir {folder}"
        self._writer = EventFileWriter(str(folder))
        # A session that starts at a step tells readers to forget what earlier files say of that step and later ones.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=kept + 1, session_log=start))
        self._add_text("config", f"```yaml\n{place.config_text()}```", kept + 1)
        self._writer.flush()
        ledger.begin(str(folder), kept)

    def send(self, item: Found) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in item.metrics.items()]
        self._writer.add_event(Event(wall_time=item.at, step=item.position, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, ok: bool) -> None:
        self._writer.close()

    def _add_text(self, tag: str, text: str, step: int) -> None:
        plugin = SummaryMetadata.PluginData(plugin_name="text")
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=TensorShapeProto())
        value = Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))
