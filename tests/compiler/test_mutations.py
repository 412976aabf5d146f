"""A damaged plan or cluster file is refused with diagnostics, or all that can be done with it works.

Random damage, each kind from its seed, in this process, which may take little more memory than it has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from ruamel.yaml import YAML

import hflow
from hflow.compiler.compile import compile_graph
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.plan.cluster_file import load_cluster
from hflow.plan.cluster_text import cluster_text
from hflow.plan.plan import Plan, to_json
from hflow.plan.plan_file import load_plan
from hflow.plan.verify.runnable import check_runnable
from hflow.report.trace import chrome_trace
from hflow.view.pages.plan_page import plan_html
from hflow.view.terminal.plan_json import plan_json
from hflow.view.terminal.terminal import plan_text
from tests.compiler.test_compile import local
from tests.compiler.test_language import load as load_graph
from tests.damage import damaged, with_bad_bytes
from tests.graph.mutants import mutated
from tests.limits import memory_limited_to
from tests.model_folder import CONFIG

CLUSTERS = sorted(Path("clusters").glob("*.yaml"))
CLUSTER_MUTANTS, PLAN_MUTANTS, CHUNKS = 400, 400, 4
T = TypeVar("T")
MEMORY = 2**30  # bytes that a test may take beyond what the process has


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    with memory_limited_to(MEMORY):
        yield


@pytest.fixture(scope="module")
def sft() -> Graph:
    return hflow.load("algorithms/sft.yaml", ["params.model=shape:qwen2.5-0.5b"])


@pytest.mark.slow
@pytest.mark.matrix(4, cover=False)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_damaged_cluster_files(sft: Graph, tmp_path: Path, chunk: int) -> None:
    file, again, accepted = tmp_path / "cluster.yaml", tmp_path / "again.yaml", 0
    for seed in seeds(CLUSTER_MUTANTS, chunk):
        file.write_bytes(damaged_cluster(CLUSTERS[seed % len(CLUSTERS)].read_bytes(), seed))
        cluster = loaded(partial(load_cluster, file), seed)
        if cluster is None:
            continue
        accepted += 1
        again.write_text(cluster_text(cluster, "again"))
        assert load_cluster(again) == cluster, seed
        plan = loaded(partial(compile_graph, sft, cluster), seed)
        assert plan is None or uses(plan), seed
    assert 0 < accepted < CLUSTER_MUTANTS // CHUNKS // 2  # most are damaged indeed, and some are not


def damaged_cluster(content: bytes, seed: int) -> bytes:
    """Every third one is damaged as a text; the tree of the others, which is written as JSON."""
    if seed % 3 == 0:
        return mutated(content, seed)
    text = json.dumps(damaged(YAML(typ="safe").load(content), seed), ensure_ascii=False)
    return text.replace("Infinity", ".inf").replace("NaN", ".nan").encode()


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Plans, as JSON, that have together all that a plan can have."""
    model = str(tmp_path_factory.mktemp("model"))
    (Path(model) / "config.json").write_text(json.dumps(CONFIG))
    made = [compile_graph(load_graph(name, model), local(2)) for name in ("region", "lagged", "carried")]
    grpo = hflow.load("algorithms/grpo.yaml", [f"params.model={model}"])
    return [json.loads(to_json(plan)) for plan in (*made, compile_graph(grpo, local(2)))]


@pytest.mark.slow
@pytest.mark.matrix(4, cover=False)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_damaged_plans(plans: Sequence[Any], tmp_path: Path, chunk: int) -> None:
    file, again, accepted = tmp_path / "plan.json", tmp_path / "again.json", 0
    for seed in seeds(PLAN_MUTANTS, chunk):
        file.write_bytes(damaged_plan(plans[seed % len(plans)], seed))
        plan = loaded(partial(load_plan, file), seed)
        if plan is None:
            continue
        accepted += 1
        assert uses(plan), seed
        plan.save(again)
        assert load_plan(again) == plan, seed
        loaded(partial(check_runnable, plan), seed)
    assert 0 < accepted < PLAN_MUTANTS // CHUNKS // 2


def damaged_plan(plan: Any, seed: int) -> bytes:
    """Every tenth one is damaged as bytes."""
    if seed % 10 == 0:
        return with_bad_bytes(json.dumps(plan).encode(), seed)
    return json.dumps(damaged(plan, seed)).encode()


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("step", "edges", "weights", "source_sharding", "ep"), 0, "source_sharding"),
        (("nodes", 1, "strategy", "ep"), 0, "nodes.1.strategy.ep is 0"),
        (("nodes", 1, "strategy", "ep"), 5, "shares experts among 5"),
        (("nodes", 1, "mesh", "devices", 0), 9, "device 9 is not in its cluster"),
        (("nodes", 1, "kind"), "score", "another kind of node"),
        (("nodes", 1, "engine"), "python", "is planned on python"),
        (("nodes", 1, "model"), None, "another model"),
        (("cluster", "hosts"), 10**6, "cluster.hosts is 1000000"),
        (("cluster", "device", "flops"), float("inf"), "Infinity is no JSON number"),
        (("cluster", "device", "flops"), 1e300, "cluster.device.flops is 1e+300"),
        (("cluster", "device", "memory_bytes"), 2**70, "cluster.device.memory_bytes"),
        (("shapes", "actor", "num_layers"), 0, "shapes.actor.num_layers is 0"),
        (("shapes", "actor", "num_layers"), 10**9, "shapes.actor.num_layers is 1000000000"),
        (("shapes",), {}, "has no shape"),
        (("memory",), [], "predicts the memory of no device"),
        (("step", "instructions"), [], "no instructions"),
        (("step", "graph", "nodes"), [], "no nodes"),
        (("step", "graph", "regions"), [], "no step"),
        (("step", "graph", "nodes", 1, "inputs", 0, "source", "node"), "nobody", "which does not exist"),
        (("step", "graph", "nodes", 1, "options", "n"), "many", "is not an integer > 0"),
        (("step", "graph", "nodes", 1, "options", "m"), 1, "has no option `m`"),
        (("step", "graph", "nodes", 1, "options"), {}, "lacks the option"),
        (("step", "graph", "nodes", 1, "model"), None, "has no model"),
        (("step", "graph", "nodes", 1, "region"), "nowhere", "which is no region"),
        (("step", "graph", "nodes", 1, "span", "column"), 2**40, "span.column"),
        (("step", "edges", 0, "target"), "nobody", "joins"),
        (("step", "edges", 0, "ports"), [], "0 ports"),
        (("step", "edges", 0, "kind"), "orders", "does not match any of the expected tags"),
        (("step", "edges", 0, "source_sharding"), None, "source_sharding: Unexpected keyword argument"),
        (("step", "edges", "weights", "source_sharding"), None, "source_sharding"),
        (("step", "edges", "weights", "ports"), [], "ports: Unexpected keyword argument"),
        (("step", "instructions", 0, "op"), "wait", "does not match any of the expected tags"),
        (("step", "instructions", 0, "every"), 2, "every: Unexpected keyword argument"),
        (("step", "instructions", "weights", "edge"), 0, "names edge 0, which is no weight edge"),
        (("step", "instructions", "weights", "edge"), 99, "names edge 99, which is no weight edge"),
        (("step", "instructions", "weights", "node"), "nobody", "names `nobody`, which is no node"),
        (("step_time_s",), -1.0, "step_time_s is -1.0"),
        (("tokens_per_step",), 10**400, "a whole number of 1329 bits"),
    ],
)
def test_what_is_wrong_is_told(
    plans: Sequence[Any], tmp_path: Path, path: tuple[str | int, ...], value: Any, said: str
) -> None:
    plan = json.loads(json.dumps(plans[1]))
    *above, key = path
    holder = plan
    for part in above:
        holder = moves_weights(holder) if part == "weights" else holder[part]
    holder[key] = value
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    with pytest.raises(HflowError, match="HF306") as caught:
        load_plan(file)
    assert said in caught.value.diagnostics[0].message


def moves_weights(entries: Any) -> Any:
    """The first edge, or instruction, that moves weights."""
    return next(entry for entry in entries if "weights" in (entry.get("kind"), entry.get("op")))


def seeds(count: int, chunk: int) -> range:
    return range(chunk * count // CHUNKS, (chunk + 1) * count // CHUNKS)


def loaded(action: Callable[[], T], seed: int) -> T | None:
    """What the action gives; None when it refuses, with something to read."""
    try:
        return action()
    except HflowError as error:
        assert any(d.severity == "error" for d in error.diagnostics), seed
        assert str(error), seed
        return None


def uses(plan: Plan) -> bool:
    """Everything that shows a plan."""
    texts = (plan_text(plan, width=100), plan_html(plan), chrome_trace(plan), plan.hash)
    return all(texts) and bool(json.dumps(plan_json(plan, 0.0)))
