"""A graph and a plan written down by hand: GRPO on two hosts of four devices."""

from __future__ import annotations

from dataclasses import replace

from hflow.graph.ir import (
    Evaluation,
    Function,
    Graph,
    Input,
    Model,
    ModelUse,
    Node,
    Output,
    Ref,
    Region,
    Repeat,
)
from hflow.graph.types import Dim, DType, Factor, Provenance, ValueType
from hflow.plan.cluster import Cluster, DeviceKind, Link
from hflow.plan.digests import Digests
from hflow.plan.edges import Copy, CopySet, DataEdge, WeightEdge
from hflow.plan.layout import Mesh
from hflow.plan.model_shape import ModelShape
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import DeviceMemory, Plan, Search
from hflow.plan.program import Call, Instruction, Offload, Onload, Program, SyncWeights, Transfer
from hflow.plan.sharding import Sharding
from hflow.plan.strategy import Strategy
from hflow.schedule.timed_span import step_time_s
from tests.layouts import rows_layout

BATCH = Factor("batch", 128, "prompts")
GROUP = Factor("group", 8, "rollout")
ROWS = Dim((BATCH, GROUP))
PROMPT = Dim((Factor("prompt", 512, "prompts"),), ragged=True)
SEQ = Dim((Factor("seq", 1536, "rollout"),), ragged=True)
RESP = Dim((Factor("resp", 1024, "rollout"),), ragged=True)


def value(dtype: DType, *dims: Dim, made_by: Provenance | None = None) -> ValueType:
    return ValueType(dtype, dims, made_by)


TOKENS = value("i32", ROWS, SEQ)
MASK = value("bool", ROWS, RESP)
TEXT = value("str", ROWS)
LOGPROBS = value("f32", ROWS, RESP, made_by=Provenance("actor", "behaviour"))
REF_LOGPROBS = value("f32", ROWS, RESP, made_by=Provenance("ref", "scored"))
SCORE = value("f32", ROWS)
PROMPTS = value("i32", Dim((BATCH,)), PROMPT)
ANSWER = value("str", Dim((BATCH,)))


def edge(port: str, source: str, kind: ValueType, derived: bool = False) -> Input:
    node, output = source.split(".")
    return Input(port, Ref(node, output), kind, derived=derived)


NODES = (
    Node(
        "prompts",
        "data",
        outputs=(Output("tokens", PROMPTS), Output("answer", ANSWER)),
        options={"dataset": "gsm8k.jsonl", "batch": 128},
    ),
    Node(
        "rollout",
        "generate",
        ModelUse("actor"),
        inputs=(edge("prompt", "prompts.tokens", PROMPTS),),
        outputs=(
            Output("tokens", TOKENS),
            Output("logprobs", LOGPROBS),
            Output("mask", MASK),
            Output("text", TEXT),
        ),
        options={"n": 8, "max_new_tokens": 1024, "temperature": 1.0},
    ),
    Node(
        "reward",
        "call",
        function=Function(
            "hflow.ops.rewards.exact_match", "text: str[rows*k], answer: str[rows] -> score: f32[rows*k]"
        ),
        inputs=(edge("text", "rollout.text", TEXT), edge("answer", "prompts.answer", ANSWER)),
        outputs=(Output("score", SCORE),),
    ),
    Node(
        "ref_logprobs",
        "score",
        ModelUse("ref"),
        inputs=(edge("tokens", "rollout.tokens", TOKENS), edge("mask", "rollout.mask", MASK, derived=True)),
        outputs=(Output("logprobs", REF_LOGPROBS), Output("entropy", value("f32", ROWS, RESP))),
    ),
    Node(
        "advantages",
        "call",
        function=Function(
            "hflow.ops.advantages.group_normalise",
            "score: f32[prompts*group] -> advantages: f32[prompts*group]",
        ),
        inputs=(edge("score", "reward.score", SCORE),),
        outputs=(Output("advantages", SCORE),),
    ),
    Node(
        "actor_train",
        "train",
        ModelUse("actor"),
        function=Function("hflow.ops.losses.ppo_clip", ""),
        inputs=(
            edge("tokens", "rollout.tokens", TOKENS),
            edge("old_logprobs", "rollout.logprobs", LOGPROBS),
            edge("ref_logprobs", "ref_logprobs.logprobs", REF_LOGPROBS),
            edge("advantages", "advantages.advantages", SCORE),
            edge("mask", "rollout.mask", MASK, derived=True),
        ),
        repeat=Repeat(1, 256),
    ),
)

GRAPH = Graph(
    name="grpo",
    doc="Group Relative Policy Optimization, arXiv:2402.03300",
    params={"batch": 128, "group": 8},
    models=(
        Model("actor", "models/qwen2-7b", dtype="f32"),
        Model("ref", "models/qwen2-7b", frozen=True, dtype="f32"),
    ),
    nodes=NODES,
    regions=(Region("step", times=200),),
    evaluation=Evaluation(Ref("reward", "score"), rows=512),
)

CLUSTER = Cluster(
    name="h100x8",
    device=DeviceKind("H100", "cuda", 989e12, 80 * 10**9, 3.35e12, 0.5, 0.0),
    hosts=2,
    devices_per_host=4,
    intra_host=Link(450e9, 5e-6),
    inter_host=Link(50e9, 1e-5),
)

ALL = Mesh.of(tuple(range(8)), dp=8)
TRAIN = Mesh.of((0, 1, 2, 3), dp=2, tp=2)
LEFT = Mesh.of((0, 1, 2, 3), dp=4)
RIGHT = Mesh.of((4, 5, 6, 7), dp=4)


def node_plan(node: str, kind: str, model: str | None, mesh: Mesh, start: float, time: float) -> NodePlan:
    engine = "megatron" if model else "python"
    memory = 41_600_000_000 if kind in ("generate", "train") else 11_200_000_000 if model else 0
    return NodePlan(node, kind, model, engine, mesh, 8, start, time, memory)


NODE_PLANS = (
    node_plan("prompts", "data", None, ALL, 0.0, 0.02),
    node_plan("rollout", "generate", "actor", ALL, 0.21, 14.0),
    node_plan("reward", "call", None, ALL, 14.21, 0.4),
    node_plan("ref_logprobs", "score", "ref", RIGHT, 14.61, 3.2),
    node_plan("advantages", "call", None, LEFT, 14.61, 0.01),
    node_plan("actor_train", "train", "actor", TRAIN, 17.82, 9.7),
)


def data_edge(source: str, target: str, ports: tuple[str, ...], moves: bool) -> DataEdge:
    """An edge between two of the nodes above, with one copy of rows if it moves anything."""
    types = tuple(i.type for i in GRAPH.node(target).inputs if i.source.node == source)
    at = {n.node: n.mesh for n in NODE_PLANS}
    copy = Copy(4, 0, ((0, 128),))
    copies = (CopySet(ports, (1024,), "p2p", (copy,)),) if moves else ()
    return DataEdge(
        name=f"{source}.{','.join(ports)}",
        source=source,
        target=target,
        ports=ports,
        types=types,
        source_layout=rows_layout(at[source]),
        target_layout=rows_layout(at[target]),
        collective="p2p" if moves else "alias",
        copies=copies,
        size_bytes=6_291_456,
        bytes_per_device=786_432 if moves else 0,
        lower_bound_bytes_per_device=786_432 if moves else 0,
        peak_bytes=1_572_864,
        time_s=0.0004 if moves else 0.0,
    )


WEIGHTS = WeightEdge(
    name="actor => rollout",
    source="actor_train",
    target="rollout",
    source_sharding=Sharding(TRAIN),
    target_sharding=Sharding(ALL),
    collective="all_gather",
    copies=(),
    size_bytes=15_231_233_024,
    bytes_per_device=15_231_233_024,
    lower_bound_bytes_per_device=15_231_233_024,
    peak_bytes=22_846_849_536,
    time_s=0.19,
)
EDGES = (
    data_edge("prompts", "rollout", ("tokens",), moves=False),
    data_edge("rollout", "reward", ("text",), moves=False),
    data_edge("prompts", "reward", ("answer",), moves=False),
    data_edge("rollout", "ref_logprobs", ("tokens", "mask"), moves=True),
    data_edge("reward", "advantages", ("score",), moves=True),
    data_edge("rollout", "actor_train", ("tokens", "logprobs", "mask"), moves=True),
    data_edge("ref_logprobs", "actor_train", ("logprobs",), moves=True),
    data_edge("advantages", "actor_train", ("advantages",), moves=False),
    WEIGHTS,
)

SHAPE = ModelShape("qwen2", 28, 3584, 28, 4, 128, 18944, 152064, 32768, 1e6, 1e-6, False, True)


def call(node: str, after: tuple[int, ...] = ()) -> Call:
    plan = next(n for n in NODE_PLANS if n.node == node)
    return Call(node, plan.mesh.devices, after=after, time_s=plan.time_s)


def move(number: int, after: tuple[int, ...]) -> Transfer | SyncWeights:
    """A transfer of data edge `number`, or the weights over it."""
    edge = EDGES[number]
    if isinstance(edge, WeightEdge):
        return SyncWeights(edge.target, ALL.devices, number, after=after, time_s=edge.time_s)
    inputs = {port: f"{edge.source}.{port}" for port in edge.ports}
    outputs = {port: f"{edge.source}.{port}@{edge.target}" for port in edge.ports}
    return Transfer(edge.target, ALL.devices, number, inputs, outputs, after=after, time_s=edge.time_s)


INSTRUCTIONS = (
    call("prompts"),
    move(8, ()),
    call("rollout", (0, 1)),
    call("reward", (2,)),
    move(3, (2,)),
    move(4, (3,)),
    call("ref_logprobs", (4,)),
    call("advantages", (5,)),
    move(5, (2,)),
    move(6, (6,)),
    call("actor_train", (7, 8, 9)),
)

PLAN = Plan(
    version=1,
    cluster=CLUSTER,
    shapes={"actor": SHAPE, "ref": SHAPE},
    nodes=NODE_PLANS,
    step=Program(GRAPH, EDGES, INSTRUCTIONS),
    evaluation=None,
    memory=(
        DeviceMemory(
            TRAIN.devices,
            72_100_000_000,
            80_000_000_000,
            {"actor": 22_900_000_000, "ref": 7_600_000_000, "kv_cache": 41_600_000_000},
            "rollout",
        ),
        DeviceMemory(
            RIGHT.devices,
            49_200_000_000,
            80_000_000_000,
            {"ref": 7_600_000_000, "kv_cache": 41_600_000_000},
            "rollout",
        ),
    ),
    step_time_s=27.52,
    tokens_per_step=524_288,
    search=Search(explored=1234, gap=0.0),
    digests=Digests({}, {}),
)

RELOAD_S, OFFLOAD_S = 1.5, 2.0


def _with_swaps() -> tuple[Instruction, ...]:
    """Two of the calls with the loading before and the storing after them."""
    swaps_s = {"ref_logprobs": (RELOAD_S, 0.0), "actor_train": (OFFLOAD_S, OFFLOAD_S)}
    out: list[Instruction] = []
    at: list[int] = []  # where each instruction went
    for i in INSTRUCTIONS:
        first, last = swaps_s.get(i.node, (0.0, 0.0)) if isinstance(i, Call) else (0.0, 0.0)
        if first:
            out.append(Onload(i.node, i.devices, time_s=first))
        at.append(len(out))
        out.append(replace(i, after=tuple(at[n] for n in i.after)))
        if first:
            out.append(Offload(i.node, i.devices, time_s=last))
    return tuple(out)


OFFLOAD_STEP = replace(PLAN.step, instructions=_with_swaps())
OFFLOAD_PLAN = replace(
    PLAN,
    nodes=tuple(
        replace(
            n,
            offload=n.node in ("ref_logprobs", "actor_train"),
            strategy=Strategy("full", 1, 2) if n.kind == "train" else n.strategy,
        )
        for n in NODE_PLANS
    ),
    step=OFFLOAD_STEP,
    step_time_s=step_time_s(OFFLOAD_STEP),
)


def measured_events(steps: int = 2) -> list[dict[str, object]]:
    """The plan's own times, stretched by a tenth, as a run would have written them."""
    return [
        {
            "step": step,
            "device": device,
            "name": node.node,
            "kind": "call",
            "start_s": 100 + step * 31 + 1.1 * node.start_s + 0.01 * device,
            "end_s": 100 + step * 31 + 1.1 * (node.start_s + node.time_s),
        }
        for step in range(steps)
        for node in NODE_PLANS
        for device in node.mesh.devices
    ]


def metric_lines(steps: int = 40) -> list[dict[str, float]]:
    return [
        {
            "step": step,
            "loss.actor_train": 1.9 * 0.93**step + 0.05 * (step % 3),
            "reward_mean": 1 - 0.96**step,
            "tokens_per_s": 17_000 + 300 * (step % 5) - (9000 if step == 0 else 0),
            **{f"time_s.{n.node}": 1.1 * n.time_s + 0.4 * (n.node == "reward") for n in NODE_PLANS},
        }
        for step in range(steps)
    ]


SUMMARY: dict[str, object] = {
    "status": "finished",
    "steps": 40,
    "wall_s": 1240.0,
    "tokens_per_s": 17_312.4,
    "eval": {"before": 0.117, "after": 0.806},
    "plan_hash": PLAN.hash,
}
