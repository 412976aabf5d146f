"""The order in which graph files write the keys of a mapping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from hflow.graph.source.document import Item, KeyPath
from hflow.graph.source.schema import keys_at, node_path

_NODE = (
    ("op", "model", "fn", "loss", "in", "after", "lengths")
    + ("nodes", "until", "times", "short")
    + ("with", "repeat", "out")
)


def ordered_keys(path: KeyPath, keys: Iterable[str]) -> list[str]:
    """The keys of the mapping at `path`: those of the language in its order, then all others as they are."""
    written = list(keys)
    known = _NODE if node_path(path) == path else keys_at(path) or ()
    first = [key for key in known if key in written]
    return [*first, *(key for key in written if key not in first)]


def in_order(item: Item, path: KeyPath = ()) -> Item:
    """A graph file's tree with the keys of every mapping in their order."""
    if not isinstance(item.value, Mapping):
        return item
    entries = {key: in_order(item.value[key], (*path, key)) for key in ordered_keys(path, item.value)}
    return replace(item, value=entries)
