from __future__ import annotations

from itertools import combinations

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.view.layout import Box, Layering, layered


@st.composite
def dags(draw: st.DrawFn) -> nx.DiGraph[str]:
    """Any DAG of up to eight nodes: edges go from lower to higher numbers."""
    count = draw(st.integers(2, 8))
    pairs = st.sampled_from(list(combinations(range(count), 2)))
    dag: nx.DiGraph[str] = nx.DiGraph()
    dag.add_nodes_from(f"n{i}" for i in range(count))
    dag.add_edges_from((f"n{a}", f"n{b}") for a, b in draw(st.lists(pairs, max_size=12)))
    return dag


def place(dag: nx.DiGraph[str]) -> Layering:
    return layered(dag, {n: (60.0 + 7 * i, 30.0 + 11 * i) for i, n in enumerate(dag.nodes)})


def overlap(a: Box, b: Box) -> bool:
    return a.x < b.right and b.x < a.right and a.y < b.bottom and b.y < a.bottom


@settings(max_examples=150, derandomize=True, deadline=None)
@given(dags())
def test_boxes_do_not_overlap_and_edges_point_right(dag: nx.DiGraph[str]) -> None:
    layering = place(dag)
    assert set(layering.boxes) == set(dag.nodes)
    assert not any(overlap(a, b) for a, b in combinations(layering.boxes.values(), 2))
    for source, target in dag.edges:
        points = [layering.boxes[source].right, *(x for x, _ in layering.bends[source, target])]
        assert points == sorted(points)
        assert points[-1] < layering.boxes[target].x
    for box in layering.boxes.values():
        assert box.x >= 0 and box.right <= layering.width
        assert box.y >= 0 and box.bottom <= layering.height


@settings(max_examples=150, derandomize=True, deadline=None)
@given(dags())
def test_edges_pass_between_boxes_not_through_them(dag: nx.DiGraph[str]) -> None:
    layering = place(dag)
    for points in layering.bends.values():
        for (x0, y), (x1, _) in zip(points[::2], points[1::2]):
            line = Box(x0, y, x1 - x0, 0.1)
            assert not any(overlap(line, box) for box in layering.boxes.values())


def test_columns_are_the_longest_path() -> None:
    dag: nx.DiGraph[str] = nx.DiGraph([("a", "b"), ("b", "c"), ("a", "c"), ("c", "d"), ("late", "d")])
    boxes = place(dag).boxes
    columns = sorted({box.x for box in boxes.values()})
    assert len(columns) == nx.dag_longest_path_length(dag) + 1
    assert boxes["late"].x == boxes["c"].x, "a source stands right before its reader"
