from __future__ import annotations

from itertools import combinations, pairwise, permutations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.view.picture.layout import Layering, Rectangle, layered
from hflow.view.picture.ordering import GraphLink, column_numbers, crossings, ordered, wires
from hflow.view.picture.spacing import spaced


@st.composite
def links(draw: st.DrawFn) -> list[GraphLink]:
    """Any DAG of up to eight nodes: links go from lower to higher numbers."""
    pairs = st.sampled_from(list(combinations(range(draw(st.integers(2, 8))), 2)))
    chosen = draw(st.lists(st.tuples(pairs, st.sampled_from("xy")), max_size=12, unique=True))
    return [GraphLink(f"n{a}", f"n{b}", value) for (a, b), value in chosen]


PLACES = st.tuples(st.integers(-50, 50), st.integers(1, 9), st.integers(0, 9))


def nodes_of(dag: list[GraphLink]) -> list[str]:
    return sorted({n for link in dag for n in (link.source, link.target)} | {"alone"})


def place(dag: list[GraphLink]) -> Layering:
    return layered(dag, {n: (60.0 + 7 * i, 30.0 + 11 * i) for i, n in enumerate(nodes_of(dag))})


def overlap(a: Rectangle, b: Rectangle) -> bool:
    return a.x < b.right and b.x < a.right and a.y < b.bottom and b.y < a.bottom


@settings(max_examples=150, derandomize=True, deadline=None)
@given(links())
def test_boxes_do_not_overlap_and_links_point_right(dag: list[GraphLink]) -> None:
    layering = place(dag)
    assert set(layering.boxes) == set(nodes_of(dag))
    assert not any(overlap(a, b) for a, b in combinations(layering.boxes.values(), 2))
    for link in dag:
        points = [layering.boxes[link.source].right, *(x for x, _ in layering.bends[link])]
        assert points == sorted(points)
        assert points[-1] < layering.boxes[link.target].x
    for box in layering.boxes.values():
        assert box.x >= 0 and box.right <= layering.width
        assert box.y >= 0 and box.bottom <= layering.height


@settings(max_examples=150, derandomize=True, deadline=None)
@given(links())
def test_links_pass_between_boxes_not_through_them(dag: list[GraphLink]) -> None:
    layering = place(dag)
    for points in layering.bends.values():
        for (x0, y), (x1, _) in zip(points[::2], points[1::2]):
            line = Rectangle(x0, y, x1 - x0, 0.1)
            assert not any(overlap(line, box) for box in layering.boxes.values())


@settings(max_examples=100, derandomize=True, deadline=None)
@given(links())
def test_links_of_one_value_share_their_way_and_others_do_not(dag: list[GraphLink]) -> None:
    bends = place(dag).bends
    for a, b in combinations(dag, 2):
        shared = set(bends[a]) & set(bends[b])
        if (a.source, a.value) == (b.source, b.value):
            assert len(shared) == min(len(bends[a]), len(bends[b]))
        else:
            assert not shared


def test_columns_are_the_longest_path() -> None:
    dag = [GraphLink(*pair) for pair in ("ab", "bc", "ac", "cd", "ld")]
    column = column_numbers(list("abcdl"), dag)
    tree: nx.DiGraph[str] = nx.DiGraph([(link.source, link.target) for link in dag])
    assert len(set(column.values())) == nx.dag_longest_path_length(tree) + 1
    assert column["l"] == column["c"], "a source stands right before its reader"


@pytest.mark.parametrize("targets", ["xyz", "zxy", "zyx"])
def test_an_order_without_crossings_is_found(targets: str) -> None:
    dag = [GraphLink(a, b) for a, b in zip("abc", targets)] + [GraphLink("a", targets[1])]
    column = column_numbers(list("abcxyz"), dag)
    pieces = wires(dag, column, {})
    found = ordered(column, pieces)
    all_orders = ([list(p), list(q)] for p in permutations("abc") for q in permutations("xyz"))
    assert crossings(found, pieces) == min(crossings(order, pieces) for order in all_orders) == 0


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(PLACES, min_size=1, max_size=7))
def test_spacing_is_the_optimum(places: list[tuple[int, int, int]]) -> None:
    """Optimal: the problem is convex, so a point that no move of a run of places improves is the best."""
    wanted, weights, distances = ([float(v) for v in column] for column in zip(*places))
    found = spaced(wanted, weights, distances[1:])
    gaps = [b - a for a, b in pairwise(found)]
    assert all(gap >= least - 1e-9 for gap, least in zip(gaps, distances[1:]))

    def cost(at: list[float]) -> float:
        return sum(w * (y - want) ** 2 for y, want, w in zip(at, wanted, weights))

    for start, stop in combinations(range(len(found) + 1), 2):
        for move in (-1e-4, 1e-4):
            moved = [y + move * (start <= i < stop) for i, y in enumerate(found)]
            allowed = all(b - a >= least - 1e-9 for (a, b), least in zip(pairwise(moved), distances[1:]))
            assert not allowed or cost(moved) >= cost(found) - 1e-9
