"""``--set key.path=value``: replace values of a graph file before it is checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hflow.diagnostics import SET, Diagnostic, HflowError, Span
from hflow.graph.foreign.lookup import help_for_unknown
from hflow.graph.source.document import Document, Item, KeyPath, parse
from hflow.graph.source.run_schema import CHECKPOINT, HANG, REPLAN, SAMPLES
from hflow.graph.source.run_section import opened
from hflow.graph.source.schema import NAMED_SECTIONS, keys_at, node_path

_IN_LIST = re.compile(r"(?P<list>.+)\[-?\d+\]")


def file_of(text: str) -> str:
    """What a place in an override calls its file; `text` is that file's text."""
    return f"{SET}{text}"


def override(document: Document, overrides: Sequence[str]) -> Document:
    """The document with every ``key.path=value`` applied, in order.

    The key must be in the file or be one that the schema knows there; params, models and nodes can
    be changed, not made. Values are YAML: ``3``, ``1e-4``, ``true``, ``[1, 2]``, ``{a: b}``.

    Raises:
        HflowError: HF105 for each override that cannot be applied.
    """
    problems: list[Diagnostic] = []
    for text in overrides:
        try:
            document = _apply(document, text)
        except HflowError as error:
            problems.extend(replace(d, code="HF105") for d in error.diagnostics)
    if problems:
        raise HflowError(problems)
    return document


def _apply(document: Document, text: str) -> Document:
    dotted, equals, value = text.partition("=")
    span = Span(file_of(text), 1, 1, max(2, len(dotted) + 1))
    if not equals or not dotted.strip() or len(text.splitlines()) != 1:
        help_ = "write it like `--set params.steps=3`"
        raise HflowError(Diagnostic("HF105", f"`{text}` is not of the form key.path=value", span, help_))
    path = tuple(part.strip() for part in dotted.split("."))
    short = document.get(path[:2])
    if short and path[:2] in (CHECKPOINT, HANG, SAMPLES, REPLAN) and len(path) > 2:
        document = replace(document, root=document.root.replaced(path[:2], opened(short, path[:2])))
    _check_path(document, path, span)
    if not value.strip():
        raise HflowError(Diagnostic("HF105", f"no value for `{dotted}`", span, "write `null` or `''`"))
    item = replace(_value(text, dotted, value), key_span=span)
    if item.value is None and len(path) == 2 and _is_named(path[:1]):
        message = f"`--set` cannot remove `{dotted}`"
        help_ = f"write `{path[0]}: {{{path[1]}: null}}` into a file, and add it with `-f`"
        raise HflowError(Diagnostic("HF105", message, span, help_))
    return replace(document, root=document.root.replaced(path, item))


def _value(text: str, dotted: str, value: str) -> Item:
    """What is written behind the equals sign."""
    padding = " " * (len(dotted) + 1)  # keeps the value at its own column
    try:
        return parse(padding + value, file_of(text)).root
    except HflowError as error:
        if not value.lstrip().startswith("{{"):
            raise
        help_ = f"a template is a string, in quotes: `--set '{dotted}=\"{value.strip()}\"'`"
        raise HflowError([replace(d, help=help_) for d in error.diagnostics]) from None


def _check_path(document: Document, path: tuple[str, ...], span: Span) -> None:
    """Refuse a path at the first key that is neither in the file nor known to the schema."""
    if path[0] == "extends":  # parents are merged before anything is overridden
        raise HflowError(Diagnostic("HF105", "`extends` cannot be overridden", span))
    for depth, key in enumerate(path):
        parent = path[:depth]
        here = document.get(parent)
        if here and not isinstance(here.value, Mapping):
            message = f"`{'.'.join(parent)}` is no mapping"
            raise HflowError(Diagnostic("HF105", message, span))
        present = document.keys(parent)
        place = _IN_LIST.fullmatch(key)
        whole = document.get((*parent, place["list"])) if place else None
        if place and whole and isinstance(whole.value, tuple):
            message = f"`--set` cannot change one item of a list, `{key}`"
            help_ = f"write the whole list: `{'.'.join((*parent, place['list']))}=[...]`"
            raise HflowError(Diagnostic("HF105", message, span, help_))
        legal = () if _is_named(parent) else keys_at(parent, _op(document, parent))
        if legal is None or key in present or key in legal:
            continue
        where = f"`{'.'.join(parent)}`" if parent else "the file"
        known = sorted({*present, *legal})
        whole = ".".join(path[depth:])  # another library's names may be dotted: `rollout.n`
        help_ = _elsewhere(document, parent, key) or help_for_unknown(key, known, "keys", whole)
        raise HflowError(Diagnostic("HF105", f"{where} has no key `{key}`", span, help_))


def _elsewhere(document: Document, parent: KeyPath, key: str) -> str:
    """Help where `key` is no key here, but is a param, or an option of the node at `parent`."""
    if not parent and key in document.keys(("params",)):
        return f"did you mean `params.{key}`?"
    if key in document.keys((*parent, "with")):
        return f"`{key}` is an option: `{'.'.join(map(str, parent))}.with.{key}`"
    return ""


def _is_named(path: KeyPath) -> bool:
    """Whether the keys at `path` are the user's own names: of sections, and of the nodes in a region."""
    return path in NAMED_SECTIONS or (len(path) == 3 and path[0] == path[2] == "nodes")


def _op(document: Document, path: KeyPath) -> str | None:
    node = node_path(path)
    item = document.get((*node, "op")) if node else None
    return str(item.value) if item else None
