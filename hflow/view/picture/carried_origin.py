"""The graph file and the plan within a picture, as metadata that nobody sees, and out of it again.

SVG has the element ``metadata`` for this. In a page of HTML, a picture keeps it.
"""

from __future__ import annotations

import html
import re

from hflow.plan.origin import Origin

_HEAD = re.compile(r"<svg\b[^>]*>\n?")
_GRAPH, _PLAN, _END = '<metadata id="hflow-graph">', '<metadata id="hflow-plan">', "</metadata>\n"


def with_origin(svg: str, origin: Origin) -> str:
    """`svg` with what it was drawn from."""
    head = _HEAD.match(svg)
    assert head, svg[:80]
    parts = ((_GRAPH, origin.graph), (_PLAN, origin.plan))
    carried = "".join(f"{begin}{html.escape(text, quote=False)}{_END}" for begin, text in parts if text)
    return svg[: head.end()] + carried + svg[head.end() :]


def carried_origin(text: str) -> Origin | None:
    """What the first picture in `text`, of SVG or HTML, was drawn from; None where it does not tell."""
    begin = text.find(_GRAPH)
    if begin < 0:
        return None
    graph, end = _part(text, begin + len(_GRAPH))
    has_plan = text.startswith(_PLAN, end)
    plan = _part(text, end + len(_PLAN))[0] if has_plan else ""
    return Origin(graph, plan) if graph else None


def _part(text: str, begin: int) -> tuple[str, int]:
    """The text of an element, empty where it has no end; and where the next one would begin."""
    end = text.find(_END, begin)
    return (html.unescape(text[begin:end]), end + len(_END)) if end >= 0 else ("", len(text))
