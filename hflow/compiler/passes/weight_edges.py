"""Derive the weight edges: a node that reads a model which some node trains."""

from __future__ import annotations

from dataclasses import replace

from hflow.compiler.draft import Draft, WeightEdge


def weight_edges(draft: Draft) -> Draft:
    edges = tuple(
        WeightEdge(reader.model.model, trainer.name, reader.name)
        for reader in draft.graph.nodes
        if reader.model and reader.op != "train"
        for trainer in draft.graph.trainers(reader.model.model)
    )
    return replace(draft, weight_edges=edges)
