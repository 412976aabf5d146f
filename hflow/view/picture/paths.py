"""Lines of a picture as SVG path data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hflow.view.picture.layout import Point

HEAD = 7.0  # length of an arrow head


def curve(points: Sequence[Point]) -> str:
    """Through all points, level at each; straight where two are at one height."""
    path = [f"M{_pair(points[0])}"]
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (x0 + x1) / 2
        bent = f"C{_pair((middle, y0))} {_pair((middle, y1))} {_pair((x1, y1))}"
        path.append(bent if abs(y0 - y1) > 0.5 else f"L{_pair((x1, y1))}")
    return "".join(path)


def corners(points: Sequence[Point], radius: float = 9) -> str:
    """Along level and upright lines, rounded where they meet."""
    path = [f"M{_pair(points[0])}"]
    for before, at, after in zip(points, points[1:], points[2:]):
        bend, end = _towards(at, before, radius), _towards(at, after, radius)
        path.append(f"L{_pair(bend)}Q{_pair(at)} {_pair(end)}")
    return "".join([*path, f"L{_pair(points[-1])}"])


def arrow_head(tip: Point, leftwards: bool = False) -> str:
    """A triangle that points to the right, or to the left."""
    x, y = tip
    back = x + HEAD if leftwards else x - HEAD
    return f"M{_pair((back, y - 3.5))}L{_pair(tip)}L{_pair((back, y + 3.5))}z"


def _towards(start: Point, end: Point, distance: float) -> Point:
    """`distance` from `start` towards `end`, but half of the way at most."""
    length = abs(end[0] - start[0]) + abs(end[1] - start[1])
    part = min(distance / length, 0.5) if length else 0.0
    return start[0] + part * (end[0] - start[0]), start[1] + part * (end[1] - start[1])


def _pair(point: Point) -> str:
    return f"{point[0]:.0f} {point[1]:.0f}"
