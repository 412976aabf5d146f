"""One pair of colours (fill, line) per model, the same in every picture of a graph."""

from __future__ import annotations

from hflow.graph.graph import Graph

Colours = tuple[str, str]
NO_MODEL: Colours = ("#f8f9fb", "#667085")
_MODELS: tuple[Colours, ...] = (
    ("#e8f1fd", "#2f6fce"),  # blue
    ("#fdf0e3", "#c8741a"),  # orange
    ("#e6f6ef", "#1b8a5a"),  # green
    ("#fbeaf4", "#b8327f"),  # magenta
    ("#f0ecfc", "#6a4bc4"),  # violet
    ("#fbf5d9", "#96780a"),  # ochre
)


def model_colours(graph: Graph) -> dict[str | None, Colours]:
    """Colours by model name, in the order in which the graph declares its models."""
    named = {m.name: _MODELS[i % len(_MODELS)] for i, m in enumerate(graph.models)}
    return {**named, None: NO_MODEL}


def node_colours(graph: Graph) -> dict[str, Colours]:
    """Colours by node name; a node without a model is grey."""
    colours = model_colours(graph)
    return {n.name: colours[n.model.model if n.model else None] for n in graph.nodes}
