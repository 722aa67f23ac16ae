"""Metrics and the configuration become a run in MLflow; steps that were set aside are in no run that is shown.

MLflow can add points and cannot replace them. So a run that goes on after a step it has already told of is told anew,
from the first step, and its earlier telling goes to MLflow's trash, from where it can be restored.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from importlib.util import find_spec
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from rally.track.export.ledger import Ledger
from rally.track.export.place import Place, flat, without_password
from rally.track.export.sources import Found

REFUSED = "INVALID_PARAMETER_VALUE"
MAX_METRICS = 1000  # of one request
MAX_PARAMS = 100
MAX_PARAM = 6000  # characters
MAX_NAME = 250
# Characters it has no use for; what a path could be written without, a slash before a slash or at either end, and the
# parts `.` and `..`; and two dots at the beginning, whatever follows.
_FORBIDDEN = re.compile(r"[^\w\-. :/]|^/|/(?=/|$)|^\.\.|(?<![^/])\.{1,2}(?![^/])", re.ASCII)
_log = logging.getLogger(__name__)


def connect(folder: Path) -> MlflowClient:
    """The store of MLFLOW_TRACKING_URI, or a database in the run folder."""
    return MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or _local(folder))


def experiment_of(client: MlflowClient, name: str, folder: Path) -> str:
    """The experiment of this name, made where it is missing."""
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    local = client.tracking_uri == _local(folder)
    # A database says nothing about files, and MLflow would put them into whatever folder the command was run in.
    return str(client.create_experiment(name, artifact_location=_files(folder) if local else None))


def how_to_look(client: MlflowClient) -> str:
    """The command that shows what is in the store, or where its server is."""
    uri = without_password(client.tracking_uri)
    if uri.startswith(("http://", "https://")):
        return uri
    whole = "" if find_spec("flask") else "  (its page needs the whole of MLflow: pip install mlflow)"
    return f"mlflow ui --backend-store-uri {uri}{whole}"


class MlflowRun:
    """One run, named like the experiment of the configuration, in an experiment named like its project."""

    def __init__(self, place: Place, ledger: Ledger) -> None:
        self._client = connect(place.folder)
        experiment = experiment_of(self._client, place.project, place.folder)
        if ledger.continues(place.after) and self._shown(ledger.id):
            self._client.update_run(ledger.id, status="RUNNING")
        else:
            id = str(self._client.create_run(experiment, run_name=place.name).info.run_id)
            self._tell_config(id, place)  # a run that the ledger knows has it: who goes on there does not tell it again
            if ledger.id and self._shown(ledger.id):
                self._client.delete_run(ledger.id)
            ledger.begin(id)
        self._id = ledger.id
        self._refused: set[str] = set()

    @property
    def where(self) -> str:
        lacking = f", without {len(self._refused)} metrics that it refused (tracking/log.txt)" if self._refused else ""
        return how_to_look(self._client) + lacking

    def send(self, item: Found) -> None:
        # The time is the one of the finding: a row that is sent again is the same row, which MLflow then has once.
        points = [
            Metric(metric_name(name), value, int(item.at * 1000), item.position) for name, value in item.metrics.items()
        ]
        for first in range(0, len(points), MAX_METRICS):
            self._add(points[first : first + MAX_METRICS])

    def _add(self, points: list[Metric]) -> None:
        """All of them, or of a request that is refused every one that is not refused by itself."""
        try:
            self._client.log_batch(self._id, metrics=points)
        except MlflowException as error:
            if error.error_code != REFUSED or not self._shown(self._id):
                raise
            if len(points) > 1:
                half = len(points) // 2
                self._add(points[:half])
                self._add(points[half:])
            else:
                self._refused.add(points[0].key)
                _log.warning("MLflow refused %s: %s", points[0].key, error)

    def close(self, ok: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if ok else "KILLED")

    def _shown(self, id: str) -> bool:
        try:
            return bool(self._client.get_run(id).info.lifecycle_stage == "active")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise

    def _tell_config(self, id: str, place: Place) -> None:
        params = [Param(metric_name(key), value[:MAX_PARAM]) for key, value in flat(place.config())]
        for first in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(id, params=params[first : first + MAX_PARAMS])


def metric_name(name: str) -> str:
    """The name with what MLflow refuses spelled out: `@` as `_at_`, other characters by their number. What is too long
    is cut, and ends with a hash of the whole, so that two names stay two."""
    spelled = _FORBIDDEN.sub(_spelled, name.replace("@", "_at_")) or "_"
    if len(spelled) <= MAX_NAME:
        return spelled
    tail = "_" + hashlib.blake2b(spelled.encode(), digest_size=4).hexdigest()
    return spelled[: MAX_NAME - len(tail)] + tail


def _spelled(match: re.Match[str]) -> str:
    return "".join(f"_u{ord(character):x}_" for character in match.group())


def _local(folder: Path) -> str:
    return f"sqlite:///{folder.absolute() / 'mlflow.db'}"


def _files(folder: Path) -> str:
    return (folder.absolute() / "mlflow_files").as_uri()
