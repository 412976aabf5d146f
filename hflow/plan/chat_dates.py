"""The date that chat templates write: said by the graph, else that of the day on which it is compiled.

A template asks for it by ``strftime_now``. The date is part of the graph that a plan holds, so that every
worker and every resumed run writes the same one. Only nodes whose template asks get one: plans of others are
the same on every day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, cast

from hflow.bounded_read import UnreadableError, read_json, read_text
from hflow.graph.infer.kinds import chat
from hflow.graph.ir import Graph, Node, step_node
from hflow.plan.digests import CHAT_TEMPLATE, MORE_TEMPLATES
from hflow.plan.model_shape import NAMED

ASKS = "strftime_now"
CONFIG = "tokenizer_config.json"
MAX_BYTES = 2**26


def with_dates(graph: Graph, today: date) -> Graph:
    """`graph`, in which data nodes whose chat template asks for a date, and that say none, have `today`; in
    its named evaluations, too, which hold rows out of the dataset that the step's node reads."""
    paths = {model.name: model.path for model in graph.models}
    return _with(graph, lambda node: today.isoformat() if _asks(node, paths) else None)


def keep_dates(former: Graph, graph: Graph) -> Graph:
    """`graph`, in which data nodes that say no date have that of the `former` graph, which a run was begun
    with."""
    known = (*former.nodes, *(node for evaluation in former.evaluations for node in evaluation.nodes))
    dates = {n.name: n.options["date"] for n in known if n.op == "data" and n.options.get("date")}
    return _with(graph, lambda node: dates.get(node.name) or dates.get(step_node(node.name)))


def _with(graph: Graph, date_of: Callable[[Node], str | None]) -> Graph:
    """`graph`, in which data nodes that lack a date have their `date_of`, if there is one."""
    nodes = _all_dated(graph.nodes, date_of)
    evaluations = tuple(replace(e, nodes=_all_dated(e.nodes, date_of)) for e in graph.evaluations)
    is_same = nodes == graph.nodes and evaluations == graph.evaluations
    return graph if is_same else replace(graph, nodes=nodes, evaluations=evaluations)


def _all_dated(nodes: tuple[Node, ...], date_of: Callable[[Node], str | None]) -> tuple[Node, ...]:
    return tuple(_dated(n, found) if _lacks(n) and (found := date_of(n)) else n for n in nodes)


def _lacks(node: Node) -> bool:
    return node.op == "data" and chat.is_chat(node.options) and not node.options.get("date")


def _dated(node: Node, text: str) -> Node:
    return replace(node, options={**node.options, "date": text})


def _asks(node: Node, paths: Mapping[str, str]) -> bool:
    """Whether a template that the node may use asks for a date; no, where there is none that can be read: who
    renders then says so."""
    written = node.options.get("chat_template")
    if isinstance(written, str) and written.endswith(".jinja"):
        return ASKS in _text(Path(written))
    path = paths.get(str(node.options.get("tokenizer")), NAMED)
    return not path.startswith(NAMED) and any(ASKS in text for text in _templates(Path(path)))


def _templates(folder: Path) -> Iterator[str]:
    """All chat templates in a model folder."""
    yield _text(folder / CHAT_TEMPLATE)
    try:
        yield from [_text(file) for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))]
        found = read_json(folder / CONFIG, MAX_BYTES)
    except (OSError, UnreadableError):
        return
    template: Any = cast("dict[str, Any]", found).get("chat_template") if isinstance(found, dict) else None
    for entry in cast("list[Any]", template) if isinstance(template, list) else [template]:
        yield str(cast("dict[str, Any]", entry).get("template")) if isinstance(entry, dict) else str(entry)


def _text(file: Path) -> str:
    try:
        return read_text(file, MAX_BYTES)
    except UnreadableError:
        return ""
