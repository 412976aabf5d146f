"""Folders like those that runs leave, without a run."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PLAN = {"version": 1, "step": {"graph": {"name": "grpo", "regions": [{"name": "step", "times": 20}]}}}


def run_folder(
    path: Path,
    status: str = "finished",
    rewards: Sequence[float | None] = (0.25, 0.5),
    checkpoints: Sequence[int] = (),
    began: float | None = None,
    **summary: Any,
) -> Path:
    """Make one. `checkpoints`: steps of whole ones."""
    path.mkdir(parents=True)
    write_json(path / "plan.json", PLAN)
    (path / "events.jsonl").write_text('{"time": 1.0, "event": "started"}\n')
    lines = [{"step": n, "reward_mean": reward, "tokens": 3} for n, reward in enumerate(rewards)]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    write_json(path / "summary.json", {"status": status, "steps": len(lines), "graph": "grpo", **summary})
    for step in checkpoints:
        checkpoint(path, step)
    if began is not None:
        os.utime(path / "plan.json", (began, began))
    return path


def checkpoint(run: Path, step: int) -> Path:
    folder = run / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(100_000))
    write_json(folder / "manifest.json", {"step": step})
    return folder


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value))


def running(pid: int, host: str | None = None) -> dict[str, Any]:
    """Of a summary: a process, by default of this host."""
    return {"status": "running", "pid": pid, "host": host or socket.gethostname()}
