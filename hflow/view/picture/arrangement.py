"""Where the cards of a graph stand: those of a region inside its frame, the frame among the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hflow.graph.ir import Graph
from hflow.view.picture.cards import Face
from hflow.view.picture.connections import Connection, Feedback
from hflow.view.picture.layout import Layering, Point, Rectangle, layered
from hflow.view.picture.ordering import GraphLink, column_numbers

FRAME_PAD, FRAME_TOP, FRAME_BOTTOM = 30, 46, 16
CHANNEL = 14  # height of a line that enters a frame from below
LOOP = 32  # height of a line below a card, from the card to itself


@dataclass(frozen=True)
class Arrangement:
    """Pixels, from (0, 0). `columns`: the left and right end of the column in which a card (or, for a
    ``repeat`` node, its frame) stands; `frames`: by region, with the outlet at the right end."""

    boxes: Mapping[str, Rectangle]
    columns: Mapping[str, Point]
    frames: Mapping[str, Rectangle]
    bends: Mapping[GraphLink, tuple[Point, ...]]
    width: float
    height: float


def arranged(
    graph: Graph, faces: Mapping[str, Face], lines: Sequence[Connection], backwards: Sequence[Feedback]
) -> Arrangement:
    sizes = {name: _slot(shown, backwards) for name, shown in faces.items()}
    ports = {(name, port): at for name, shown in faces.items() for port, at in shown.ports_below.items()}
    links = [line.link for line in lines]
    frames: dict[str, Rectangle] = {}
    insides: dict[str, Layering] = {}
    for region in graph.regions[1:]:
        names = [*(n.name for n in graph.inside(region.name)), region.name]
        inside = insides[region.name] = _layered(names, links, sizes, ports, fixed=())
        bottom = FRAME_BOTTOM + CHANNEL * len(entering(graph, region.name, backwards))
        height = FRAME_TOP + inside.height + bottom
        frames[region.name] = Rectangle(0, 0, FRAME_PAD + inside.width, height)
        sizes[region.name] = (frames[region.name].width, height)
        outlet = FRAME_TOP + inside.boxes[region.name].y
        ports.update({(region.name, p): outlet + at for p, at in faces[region.name].ports_below.items()})
    names = [n.name for n in graph.inside(graph.regions[0].name)]
    outer = _layered(names, links, sizes, ports, fixed=tuple(frames))
    corners = {name: outer.boxes[name] for name in frames}
    placed = {name: box.moved(corners[name].x, corners[name].y) for name, box in frames.items()}
    return _merged(faces, outer, insides, placed)


def entering(graph: Graph, region: str, backwards: Iterable[Feedback]) -> list[Feedback]:
    """What goes back to nodes of a region."""
    inside = {n.name for n in graph.inside(region)}
    return [f for f in backwards if not inside.isdisjoint(f.targets)]


def _slot(shown: Face, backwards: Sequence[Feedback]) -> tuple[float, float]:
    """The size of a card, with room for the lines that lead back to it from itself."""
    width, height = shown.size
    return width, height + LOOP * sum(f.own and f.source == shown.name for f in backwards)


def _layered(
    names: Sequence[str],
    links: Sequence[GraphLink],
    sizes: Mapping[str, tuple[float, float]],
    ports: Mapping[tuple[str, str], float],
    fixed: tuple[str, ...],
) -> Layering:
    """Cards of a column are equally wide; what is `fixed` keeps its size."""
    own = [link for link in links if link.source in names and link.target in names]
    column = column_numbers(names, own)
    widest: dict[int, float] = {}
    for name in set(names) - set(fixed):
        widest[column[name]] = max(widest.get(column[name], 0), sizes[name][0])
    uniform = {n: (sizes[n][0] if n in fixed else widest[column[n]], sizes[n][1]) for n in names}
    return layered(own, uniform, {key: at for key, at in ports.items() if key[0] in uniform})


def _merged(
    faces: Mapping[str, Face],
    outer: Layering,
    insides: Mapping[str, Layering],
    frames: Mapping[str, Rectangle],
) -> Arrangement:
    """One picture of the layouts inside and outside of frames."""
    boxes, columns, bends = dict(outer.boxes), dict(outer.columns), dict(outer.bends)
    for region, inside in insides.items():
        dx, dy = frames[region].x + FRAME_PAD, frames[region].y + FRAME_TOP
        boxes.update({name: box.moved(dx, dy) for name, box in inside.boxes.items()})
        inner = {n: (left + dx, right + dx) for n, (left, right) in inside.columns.items() if n != region}
        columns.update(inner)
        moved = {link: tuple((x + dx, y + dy) for x, y in way) for link, way in inside.bends.items()}
        bends.update(moved)
    cards = {name: replace(box, height=faces[name].size[1]) for name, box in boxes.items()}
    return Arrangement(cards, columns, frames, bends, outer.width, outer.height)
