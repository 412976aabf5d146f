"""Every file of tests/bad says in its first lines what must be reported about it, and where.

Most extend a valid file of tests/bad/parents by one mistake.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from hflow.diagnostics import CODES, Diagnostic, HflowError, render
from hflow.graph.load import check, load

BAD = Path("tests/bad")
FILES = sorted(BAD.glob("*.yaml"))
EXPECT = re.compile(r"# expect: (HF\d{3}) ((?:[\w/]+\.yaml:)?\d+:\d+|-)$", re.MULTILINE)
# Not about the contents of a graph file: unreadable files, `fmt`, `--set`, and what comes after the graph.
ELSEWHERE = {"HF001", "HF006", "HF105"} | {code for code in CODES if code >= "HF3"}


@cache
def found(path: Path) -> tuple[Diagnostic, ...]:
    try:
        return check(path)[1]
    except HflowError as error:
        return error.diagnostics


def place(diagnostic: Diagnostic, path: Path) -> str:
    """Line and column; of another file than the one checked, its name too."""
    span = diagnostic.span
    if span is None:
        return "-"
    other = "" if span.file == str(path) else f"{Path(span.file).relative_to(BAD)}:"
    return f"{other}{span.line}:{span.column}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_exactly_the_expected_is_reported(path: Path) -> None:
    expected = EXPECT.findall(path.read_text())
    assert expected
    assert [(d.code, place(d, path)) for d in found(path)] == expected


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_errors_are_raised_and_warnings_are_not(path: Path) -> None:
    if all(d.severity == "warning" for d in found(path)):
        assert load(path).nodes
        return
    with pytest.raises(HflowError) as caught:
        load(path)
    assert all(d.severity == "error" for d in caught.value.diagnostics)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_caret_stands_under_text(path: Path) -> None:
    for diagnostic in found(path):
        if diagnostic.span is None:
            continue
        file = diagnostic.span.file
        lines = render(diagnostic, {file: Path(file).read_text()}).splitlines()
        assert lines[0] == f"{diagnostic.severity}[{diagnostic.code}]: {diagnostic.message}"
        text, caret = lines[2], lines[3]
        marked = text[caret.index("^") : caret.rindex("^") + 1]
        assert marked.strip() or marked == "\t"
        assert len(caret) <= len(text)


@pytest.mark.parametrize("path", sorted(BAD.glob("parents/*.yaml")), ids=lambda p: p.stem)
def test_what_they_extend_is_right(path: Path) -> None:
    assert found(path) == ()


def test_every_code_has_a_file() -> None:
    seen = {code for path in FILES for code, _ in EXPECT.findall(path.read_text())}
    assert seen == CODES.keys() - ELSEWHERE
