"""The resolved graph file: parents, overrides and expressions applied, with the origin of every value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hflow.diagnostics import SET, Span
from hflow.graph.source.document import Document, Item
from hflow.graph.source.expressions import substitute
from hflow.graph.source.yaml_text import flow, key, scalar

MAX_COLUMN = 60  # comments are aligned up to here; longer lines push theirs to the right


def resolved(document: Document) -> str:
    """YAML that says the same as an assembled document (`hflow.graph.load.assembled`), in which each value
    tells its origin: the file and line, or the ``--set``, and the expression that it was computed from.

    An expression that cannot be evaluated stays as it is.
    """
    lines = list(_mapping(document.root, substitute(document)[0].root, 0))
    widths = [len(text) for text, origin in lines if origin and len(text) <= MAX_COLUMN]
    width = max(widths, default=0)
    return "".join(f"{text:<{width}}   # {origin}\n" if origin else f"{text}\n" for text, origin in lines)


def _mapping(written: Item, evaluated: Item, depth: int) -> Iterator[tuple[str, str]]:
    """Lines and their origins; lines that hold no value have none."""
    if not isinstance(evaluated.value, Mapping):
        yield flow(evaluated.plain()), _origin(written)
        return
    for name, item in evaluated.value.items():
        head, before = f"{'  ' * depth}{key(name)}:", written.child(name)
        assert before
        if isinstance(item.value, Mapping) and item.value:
            if depth == 0:
                yield "", ""
            yield head, ""
            yield from _mapping(before, item, depth + 1)
        else:
            yield f"{head} {_value(item)}", _origin(before)


def _value(item: Item) -> str:
    if isinstance(item.value, (Mapping, tuple)):
        return flow(item.plain())
    return scalar(item.value, in_flow=False)


def _origin(written: Item) -> str:
    text = written.value
    expression = f" ({' '.join(text.split())})" if isinstance(text, str) and "${" in text else ""
    return _place(written.span) + expression


def _place(span: Span) -> str:
    return span.file if span.file.startswith(SET) else f"{span.file}:{span.line}"
