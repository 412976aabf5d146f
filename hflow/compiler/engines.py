"""Which engine each generate node runs on: what ``--engine NODE=NAME`` says, else what its cluster has.

Where that is `auto`, each engine that can run the node is tried, and the plan with the shortest step counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import cast

from hflow.diagnostics import Diagnostic, HflowError, did_you_mean
from hflow.graph.adapter import StoredAdapter
from hflow.graph.infer.kinds.generate import ROUTES
from hflow.graph.ir import Graph, Node
from hflow.plan.cluster import Cluster
from hflow.plan.engine_registry import (
    AUTO_ENGINES,
    DEFAULT_ENGINE,
    ENGINE_CHOICES,
    GENERATION_ENGINES,
    EngineChoice,
    GenerationEngine,
    profile_of,
)
from hflow.plan.plan import Plan

NodeEngines = Mapping[str, GenerationEngine]


def engine_choices(texts: Iterable[str], graph: Graph, cluster: Cluster) -> tuple[NodeEngines, ...]:
    """The engines of all generate nodes of `graph`: several where those of some are to be chosen by price, of
    which nodes that sample with one model have the same.

    Args:
        texts: like ``rollout=sglang``; the last one about a node counts.

    Raises:
        HflowError: HF310 with one diagnostic per text that names no generate node, or no engine; if there is
            none, per node whose engine cannot do what it asks for.
    """
    said, bad = _said(texts, graph, cluster)
    if bad:
        raise HflowError(bad)
    choices = tuple(_choices(said, graph))
    able = tuple(engines for engines in choices if not tuple(_problems(engines, graph)))
    if not able:
        raise HflowError(_problems(choices[0], graph))
    return able


def engines_of(plan: Plan) -> tuple[str, ...]:
    """The engines that a plan has, as `engine_choices` reads them."""
    generates = [node.name for node in plan.graph.nodes if node.op == "generate"]
    return tuple(f"{name}={plan.node(name).engine}" for name in generates)


def _said(
    texts: Iterable[str], graph: Graph, cluster: Cluster
) -> tuple[dict[str, EngineChoice], list[Diagnostic]]:
    """What is wanted for each generate node, and which of `texts` say nothing."""
    said: dict[str, EngineChoice] = {
        n.name: cluster.generate_engine for n in graph.nodes if n.op == "generate"
    }
    bad: list[Diagnostic] = []
    for text in texts:
        node, _, engine = text.partition("=")
        problem, help_ = _problem(node, engine, said)
        if problem:
            bad.append(Diagnostic("HF310", f"--engine {text}: {problem}", help=help_))
        else:
            said[node] = cast(EngineChoice, engine)
    return said, bad


def _problem(node: str, engine: str, known: Iterable[str]) -> tuple[str, str]:
    """What is wrong, and what helps; empty if nothing is."""
    if node not in known:
        return f"no generate node `{node}`", did_you_mean(node, known, "generate nodes")
    if engine not in ENGINE_CHOICES:
        return f"`{engine}` is no engine that generates", f"engines: {', '.join(ENGINE_CHOICES)}"
    return "", ""


def _choices(said: Mapping[str, EngineChoice], graph: Graph) -> Iterator[NodeEngines]:
    model_of = {node: graph.model_of(graph.node(node)).name for node in said}
    fixed: dict[str, GenerationEngine] = {n: engine for n, engine in said.items() if engine != "auto"}
    models = tuple(dict.fromkeys(model_of[node] for node, engine in said.items() if engine == "auto"))
    for engines in product(AUTO_ENGINES, repeat=len(models)):
        chosen = dict(zip(models, engines, strict=True))
        yield {node: fixed.get(node) or chosen[model_of[node]] for node in said}


def _problems(engines: NodeEngines, graph: Graph) -> Iterator[Diagnostic]:
    """Of nodes whose engine cannot do what they ask for."""
    generates = [node for node in graph.nodes if node.name in engines]
    for node in generates:
        if node.in_flight and not profile_of(engines[node.name]).in_flight:
            yield _cannot(node)
    for node in generates:
        if node.output(ROUTES) and not _tells(engines[node.name]):
            yield _tells_no_routes(node)
    yield from filter(None, (_begins_bare(node, graph, engines[node.name]) for node in generates))


def _cannot(node: Node) -> Diagnostic:
    able = {name: profile_of(name).title for name in GENERATION_ENGINES if profile_of(name).in_flight}
    titles, first = " and ".join(able.values()), next(iter(able))
    message = f"`{node.name}` takes over weights `in_flight`, which of the engines only {titles} can"
    return Diagnostic("HF310", message, node.span, f"choose it: `--engine {node.name}={first}`")


def _begins_bare(node: Node, graph: Graph, engine: GenerationEngine) -> Diagnostic | None:
    """A server reads the model's own folder, and gets an adapter with the newest weights alone."""
    model = graph.model_of(node)
    renewed = graph.trainers(model.name) and not node.model_use.lag
    if renewed or not isinstance(model.adapter, StoredAdapter) or profile_of(engine).server is None:
        return None
    title = profile_of(engine).title
    message = f"`{node.name}` begins with the adapter in `{model.adapter.path}`, which {title} does not read"
    return Diagnostic("HF310", message, node.span, f"choose another: `--engine {node.name}={DEFAULT_ENGINE}`")


def _tells_no_routes(node: Node) -> Diagnostic:
    able: list[GenerationEngine] = [name for name in GENERATION_ENGINES if _tells(name)]
    titles = " and ".join(profile_of(name).title for name in able)
    message = f"the `routes` of `{node.name}` are read, which of the engines only {titles} can tell"
    return Diagnostic("HF310", message, node.span, f"choose it: `--engine {node.name}={able[0]}`")


def _tells(engine: GenerationEngine) -> bool:
    return "generate" in profile_of(engine).routes
