"""What a plan edited by hand may get wrong about who runs where: node plans, meshes, edges, copies."""

from __future__ import annotations

from collections.abc import Iterator

from hflow.graph.ir import Node
from hflow.plan.edges import Copy, DataEdge, Edge, WeightEdge
from hflow.plan.engine_registry import MODELLESS_ENGINE
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import Plan
from hflow.plan.ports import generates_evenly, num_groups
from hflow.plan.program import Call, Instruction, Loop, Program, SyncWeights, Transfer, with_bodies
from hflow.plan.sharding import spreads
from hflow.plan.shared_forward import sharing


def misplaced(plan: Plan) -> Iterator[str]:
    """Where node plans, edges and instructions contradict the graph, the cluster or each other, in words."""
    nodes = {node.name: node for program in reversed(plan.programs) for node in program.graph.nodes}
    if [e.name for e in plan.evaluations] != [e.name for e in plan.graph.evaluations]:
        yield "its evaluations are not those of its graph"
    planned = [n.node for n in plan.all_nodes]
    if planned != list(dict.fromkeys(planned)):
        yield "a node has two plans"
    lacking = nodes.keys() - set(planned)
    yield from (f"node `{name}` has no plan" for name in sorted(lacking))
    for own in plan.all_nodes:
        yield from _bad_node_plan(own, nodes.get(own.node))
    if not lacking:
        yield from _bad_sharing(plan)
    used = {d for n in plan.all_nodes for d in n.mesh.devices} | {
        d for part in plan.memory for d in part.devices
    }
    beyond = sorted(d for d in used if not 0 <= d < plan.cluster.num_devices)
    yield from (f"device {device} is not in its cluster" for device in beyond)
    if not plan.memory:
        yield "it predicts the memory of no device"
    for program in plan.programs:
        models = [m.name for m in program.graph.models]
        yield from (f"model `{name}` has no shape" for name in models if name not in plan.shapes)
        if not lacking:
            yield from _bad_program(plan, program)


def _bad_node_plan(own: NodePlan, node: Node | None) -> Iterator[str]:
    if not own.mesh.has_plan_axes:
        yield f"the mesh of `{own.node}` has other axes than pp, dp, cp and tp"
    elif not spreads(own.mesh, own.strategy.ep, own.strategy.whole_experts):
        yield f"`{own.node}` shares experts among {own.strategy.ep} ranks of {own.mesh.sizes_text}"
    elif own.strategy.sp and own.mesh.tp == 1:
        yield f"`{own.node}` has sequence parallelism over tp1"
    elif own.strategy.vpp > 1 and own.mesh.pp == 1:
        yield f"`{own.node}` has interleaved stages over pp1"
    if node is None:
        yield f"`{own.node}` is planned, and is no node"
    elif (own.kind, own.model) != (node.op, node.model.model if node.model else None):
        yield f"`{own.node}` is planned as another kind of node, or with another model, than it is"
    elif (own.engine == MODELLESS_ENGINE) == (node.model is not None):
        yield f"`{own.node}` ({node.op}) is planned on {own.engine}"
    elif node.op == "generate" and not _has_rows(node, own.mesh.dp):
        yield f"`{own.node}` cannot share its prompts among dp{own.mesh.dp}"


def _bad_sharing(plan: Plan) -> Iterator[str]:
    """Score and train nodes that cannot have one forward pass as the plan says."""
    pairs = sharing(plan.graph, plan.shapes)
    known = {*pairs, *pairs.values()}
    shares = {n.node: n for n in plan.nodes if n.strategy.share_forward}
    yield from (
        f"`{name}` has nobody to share its forward pass with" for name in sorted(shares.keys() - known)
    )
    for name, trainer in pairs.items():
        own, other = plan.node(name), plan.node(trainer)
        if name not in shares and trainer not in shares:
            continue
        if _way(own) != _way(other):
            yield f"`{name}` and `{trainer}` share a forward pass and run in different ways"
        elif own.mesh.pp > 1 or own.offload:
            yield f"`{name}` shares its forward pass on pipeline stages, or with offload"


def _way(own: NodePlan) -> tuple[object, ...]:
    return own.mesh, own.strategy, own.micro_batch, own.offload


def _has_rows(node: Node, dp: int) -> bool:
    """Whether each replica has some of a generate node; of an evaluation, maybe more than others."""
    return dp <= num_groups(node.type_of("tokens")) or generates_evenly(node, dp)


def _bad_program(plan: Plan, program: Program) -> Iterator[str]:
    nodes, planned = {n.name for n in program.graph.nodes}, {n.node for n in plan.all_nodes}
    for number, edge in enumerate(program.edges):
        if edge.source not in planned or edge.target not in nodes:
            yield f"edge {number} joins `{edge.source}` and `{edge.target}`, of which one is no node"
        else:
            yield from _bad_edge(plan, edge, f"edge {number}")
    if not program.instructions:
        yield "a program has no instructions"
    for instruction in with_bodies(program.instructions):
        yield from _bad_instruction(plan, program, instruction)


def _bad_edge(plan: Plan, edge: Edge, where: str) -> Iterator[str]:
    ends = (edge.source_mesh, edge.target_mesh)
    if ends != (plan.node(edge.source).mesh, plan.node(edge.target).mesh):
        yield f"{where} has other meshes than its nodes"
    if isinstance(edge, DataEdge) and len(edge.ports) != len(edge.types):
        yield f"{where} has {len(edge.ports)} ports and {len(edge.types)} types"
    devices = {d for mesh in ends for d in mesh.devices}
    if not all(_fits(copy, part.shape, devices) for part in edge.copies for copy in part.copies):
        yield f"{where} copies what is outside its values, or between devices that are not its own"


def _fits(copy: Copy, shape: tuple[int, ...], devices: set[int]) -> bool:
    inside = len(copy.box) == len(shape) and all(0 <= a < b <= size for (a, b), size in zip(copy.box, shape))
    return inside and {copy.source, copy.target} <= devices


def _bad_instruction(plan: Plan, program: Program, instruction: Instruction) -> Iterator[str]:
    node, what = instruction.node, f"an instruction ({instruction.op} {instruction.node})"
    if not instruction.devices or not all(0 <= d < plan.cluster.num_devices for d in instruction.devices):
        yield f"{what} has no devices, or some that are not in its cluster"
    names = {n.name for n in program.graph.nodes}
    match instruction:
        case Transfer(edge=number) if not _is_edge(program, number, DataEdge):
            yield f"{what} names edge {number}, which is no data edge"
        case SyncWeights(edge=number) if not _is_edge(program, number, WeightEdge):
            yield f"{what} names edge {number}, which is no weight edge"
        case Call() if node in names and set(instruction.devices) != set(plan.node(node).mesh.devices):
            yield f"`{node}` is called on other devices than it is planned for"
        case Loop(body=()):
            yield f"{what} is a loop without a body"
        case _:
            pass


def _is_edge(program: Program, number: int, kind: type[DataEdge | WeightEdge]) -> bool:
    return 0 <= number < len(program.edges) and isinstance(program.edges[number], kind)
