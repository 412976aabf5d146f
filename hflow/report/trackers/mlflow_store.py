"""MLflow: in ``mlruns`` beside the run folders, or where ``MLFLOW_TRACKING_URI`` says.

The experiment is the graph's name.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hflow.report.trackers.shown import remember, remembered, samples_text
from hflow.runtime.controller.tracking import TrackedRun

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

URI, FOLDER = "MLFLOW_TRACKING_URI", "mlruns"
MOST_VALUES = 1000  # that MLflow takes at once
STATES = {"finished": "FINISHED", "interrupted": "KILLED"}
_ARROW, _REFUSED = re.compile(r"[-=]>"), re.compile(r"[^\w. :-]")


class MlflowTracker:
    """MLflow can take nothing back: of a run that goes on, steps that it has are not sent again."""

    name = "mlflow"

    def __init__(self) -> None:
        self._client: MlflowClient | None = None
        self._id = ""
        self._run: TrackedRun | None = None
        self._known: dict[str, set[int]] = {}

    def begin(self, run: TrackedRun) -> None:
        self._run, uri = run, tracking_uri(run.folder)
        self._client = _client(uri)
        state = remembered(run.folder, self.name)
        self._id = state["run"] if state.get("uri") == uri else self._new(run)
        remember(run.folder, self.name, {"uri": uri, "run": self._id})
        self._client.update_run(self._id, status="RUNNING")
        metrics = self._client.get_run(self._id).data.metrics
        self._known = {name: self._steps_of(name) for name in metrics}
        for step, values in run.values.items():
            self.values(step, values)
        self._client.log_text(self._id, run.plan.graph.text, "graph.yaml")

    def values(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        assert self._client
        named = {plain_name(name): value for name, value in values.items()}
        now_ms = int(time.time() * 1000)
        new = [Metric(n, v, now_ms, step) for n, v in named.items() if step not in self._known.get(n, ())]
        for start in range(0, len(new), MOST_VALUES):
            self._client.log_batch(self._id, metrics=new[start : start + MOST_VALUES])

    def samples(self, step: int, file: Path) -> None:
        assert self._client and self._run
        self._client.log_artifact(self._id, str(file), "samples")
        text = samples_text(self._run.folder, step)
        self._client.log_text(self._id, text, f"samples/{file.stem}.txt")

    def finish(self, status: str, files: Sequence[Path]) -> None:
        if self._client is None:
            return
        for file in files:
            self._client.log_artifact(self._id, str(file))
        self._client.set_terminated(self._id, STATES.get(status, "FAILED"))

    def _new(self, run: TrackedRun) -> str:
        assert self._client
        name = run.plan.graph.name
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        made = self._client.create_run(experiment, run_name=run.folder.name)
        for key, value in _params(run).items():
            self._client.log_param(made.info.run_id, key, value)
        return made.info.run_id

    def _steps_of(self, name: str) -> set[int]:
        assert self._client
        return {metric.step for metric in self._client.get_metric_history(self._id, name)}


def tracking_uri(run: Path) -> str:
    return os.environ.get(URI) or (run.absolute().parent / FOLDER).as_uri()


def plain_name(name: str) -> str:
    """A name that MLflow takes. No ``/``: its file store would make a folder ``time_s`` where the metric
    ``time_s`` has its file."""
    return _REFUSED.sub("_", _ARROW.sub("to", name).replace("@", " at "))


def _client(uri: str) -> MlflowClient:
    if uri.startswith(
        "file:"
    ):  # MLflow asks for consent: it only mends its file store, and adds nothing to it
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def _params(run: TrackedRun) -> dict[str, Any]:
    graph, plan = run.plan.graph, run.plan
    return {"seed": graph.seed, "plan": plan.hash, "cluster": plan.cluster.name, **graph.params}
