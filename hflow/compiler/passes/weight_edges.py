"""Derive the weight edges: a node that reads a model which some node trains."""

from __future__ import annotations

from dataclasses import replace

from hflow.compiler.draft import Draft, WeightEdge
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.graph import Node


def _not_scheduled(node: Node) -> Diagnostic:
    assert node.model
    message = (
        f"`{node.name}` may read weights {node.model.lag} updates old (`lag`), which is not scheduled yet"
    )
    return Diagnostic(
        "HF307", message, node.span, "drop `lag`: the node then always reads the latest weights"
    )


def weight_edges(draft: Draft) -> Draft:
    """Raises HF307 for a node that may read weights older than the last update (`lag`)."""
    lagging = [n for n in draft.graph.nodes if n.model and n.model.lag]
    if lagging:
        raise HflowError(_not_scheduled(n) for n in lagging)
    edges = tuple(
        WeightEdge(reader.model.model, trainer.name, reader.name)
        for reader in draft.graph.nodes
        if reader.model and reader.op != "train"
        for trainer in draft.graph.trainers(reader.model.model)
    )
    return replace(draft, weight_edges=edges)
