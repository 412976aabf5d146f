"""What all stages have: where they run, what ends them, and how they tell it."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hflow.plan.cluster import Cluster
from hflow.plan.cluster_file import load_cluster

Figures = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    device: torch.device
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def cluster(self) -> Cluster:
        """One device of this machine."""
        if not self.on_gpu:
            return load_cluster("local1")
        found = load_cluster("h200x1" if "H200" in torch.cuda.get_device_name() else "h100x1")
        has = torch.cuda.get_device_properties(0).total_memory
        size = min(found.device.memory_bytes, has)
        kind = replace(found.device, memory_bytes=size, reserve_bytes=size // 10)
        return replace(found, device=kind)

    @contextmanager
    def timed(self) -> Iterator[Callable[[], float]]:
        """The seconds that what is entered has taken on the device, when it has ended."""
        self.wait()
        began, taken = time.perf_counter(), [0.0]
        yield lambda: taken[0]
        self.wait()
        taken[0] = time.perf_counter() - began

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


class Skipped(Exception):  # noqa: N818  (it is what happened)
    """The rest of a stage needs CUDA; `figures` are those of what did run."""

    def __init__(self, reason: str, figures: Figures | None = None):
        super().__init__(reason)
        self.figures = figures or {}


class Failed(Exception):  # noqa: N818
    """What was found is not what was promised; `figures` as far as they are known."""

    def __init__(self, message: str, figures: Figures | None = None):
        super().__init__(message)
        self.figures = figures or {}


def need(condition: bool, message: str, figures: Figures) -> None:
    """Raises `Failed` where the condition does not hold."""
    if not condition:
        raise Failed(message, figures)


def main(run: Callable[[Setting], Figures]) -> None:
    """Of a stage's program: DEVICE FOLDER."""
    device, folder = sys.argv[1:]
    print(json.dumps(_outcome(run, device, Path(folder))))


def _outcome(run: Callable[[Setting], Figures], device: str, folder: Path) -> Figures:
    if device == "cuda" and not torch.cuda.is_available():
        return {"state": "failed", "message": "torch finds no CUDA device"}
    try:
        return {"state": "ok", **run(Setting(torch.device(device), folder))}
    except Skipped as skipped:
        return {"state": "skipped", "message": str(skipped), **skipped.figures}
    except Failed as failed:
        return {"state": "failed", "message": str(failed), **failed.figures}
    except Exception as error:
        traceback.print_exc()
        return {"state": "failed", "message": f"{type(error).__name__}: {error}"}
