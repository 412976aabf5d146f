"""The graph file and the plan within a picture, as metadata that nobody sees, and out of it again.

SVG has the element ``metadata`` for this. In a page of HTML, a picture keeps it.
"""

from __future__ import annotations

import html
import re

from hflow.plan.origin import Origin

_HEAD = re.compile(r"<svg\b[^>]*>\n?")
_PART = re.compile(r'<metadata id="hflow-(graph|plan)">(.*?)</metadata>', re.S)


def with_origin(svg: str, origin: Origin) -> str:
    """`svg` with what it was drawn from."""
    head = _HEAD.match(svg)
    assert head, svg[:80]
    parts = {"graph": origin.graph, "plan": origin.plan}
    carried = "".join(
        f'<metadata id="hflow-{name}">{html.escape(text, quote=False)}</metadata>\n'
        for name, text in parts.items()
        if text
    )
    return svg[: head.end()] + carried + svg[head.end() :]


def carried_origin(text: str) -> Origin | None:
    """What the first picture in `text`, of SVG or HTML, was drawn from; None where none tells."""
    parts: dict[str, str] = {}
    for name, part in _PART.findall(text):
        parts.setdefault(name, html.unescape(part))
    return Origin(parts["graph"], parts.get("plan", "")) if "graph" in parts else None
