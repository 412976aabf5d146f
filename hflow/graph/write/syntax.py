"""A graph file with everything that a person wrote in it: the tree of its text, comments and blank lines.

`hflow.graph.source.document` reads what a file means; this module reads, from the same parser's events, how
it is written, for the formatter. Each comment belongs to one entry:

- on an entry's line: to the outermost entry that starts and ends there, else to the first that starts there;
- on lines of its own: to the next entry, or, indented deeper than that, to the end of the mapping before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from hflow.graph.source.document import events

SyntaxKind = Literal["mapping", "sequence", "scalar"]


@dataclass
class SyntaxNode:
    """A mapping, sequence or scalar as it is written, from line `start` to line `end` (0-based).

    `text` is the source of a scalar from its first character; `value` what it stands for, with `style` the
    quote or block mark that it is written in. `footer` are the comment lines after the last entry.
    """

    kind: SyntaxKind
    start: int
    end: int
    flow: bool = False
    entries: list[SyntaxEntry] = field(default_factory=list["SyntaxEntry"])
    value: str = ""
    style: str = ""
    text: str = ""
    footer: list[str] = field(default_factory=list[str])


@dataclass
class SyntaxEntry:
    """A key of a mapping or an item of a sequence. `above` are its comment lines (empty ones are blank lines
    among them), `beside` is the comment on its line, `apart` tells of a blank line before it all."""

    key: str
    line: int
    column: int
    value: SyntaxNode
    above: list[str] = field(default_factory=list[str])
    beside: str = ""
    apart: bool = False


def read_syntax(text: str) -> SyntaxNode:
    """The tree of a text that `source.document.parse` accepts and whose lines end in newlines only."""
    reader = _Reader(text.split("\n"))
    root = reader.document(events(text))
    _Comments(root, reader).attach()
    return root


class _Reader:
    """Builds the tree; `hidden` collects what is text, (line, first column, end column), so no comment."""

    def __init__(self, lines: list[str]):
        self.lines = lines
        self.hidden: dict[int, list[range]] = {}

    def document(self, stream: Iterator[Any]) -> SyntaxNode:
        next(stream)  # the stream starts
        next(stream)  # the document starts
        return self.value(next(stream), stream)

    def value(self, event: Any, stream: Iterator[Any]) -> SyntaxNode:
        match type(event).__name__:
            case "MappingStartEvent":
                return self.collection("mapping", event, stream)
            case "SequenceStartEvent":
                return self.collection("sequence", event, stream)
            case _ if event.style in ("|", ">"):
                return self.block_scalar(event)
            case _:
                return self.scalar(event)

    def collection(self, kind: SyntaxKind, opening: Any, stream: Iterator[Any]) -> SyntaxNode:
        line = opening.start_mark.line
        made = SyntaxNode(kind, line, line, flow=bool(opening.flow_style))
        while type(event := next(stream)).__name__ not in ("MappingEndEvent", "SequenceEndEvent"):
            mark, key = event.start_mark, ""
            if kind == "mapping":
                key = self.scalar(event).value
                event = next(stream)
            dash = 2 if kind == "sequence" and not made.flow else 0
            made.entries.append(SyntaxEntry(key, mark.line, mark.column - dash, self.value(event, stream)))
        last = max((e.value.end for e in made.entries), default=line)
        made.end = event.end_mark.line if made.flow else last
        return made

    def scalar(self, event: Any) -> SyntaxNode:
        start, end = event.start_mark, event.end_mark
        rows = self.lines[start.line : end.line + 1]
        for number in range(start.line, end.line + 1):
            first = start.column if number == start.line else 0
            last = end.column if number == end.line else len(self.lines[number])
            self.hidden.setdefault(number, []).append(range(first, last))
        rows[-1] = rows[-1][: end.column]
        rows[0] = rows[0][start.column :]
        text = "\n".join(rows)
        return SyntaxNode(
            "scalar", start.line, end.line, value=event.value, style=event.style or "", text=text
        )

    def block_scalar(self, event: Any) -> SyntaxNode:
        """A ``|`` or ``>`` text: its lines are as deep as the first, or empty."""
        mark = event.start_mark
        body = [line.expandtabs() for line in self.lines[mark.line + 1 :]]
        indent = next((len(line) - len(line.lstrip()) for line in body if line.strip()), 0)
        inside = takewhile(lambda line: not line.strip() or len(line) - len(line.lstrip()) >= indent, body)
        written = [number for number, line in enumerate(inside, 1) if line.strip()]
        end = mark.line + max(written, default=0)
        for number in range(mark.line + 1, end + 1):
            self.hidden[number] = [range(len(self.lines[number]))]
        rows = self.lines[mark.line : end + 1]
        rows[0] = rows[0][mark.column :]
        return SyntaxNode(
            "scalar", mark.line, end, value=event.value, style=event.style, text="\n".join(rows)
        )


@dataclass(frozen=True)
class _Placed:
    """An entry, and the collections that it stands in, outermost first."""

    entry: SyntaxEntry
    parents: tuple[SyntaxNode, ...]


class _Comments:
    """Finds the comments of a text and gives each to its entry."""

    def __init__(self, root: SyntaxNode, reader: _Reader):
        self.root = root
        self.lines = reader.lines
        self.hidden = reader.hidden
        self.placed = list(_walk(root, ()))
        self.above: dict[int, list[int]] = {}  # comment lines, by the number of the entry below them
        self.footers: dict[int, tuple[SyntaxNode, list[int]]] = {}

    def attach(self) -> None:
        for line in range(len(self.lines)):
            column = self.column_of_comment(line)
            if column is not None and not self.give_beside(line, column):
                self.give_line(line, column)
        for number, placed in enumerate(self.placed):
            if number == 0 or self.placed[number - 1].entry.line < placed.entry.line:
                numbers = self.above.get(number, [])
                placed.entry.apart = self.is_blank((numbers or [placed.entry.line])[0] - 1)
                placed.entry.above = self.paragraphs([*numbers, placed.entry.line])[:-1]
        for value, numbers in self.footers.values():
            blank = [""] if self.is_blank(numbers[0] - 1) else []
            value.footer = [*blank, *self.paragraphs(numbers)]

    def column_of_comment(self, line: int) -> int | None:
        text, hidden = self.lines[line], self.hidden.get(line, [])
        for match in re.finditer(r"(?:^|(?<=[ \t]))#", text):
            if not any(match.start() in columns for columns in hidden):
                return match.start()
        return None

    def give_beside(self, line: int, column: int) -> bool:
        """Give a comment that follows something on its line to an entry of that line."""
        if not self.lines[line][:column].strip():
            return False
        starting = [p.entry for p in self.placed if p.entry.line == line]
        ending = [p.entry for p in self.placed if p.entry.value.end == line]
        both = [e for e in starting if e.value.end == line]
        entry = next(iter([*both, *starting, *ending]), None)
        if entry is None or entry.beside:
            return False
        entry.beside = self.lines[line][column:].rstrip()
        return True

    def give_line(self, line: int, column: int) -> None:
        """Give a comment to the entry below it, or to the end of the collection that it closes."""
        below = next((n for n, p in enumerate(self.placed) if p.entry.line > line), len(self.placed))
        before = self.placed[below - 1].parents if below else (self.root,)
        after = self.placed[below].parents if below < len(self.placed) else ()
        around = [v for v in before if v.flow and v.start <= line <= v.end]
        if around and around[-1] not in after:
            return self.give_footer(around[-1], line)
        goes_in = len(after) > len(before)  # the entry below is the first of its collection
        if after and (goes_in or after[-1].flow or column <= self.placed[below].entry.column):
            self.above.setdefault(below, []).append(line)
            return None
        open_ = [v for v in before if v.entries and v.entries[0].column <= column and not v.flow]
        return self.give_footer(open_[-1] if open_ else self.root, line)

    def give_footer(self, value: SyntaxNode, line: int) -> None:
        self.footers.setdefault(id(value), (value, []))[1].append(line)

    def paragraphs(self, numbers: list[int]) -> list[str]:
        """The comments on these lines; an empty text for blank lines between two, and none for the last."""
        texts: list[str] = []
        for number, following in zip(numbers, [*numbers[1:], None]):
            texts.append(self.lines[number].strip())
            if following and any(self.is_blank(n) for n in range(number + 1, following)):
                texts.append("")
        return texts

    def is_blank(self, line: int) -> bool:
        return line >= 0 and not self.lines[line].strip()


def _walk(value: SyntaxNode, parents: tuple[SyntaxNode, ...]) -> Iterator[_Placed]:
    inside = (*parents, value)
    for entry in value.entries:
        yield _Placed(entry, inside)
        yield from _walk(entry.value, inside)
