"""Makes the checkpoint of the present format that is kept beside this file: ``python -m`` this module.

A format that was released once must be read for ever, or be refused with what to do. So make one for a new
format, and leave the folders of older formats as they are.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, uint8

import hflow
from hflow.graph.run_config import CheckpointPolicy, RunConfig
from hflow.plan.plan import Plan
from hflow.runtime.checkpoint.manifest import FORMAT, name_of
from hflow.runtime.execute import execute
from hflow.runtime.run import Run
from hflow.runtime.tools.new_model import new_model
from tests.checkpoint.written import load

HERE = Path(__file__).parent
GRAPH = HERE / "fixture_graph.yaml"
DIGESTS = "digests.json"
STEP = 2


def folder_of(number: int) -> Path:
    """Of the fixture of a format."""
    return HERE / f"format_{number}"


def plan_of(model: Path, steps: int) -> Plan:
    return hflow.compile(hflow.load(GRAPH, [f"params.model={model}", f"params.steps={steps}"]), "local1")


def begin(folder: Path, seed: int, steps: int = STEP) -> Run:
    """A run of some steps with a checkpoint of each; `seed`: of the model's weights."""
    new_model(
        folder / "model", layers=1, hidden=8, heads=2, ffn=8, alphabet="0123456789+=", max_positions=32,
        tied=True, seed=seed,
    )  # fmt: skip
    config = RunConfig(CheckpointPolicy(every=1, keep=9))
    return execute(plan_of(folder / "model", steps), folder / "run", workers="inline", config=config)


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Of dtype, shape and bytes."""
    return {name: _digest(tensors[name]) for name in sorted(tensors)}


def _digest(tensor: Tensor) -> str:
    content = tensor.contiguous().reshape(-1).view(uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode() + content).hexdigest()


def main() -> None:
    target = folder_of(FORMAT)
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        run = begin(Path(folder), seed=1)
        shutil.copytree(run.folder / "checkpoints" / name_of(STEP), target / name_of(STEP))
    text = json.dumps(digests(load(target / name_of(STEP))), indent=1)
    (target / DIGESTS).write_text(f"{text}\n")


if __name__ == "__main__":
    main()
