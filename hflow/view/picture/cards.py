"""The cards of a graph's picture: what each shows, how large it is, and where its values leave it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hflow import units
from hflow.graph.adapter import StoredAdapter
from hflow.graph.ir import Graph, Model, Node
from hflow.graph.types import ValueType
from hflow.view.picture.layout import Rectangle
from hflow.view.picture.palette import INK, MUTED, Colours, model_colours

LINE = 17
PAD = 12
NAME_SIZE, TEXT_SIZE, PORT_SIZE, PILL_SIZE = 13, 12, 11, 10
PILL_PAD, PILL_GAP, PILL_HEIGHT = 6, 6, 15
CHIP, CHIP_GAP, CHIP_LINE = 11, 26, 22


@dataclass(frozen=True)
class Label:
    """`halo`: drawn over lines, which it keeps a little away."""

    x: float
    y: float
    content: str
    fill: str
    size: int = TEXT_SIZE
    bold: bool = False
    anchor: str = "start"
    halo: bool = False

    @property
    def right(self) -> float:
        """The end of a text that starts at `x`."""
        return self.x + text_width(self.content, self.size)


@dataclass(frozen=True)
class Pill:
    """A word in a rounded frame."""

    x: float
    y: float
    width: float
    height: float
    content: str
    colour: str


@dataclass(frozen=True)
class Card:
    """One node. `ports` maps each output to the height at which its edges leave."""

    box: Rectangle
    fill: str
    line: str
    tooltip: str
    texts: tuple[Label, ...]
    pills: tuple[Pill, ...]
    ports: Mapping[str, float]


@dataclass(frozen=True)
class Chip:
    """A model in the legend."""

    x: float
    y: float
    fill: str
    line: str
    texts: tuple[Label, ...]


def text_width(text: str, size: int) -> float:
    """Pixels of monospaced text; a little more than the widest of the usual fonts needs."""
    return 0.61 * size * len(text)


@dataclass(frozen=True)
class Face:
    """What a card shows, before it has a place."""

    name: str
    lines: tuple[str, ...]
    ports: tuple[tuple[str, str], ...]  # each output and its text
    pills: tuple[str, ...]
    tooltip: str

    @property
    def size(self) -> tuple[float, float]:
        pills = sum(PILL_GAP + _pill_width(p) for p in self.pills)
        widths = [text_width(self.name, NAME_SIZE) + (pills + PILL_GAP if pills else 0)]
        widths += [text_width(line, TEXT_SIZE) for line in self.lines]
        widths += [text_width(text, PORT_SIZE) for _, text in self.ports]
        ports = LINE * len(self.ports) + (6 if self.ports else 0)
        return round(max(widths) + 2 * PAD), LINE * (1 + len(self.lines)) + ports + PAD

    @property
    def ports_below(self) -> dict[str, float]:
        """How far below the card's top each output leaves it."""
        first = LINE * (2 + len(self.lines)) + 3
        return {port: first + LINE * i for i, (port, _) in enumerate(self.ports)}


def face(graph: Graph, node: Node, lines: Sequence[str]) -> Face:
    """`lines` stand below the name."""
    ports = tuple((o.port, f"{o.port}: {bare(o.type)}") for o in node.outputs)
    return Face(node.name, tuple(lines), ports, _marks(graph, node), _tooltip(node))


def card(shown: Face, box: Rectangle, colours: Colours) -> Card:
    x, y = box.x + PAD, box.y + LINE + 2
    texts = [Label(x, y, shown.name, INK, NAME_SIZE, bold=True)]
    texts += [Label(x, y + LINE * i, line, colours[1]) for i, line in enumerate(shown.lines, 1)]
    ports = {port: box.y + below for port, below in shown.ports_below.items()}
    texts += [Label(x, ports[port] + 4, text, MUTED, PORT_SIZE) for port, text in shown.ports]
    return Card(box, *colours, shown.tooltip, tuple(texts), _pills(shown.pills, box, colours[1]), ports)


def kind(node: Node) -> tuple[str, ...]:
    """What a node is, in words: ``generate actor``; ``train actor`` and its loss; ``call whiten``."""
    if node.op == "repeat":
        return ("what was kept",)
    function = node.function.reference.rpartition(".")[2].rpartition(":")[2] if node.function else ""
    if not node.model:
        return (f"{node.op} {function}".rstrip(),)
    does = f"{node.op} {node.model.weights}"
    return (does, function) if function else (does,)


def bare(value: ValueType) -> str:
    """A type without its provenance, which only the tooltip has room for."""
    return f"{value.dtype}[{', '.join(map(str, value.dims))}]"


def _marks(graph: Graph, node: Node) -> tuple[str, ...]:
    if node.function and node.function.whole_batch:
        return ("whole batch",)
    scalar = node.model and graph.model_of(node).head == "scalar"
    return ("scalar",) if scalar else ()


def _tooltip(node: Node) -> str:
    function = [node.function.reference] if node.function else []
    options = [f"{name}: {value}" for name, value in node.options.items()]
    return "\n".join([f"{node.name}: {kind(node)[0]}", *function, *options])


def _pill_width(text: str) -> float:
    return round(text_width(text, PILL_SIZE) + 2 * PILL_PAD)


def _pills(words: Sequence[str], box: Rectangle, colour: str) -> tuple[Pill, ...]:
    """From the right end of the card's first line to the left."""
    right = box.right - PAD + PILL_PAD
    pills: list[Pill] = []
    for word in reversed(words):
        width = _pill_width(word)
        pills.append(Pill(right - width, box.y + 7, width, PILL_HEIGHT, word, colour))
        right -= width + PILL_GAP
    return tuple(pills)


def legend(graph: Graph, width: float) -> tuple[tuple[Chip, ...], float]:
    """A chip per model, in as many lines as `width` makes necessary, and the height of all lines."""
    colours = model_colours(graph)
    chips: list[Chip] = []
    x, y = 0.0, 0.0
    for model in graph.models:
        about = _about(model)
        name_width = text_width(model.name, TEXT_SIZE)
        whole = CHIP + 7 + name_width + 7 + text_width(about, PORT_SIZE)
        if x and x + whole > width:
            x, y = 0.0, y + CHIP_LINE
        name = Label(x + CHIP + 7, y + 10, model.name, INK, bold=True)
        what = Label(round(x + CHIP + 7 + name_width + 7), y + 10, about, MUTED, PORT_SIZE)
        chips.append(Chip(x, y, *colours[model.name], (name, what)))
        x = round(x + whole + CHIP_GAP)
    return tuple(chips), y + CHIP + CHIP_LINE if chips else 0.0


def _about(model: Model) -> str:
    head = "scalar head" if model.head == "scalar" else "language model"
    if model.refresh:
        return f"{head}, {model.refresh.model}'s weights every {units.plural(model.refresh.every, 'step')}"
    if model.adapter:
        beside = f" beside {model.base}'s base" if model.base else ""
        rank = f" of rank {model.adapter.rank}" if model.adapter.rank is not None else ""
        stored = f" from {model.adapter.path}" if isinstance(model.adapter, StoredAdapter) else ""
        return f"{head}, adapter{rank}{stored} {'frozen' if model.frozen else 'trained'}{beside}"
    return f"{head}, {'frozen' if model.frozen else 'trained'}"
