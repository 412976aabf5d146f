"""What else a node could have had, and why it has not: the best whole plan for each of its other layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hflow.compiler.candidates.meshes import (
    candidate_text,
    candidates_of,
    layout_text,
    meshes,
    needed_bytes,
    of_text,
    refusal,
)
from hflow.compiler.candidates.node_groups import Candidate, NodeGroup, node_groups
from hflow.compiler.candidates.shared_bases import alike, sharing_groups
from hflow.compiler.compile import new_draft
from hflow.compiler.engines import engines_of
from hflow.compiler.explain.min_memory import min_memory
from hflow.compiler.options import PlannerOptions
from hflow.compiler.passes.weight_edges import weight_edges
from hflow.compiler.pins import placed_node
from hflow.compiler.planner.incumbent import RESOLUTION
from hflow.compiler.planner.search_space import SearchSpace
from hflow.compiler.planner.widening import search_wider
from hflow.compiler.shared_forward import sharing_of
from hflow.compiler.state import Draft
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.ir import Graph
from hflow.plan.engine_registry import profile_of
from hflow.plan.layout import Mesh
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import Plan, Search
from hflow.plan.strategy import PLAIN
from hflow.plan.workload import rounds

TRIED, SHOWN, TOO_LARGE = 12, 6, 2  # layouts at most
BUDGET_S = 40.0  # for all of them, at most


@dataclass(frozen=True)
class Alternative:
    """A way to run a node. `node_time_s`: of all its runs in a step; `step_time_s`: of the best plan that has
    it so; both None where there is none. `reason`: why it is the plan's, or is not."""

    layout: str
    devices: tuple[int, ...]
    node_time_s: float | None
    step_time_s: float | None
    reason: str


@dataclass(frozen=True)
class _Question:
    """`draft`: with the candidates of all node groups; `pinned`: whether the node was."""

    plan: Plan
    draft: Draft
    group: NodeGroup
    chosen: NodePlan
    pinned: bool


def explain(plan: Plan, pins: Iterable[str], options: PlannerOptions, node: str) -> tuple[Alternative, ...]:
    """The chosen way to run `node` first, then others by rising step time, then some that do not fit.

    Each other layout is judged by the best plan that has it, as ``--planner exact`` finds it with the pins of
    all other nodes. Tried are the layouts in which the node itself is fastest, on its own number of devices
    and on others. The last one is of pipeline stages, where the node's engine has none.

    Args:
        pins, options: with which `plan` was made. Where the time is up, a step is `at most` so long.
    Raises:
        HflowError: HF302 when there is no such node, or it has no model.
    """
    question = _question(plan, pins, options, node)
    tried = _tried(question)
    budget_s = min(options.budget_s or BUDGET_S, BUDGET_S) / max(1, len(tried))
    found = [_judged(question, candidates, budget_s) for candidates in tried]
    fitting = sorted((a for a in found if a.step_time_s is not None), key=lambda a: a.step_time_s or 0.0)
    crowded = [a for a in found if a.step_time_s is None]
    unfit = *crowded[:TOO_LARGE], *_too_large(question), *_without_stages(question)
    return _chosen(question), *fitting[:SHOWN], *unfit


def check_explained(graph: Graph, node: str) -> None:
    """Raises HflowError HF302 when there is nothing to explain about `node`."""
    try:
        placed_node(node, graph)
    except ValueError as error:
        message, help_ = error.args
        raise HflowError(Diagnostic("HF302", f"--explain {node}: {message}", help=help_)) from None


def _question(plan: Plan, pins: Iterable[str], options: PlannerOptions, node: str) -> _Question:
    check_explained(plan.graph, node)
    exact = replace(options, planner="exact", engines=engines_of(plan))
    draft = weight_edges(new_draft(plan.graph, plan.cluster, pins, exact))
    draft = replace(draft, sharing=sharing_of(plan))
    all_groups = node_groups(draft.graph, draft.engines, draft.evaluation_graph, draft.sharing)
    group = next(g for g in all_groups if node in {n.name for n in g.nodes})
    own = _placed_together(draft.graph, group, all_groups)
    kept = tuple(pin for pin in draft.pins if pin.node not in own)
    free = replace(draft, pins=kept)
    found = alike(draft.graph, all_groups, {g.name: candidates_of(free, g) for g in all_groups})
    is_pinned = len(kept) < len(draft.pins)
    return _Question(plan, replace(free, candidates=found), group, plan.node(node), is_pinned)


def _placed_together(graph: Graph, group: NodeGroup, all_groups: Sequence[NodeGroup]) -> set[str]:
    """The nodes of which a pin would be one of `group`: its own, and those that train models of its base."""
    sharing = next((names for names in sharing_groups(graph, all_groups) if group.name in names), ())
    return {node.name for g in all_groups if g.name in (group.name, *sharing) for node in g.nodes}


def _tried(question: _Question) -> list[tuple[Candidate, ...]]:
    """Ways to run the node group, those in one group differ in what saves memory only: other strategies on
    the chosen mesh, each apart; the fastest meshes of as many devices; the fastest of each other number."""
    by_mesh: dict[Mesh, list[Candidate]] = {}
    for candidate in (c for each in question.draft.candidates[question.group.name].values() for c in each):
        by_mesh.setdefault(candidate.mesh(0), []).append(candidate)
    fastest = sorted(by_mesh.values(), key=lambda same_mesh: min(c.least_s for c in same_mesh))
    chosen, same, fewer = question.chosen, list[tuple[Candidate, ...]](), dict[int, tuple[Candidate, ...]]()
    for same_mesh in map(tuple, fastest):
        if _lies_on(same_mesh[0], chosen):
            same[:0] = [(c,) for c in same_mesh if not _is_chosen(c, chosen)]
        elif same_mesh[0].num_devices == len(chosen.mesh.devices):
            same.append(same_mesh)
        else:
            fewer.setdefault(same_mesh[0].num_devices, same_mesh)
    others = list(fewer.values())[: TRIED // 3]
    return same[: TRIED - len(others)] + others


def _lies_on(candidate: Candidate, plan: NodePlan) -> bool:
    return candidate.mesh(0).axes == plan.mesh.axes


def _is_chosen(candidate: Candidate, plan: NodePlan) -> bool:
    strategy = replace(candidate.strategy, recompute=plan.strategy.recompute)
    return strategy == plan.strategy and candidate.offload == plan.offload


def _chosen(question: _Question) -> Alternative:
    plan, node = question.plan, question.chosen
    reason = "pinned" if question.pinned else _best(plan.search)
    text = layout_text(node.mesh, node.strategy, node.offload) or "dp1"
    devices = tuple(sorted(node.mesh.devices))
    return Alternative(text, devices, node.time_s, plan.step_time_s, reason)


def _best(found: Search) -> str:
    """Why the plan's layout was chosen, by what is proven of the plan."""
    if found.unsearched:
        return "the best found, not proven best"
    if found.gap is None:
        return f"what {found.planner} chooses"
    return f"the best found, gap {found.gap:.1%}" if found.gap else "no other step is shorter"


def _judged(question: _Question, candidates: tuple[Candidate, ...], budget_s: float) -> Alternative:
    """The best plan in which the node group runs in one of `candidates`, all of one mesh."""
    draft, group = question.draft, question.group
    only = {**draft.candidates, group.name: {candidates[0].num_devices: candidates}}
    groups = node_groups(draft.graph, draft.engines, draft.evaluation_graph, draft.sharing)
    draft = replace(draft, candidates=alike(draft.graph, groups, only))
    space = SearchSpace(draft)
    reason = _why_nothing_fits(space)
    found = None if reason else search_wider(space, budget_s)
    if not (found and found.choice):
        first, reason = candidates[0], reason or "does not fit"
        return Alternative(candidate_text(first), first.mesh(0).devices, None, None, reason)
    assignment, config = found.choice.assignments[group.name], found.choice.configs[question.chosen.node]
    strategy = replace(assignment.candidate.strategy, recompute=config.recompute)
    text = layout_text(assignment.mesh, strategy, assignment.candidate.offload) or "dp1"
    graph, step_s = question.plan.graph, found.choice.step_s
    seconds = config.time_s * rounds(graph, graph.node(question.chosen.node))
    return Alternative(text, assignment.mesh.devices, seconds, step_s, _why(question, step_s, found.gap))


def _why_nothing_fits(space: SearchSpace) -> str:
    """Why no plan of `space` fits, as far as that is known without a search."""
    if space.pinned:
        return ""
    lean, usable = min_memory(space), space.draft.cluster.device.usable_bytes
    if lean is None:
        return "leaves too few devices for other models"
    least = lean.fullest.peak_bytes
    return f"does not fit: {of_text(least, usable)}" if least > usable else ""


def _why(question: _Question, step_s: float, gap: float) -> str:
    plan = question.plan
    later_s = step_s - plan.step_time_s
    if abs(later_s) <= RESOLUTION * plan.step_time_s:
        return "as fast"
    if later_s > 0:
        at_most = gap > RESOLUTION or plan.search.unsearched
        return f"slower by {'at most ' if at_most else ''}{_figure(later_s)} s"
    ended = bool(plan.search.searched_gap)
    missed = "the budget ended before" if ended else f"{plan.search.planner} does not try it"
    return f"faster by {_figure(-later_s)} s, but {'pinned otherwise' if question.pinned else missed}"


def _figure(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _too_large(question: _Question) -> Iterator[Alternative]:
    """Layouts on as many devices in which the node does not fit even alone, the nearest to it first."""
    draft, group, count = question.draft, question.group, len(question.chosen.mesh.devices)
    known = {candidate.mesh(0) for candidate in draft.candidates[group.name].get(count, ())}
    left = (m for m in meshes(draft, group) if len(m.devices) == count and m not in known)
    sizes = {mesh: needed_bytes(draft, group, mesh) for mesh in left if not refusal(draft, group, mesh)}
    for mesh, size in sorted(sizes.items(), key=lambda pair: pair[1])[:TOO_LARGE]:
        reason = f"does not fit: {of_text(size, draft.cluster.device.usable_bytes)}"
        text = layout_text(mesh, PLAIN, False) or "dp1"
        yield Alternative(text, mesh.devices, None, None, reason)


def _without_stages(question: _Question) -> Iterator[Alternative]:
    """Why `tp` was chosen, and `pp` not tried, where it was not."""
    chosen = question.chosen
    engine = profile_of(chosen.engine)
    if question.plan.graph.node(chosen.node).op in engine.pipelines or len(chosen.mesh.devices) == 1:
        return
    reason = f"not tried: {engine.title} generates without pipeline stages"
    yield Alternative("pp2 and more", tuple(sorted(chosen.mesh.devices)), None, None, reason)
