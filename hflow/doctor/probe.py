"""Has one engine do its work in this process: ``python -m hflow.doctor.probe megatron MODEL``.

`python` draws rows and calls a reward; `megatron` samples from the model and trains it for one step;
`transformers`, like any engine that does not train, only samples.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

import hflow
from hflow.plan.cluster import Cluster
from hflow.plan.cluster_file import load_cluster
from hflow.plan.engine_registry import ENGINES, MODELLESS_ENGINE
from hflow.plan.plan import Plan
from hflow.runtime.engines.protocol import EngineCall
from hflow.runtime.engines.python.engine import PythonEngine
from hflow.runtime.rows import from_strings
from hflow.runtime.tokenizer import load_tokenizer
from hflow.shipped import find

GRAPH = Path(__file__).with_name("probe.yaml")
TRAINS = GRAPH.with_name("probe_train.yaml")
ROWS = ({"question": "1+2", "answer": "3"}, {"question": "3+4", "answer": "7"})


def main(engine: str, model: str) -> None:
    with tempfile.TemporaryDirectory(prefix="hflow-probe-") as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        trains = engine in {name for name, known in ENGINES.items() if "train" in known.profile.ops}
        graph = hflow.load(TRAINS if trains else GRAPH, (f"params.model={model}", f"params.rows={rows}"))
        engines = () if engine == MODELLESS_ENGINE else (f"rollout={engine}",)
        plan = hflow.compile(graph, this_cluster(), engines=engines)
        if engine == MODELLESS_ENGINE:
            reward(plan, model)
        elif trains:
            train(plan, Path(folder) / "run")
        else:
            generate(plan, Path(folder) / "run")


def this_cluster() -> Cluster:
    """One device of this machine; its rates, which nothing here depends on, are those of a CPU."""
    cluster = load_cluster(str(find("local1", "clusters", "cluster")))
    if not torch.cuda.is_available():
        return cluster
    return replace(cluster, device=replace(cluster.device, platform="cuda"))


def train(plan: Plan, folder: Path) -> None:
    run = hflow.execute(plan, run_dir=folder, workers="inline", export=False)
    if not run.metrics[-1]["actor_train.grad_norm"] > 0:
        raise RuntimeError("a training step has no gradient")


def generate(plan: Plan, folder: Path) -> None:
    run = hflow.execute(plan, run_dir=folder, workers="inline", export=False)
    length = run.metrics[-1]["rollout.response_length"]
    longest = plan.graph.node("rollout").options["max_new_tokens"]
    if not 0 < length <= longest:
        raise RuntimeError(f"responses of at most {longest} tokens have {length}")


def reward(plan: Plan, model: str) -> None:
    """Two answers to each row, of which the first is right."""
    engine = PythonEngine({"actor": load_tokenizer(model)})
    drawn = engine.run(_call(plan, "prompts", len(ROWS)), {}).outputs
    right = [row["answer"] for row in ROWS]
    texts = from_strings([text for answer in drawn["answer"].strings() for text in (answer, "?")])
    inputs = {"text": texts, "answer": drawn["answer"]}
    scores = engine.run(_call(plan, "reward", 2 * len(ROWS)), inputs).outputs["score"].values.tolist()
    if sorted(drawn["answer"].strings()) != sorted(right) or scores != [1.0, 0.0] * len(ROWS):
        raise RuntimeError(f"rewards of right and wrong answers are {scores}")


def _call(plan: Plan, name: str, num_rows: int) -> EngineCall:
    node = next(node for node in plan.graph.nodes if node.name == name)
    return EngineCall(node, plan.node(name), 0, num_rows, seed=0, step=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
