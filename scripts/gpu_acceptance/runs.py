"""Runs of the graphs beside this file, inline: without Ray."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hflow.plan.cluster import Cluster
from hflow.plan.cluster_text import cluster_text

HERE = Path(__file__).parent
# Ray is not needed: with it, an import of it would go unnoticed.
PROGRAM = """
import sys
sys.modules["ray"] = sys.modules["sglang"] = None
from hflow.cli.app import main
sys.argv[0] = "hflow"
main()
"""


@dataclass(frozen=True)
class Done:
    """`told`: on standard error."""

    code: int
    told: str
    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())


def sums(folder: Path, count: int = 400) -> Path:
    """Additions of two digits, one JSON object per line."""
    numbers = random.Random(0)
    pairs = [(numbers.randrange(10, 100), numbers.randrange(10, 100)) for _ in range(count)]
    rows = [json.dumps({"question": f"{a}+{b}", "answer": str(a + b)}) for a, b in pairs]
    path = folder / "sums.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return path


def execute(
    graph: str,
    cluster: Cluster,
    folder: Path,
    params: Mapping[str, object],
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Done:
    """``hflow exec`` of ``GRAPH.yaml`` in a process of its own, into `folder`, which is new."""
    described = folder.parent / f"{folder.name}-cluster.yaml"
    described.write_text(cluster_text(cluster))
    settings = [part for name, value in params.items() for part in ("--set", f"params.{name}={value}")]
    where = ["--cluster", str(described), "--workers", "inline", "--run-dir", str(folder)]
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        "exec",
        str(HERE / f"{graph}.yaml"),
        *settings,
        *where,
        *options,
    ]
    done = subprocess.run(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | dict(environment or {}),
    )
    print(done.stderr, file=sys.stderr)
    return Done(done.returncode, done.stderr, folder)
