"""Which engine each generate node runs on: what ``--engine NODE=NAME`` says, else what its cluster has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from hflow.diagnostics import Diagnostic, HflowError, did_you_mean
from hflow.graph.adapter import StoredAdapter
from hflow.graph.infer.kinds.generate import ROUTES
from hflow.graph.ir import Graph, Node
from hflow.plan.cluster import Cluster
from hflow.plan.engine_registry import DEFAULT_ENGINE, GENERATION_ENGINES, GenerationEngine, profile_of


def generation_engines(
    texts: Iterable[str], graph: Graph, cluster: Cluster
) -> Mapping[str, GenerationEngine]:
    """The engine of every generate node of `graph`.

    Args:
        texts: like ``rollout=sglang``; the last one about a node counts.

    Raises:
        HflowError: HF310 with one diagnostic per text that names no generate node, or no engine, and per node
            whose engine cannot do what it asks for.
    """
    chosen: dict[str, GenerationEngine] = {
        n.name: cluster.generate_engine for n in graph.nodes if n.op == "generate"
    }
    bad: list[Diagnostic] = []
    for text in texts:
        node, _, engine = text.partition("=")
        problem, help_ = _problem(node, engine, chosen)
        if problem:
            bad.append(Diagnostic("HF310", f"--engine {text}: {problem}", help=help_))
        else:
            chosen[node] = cast(GenerationEngine, engine)
    bad += [_cannot(n) for n in graph.nodes if n.in_flight and not profile_of(chosen[n.name]).in_flight]
    samplers = [node for node in graph.nodes if node.op == "generate" and node.output(ROUTES)]
    bad += [_tells_no_routes(node) for node in samplers if not _tells(chosen[node.name])]
    bad += [
        found for n in graph.nodes if n.name in chosen and (found := _begins_bare(n, graph, chosen[n.name]))
    ]
    if bad:
        raise HflowError(bad)
    return chosen


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


def _problem(node: str, engine: str, known: Mapping[str, GenerationEngine]) -> tuple[str, str]:
    """What is wrong, and what helps; empty if nothing is."""
    if node not in known:
        return f"no generate node `{node}`", did_you_mean(node, known, "generate nodes")
    if engine not in GENERATION_ENGINES:
        return f"`{engine}` is no engine that generates", f"engines: {', '.join(GENERATION_ENGINES)}"
    return "", ""
