"""Errors are data: a code, a message, the place in the user's file, and what to do about it.

Every stage collects `Diagnostic` values and raises them together in one `HflowError`; only the
command line prints. The table `CODES` is the whole list of what hflow can refuse.
"""

from __future__ import annotations

import difflib
import linecache
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hflow.bounded_read import UnreadableError, read_bytes

CODES: dict[str, str] = {
    # 0xx: the text of a file
    "HF001": "file cannot be read or written",
    "HF002": "not valid YAML",
    "HF003": "duplicate key",
    "HF004": "YAML feature outside the strict subset (anchor, alias, tag, several documents)",
    "HF005": "file too large or too deeply nested",
    "HF006": "file cannot be formatted",
    # 1xx: the shape of a file
    "HF101": "missing key",
    "HF102": "unknown key",
    "HF103": "value of the wrong kind",
    "HF104": "bad expression in ${ }",
    "HF105": "bad override (--set)",
    "HF106": "bad name",
    "HF107": "bad parent file (extends) or file of overrides (-f)",
    # 2xx: what the graph means
    "HF201": "unknown node or port",
    "HF202": "unknown model",
    "HF203": "frozen model trained",
    "HF204": "cycle within one step",
    "HF205": "unknown or unreadable function",
    "HF206": "bad type or function signature",
    "HF207": "missing input",
    "HF208": "input of the wrong type",
    "HF209": "rows do not belong together",
    "HF210": "log-probs or values of the wrong model",
    "HF211": "unknown option",
    "HF212": "bad option value",
    "HF213": "declared output differs from the inferred one",
    "HF214": "unknown input port",
    "HF215": "two trains of one model without order",
    "HF216": "trained model that no node reads",
    "HF217": "output that no node reads",
    "HF218": "model that no node uses",
    "HF219": "sizes do not divide",
    "HF220": "bad evaluation",
    "HF221": "tokenizer cannot be determined",
    "HF222": "head of a model does not fit",
    "HF223": "values staler than a train node allows",
    "HF224": "bad repeat region",
    "HF225": "bad loop-carried value",
    "HF226": "bad refresh of a model",
    "HF227": "param that nothing reads",
    "HF228": "bad way of keeping a run (run)",
    "HF229": "log-probs over different tokens",
    "HF230": "bad adapter, or base, of a model",
    "HF231": "impossible lengths",
    # 3xx: graph on a cluster
    "HF301": "bad cluster file value",
    "HF302": "bad pin, or node that cannot be explained",
    "HF303": "model shape cannot be read",
    "HF304": "no layout is feasible for a node",
    "HF305": "plan does not fit in memory",
    "HF306": "plan file cannot be used",
    "HF307": "the graph asks for what the compiler cannot schedule yet",
    "HF308": "models that read the same tokens have different vocabularies",
    "HF309": "what a planner cannot plan",
    "HF310": "bad choice of an engine",
    "HF311": "routes of a model of another shape",
    "HF312": "what cannot be priced as a technique",
    # 4xx: running
    "HF401": "a node failed",
    "HF402": "a worker died",
    "HF403": "data cannot be read",
    "HF404": "resources are not available",
    "HF405": "a number is not finite",
    "HF406": "model files cannot be used",
    "HF407": "run folder cannot be used",
    "HF408": "a repeat region found too few rows",
    "HF409": "texts are older than a train node allows",
    "HF410": "a reader has other weights than it should",
    "HF411": "the graph differs from that of the checkpoint",
    "HF412": "a checkpoint cannot be used",
    "HF413": "a worker hangs",
}


MAX_SHOWN_BYTES = 2**26  # of a file that a diagnostic quotes
EXCERPT = 120  # columns of a source line that are shown
SET = "--set "  # begins the "file" of a place in an override; the rest is its text


@dataclass(frozen=True)
class Span:
    """A place in a text: 1-based line and column; `end_column` is exclusive and on the same line."""

    file: str
    line: int
    column: int
    end_column: int


def shown_path(file: str) -> str:
    """A path under the working folder is shown relative to it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


@dataclass(frozen=True)
class Diagnostic:
    code: str
    message: str
    span: Span | None = None
    help: str = ""
    severity: Literal["error", "warning"] = "error"

    def __post_init__(self) -> None:
        assert self.code in CODES, self.code


class HflowError(Exception):
    """One or more things the user can mend. Carries at least one diagnostic of severity `error`.

    Its text is what the command line prints: every diagnostic with its place, excerpt and help.
    """

    def __init__(self, diagnostics: Diagnostic | Iterable[Diagnostic]):
        found = (diagnostics,) if isinstance(diagnostics, Diagnostic) else tuple(diagnostics)
        super().__init__(found)
        self.diagnostics = found

    def __str__(self) -> str:
        return "\n\n".join(render(d, source_of(d)) for d in self.diagnostics)


class Terminated(BaseException):
    """A signal asked the process to end; the exit code is 128 + its `number`."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def did_you_mean(name: str, known: Iterable[str], what: str = "known") -> str:
    """Help text: the nearest of `known`, or the list of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{near[0]}`?"
    return f"{what}: {', '.join(names)}" if names else ""


def render(diagnostic: Diagnostic, sources: dict[str, str] | None = None) -> str:
    """The compiler-style text of one diagnostic.

    `sources` maps a span's file to its text; without it (or for a place outside it) the excerpt is
    left out.
    """
    head = f"{diagnostic.severity}[{diagnostic.code}]: {diagnostic.message}"
    out, gutter = [head], 0
    if span := diagnostic.span:
        lines = (sources or {}).get(span.file, "").splitlines()
        gutter = len(str(span.line))
        out.append(f"{' ' * gutter} --> {span.file}:{span.line}:{span.column}")
        if span.line <= len(lines):
            width = max(1, span.end_column - span.column)
            text = lines[span.line - 1]
            line, column = _excerpt(text, min(span.column, len(text) + 1))
            out.append(f"{span.line} | {line}")
            out.append(f"{' ' * gutter} | {' ' * (column - 1)}{'^' * min(width, EXCERPT)}")
    if diagnostic.help:
        start = f"{' ' * gutter} = help: "
        out.append(start + diagnostic.help.replace("\n", "\n" + " " * len(start)))
    return "\n".join(out)


def source_of(diagnostic: Diagnostic) -> dict[str, str]:
    """The text that the diagnostic points into, as `render` takes it; empty when it cannot be read.

    An override stands for itself, and cells of notebooks are where Python keeps them for tracebacks.
    """
    if not diagnostic.span:
        return {}
    file = diagnostic.span.file
    if file.startswith(SET):
        return {file: file.removeprefix(SET)}
    try:
        return {file: read_bytes(file, MAX_SHOWN_BYTES).decode(errors="replace")}
    except UnreadableError:
        found = linecache.cache.get(file, ())  # `linecache.getlines` would read a file, of any size
        return {file: "".join(found[2])} if len(found) == 4 else {}


def _excerpt(line: str, column: int) -> tuple[str, int]:
    """The part of a long line around `column`, and the column's place in it."""
    if len(line) <= EXCERPT:
        return line, column
    start = max(0, min(column - 1 - EXCERPT // 3, len(line) - EXCERPT))
    return line[start : start + EXCERPT], column - start


def ordered(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Diagnostics in reading order of the files they point to, without repetitions."""
    place = lambda d: (d.span.file, d.span.line, d.span.column) if d.span else ("", 0, 0)  # noqa: E731
    return tuple(sorted(dict.fromkeys(diagnostics), key=lambda d: (place(d), d.code)))
