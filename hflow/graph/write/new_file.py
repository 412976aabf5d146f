"""``hflow new``: a graph file of one's own, copied from an algorithm that works."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hflow.diagnostics import Diagnostic, HflowError, Span
from hflow.graph.source.document import Document, read
from hflow.graph.source.extends import function_paths, moved_function, parent_path
from hflow.graph.source.schema_values import NAME_PATTERN
from hflow.graph.source.yaml_text import scalar
from hflow.shipped import algorithm
from hflow.whole_file import write_whole

Edit = tuple[Span, str]


def new_file(name: str, source: Path, force: bool = False) -> Path:
    """Copy the graph file `source` to ``NAME.yaml`` here: comments kept, `name` replaced, and the files that
    it names (a parent, functions) named from here.

    Raises:
        HflowError: HF106 for a bad name, HF001 when the file is there already or one cannot be read or
            written.
    """
    if not re.fullmatch(NAME_PATTERN, name):
        help_ = "names are lower case: letters, digits and `_`, not starting with a digit"
        raise HflowError(Diagnostic("HF106", f"bad name `{name}`", help=help_))
    target = Path(f"{name}.yaml")
    document = read(source)
    text = _edited(document.text, [(_span(document, "name"), name), *_moved(document, target)])
    if target.exists() and not force:
        message = f"`{target}` is there already"
        raise HflowError(Diagnostic("HF001", message, help="--force overwrites it"))
    write_whole(target, text)
    return target


def _span(document: Document, key: str) -> Span:
    if key not in document.keys(()):
        raise HflowError(Diagnostic("HF101", f"`{document.file}` has no `{key}`", document.span(())))
    return document.span((key,))


def _moved(document: Document, target: Path) -> Iterator[Edit]:
    """The references to other files, as they read in `target`."""
    parent = document.get(("extends",))
    if parent and isinstance(parent.value, str):
        yield parent.span, scalar(_parent(document.file, parent.value, target))
    for path in function_paths(document):
        item = document.get(path)
        if item and isinstance(item.value, str):
            moved = moved_function(item.value, Path(document.file).parent, target.parent)
            if moved != item.value:
                yield item.span, scalar(moved)


def _parent(source: str, name: str, target: Path) -> str:
    """What `source` calls its parent, as `target` does: an algorithm that is not in a folder here by its
    name, for where hflow lies is another path on every machine."""
    path = Path(parent_path(source, name))
    called = algorithm(path.stem, target.parent, besides=str(target))
    if called and called.resolve() == path.resolve() and not path.resolve().is_relative_to(Path.cwd()):
        return path.stem
    return Path(os.path.relpath(path, target.parent)).as_posix()


def _edited(text: str, edits: Sequence[Edit]) -> str:
    """`text` with what stands at each place replaced."""
    lines = text.split("\n")
    for span, new in sorted(edits, key=lambda e: (e[0].line, e[0].column), reverse=True):
        line = lines[span.line - 1]
        lines[span.line - 1] = line[: span.column - 1] + new + line[span.end_column - 1 :]
    return "\n".join(lines)
