"""Random planning problems, small enough to enumerate: graphs, model shapes, clusters, placements, pins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod
from random import Random

import hflow
from hflow.compiler.candidates.node_groups import Candidate, Candidates, node_groups
from hflow.compiler.candidates.shared_bases import alike
from hflow.compiler.compile import new_draft
from hflow.compiler.explain.min_memory import min_memory
from hflow.compiler.options import PlannerOptions
from hflow.compiler.passes.candidates import candidates
from hflow.compiler.passes.weight_edges import weight_edges
from hflow.compiler.planner.assignments import Assignments
from hflow.compiler.planner.placements import Allocation, Colocation, allocations
from hflow.compiler.planner.search_space import SearchSpace
from hflow.compiler.planner.step import Configs, tasks_of_step
from hflow.compiler.state import Draft
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.plan.cluster import Calibration, Cluster, DeviceKind, Link
from hflow.plan.model_shape import ModelShape
from hflow.plan.shared_forward import sharing
from hflow.plan.stored_adapter import resolved_adapter
from hflow.schedule.random_search import best_order
from hflow.schedule.task_times import period_s
from tests.compiler.workloads import ROOT

STAND_IN = "shape:llama-7b"  # a path that reads no file; the shapes are replaced
GRAPHS = {
    **{name: f"algorithms/{name}.yaml" for name in ("ppo", "grpo", "remax", "safe_rlhf", "dpo", "dapo")},
    **{name: f"algorithms/{name}.yaml" for name in ("async_grpo", "iterative_grpo", "tool_grpo")},
    **{
        name: f"tests/runtime/graphs/{name}.yaml"
        for name in ("lagged", "region", "region_scored", "trained_twice", "adapted_ppo")
    },
}
FIXED = ("dpo", "lagged", "region", "region_scored", "trained_twice", "adapted_ppo")  # lengths of responses
PATHS = {
    "ppo": ("reward_model",),
    "adapted_ppo": ("reward_model",),
    "safe_rlhf": ("reward_model", "cost_model"),
}
BEYOND_ANY = 10**15


def case(
    name: str, seed: int, most: int, overrides: tuple[str, ...] = (), shares_forward: bool = False
) -> Draft:
    """A problem with graph `name` that has `most` plans at the most, after `candidates`; with `overrides` of
    its graph, which leave its shapes and sizes; of all plans, or of those with shared forward passes.

    Some problems have no plan that fits, but none has a node group which does not fit even alone.
    """
    random = Random(f"{name} {seed}")
    while True:
        try:
            draft = _drawn(name, random, overrides, shares_forward)
        except HflowError:  # a pinned node cannot run on so many devices
            continue
        for kept in (8, 6, 4, 3, 2, 1):
            few = replace(draft, candidates=_thinned(draft, kept, random))
            if all(few.candidates.values()) and 1 <= num_plans(few, most) <= most:
                return few


def scarce_case(name: str, seed: int, most: int, overrides: tuple[str, ...] = ()) -> Draft:
    """The same with no more memory than the least plan needs, or hardly more; as it is where nodes are pinned
    to devices."""
    draft, random = case(name, seed, most, overrides), Random(f"scarce {name} {seed}")
    lean = None if draft.pins else min_memory(space_of(draft))
    return (
        with_memory(draft, int(lean.fullest.peak_bytes * random.choice((1.0, 1.02, 1.1)))) if lean else draft
    )


def with_memory(draft: Draft, size: int) -> Draft:
    """On devices of which plans may fill so many bytes."""
    device = replace(draft.cluster.device, memory_bytes=size, reserve_bytes=0, overhead_bytes=0)
    return replace(draft, cluster=replace(draft.cluster, name=str(size), device=device))


def space_of(draft: Draft) -> SearchSpace:
    return SearchSpace(draft)


def num_plans(draft: Draft, enough: int) -> int:
    """How many plans the space has, or a number above `enough`."""
    return num_plans_of(space_of(draft), enough)


def num_plans_of(space: SearchSpace, enough: int) -> int:
    total = 0
    for allocation in all_allocations(space):
        total += prod(map(len, space.assignments(allocation).values()))
        if total > enough:
            break
    return total


def all_allocations(space: SearchSpace) -> Iterator[Allocation]:
    for partition, spread, first in space.colocations():
        sizes = [space.sizes(members) for members in partition]
        for each in allocations(partition, sizes, space.num_devices - (first or 0)):
            yield replace(each, spread=spread, first=first)


def allocation_in(space: SearchSpace, colocation: Colocation, random: Random) -> Allocation | None:
    """One of it, in which each set has as many devices as happen to be left; None where too few are."""
    partition, spread, first = colocation
    counts: list[int] = []
    for members in partition:
        left = space.num_devices - (first or 0) - sum(counts)
        counts += [random.choice([n for n in space.sizes(members) if n <= left] or [0])]
    return Allocation(partition, tuple(counts), spread, first) if all(counts) else None


def _drawn(name: str, random: Random, overrides: tuple[str, ...], shares_forward: bool) -> Draft:
    graph, cluster = _graph(name, random.choice((16, 64, 256)), overrides), _cluster(random)
    options = PlannerOptions(
        placement=random.choice(("auto", "auto", "auto", "split", "standalone", "colocate"))
    )
    pins = _pins(graph, cluster, random) if random.random() < 0.2 else ()
    drawn = {model.name: _shape(random).with_head(model.head) for model in graph.models}
    shapes = {m.name: drawn[m.refresh.model] if m.refresh else drawn[m.name] for m in graph.models}
    for m in (m for m in graph.models if m.adapter):
        shapes[m.name] = replace(drawn[m.base_owner].with_head(m.head), adapter=resolved_adapter(m))
    draft = replace(weight_edges(new_draft(graph, cluster, pins, options)), shapes=shapes)
    draft = replace(draft, sharing=sharing(graph, shapes)) if shares_forward else draft
    memory = _memory_bytes(candidates(draft), random)
    device = replace(cluster.device, memory_bytes=memory)
    return candidates(replace(draft, cluster=replace(cluster, name=str(memory), device=device)))


@lru_cache
def _graph(name: str, response: int, more: tuple[str, ...] = ()) -> Graph:
    paths = ("model", *PATHS.get(name, ()))
    overrides = [f"params.{path}={STAND_IN}" for path in paths]
    if name not in FIXED:
        overrides.append(f"params.max_new_tokens={response}")
    return hflow.load(ROOT / GRAPHS[name], [*overrides, *more])


def _shape(random: Random) -> ModelShape:
    heads, width = random.choice((2, 4)), random.choice((32, 64, 128))
    hidden = heads * width
    return ModelShape(
        "llama", random.choice((2, 4)), hidden, heads, random.choice((heads // 2, heads)), width,
        random.choice((2, 4)) * hidden, random.choice((256, 4096)), 4096, 1e4, 1e-5, False, False,
    )  # fmt: skip


def _cluster(random: Random) -> Cluster:
    """Devices and links of all speeds, so that now one and now the other counts."""
    device = DeviceKind(
        "any", "cpu", 10 ** random.uniform(10, 13), BEYOND_ANY, 10 ** random.uniform(9, 11), 0.5,
        10 ** random.uniform(-6, -3), calibration=Calibration(),
    )  # fmt: skip
    intra, inter, host = (Link(10 ** random.uniform(7, 10), 10 ** random.uniform(-6, -3)) for _ in range(3))
    hosts, per_host = random.choice(((1, 2), (1, 4), (2, 2), (2, 4)))
    host_link = host if random.random() < 0.6 else None
    return Cluster("random", device, hosts, per_host, intra, inter, host_link, random.choice((1, 2)))


def _pins(graph: Graph, cluster: Cluster, random: Random) -> tuple[str, ...]:
    node = random.choice([n.name for n in graph.nodes if n.model])
    half = cluster.num_devices // 2
    return (f"{node}=@{random.choice((f'0-{half - 1}', f'{half}-{2 * half - 1}'))}",)


def _memory_bytes(draft: Draft, random: Random) -> int:
    """Enough for each node group alone, and about what a device needs if all models share all devices."""
    options = [each[max(each)] for each in draft.candidates.values()]
    alone = max(min(o.idle_bytes + o.kept.copy_bytes + o.least_bytes for o in own) for own in options)
    staying = sum(min(o.idle_bytes for o in own) for own in options)
    together = staying + max(min(o.kept.copy_bytes + o.least_bytes for o in own) for own in options)
    return max(alone, int(together * random.uniform(0.7, 2.5)))


def _thinned(draft: Draft, kept: int, random: Random) -> dict[str, Candidates]:
    """At most `kept` candidates of each node group on each number of devices, in their order."""
    found = {
        group: {n: _some(own, kept, random) for n, own in options.items()}
        for group, options in draft.candidates.items()
    }
    return alike(draft.graph, node_groups(draft.graph, draft.engines, draft.evaluation_graph), found)


def _some(options: tuple[Candidate, ...], kept: int, random: Random) -> tuple[Candidate, ...]:
    numbers = sorted(random.sample(range(len(options)), min(kept, len(options))))
    return tuple(options[number] for number in numbers)


def best_step_s(space: SearchSpace, assignments: Assignments, configs: Configs) -> float:
    """Seconds of a complete choice, in the best order that is found."""
    tasks = tasks_of_step(space.builder, space.groups, assignments, configs)
    return period_s(tasks, best_order(tasks))
