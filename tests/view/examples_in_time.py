"""Plans that take more than one step or round, made of the example: GRPO with weights and values of earlier
steps, and the same with rounds of sampling."""

from __future__ import annotations

from dataclasses import replace

from hflow.graph.ir import Graph, Input, ModelUse, Node, Output, Ref, Refresh, Region
from hflow.graph.types import ValueType
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import Plan
from hflow.plan.program import Call, Loop, Program
from hflow.plan.sharding import Sharding
from tests.view.examples import (
    ALL,
    CLUSTER,
    GRAPH,
    LEFT,
    PLAN,
    RIGHT,
    WEIGHTS,
    node_plan,
    value,
)

SCALAR = ValueType("f32", ())


def _late(node: Node) -> Node:
    """Samples with weights one update old; advantages read a scalar of the step before."""
    if node.name == "rollout":
        return replace(node, model=ModelUse("actor", lag=1))
    if node.name != "advantages":
        return node
    carried = Input("weight", Ref("advantages", "weight"), SCALAR, lag=1, init=0.5)
    return replace(node, inputs=(*node.inputs, carried), outputs=(*node.outputs, Output("weight", SCALAR)))


LATE_GRAPH = replace(
    GRAPH,
    models=tuple(replace(m, refresh=Refresh("actor", 50) if m.frozen else None) for m in GRAPH.models),
    nodes=tuple(map(_late, GRAPH.nodes)),
)
REFRESH = replace(
    WEIGHTS, name="actor => ref_logprobs", target="ref_logprobs", target_sharding=Sharding(RIGHT)
)
LATE_PLAN = replace(PLAN, step=replace(PLAN.step, graph=LATE_GRAPH, edges=(*PLAN.step.edges, REFRESH)))

NUM_ROUNDS, ROWS = 3, 300  # a round draws 128 prompts


def _rounds_graph() -> Graph:
    """The prompts, rollout and reward of GRPO in rounds, of which all of the reward's groups are kept."""
    inner = [replace(GRAPH.node(name), region="sampling") for name in ("prompts", "rollout", "reward")]
    keep = Output("keep", value("bool", GRAPH.nodes[0].outputs[0].type.dims[0]))
    inner[2] = replace(inner[2], outputs=(*inner[2].outputs, keep))
    exports = {"tokens": "rollout", "logprobs": "rollout", "mask": "rollout", "score": "reward"}
    handed = {port: GRAPH.node(node).output(port) for port, node in exports.items()}
    outputs = tuple(o for o in handed.values() if o)
    sampling = Node(
        "sampling",
        "repeat",
        inputs=(
            Input("keep", Ref("reward", "keep"), keep.type),
            *(Input(o.port, Ref(exports[o.port], o.port), o.type) for o in outputs),
        ),
        outputs=outputs,
        options={"rows": ROWS, "times": 16, "short": "fill"},
    )
    outer = [_from_sampling(GRAPH.node(name)) for name in ("ref_logprobs", "advantages", "actor_train")]
    region = Region("sampling", 16, Ref("reward", "keep"), ROWS, "step")
    return replace(GRAPH, nodes=(*inner, sampling, *outer), regions=(*GRAPH.regions, region))


def _from_sampling(node: Node) -> Node:
    inside = ("rollout", "reward")
    inputs = tuple(
        replace(i, source=Ref("sampling", i.source.port)) if i.source.node in inside else i
        for i in node.inputs
    )
    return replace(node, inputs=inputs)


def _rounds_nodes() -> tuple[NodePlan, ...]:
    """Times of all three rounds; starts in the first."""
    return (
        node_plan("prompts", "data", None, ALL, 0.0, 3.0),
        node_plan("rollout", "generate", "actor", ALL, 1.0, 12.0),
        node_plan("reward", "call", None, RIGHT, 5.0, 6.0),
        node_plan("sampling", "repeat", None, ALL, 7.0, 3.0),
        node_plan("ref_logprobs", "score", "ref", RIGHT, 24.0, 3.0),
        node_plan("advantages", "call", None, LEFT, 24.0, 1.0),
        node_plan("actor_train", "train", "actor", LEFT, 27.0, 10.0),
    )


ROUNDS_GRAPH = _rounds_graph()
BODY = tuple(
    Call(name, mesh.devices, after=after, time_s=time_s)
    for name, mesh, after, time_s in (
        ("prompts", ALL, (), 1.0),
        ("rollout", ALL, (0,), 4.0),
        ("reward", RIGHT, (1,), 2.0),
        ("sampling", ALL, (2,), 1.0),
    )
)
LOOP = Loop("sampling", ALL.devices, BODY, {}, time_s=24.0)
AFTER_LOOP = (
    Call("ref_logprobs", RIGHT.devices, after=(0,), time_s=3.0),
    Call("advantages", LEFT.devices, after=(0,), time_s=1.0),
    Call("actor_train", LEFT.devices, after=(1, 2), time_s=10.0),
)
ROUNDS_PLAN = Plan(
    version=PLAN.version,
    cluster=CLUSTER,
    shapes=PLAN.shapes,
    nodes=_rounds_nodes(),
    step=Program(ROUNDS_GRAPH, (), (LOOP, *AFTER_LOOP)),
    evaluation=None,
    memory=PLAN.memory,
    step_time_s=37.0,
    tokens_per_step=PLAN.tokens_per_step,
    search=PLAN.search,
    digests=PLAN.digests,
)
