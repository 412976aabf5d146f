"""Graph x Cluster -> Plan: shapes are read, then the passes run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import date
from functools import partial

from hflow.compiler.base_pins import spread_pins
from hflow.compiler.cheapest_engine import cheapest
from hflow.compiler.engines import NodeEngines, engine_choices
from hflow.compiler.evaluations_apart import planned_apart
from hflow.compiler.gc_pause import gc_pause
from hflow.compiler.host_room import planned_in_hosts
from hflow.compiler.options import DEFAULTS, PlannerOptions
from hflow.compiler.passes.candidates import candidates
from hflow.compiler.passes.check_memory import check_memory
from hflow.compiler.passes.lower_edges import lower_edges
from hflow.compiler.passes.place import place
from hflow.compiler.passes.schedule import schedule
from hflow.compiler.passes.weight_edges import weight_edges
from hflow.compiler.pins import parse_pins
from hflow.compiler.positions import too_few_positions
from hflow.compiler.shared_forward import planned_sharing
from hflow.compiler.state import Draft
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.evaluation import evaluation_graph, named_graph
from hflow.graph.ir import Graph
from hflow.plan.balance import idle_balancing
from hflow.plan.chat_dates import with_dates
from hflow.plan.cluster import Cluster
from hflow.plan.digests import digests_of
from hflow.plan.dtypes import with_dtypes
from hflow.plan.frozen import unusable_adapters, unusable_patterns
from hflow.plan.model_shape import ModelShape
from hflow.plan.plan import VERSION, Plan
from hflow.plan.program import Program
from hflow.plan.read_shape import read_shape
from hflow.plan.routes import unusable_routes, with_choices
from hflow.plan.row_lengths import row_lengths
from hflow.plan.stored_adapter import resolved_adapter, unfit_adapters
from hflow.plan.vocabulary import foreign_tokens, tokens_beyond
from hflow.plan.workload import rounds, token_makers, workload

Pass = Callable[[Draft], Draft]
PASSES: tuple[Pass, ...] = (weight_edges, candidates, place, lower_edges, schedule, check_memory)


def compile_graph(
    graph: Graph,
    cluster: Cluster,
    pins: Iterable[str] = (),
    options: PlannerOptions = DEFAULTS,
    after: Callable[[str, Draft], None] | None = None,
    today: date | None = None,
) -> Plan:
    """Compile `graph` for `cluster`.

    Args:
        today: what chat templates that ask for the date write, where the graph says none; default: the
            present day, local time.
        pins: texts like ``actor_train=tp2,dp2@0-3``.
        after: called with the name of each pass and what it has made, for each choice of engines, and again
            where evaluations are tried in layouts of their own, or shared forward passes.

    Raises:
        HflowError: HF212, HF226, HF302-HF305, HF307, HF308, HF310, HF311.
    """
    graph = with_dates(graph, today or date.today())
    with gc_pause():
        first = new_draft(graph, cluster, pins, options)
        choices = engine_choices(options.engines, first.graph, cluster)
        budget_s = options.budget_s and options.budget_s / len(choices)
        first = replace(first, options=replace(options, budget_s=budget_s))

        def planned(engines: NodeEngines) -> Plan:
            in_hosts = partial(planned_in_hosts, planned=lambda draft: _plan(_passed(draft, after)))
            apart = partial(planned_apart, planned=in_hosts)
            return planned_sharing(replace(first, engines=engines), apart)

        return cheapest(choices, planned)


def _passed(draft: Draft, after: Callable[[str, Draft], None] | None) -> Draft:
    for step in PASSES:
        draft = step(draft)
        if after:
            after(step.__name__, draft)
    return draft


def _plan(draft: Draft) -> Plan:
    return Plan(
        VERSION, draft.cluster, draft.shapes, draft.nodes, draft.step, draft.evaluation, draft.memory,
        draft.step_time_s, _tokens_per_step(draft.graph), draft.search, digests_of(draft.graph),
        draft.evaluations,
    )  # fmt: skip


def new_draft(
    graph: Graph, cluster: Cluster, pins: Iterable[str] = (), options: PlannerOptions = DEFAULTS
) -> Draft:
    """What the first pass is given; of engines to be chosen by price it has the first ones.

    Raises:
        HflowError: HF212, HF230, HF302-HF304, HF307, HF308, HF310, HF311.
    """
    graphs = (graph, *(named_graph(graph, evaluation) for evaluation in graph.evaluations))
    if foreign := next(filter(None, (tuple(foreign_tokens(each)) for each in graphs)), None):
        raise HflowError(foreign)
    _refuse_mixed(cluster)
    graph = with_dtypes(graph, cluster)
    found = spread_pins(parse_pins(pins, graph, cluster), graph)
    engines, *_ = engine_choices(options.engines, graph, cluster)
    shapes = _shapes(graph)
    too_few = (problem for each in graphs for problem in too_few_positions(each, shapes))
    adapters = (*unusable_adapters(graph, shapes), *unfit_adapters(graph, shapes))
    untrainable = (*unusable_patterns(graph, shapes), *adapters)
    unusable = (*untrainable, *idle_balancing(graph, shapes), *unusable_routes(graph, shapes))
    if unfit := (*tokens_beyond(graph, shapes), *too_few, *unusable):
        raise HflowError(unfit)
    graph = with_choices(graph, shapes)
    step = Program(graph, (), ())
    return Draft(graph, evaluation_graph(graph), cluster, shapes, step, found, options, engines)


def _refuse_mixed(cluster: Cluster) -> None:
    if cluster.more:
        kinds = " and ".join(dict.fromkeys(group.device.name for group in cluster.groups))
        message = f"cluster `{cluster.name}` mixes {kinds}: only clusters of one kind of host can be planned"
        raise HflowError(Diagnostic("HF307", message))


def _shapes(graph: Graph) -> dict[str, ModelShape]:
    shapes: dict[str, ModelShape] = {}
    errors: list[HflowError] = []
    for model in graph.models:
        try:
            read = read_shape(model.path, model.span, model.head, _tiny(graph, model.path))
            shapes[model.name] = replace(read, adapter=resolved_adapter(model))
        except HflowError as error:
            errors.append(error)
    if errors:
        raise HflowError(d for error in errors for d in error.diagnostics)
    return shapes


def _tiny(graph: Graph, path: str) -> str:
    """Options of `hflow new-model` for tiny models in the folders that a graph names: where one has an `lm`
    head all models of it can begin from that, and each folder has a seed of its own, lest two be equal."""
    paths = list(dict.fromkeys(model.path for model in graph.models))
    head = "" if any(m.path == path and m.head == "lm" for m in graph.models) else "--head scalar"
    seed = f"--seed {paths.index(path)}" if paths.index(path) else ""
    return " ".join(filter(None, (head, seed)))


def _tokens_per_step(graph: Graph) -> int:
    """Prompt and response tokens of the rows that a step makes (or, without rollouts, trains on)."""
    works = [(rounds(graph, n), workload(n, row_lengths(graph, n))) for n in token_makers(graph)]
    return round(sum(times * work.rows * work.mean_sequence for times, work in works))
