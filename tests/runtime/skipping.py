"""``python -m tests.runtime.skipping MODEL FOLDER MARK``: a run on three workers, of which one skips the
transfer of weights in the third step, unless the file MARK is there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hflow
from hflow.graph.run_config import CheckpointPolicy, HangPolicy, RunConfig
from hflow.plan.program import SyncWeights
from hflow.runtime.controller.local_ray import LocalRay
from hflow.runtime.execute import execute
from hflow.runtime.worker.transfer import Received

GRAPH = Path(__file__).parent / "graphs" / "lagged.yaml"
PINS = ("rollout=tp1@0", "actor_train=dp2@1-2")
STEPS = 4
CONFIG = RunConfig(CheckpointPolicy(every=1), restarts=1, hang=HangPolicy(10, 12, 150))


def main(model: str, folder: str, mark: str) -> None:
    local = LocalRay()
    from hflow.runtime.controller.ray_pool import RayPool
    from hflow.runtime.controller.ray_worker import RayWorker

    class Skipping(RayWorker):
        def run(self, step: int, evaluation: bool = False, *named: Any) -> dict[str, Any]:
            assert self.world and self.interpreter
            if step == 2 and not evaluation and self.world.rank == 1 and not Path(mark).exists():
                Path(mark).touch()
                runs: Any = self.interpreter
                before = runs._run
                runs._run = lambda i, s: Received() if isinstance(i, SyncWeights) else before(i, s)
            return super().run(step, evaluation, *named)

    graph = hflow.load(GRAPH, [f"params.model={model}", f"params.steps={STEPS}", "eval.every=1"])
    pool = RayPool((3,), local, worker=Skipping)
    try:
        execute(hflow.compile(graph, "local4", PINS), Path(folder), pool=pool, config=CONFIG)
    finally:
        pool.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
