"""The order in which a program names its nodes: models are read in a step before they are trained."""

from __future__ import annotations

import networkx as nx

from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.ir import Graph, Node


def node_order(graph: Graph) -> tuple[Node, ...]:
    """Topological order in which a model is read in a step before it is trained.

    Raises:
        HflowError: HF307 when there is none.
    """
    dag = graph.dag()
    for reader in (n for n in graph.nodes if n.model and n.op != "train"):
        whole = [reader.name] if graph.region(reader.region).until is None else [reader.name, reader.region]
        trainers = graph.trainers(reader.model_use.model)
        dag.add_edges_from((first, trainer.name) for trainer in trainers for first in whole)
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    try:
        order = list(nx.lexicographical_topological_sort(dag, key=position.__getitem__))
    except nx.NetworkXUnfeasible:
        raise HflowError(_read_after_training(graph, dag)) from None
    return tuple(map(graph.node, order))


def _read_after_training(graph: Graph, dag: nx.DiGraph[str]) -> Diagnostic:
    cycle = next(names for names in nx.strongly_connected_components(dag) if len(names) > 1)
    reader = next(n for n in graph.nodes if n.name in cycle and n.model and n.op != "train")
    model = reader.model_use.model
    trainer = graph.trainers(model)[0].name
    message = (
        f"`{reader.name}` reads `{model}` after `{trainer}` has trained it in the same step,"
        " which is not scheduled"
    )
    return Diagnostic("HF307", message, reader.span, "a step reads all models before it trains them")
