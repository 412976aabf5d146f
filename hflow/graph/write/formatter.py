"""``hflow fmt``: one canonical form for graph files, comments kept, meaning unchanged.

- keys in the order of the language (`hflow.graph.source.key_order`); the user's own names stay as they are;
- two spaces of indentation; a blank line between sections and between nodes, elsewhere where one was;
- a mapping or list in ``{ }`` or ``[ ]`` stays so while it fits on a line of 110 columns and has no comments
  inside, else it becomes a block; a block stays a block;
- quotes only where needed, and double ones; ``"${ name }"`` with its spaces; texts of several lines as they
  are.

`format_text` reads its result back: a file is refused rather than changed in meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hflow.bounded_read import UnreadableError, read_bytes
from hflow.diagnostics import Diagnostic, HflowError, Span
from hflow.graph.source.document import MAX_BYTES, KeyPath, parse, read, resolve
from hflow.graph.source.key_order import in_order, ordered_keys
from hflow.graph.source.schema import node_path
from hflow.graph.source.yaml_text import WIDTH, key, scalar
from hflow.graph.write.syntax import SyntaxEntry, SyntaxNode, read_syntax
from hflow.whole_file import write_whole

_EXPRESSION = re.compile(r"\s*\$\{\s*(.*?)\s*\}\s*", re.DOTALL)
_STRANGE_BREAKS = re.compile("[\x85\u2028\u2029]")
_BLOCK_MARK = re.compile(r"[|>]-?")


def format_text(text: str, file: str = "<text>") -> str:
    """The canonical form of a graph file's text.

    Raises:
        HflowError: HF002..HF005 for what is no YAML, HF006 for what cannot be formatted.
    """
    root = parse(text, file).root
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not isinstance(root.value, dict):
        raise _refusal("a graph file is a mapping", file)
    if _STRANGE_BREAKS.search(text):
        raise _refusal("it has line breaks other than newlines", file)
    formatted = "\n".join(_document(read_syntax(text))) + "\n"
    if not _same(text, formatted, file):
        raise _refusal("its meaning would change", file)
    return formatted


def format_file(path: Path | str, write: bool = True) -> bool:
    """Whether a graph file is not in its canonical form; then it is written in it, all or nothing, unless
    `write` is False.

    Raises:
        HflowError: HF001 for a file that cannot be read or written, and as `format_text`.
    """
    document = read(path)
    formatted = format_text(document.text, str(path)).encode()
    if formatted == _bytes(path):
        return False
    if write:
        write_whole(Path(path), formatted)
    return True


def _bytes(path: Path | str) -> bytes:
    try:
        return read_bytes(path, MAX_BYTES)
    except UnreadableError as error:
        raise HflowError(Diagnostic("HF001", f"cannot read `{path}`: {error}")) from None


def meaning(plain: Any) -> Any:
    """A plain tree without what formatting may change: the spaces of ``${ }``."""
    if isinstance(plain, dict):
        return {k: meaning(v) for k, v in plain.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(plain, list):
        return [meaning(v) for v in plain]  # pyright: ignore[reportUnknownVariableType]
    return _spaced(plain) if isinstance(plain, str) else plain


def _same(before: str, after: str, file: str) -> bool:
    """Whether two texts say the same, in values and in comments."""
    try:
        roots = [in_order(parse(text, file).root) for text in (before, after)]
        comments = [sorted(_comments(read_syntax(text))) for text in (before, after)]
    except HflowError:
        return False
    said = [repr(meaning(root.plain())) for root in roots]  # tells 1 from 1.0, and the order of names
    return said[0] == said[1] and comments[0] == comments[1]


def _comments(value: SyntaxNode) -> Iterator[str]:
    yield from filter(None, value.footer)
    for entry in value.entries:
        yield from filter(None, [*entry.above, entry.beside])
        yield from _comments(entry.value)


def _refusal(reason: str, file: str) -> HflowError:
    return HflowError(Diagnostic("HF006", f"`{file}` cannot be formatted: {reason}", Span(file, 1, 1, 2)))


def _document(root: SyntaxNode) -> list[str]:
    """The lines of a file. What stands above its first key stays at the top, wherever that key goes."""
    head: list[str] = []
    if root.entries:
        head, root.entries[0].above = root.entries[0].above, []
    return [*head, *_block(root, (), 0)]


def _block(value: SyntaxNode, path: KeyPath, depth: int) -> list[str]:
    """The lines of a collection's entries and comments, at `depth`."""
    lines: list[str] = []
    was_large = False
    for number, entry in enumerate(_in_order(value, path)):
        place = (*path, entry.key or number)
        written = _entry(entry, place, depth) if value.kind == "mapping" else _item(entry, place, depth)
        is_large = _is_large(entry, place, len(written))
        if number and (entry.apart or was_large or is_large):
            lines.append("")
        lines += [*_indented(_above(entry), depth), *written]
        was_large = is_large
    return [*lines, *_indented(value.footer, depth)]


def _is_large(entry: SyntaxEntry, path: KeyPath, num_lines: int) -> bool:
    """Whether blank lines part an entry from its neighbours: a section, or a node of several lines."""
    is_section = len(path) == 1 and entry.value.kind != "scalar"
    return is_section or (node_path(path) == path and num_lines > 1)


def _indented(texts: list[str], depth: int) -> list[str]:
    return ["  " * depth + text if text else "" for text in texts]


def _in_order(value: SyntaxNode, path: KeyPath) -> list[SyntaxEntry]:
    if value.kind == "sequence":
        return value.entries
    by_key = {e.key: e for e in value.entries}
    return [by_key[k] for k in ordered_keys(path, by_key)]


def _above(entry: SyntaxEntry) -> list[str]:
    """The comments above an entry; those within empty brackets go there too."""
    inside = entry.value.footer if not entry.value.entries else []
    return [*entry.above, *filter(None, inside)]


def _entry(entry: SyntaxEntry, path: KeyPath, depth: int) -> list[str]:
    """The lines of a key and its value."""
    return _lines(f"{'  ' * depth}{key(entry.key)}:", entry, path, depth + 1)


def _item(entry: SyntaxEntry, path: KeyPath, depth: int) -> list[str]:
    """The lines of one item of a block sequence."""
    dash, value = f"{'  ' * depth}-", entry.value
    if value.kind == "scalar" or _fits(dash, value, path):
        return _lines(dash, entry, path, depth + 1)
    first, *rest = _block(value, path, depth + 1)
    beside = f" {entry.beside}" if entry.beside else ""
    return [f"{dash} {first.strip()}{beside}", *rest]


def _lines(head: str, entry: SyntaxEntry, path: KeyPath, depth: int) -> list[str]:
    """`head` and the value of an entry, whose further lines stand at `depth`."""
    value = entry.value
    beside = f" {entry.beside}" if entry.beside else ""
    if value.kind != "scalar" and not _fits(head, value, path):
        return [head + beside, *_block(value, path, depth)]
    if value.kind != "scalar":
        return [f"{head} {_flow(value, path)}{beside}"]
    first, *rest = _scalar(value, depth)
    if rest and value.style not in ("|", ">"):
        rest[-1] += beside
        beside = ""
    return [f"{head} {first}{beside}", *rest]


def _fits(head: str, value: SyntaxNode, path: KeyPath) -> bool:
    """Whether a collection is written within brackets, on the line of `head`."""
    if not value.entries:
        return True
    return value.flow and not any(_comments(value)) and len(f"{head} {_flow(value, path)}") <= WIDTH


def _flow(value: SyntaxNode, path: KeyPath) -> str:
    if value.kind == "scalar":
        return _inline(value, in_flow=True)
    parts = [_flow(e.value, (*path, e.key)) for e in _in_order(value, path)]
    if value.kind == "sequence":
        return f"[{', '.join(parts)}]"
    keys = [key(e.key) for e in _in_order(value, path)]
    return "{" + ", ".join(f"{k}: {part}" for k, part in zip(keys, parts)) + "}"


def _scalar(value: SyntaxNode, depth: int) -> list[str]:
    """The lines of a scalar in a block; texts of several lines keep them, at `depth`."""
    first, *rest = value.text.split("\n")
    if not rest or _EXPRESSION.fullmatch(value.value):
        return [_inline(value, in_flow=False)]
    if value.style not in ("|", ">"):
        return [first.rstrip(), *(("  " * depth + row.strip()) if row.strip() else "" for row in rest)]
    mark = first.split(" #")[0].strip()
    if not _BLOCK_MARK.fullmatch(mark):  # it counts blank lines or columns, which would move
        return [_inline(value, in_flow=False)]
    indent = min(len(row) - len(row.lstrip(" ")) for row in rest if row.strip())
    return [mark, *(("  " * depth + row[indent:].rstrip()) if row.strip() else "" for row in rest)]


def _inline(value: SyntaxNode, in_flow: bool) -> str:
    """A scalar on one line: numbers as they are written, texts with as few quotes as can be."""
    meant = resolve(value.value) if not value.style else value.value
    if isinstance(meant, (int, float)) and not isinstance(meant, bool):
        return value.value
    return scalar(_spaced(meant) if isinstance(meant, str) else meant, in_flow)


def _spaced(text: str) -> str:
    match = _EXPRESSION.fullmatch(text)
    return f"${{ {match[1]} }}" if match else text
