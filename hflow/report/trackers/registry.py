"""The trackers that there are, by the names that `run: {trackers: [...]}` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

from hflow.diagnostics import Diagnostic, HflowError
from hflow.report.trackers.mlflow_store import MlflowTracker
from hflow.report.trackers.tensorboard_files import TensorboardTracker
from hflow.report.trackers.wandb_run import WandbTracker
from hflow.runtime.controller.tracking import Tracker

TRACKERS: Mapping[str, Callable[[], Tracker]] = {
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


def make_trackers(names: Sequence[str]) -> list[Tracker]:
    """One of each. Raises HflowError HF404 for those that are not installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise HflowError(_missing(name) for name in missing)
    return [TRACKERS[name]() for name in names]


def _missing(name: str) -> Diagnostic:
    help_ = f"`pip install -e '.[{name}]'` in hflow's checkout, or leave it out of `run.trackers`"
    return Diagnostic("HF404", f"the tracker `{name}` is not installed", help=help_)
