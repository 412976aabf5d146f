"""One pair of colours (fill, line) per model, the same in every picture; how all colours look in the dark."""

from __future__ import annotations

from hflow.graph.ir import Graph

Colours = tuple[str, str]
PAPER, INK, MUTED, EDGE, FAINT = "#ffffff", "#1d2433", "#667085", "#98a2b3", "#d0d5dd"
NO_MODEL: Colours = ("#f8f9fb", "#667085")
_MODELS: tuple[Colours, ...] = (
    ("#e8f1fd", "#2f6fce"),  # blue
    ("#fdf0e3", "#c8741a"),  # orange
    ("#e6f6ef", "#1b8a5a"),  # green
    ("#fbeaf4", "#b8327f"),  # magenta
    ("#f0ecfc", "#6a4bc4"),  # violet
    ("#fbf5d9", "#96780a"),  # ochre
)
# Pictures of several algorithms stand side by side: the usual models look alike in all of them.
_USUAL = {"actor": 0, "critic": 1, "ref": 2, "reward": 3, "cost": 4, "cost_critic": 5}

DARK = {
    PAPER: "#0d1117",
    INK: "#e6edf3",
    MUTED: "#9aa4b2",
    EDGE: "#748091",
    FAINT: "#3f4856",
    "#f8f9fb": "#171c24",
    "#fbfcfd": "#11161d",
    "#eaecf0": "#242a33",
    "#475467": "#b4bdc9",
    "#e8f1fd": "#12233d",
    "#2f6fce": "#6ea8fe",
    "#fdf0e3": "#33220f",
    "#c8741a": "#f0a35e",
    "#e6f6ef": "#0f2b20",
    "#1b8a5a": "#4cc38a",
    "#fbeaf4": "#351b2b",
    "#b8327f": "#f07ab8",
    "#f0ecfc": "#241d3f",
    "#6a4bc4": "#a78bfa",
    "#fbf5d9": "#2e270d",
    "#96780a": "#d9b938",
}


def model_colours(graph: Graph) -> dict[str | None, Colours]:
    """Colours by model name: the usual ones for usual names, for others the next that are free."""
    taken = {m.name: _USUAL[m.name] for m in graph.models if m.name in _USUAL}
    free = [i for i in range(len(_MODELS)) if i not in taken.values()] or list(range(len(_MODELS)))
    others = [m.name for m in graph.models if m.name not in taken]
    chosen = {**taken, **{name: free[i % len(free)] for i, name in enumerate(others)}}
    return {**{m.name: _MODELS[chosen[m.name]] for m in graph.models}, None: NO_MODEL}


def node_colours(graph: Graph) -> dict[str, Colours]:
    """Colours by node name; a node without a model is grey."""
    colours = model_colours(graph)
    return {n.name: colours[n.model.model if n.model else None] for n in graph.nodes}


def dark_style() -> str:
    """CSS that recolours a picture of class ``hflow`` where the reader prefers dark pages.

    Pictures say their light colours themselves, so they also show where style sheets are taken out.
    """
    rules = (
        f'.hflow [{what}="{light}"]{{{what}:{dark}}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme: dark){{{''.join(rules)}}}"
