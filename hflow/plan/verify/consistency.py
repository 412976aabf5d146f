"""What a plan edited by hand may get wrong: names, edges, handles and orders that do not exist."""

from __future__ import annotations

from collections.abc import Iterator

from hflow.plan.balance import idle_balancing
from hflow.plan.digests import CONFIG
from hflow.plan.frozen import unusable_patterns
from hflow.plan.model_shape import NAMED
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import Plan
from hflow.plan.program import Await, Call, Instruction, Loop, Program, handles_read, handles_written
from hflow.plan.routes import unusable_routes
from hflow.plan.sharding import Sharding
from hflow.plan.workload import workload


def inconsistencies(plan: Plan) -> Iterator[str]:
    """Where the parts of a plan contradict each other, in words."""
    yield from (
        f"node `{n.node}` has a micro-batch of {n.micro_batch}" for n in plan.all_nodes if n.micro_batch < 1
    )
    yield from _small_caches(plan)
    for program in plan.programs:
        yield from _bad_instructions(program, program.instructions, "instruction ")
        yield from _out_of_order(program.instructions, "instruction ")
        yield from _bad_awaits(program)
    yield from _half_offloaded(plan)
    yield from _bases_apart(plan)
    yield from _unknown_models(plan)
    if all(m.name in plan.shapes for m in plan.graph.models):
        yield from (problem.message for problem in unusable_patterns(plan.graph, plan.shapes))
        yield from (problem.message for problem in idle_balancing(plan.graph, plan.shapes))
        yield from (problem.message for problem in unusable_routes(plan.graph, plan.shapes))


def _small_caches(plan: Plan) -> Iterator[str]:
    """KV caches that do not hold one row of the greatest length."""
    for own in (own for own in plan.nodes if own.cache_tokens):
        sequence = workload(plan.graph.node(own.node)).sequence
        if own.cache_tokens < sequence:
            room = f"a KV cache of {own.cache_tokens:,} tokens"
            yield f"node `{own.node}` has {room}, and its rows may have {sequence:,}"


def _unknown_models(plan: Plan) -> Iterator[str]:
    """Model folders of which the plan does not tell what it has read."""
    for model in (m for m in plan.graph.models if not m.path.startswith(NAMED)):
        if CONFIG not in plan.digests.models.get(model.path, {}):
            yield f"it has no digest of `{model.path}/{CONFIG}`, of model `{model.name}`"


def _half_offloaded(plan: Plan) -> Iterator[str]:
    """Nodes that share weights, or an optimizer, which only some of them bring back to the devices."""
    trained = {n.model for n in plan.nodes if n.kind == "train"}
    together: dict[tuple[str, Sharding], NodePlan] = {}
    for node in plan.all_nodes:
        if node.model is None or (node.kind != "train" and node.model in trained):
            continue
        first = together.setdefault((node.model, node.sharding), node)
        if first.offload != node.offload:
            yield f"`{first.node}` and `{node.node}` use the same weights, and only one of them offloads"


def _bases_apart(plan: Plan) -> Iterator[str]:
    """Models whose frozen weights are another one's, and that lie where these do not."""
    for model in (m for m in plan.graph.models if m.base):
        own, its = plan.graph.holders(model.name), plan.graph.trainers(model.base_owner)
        if not its:
            yield f"`{model.name}` has the base of `{model.base}`, which is not trained"
        elif len({plan.node(node.name).sharding for node in (*own, *its)}) > 1:
            what = "is trained" if plan.graph.trainers(model.name) else "scores"
            yield f"`{model.name}` {what} in another layout than `{model.base}`, whose base it has"


def _bad_instructions(program: Program, instructions: tuple[Instruction, ...], where: str) -> Iterator[str]:
    """What is wrong in a list of instructions and in the bodies of its loops; `where` names the list."""
    nodes, regions = {n.name for n in program.graph.nodes}, {r.name for r in program.graph.regions}
    alive: set[str] = set()
    for number, i in enumerate(instructions):
        if i.node not in nodes:
            yield f"{where}{number} ({i.op}) names `{i.node}`, which is no node"
        if isinstance(i, Loop) and i.node not in nodes & regions:
            yield f"{where}{number} runs `{i.node}`, which is no region"
        missing = sorted(set(handles_read(i)) - alive)
        yield from (f"{where}{number} reads `{handle}`, which nothing wrote" for handle in missing)
        if isinstance(i, Loop):
            yield from _bad_instructions(program, i.body, f"{where}{number}.")
        alive |= set(handles_written(i))


def _bad_awaits(program: Program) -> Iterator[str]:
    """Nodes that are begun and never ended, or the reverse."""
    makers = {n.name for n in program.graph.nodes if n.outputs}
    called: set[str] = set()
    for number, i in enumerate(program.instructions):
        if isinstance(i, Await) and i.node not in called:
            yield f"instruction {number} waits for `{i.node}`, which nothing has called"
        if isinstance(i, Call):
            called.add(i.node)
    awaited = {i.node for i in program.instructions if isinstance(i, Await)}
    for number, i in enumerate(program.instructions):
        if isinstance(i, Call) and i.node in makers - awaited and not i.outputs:
            yield f"instruction {number} calls `{i.node}`, and nothing waits for it"


def _out_of_order(instructions: tuple[Instruction, ...], where: str) -> Iterator[str]:
    """Instructions that wait for what does not come before them."""
    for number, i in enumerate(instructions):
        late = (before for before in i.after if not 0 <= before < number)
        yield from (f"{where}{number} waits for {before}, which is not before it" for before in late)
        if isinstance(i, Loop):
            yield from _out_of_order(i.body, f"{where}{number}.")
