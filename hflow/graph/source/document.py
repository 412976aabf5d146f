"""YAML text to a tree in which every key and value knows its place.

A strict subset of YAML 1.2: one document, no anchors, aliases or tags, no duplicate keys, limited size
and depth. The tree is built from the parser's events, so a file that breaks a limit is refused
before anything grows from it. Scalars follow the 1.2 core schema: ``1e-4`` is a float, ``yes`` a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from hflow.bounded_read import UnreadableError, is_broken_text, read_text
from hflow.diagnostics import SET, Diagnostic, HflowError, Span

MAX_BYTES = 2**20
MAX_DEPTH = 32
MAX_ITEMS = 20_000  # keys and values
MAX_DIGITS = 400

Scalar = str | int | float | bool | None
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Item:
    """A value and its place. `span` of a mapping or sequence is its first character."""

    value: Scalar | Mapping[str, Item] | tuple[Item, ...]
    span: Span
    key_span: Span | None = None

    def plain(self) -> Any:
        """The value as dicts, lists and scalars."""
        if isinstance(self.value, Mapping):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, tuple):
            return [item.plain() for item in self.value]
        return self.value

    def child(self, key: str | int) -> Item | None:
        if isinstance(self.value, Mapping):
            return self.value.get(str(key))
        if isinstance(self.value, tuple) and isinstance(key, int) and key < len(self.value):
            return self.value[key]
        return None

    def replaced(self, path: KeyPath, item: Item) -> Item:
        """This tree with `item` at `path`; mappings that are missing on the way are made, lists are not."""
        if not path:
            return replace(item, key_span=item.key_span or self.key_span)
        if isinstance(self.value, tuple) and isinstance(place := path[0], int) and place < len(self.value):
            inner = self.value[place].replaced(path[1:], item)
            return replace(self, value=(*self.value[:place], inner, *self.value[place + 1 :]))
        entries = dict(self.value) if isinstance(self.value, Mapping) else {}
        key = str(path[0])
        entries[key] = entries.get(key, Item({}, item.span, item.key_span)).replaced(path[1:], item)
        return replace(self, value=entries)


@dataclass(frozen=True)
class Document:
    """One file: its text and the tree that it holds.

    `computed_from`: the params that the expression at a path read, where expressions have been evaluated.
    """

    file: str
    text: str
    root: Item
    computed_from: Mapping[KeyPath, tuple[str, ...]] = field(default_factory=dict[KeyPath, tuple[str, ...]])

    def get(self, path: KeyPath) -> Item | None:
        item: Item | None = self.root
        for key in path:
            item = item.child(key) if item else None
        return item

    def keys(self, path: KeyPath) -> tuple[str, ...]:
        """The keys of the mapping at `path`; none if there is no mapping."""
        item = self.get(path)
        return tuple(item.value) if item and isinstance(item.value, Mapping) else ()

    def span(self, path: KeyPath, key: bool = False) -> Span:
        """The place of the value at `path`, followed as far as the document has it.

        A mapping or sequence is shown by its key, as is every value with `key`.
        """
        item = self.root
        for part in path:
            found = item.child(part)
            if found is None:
                break
            item = found
        if item.key_span and (key or isinstance(item.value, (Mapping, tuple))):
            return item.key_span
        return item.span

    def where_set(self, path: KeyPath) -> str:
        """Where the params stand that the value at `path` was computed from; empty if it was written out."""
        found: list[str] = []
        for name in self.computed_from.get(path, ()):
            span = self.span(("params", name))
            place = f"by `{span.file}`" if span.file.startswith(SET) else f"at {span.file}:{span.line}"
            found.append(f"`{name}` is set {place}")
        return ", ".join(found)

    def plain(self) -> Any:
        return self.root.plain()


def read(path: Path | str) -> Document:
    """The document in a file.

    Raises:
        HflowError: HF001 when it is no regular file, or cannot be read as UTF-8 text; HF002..HF005 as
            `parse`.
    """
    try:
        text = read_text(path, MAX_BYTES, "utf-8-sig")
    except UnreadableError as error:
        if error.reason == "large":
            raise HflowError(_too_large(str(path))) from None
        raise HflowError(Diagnostic("HF001", f"cannot read `{path}`: {error}")) from None
    return parse(text, str(path))


def parse(text: str, file: str) -> Document:
    """The document in `text`; `file` names it in messages.

    Raises:
        HflowError: HF002 (no valid YAML), HF003 (duplicate key), HF004 (outside the subset),
            HF005 (too large or too deep).
    """
    if len(text.encode(errors="replace")) > MAX_BYTES:
        raise HflowError(_too_large(file))
    builder = _Builder(file)
    try:
        root = builder.document(events(text))
    except MarkedYAMLError as error:
        raise HflowError(_syntax_error(error, file)) from None
    except YAMLError as error:
        message = " ".join(str(error).split())
        raise HflowError(Diagnostic("HF002", f"not valid YAML: {message}")) from None
    except (ValueError, OverflowError):  # of `chr`, which the parser lets through
        message = "not valid YAML: an escape in a quoted string stands for no character"
        raise HflowError(Diagnostic("HF002", message)) from None
    if builder.problems:
        raise HflowError(builder.problems)
    return Document(file, text, root)


def _too_large(file: str) -> Diagnostic:
    return Diagnostic("HF005", f"`{file}` is larger than {MAX_BYTES} bytes")


def _syntax_error(error: Any, file: str) -> Diagnostic:
    mark = error.problem_mark or error.context_mark
    span = Span(file, mark.line + 1, mark.column + 1, mark.column + 2) if mark else None
    problem = " ".join(filter(None, [error.context, error.problem]))
    return Diagnostic("HF002", f"not valid YAML: {problem}", span, _SYNTAX_HELP.get(error.problem, ""))


_BROKEN = "an escape in a quoted string stands for a lone surrogate, half a character"
_BROKEN_HELP = "write the character itself, or `\\U` and eight digits"
_SYNTAX_HELP = {
    "mapping values are not allowed here": "look at the line above: it may lack a colon",
    "could not find expected ':'": "a key is followed by a colon and a space",
}


def dump(document: Document, remark: str = "") -> str:
    """YAML of the document's tree as it is now (comments are lost), after a comment line with `remark`."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = 100
    out = StringIO()
    yaml.dump(document.plain(), out)
    return (f"# {remark}\n" if remark else "") + out.getvalue()


def events(text: str) -> Iterator[Any]:
    """The parser's events, each with the marks where it starts and ends."""
    yaml: Any = YAML(typ="safe", pure=True)
    return cast(Iterator[Any], yaml.parse(text))


class _Builder:
    """Builds the tree of one document from parser events; collects what can be collected."""

    def __init__(self, file: str):
        self.file = file
        self.problems: list[Diagnostic] = []
        self.num_items = 0

    def document(self, events: Iterator[Any]) -> Item:
        next(events)  # stream start
        start = next(events)
        if _kind(start) != "DocumentStart":
            raise HflowError(Diagnostic("HF002", f"`{self.file}` is empty"))
        if start.version or start.tags:
            self._refuse("directives", start)
        root = self.item(next(events), events, 1)
        next(events)  # document end
        following = next(events)
        if _kind(following) == "DocumentStart":
            self._refuse("several documents", following)
            raise HflowError(self.problems)
        return root

    def item(self, event: Any, events: Iterator[Any], depth: int) -> Item:
        span = self._span(event)
        self.num_items += 1
        if depth > MAX_DEPTH:
            raise HflowError(Diagnostic("HF005", f"nested deeper than {MAX_DEPTH} levels", span))
        if self.num_items > MAX_ITEMS:
            raise HflowError(Diagnostic("HF005", f"more than {MAX_ITEMS} keys and values", span))
        if event.anchor is not None:
            self._refuse("aliases" if _kind(event) == "Alias" else "anchors", event)
        if getattr(event, "tag", None) is not None:
            self._refuse("tags", event)
        match _kind(event):
            case "Scalar":
                if is_broken_text(event.value):
                    self.problems.append(Diagnostic("HF002", _BROKEN, span, _BROKEN_HELP))
                return Item(self._scalar(event, span), span)
            case "MappingStart":
                return Item(self._mapping(events, depth), span)
            case "SequenceStart":
                return Item(tuple(self._sequence(events, depth)), span)
            case _:
                return Item(None, span)

    def _mapping(self, events: Iterator[Any], depth: int) -> dict[str, Item]:
        entries: dict[str, Item] = {}
        while _kind(event := next(events)) != "MappingEnd":
            key = self.item(event, events, depth + 1)
            value = self.item(following := next(events), events, depth + 1)
            if value.value is None and following.end_mark.index == following.start_mark.index:
                value = replace(value, span=key.span)  # nothing is written: the parser's mark is further on
            if _kind(event) != "Scalar":
                self._refuse("keys that are no scalars", event)
                continue
            name = str(event.value)
            if name in entries:
                self.problems.append(Diagnostic("HF003", f"duplicate key `{name}`", key.span))
            entries[name] = replace(value, key_span=key.span)
        return entries

    def _sequence(self, events: Iterator[Any], depth: int) -> Iterator[Item]:
        while _kind(event := next(events)) != "SequenceEnd":
            yield self.item(event, events, depth + 1)

    def _scalar(self, event: Any, span: Span) -> Scalar:
        if event.style:
            return str(event.value)
        if len(event.value) > MAX_DIGITS and _INT.fullmatch(event.value):
            self.problems.append(Diagnostic("HF002", f"a number of more than {MAX_DIGITS} digits", span))
            return 0
        return resolve(event.value)

    def _refuse(self, what: str, event: Any) -> None:
        message = f"{what} are outside hflow's YAML subset"
        self.problems.append(Diagnostic("HF004", message, self._span(event)))

    def _span(self, event: Any) -> Span:
        start, end = event.start_mark, event.end_mark
        one_line = _kind(event) in ("Scalar", "Alias") and end.line == start.line
        end_column = end.column + 1 if one_line else start.column + 2
        return Span(self.file, start.line + 1, start.column + 1, max(end_column, start.column + 2))


def _kind(event: Any) -> str:
    return type(event).__name__.removesuffix("Event")


_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INF = re.compile(r"([-+]?)\.(inf|Inf|INF)")


def resolve(text: str) -> Scalar:
    """The value of a plain (unquoted) scalar by the YAML 1.2 core schema."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if match := _INF.fullmatch(text):
        return float(f"{match[1]}inf")
    if text in (".nan", ".NaN", ".NAN"):
        return float("nan")
    return text
