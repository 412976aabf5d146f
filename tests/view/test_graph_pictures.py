"""The pictures of all algorithms are readable: nothing overlaps, and words stay where they belong."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from hflow.graph.ir import Graph, Input, ModelUse, Node, Ref
from hflow.graph.load import load
from hflow.view.picture.layout import Rectangle
from hflow.view.picture.palette import DARK
from hflow.view.picture.svg import graph_svg

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((ROOT / "algorithms").glob("*.yaml"))
SVG = "{http://www.w3.org/2000/svg}"
ADVANCE = 0.602  # width of a character of DejaVu Sans Mono and Menlo, in font sizes


class Picture:
    """The parts of a picture, by what they look like."""

    def __init__(self, graph: Graph, narrow: bool = False) -> None:
        self.graph = graph
        self.root = ET.fromstring(graph_svg(graph, narrow))
        self.groups = [g for g in self.root.iter(f"{SVG}g") if g.find(f"{SVG}title") is not None]

    def cards(self) -> dict[str, ET.Element]:
        names = {n.name for n in self.graph.nodes}
        found: dict[str, ET.Element] = {}
        for group in self.groups:
            texts = group.findall(f"{SVG}text")
            rect = group.find(f"{SVG}rect")
            name = next((t.text or "" for t in texts if t.get("font-weight")), "")
            if rect is not None and rect.get("rx") == "7" and name in names:
                found[name] = group
        return found

    def lines(self) -> dict[str, ET.Element]:
        return {title(g): g for g in self.groups if g.find(f"{SVG}path") is not None}

    def labels(self) -> list[ET.Element]:
        return [t for t in self.root.iter(f"{SVG}text") if t.get("paint-order")]


def title(group: ET.Element) -> str:
    return group.findtext(f"{SVG}title") or ""


def box_of(rect: ET.Element | None) -> Rectangle:
    assert rect is not None
    return Rectangle(*(float(rect.attrib[name]) for name in ("x", "y", "width", "height")))


def text_box(text: ET.Element) -> Rectangle:
    size = float(text.attrib["font-size"])
    width, x = ADVANCE * size * len(text.text or ""), float(text.attrib["x"])
    left = x - width / 2 if text.get("text-anchor") == "middle" else x
    return Rectangle(left, float(text.attrib["y"]) - 0.8 * size, width, size)


def overlap(a: Rectangle, b: Rectangle) -> bool:
    return a.x < b.right and b.x < a.right and a.y < b.bottom and b.y < a.bottom


def inside(a: Rectangle, b: Rectangle) -> bool:
    return b.x <= a.x and a.right <= b.right and b.y <= a.y and a.bottom <= b.bottom


def path_points(group: ET.Element) -> list[tuple[float, float]]:
    """Where the pieces of a line start and end."""
    path = group.find(f"{SVG}path")
    assert path is not None
    pieces = re.findall(r"[MLCQ]([-\d. ]+)", path.attrib["d"])
    numbers = [[float(n) for n in piece.split()] for piece in pieces]
    return [(piece[-2], piece[-1]) for piece in numbers]


def pieces(group: ET.Element) -> Iterator[Rectangle]:
    """The level and upright pieces of a line, as boxes without extent in one direction."""
    points = path_points(group)
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 == x1 or y0 == y1:
            yield Rectangle(min(x0, x1), min(y0, y1), abs(x1 - x0), abs(y1 - y0))


def two_ages_in_a_region() -> Graph:
    """DAPO that samples with old weights and scores the samples with new ones, inside of its rounds."""
    graph = load(ROOT / "algorithms" / "dapo.yaml")
    rollout = graph.node("rollout")
    tokens, mask, logprobs = (rollout.output(port) for port in ("tokens", "mask", "logprobs"))
    assert tokens and mask and logprobs
    inputs = tuple(Input(o.port, Ref("rollout", o.port), o.type) for o in (tokens, mask))
    scored = Node("fresh", "score", ModelUse("actor"), None, inputs, (logprobs,), region="sampling")
    nodes = {n.name: n for n in graph.nodes}
    nodes["rollout"] = replace(rollout, model=ModelUse("actor", lag=1))
    names = list(nodes)
    return replace(graph, nodes=(nodes["prompts"], nodes["rollout"], scored, *(nodes[n] for n in names[2:])))


def carried_elsewhere() -> Graph:
    """Safe RLHF in which the multiplier of the step before weighs the costs."""
    graph = load(ROOT / "algorithms" / "safe_rlhf.yaml")
    combined = graph.node("combined")
    late = tuple(replace(i, lag=1, init=0.5) if i.type.scalar else i for i in combined.inputs)
    nodes = tuple(replace(n, inputs=late) if n is combined else n for n in graph.nodes)
    return replace(graph, nodes=nodes)


GRAPHS: dict[str, Callable[[], Graph]] = {
    **{file.stem: partial(load, file) for file in FILES},
    "two_ages_in_a_region": two_ages_in_a_region,
    "carried_elsewhere": carried_elsewhere,
}


@pytest.fixture(
    params=[(name, narrow) for narrow in (False, True) for name in GRAPHS], ids=str, scope="module"
)
def picture(request: pytest.FixtureRequest) -> Picture:
    name, narrow = request.param
    return Picture(GRAPHS[name](), narrow)


def test_every_node_has_a_card_and_cards_do_not_overlap(picture: Picture) -> None:
    cards = picture.cards()
    assert set(cards) == {n.name for n in picture.graph.nodes}
    boxes = [box_of(g.find(f"{SVG}rect")) for g in cards.values()]
    assert not any(overlap(a, b) for a, b in combinations(boxes, 2))


def test_words_stay_in_their_cards_and_do_not_overlap(picture: Picture) -> None:
    for card in picture.cards().values():
        box = box_of(card.find(f"{SVG}rect"))
        words = [text_box(t) for t in card.findall(f"{SVG}text")]
        assert all(inside(word, box) for word in words), title(card)
        assert not any(overlap(a, b) for a, b in combinations(words, 2)), title(card)


def test_no_line_goes_through_a_card(picture: Picture) -> None:
    """Straight pieces are checked; bends lie in the free space between columns."""
    boxes = {name: box_of(g.find(f"{SVG}rect")) for name, g in picture.cards().items()}
    for says, line in picture.lines().items():
        for piece in pieces(line):
            hit = [name for name, box in boxes.items() if overlap(piece, box)]
            assert not hit, (says, hit)


def test_labels_touch_neither_cards_nor_lines_nor_each_other(picture: Picture) -> None:
    labels = [text_box(t) for t in picture.labels()]
    boxes = [box_of(g.find(f"{SVG}rect")) for g in picture.cards().values()]
    straight = [piece for line in picture.lines().values() for piece in pieces(line)]
    for label in labels:
        assert not any(overlap(label, other) for other in [*boxes, *straight])
    assert not any(overlap(a, b) for a, b in combinations(labels, 2))


def test_everything_is_inside_the_picture(picture: Picture) -> None:
    whole = Rectangle(0, 0, float(picture.root.attrib["width"]), float(picture.root.attrib["height"]))
    for layer in picture.root.findall(f"{SVG}g"):
        dx, dy = (float(n) for n in re.findall(r"-?[\d.]+", layer.attrib["transform"]))
        boxes = [text_box(t) for t in layer.iter(f"{SVG}text")]
        boxes += [box_of(r) for r in layer.iter(f"{SVG}rect")]
        boxes += [
            Rectangle(x, y, 0, 0)
            for g in layer
            if g.find(f"{SVG}path") is not None
            for x, y in path_points(g)
        ]
        assert all(inside(box.moved(dx, dy), whole) for box in boxes)


def test_every_value_and_every_feedback_has_a_line(picture: Picture) -> None:
    graph, said = picture.graph, "\n".join(picture.lines())
    for node, value in graph.edges():
        if value.lag == 0:
            assert f"{value.source} -> {node.name}.{value.port}: {value.type}" in said
        else:
            assert f"{value.source.node} => {node.name}: " in said
    for node in graph.nodes:
        assert all(f"{node.name} after {first}" in said for first in node.after)


@pytest.mark.parametrize("name", GRAPHS)
def test_cards_below_each_other_have_lanes_of_their_own_beside_them(name: str) -> None:
    """Upright lines of two values never lie on each other, and all else stands in one column."""
    picture = Picture(GRAPHS[name](), narrow=True)
    boxes = [box_of(g.find(f"{SVG}rect")) for g in picture.cards().values()]
    assert {(box.x, box.right) for box in boxes} == {(0, boxes[0].right)}
    upright: dict[tuple[float, float], list[Rectangle]] = {}
    for line in picture.lines().values():
        leaves = path_points(line)[0]
        upright.setdefault(leaves, []).extend(piece for piece in pieces(line) if piece.width == 0)
    for a, b in combinations(upright, 2):
        assert not any(
            p.x == q.x and p.y < q.bottom and q.y < p.bottom for p in upright[a] for q in upright[b]
        )


def test_colours_have_dark_ones(picture: Picture) -> None:
    drawn = (e.get(what) for e in picture.root.iter() for what in ("fill", "stroke"))
    assert {colour for colour in drawn if colour and colour != "none"} <= {*DARK, "#000"}


def labels_of(name: str) -> set[str]:
    return {t.text or "" for t in Picture(GRAPHS[name]()).labels()}


def test_labels_say_what_goes_back_and_when() -> None:
    assert labels_of("async_grpo") == {"actor weights, 1 update old", "actor weights, next step"}
    assert "actor weights, to ref every 50 steps" in labels_of("iterative_grpo")
    assert "lag 1, init 0" in labels_of("safe_rlhf")
    assert "multiplier.log_multiplier, lag 1, init 0.5" in labels_of("carried_elsewhere")
    assert labels_of("dpo") == set()


def test_several_trainers_hand_on_the_weights_of_the_last() -> None:
    picture = Picture(GRAPHS["safe_rlhf"]())
    back = {line.partition(":")[0] for line in picture.lines() if "=>" in line}
    assert back == {
        "ptx_train => rollout",
        "critic_train => values",
        "cost_critic_train => cost_values",
        "multiplier => multiplier",
    }


@pytest.mark.parametrize("narrow", [False, True])
def test_a_region_is_a_frame_around_its_nodes_and_says_its_rule(narrow: bool) -> None:
    graph = GRAPHS["dapo"]()
    picture = Picture(graph, narrow)
    (frame,) = (g for g in picture.groups if g[1].get("rx") == "12")
    border = box_of(frame.find(f"{SVG}rect"))
    assert "until 128 rows kept, ≤ 16 rounds" in ", ".join(t.text or "" for t in frame.findall(f"{SVG}text"))
    for name, card in picture.cards().items():
        box = box_of(card.find(f"{SVG}rect"))
        if graph.node(name).region == "sampling":
            assert inside(box, border)
        elif name == "sampling":
            across = box.y < border.bottom < box.bottom if narrow else box.x < border.right < box.right
            assert across, "the outlet stands on the border"
        else:
            assert not overlap(box, border)
