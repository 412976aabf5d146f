"""Routes are moved and priced, and refused where nobody can tell or follow them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hflow
from hflow.compiler.lowering import row_bytes
from hflow.cost.working_memory import routes_bytes
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.graph.load import load
from hflow.plan.edges import DataEdge
from hflow.plan.layout import Mesh
from hflow.plan.verify.runnable import check_runnable
from hflow.plan.workload import workload

TRAINED = "nodes.actor_train.in.routes=rollout.routes"
MOE = "params.model=shape:qwen3-30b-a3b"
PINS = ("rollout=dp16,tp2@0-31", "actor_train=dp16,ep16,zero1,micro2,recompute@32-47")


def graph_of(*options: str) -> Graph:
    return load("algorithms/grpo.yaml", [MOE, *options])


def refused(*options: str, engines: tuple[str, ...] = ()) -> tuple[str, str]:
    return refused_graph(load("algorithms/grpo.yaml", list(options)), engines)


def refused_graph(graph: Graph, engines: tuple[str, ...] = ()) -> tuple[str, str]:
    with pytest.raises(HflowError) as caught:
        hflow.compile(graph, "h100x64", engines=engines)
    (problem,) = caught.value.diagnostics
    return problem.code, problem.message


def test_a_plan_moves_and_prices_routes() -> None:
    replayed, plain = (hflow.compile(graph_of(*more), "h100x64", PINS) for more in ((TRAINED,), ()))
    rollout, train = replayed.graph.node("rollout"), replayed.graph.node("actor_train")
    tokens = rollout.type_of("tokens").dims[-1].size
    assert tokens
    per_row = tokens * 48 * 8 * 2  # layers, chosen experts, bytes
    assert row_bytes(train.type_of("routes")) == per_row
    assert not plain.graph.node("rollout").output("routes")
    (moved,) = [e for e in replayed.step.edges if isinstance(e, DataEdge) and "routes" in e.ports]
    without = sum(row_bytes(type_) for port, type_ in zip(moved.ports, moved.types) if port != "routes")
    assert moved.size_bytes == rollout.rows * (without + per_row)
    for node, pp, in_flight in ((rollout, 1, 1), (train, 1, 1), (train, 4, 4)):
        mesh = Mesh.of(tuple(range(pp)), pp=pp)
        assert routes_bytes(node.op, workload(node), mesh, 2) == in_flight * 2 * per_row
    check = hflow.compile(replayed.graph, "h100x64", PINS)
    assert check.hash == replayed.hash


def test_who_cannot_is_refused() -> None:
    code, message = refused("params.model=shape:qwen2.5-0.5b", TRAINED)
    assert code == "HF212" and "`actor` has no experts" in message
    code, message = refused(MOE, TRAINED, engines=("rollout=transformers",))
    assert code == "HF310" and "only Megatron and SGLang can tell" in message
    graph = graph_of("nodes.ref_logprobs.in.routes=rollout.routes")
    paths = {"actor": "shape:qwen3-30b-a3b", "ref": "shape:qwen3-235b-a22b"}
    models = tuple(replace(model, path=paths[model.name]) for model in graph.models)
    code, message = refused_graph(replace(graph, models=models))
    assert code == "HF311"
    assert "48 layers of 128 experts, 8 chosen, with `ref`, 94 layers of 128 experts" in message


def test_a_plan_edited_by_hand_is_refused() -> None:
    plan = hflow.compile(graph_of(TRAINED), "h100x64", PINS)
    nodes = tuple(replace(n, engine="transformers") if n.node == "rollout" else n for n in plan.nodes)
    with pytest.raises(HflowError, match="transformers, which knows no `routes`"):
        check_runnable(replace(plan, nodes=nodes))
