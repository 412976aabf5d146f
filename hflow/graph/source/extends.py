"""One graph file over another: ``extends: parent.yaml``, and ``-f overrides.yaml``.

Files are merged by key, before expressions are evaluated, and every value keeps the place of the file that
it came from:

- mappings merge key by key, at every depth; anything else (a number, a list) replaces what was there;
- ``key: null`` removes the key; it must be there to be removed;
- a node that says another `op` than its parent's node replaces it wholly, for the old node's inputs and
  options mean nothing to another op;
- a mapping that the parent does not have is taken as it is;
- ``./file.py:function`` is relative to the file in which it is written.

A child says its own `name`; the `name` and the `doc` of its parent are not inherited.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hflow.diagnostics import Diagnostic, HflowError, did_you_mean
from hflow.graph.source.document import Document, Item, KeyPath, read
from hflow.graph.source.key_order import in_order
from hflow.graph.source.run_section import opened, unfolded
from hflow.graph.source.schema import node_path
from hflow.shipped import algorithm, is_bare, is_file, is_shipped, known

MAX_PARENTS = 8
_NOT_INHERITED = ("name", "doc", "extends")
_FUNCTION_FILE = re.compile(r"(?P<file>\.{1,2}/.+\.py):(?P<name>[^:]+)")


def inherit(document: Document) -> Document:
    """The document merged over its parent, which is merged over its own, and so on.

    Raises:
        HflowError: HF107 for a parent that cannot be used or a key that cannot be removed; HF001..HF005
            when a parent is no YAML.
    """
    chain = lineage(document)
    merged = chain.pop()
    while chain:
        child = chain.pop()
        above = replace(merged, root=_without(merged.root, _NOT_INHERITED))
        root = _without(_merged(above, child, child.file), ("extends",))
        merged = replace(child, root=in_order(root))
    return merged


def overlay(document: Document, partials: Sequence[Document]) -> Document:
    """The document with partial graph files merged over it, in order.

    Raises:
        HflowError: HF107 for a file that is no mapping, extends another or removes what is not there.
    """
    if not isinstance(document.root.value, Mapping):  # which the schema refuses
        return document
    for over in partials:
        if not isinstance(over.root.value, Mapping):
            message = "a file of overrides is a mapping, like a graph file"
            raise HflowError(Diagnostic("HF107", message, over.span(())))
        if "extends" in over.keys(()):
            message = "a file of overrides cannot extend another"
            raise HflowError(Diagnostic("HF107", message, over.span(("extends",), key=True)))
        document = replace(document, root=_merged(document, over, document.file))
    return document


def lineage(document: Document) -> list[Document]:
    """The document, its parent, the parent of that, …

    Raises:
        HflowError: as `inherit`.
    """
    chain = [document]
    while (item := chain[-1].get(("extends",))) is not None:
        chain.append(_parent(chain, item))
    return chain


def _parent(chain: Sequence[Document], extends: Item) -> Document:
    name, child = extends.value, chain[-1]
    if not isinstance(name, str) or not name or "\0" in name:
        raise HflowError(Diagnostic("HF107", "`extends` must name one graph file", extends.span))
    path = parent_path(child.file, name)
    above = [os.path.realpath(d.file) for d in chain]
    if os.path.realpath(path) in above:
        ring = " -> ".join([*(d.file for d in chain[above.index(os.path.realpath(path)) :]), path])
        raise HflowError(Diagnostic("HF107", f"a file extends itself: {ring}", extends.span))
    if len(chain) > MAX_PARENTS:
        raise HflowError(Diagnostic("HF107", f"more than {MAX_PARENTS} parents", extends.span))
    parent = _read_parent(path, extends)
    if not isinstance(parent.root.value, Mapping):
        raise HflowError(Diagnostic("HF107", f"`{path}` is no graph file: it is no mapping", extends.span))
    mine, its = child.get(("hflow",)), parent.get(("hflow",))
    if mine and its and mine.plain() != its.plain():
        message = f"`{path}` is of another version of the language"
        raise HflowError(Diagnostic("HF107", message, parent.span(("hflow",))))
    return parent


def _read_parent(path: str, extends: Item) -> Document:
    try:
        return read(path)
    except HflowError as error:
        problem = error.diagnostics[0]
        if problem.code != "HF001":
            raise
    raise HflowError(replace(problem, code="HF107", span=extends.span, help=_near_files(Path(path))))


def _near_files(path: Path) -> str:
    """Help for a file that is not there: the one beside it, or the algorithm, with the nearest name."""
    bare = is_bare(Path(path.name))
    if is_shipped(path.stem):
        return f"`extends: {path.stem}` is hflow's own"
    try:
        names = [f.stem if bare else f.name for f in path.parent.glob("*.yaml") if f.is_file()]
    except OSError:
        return ""
    if bare:
        return did_you_mean(path.name, [*known("algorithms"), *names], "algorithms and files in that folder")
    return did_you_mean(path.name, names, "files in that folder")


def parent_path(child: str, name: str) -> str:
    """The path of the file that ``extends: name`` means in the file `child`: the one beside it; else, for a
    bare name, the algorithm of that name."""
    path = beside(child, name)
    if is_file(Path(path)) or not is_bare(Path(name)):
        return path
    found = algorithm(name, Path(path).parent, besides=child)
    return str(found) if found else path


def beside(file: str, name: str) -> str:
    """The path of `name`, which is written in `file` and relative to it."""
    return os.path.normpath(Path(file).parent / name)


def _merged(base: Document, over: Document, file: str) -> Item:
    """The tree of `over` laid over that of `base`, both as if they stood in `file`."""
    problems: list[Diagnostic] = []
    root = _merge(rebased(base, file).root, rebased(over, file).root, (), problems)
    if problems:
        raise HflowError(problems)
    return root


def _merge(base: Item, over: Item, path: KeyPath, problems: list[Diagnostic]) -> Item:
    base, over = opened(base, path), unfolded(over, path)
    if not isinstance(base.value, Mapping) or not isinstance(over.value, Mapping):
        return over
    if _is_another_op(base, over, path):
        return over
    entries = dict(base.value)
    for key, item in over.value.items():
        if item.value is not None:
            entries[key] = _merge(entries[key], item, (*path, key), problems) if key in entries else item
        elif entries.pop(key, None) is None:
            dotted = ".".join(map(str, (*path, key)))
            help_ = did_you_mean(key, base.value, "keys")
            message = f"`{dotted}: null` removes what is not there"
            problems.append(Diagnostic("HF107", message, item.key_span, help_))
    return replace(over, value=entries)


def _is_another_op(base: Item, over: Item, path: KeyPath) -> bool:
    old, new = base.child("op"), over.child("op")
    return bool(node_path(path) == path and old and new and old.value != new.value)


def _without(item: Item, keys: Sequence[str]) -> Item:
    assert isinstance(item.value, Mapping)
    return replace(item, value={k: v for k, v in item.value.items() if k not in keys})


def rebased(document: Document, file: str) -> Document:
    """The document with the function files that its nodes name made relative to `file`'s folder."""
    start, target = Path(document.file).parent, Path(file).parent
    if start.absolute() == target.absolute():
        return document
    root = document.root
    for path in function_paths(document):
        item = document.get(path)
        if item and isinstance(item.value, str):
            root = root.replaced(path, replace(item, value=moved_function(item.value, start, target)))
    return replace(document, root=root)


def moved_function(reference: str, start: Path, target: Path) -> str:
    """A function's reference in a file of the folder `start`, as it is written in one of `target`."""
    match = _FUNCTION_FILE.fullmatch(reference)
    if not match:
        return reference
    return f"{relative(os.path.relpath(start / match['file'], target))}:{match['name']}"


def function_paths(document: Document) -> Iterator[KeyPath]:
    """The paths of all functions that a graph file names."""
    outer = [("nodes", name) for name in document.keys(("nodes",))]
    inner = [(*node, "nodes", name) for node in outer for name in document.keys((*node, "nodes"))]
    for node in (*outer, *inner):
        yield from ((*node, key) for key in ("fn", "loss") if key in document.keys(node))
        yield from _filters(document, (*node, "with"))
    for name in document.keys(("evaluations",)):
        metrics = ("evaluations", name, "metrics")
        yield from (
            (*metrics, m, "by") for m in document.keys(metrics) if "by" in document.keys((*metrics, m))
        )
        yield from _filters(document, ("evaluations", name, "data"))


def _filters(document: Document, options: KeyPath) -> Iterator[KeyPath]:
    """The filters of a data node, of which some are functions: its own, and those of a mixture's sources."""
    dataset = document.get((*options, "dataset"))
    entries = len(dataset.value) if dataset and isinstance(dataset.value, tuple) else 0
    sources = ((*options, "dataset", number) for number in range(entries))
    yield from ((*place, "filter") for place in (options, *sources) if "filter" in document.keys(place))


def relative(path: str) -> str:
    """A path in the form of a function's file: ``./here.py``, ``../there.py``."""
    posix = Path(path).as_posix()
    return posix if posix.startswith("../") else f"./{posix}"
