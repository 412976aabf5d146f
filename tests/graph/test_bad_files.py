"""Every file of tests/bad says in its first lines what must be reported about it, and where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hflow.diagnostics import CODES, Diagnostic, HflowError, render
from hflow.graph.load import check, load, sources

FILES = sorted(Path("tests/bad").glob("*.yaml"))
EXPECT = re.compile(r"# expect: (HF\d{3}) (\d+:\d+|-)$", re.MULTILINE)
# Not about the contents of a graph file: unreadable files, `--set`, and what comes after the graph.
ELSEWHERE = {"HF001", "HF105"} | {code for code in CODES if code >= "HF3"}


def found(path: Path) -> tuple[Diagnostic, ...]:
    try:
        return check(path)[1]
    except HflowError as error:
        return error.diagnostics


def place(diagnostic: Diagnostic) -> str:
    span = diagnostic.span
    return f"{span.line}:{span.column}" if span else "-"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_exactly_the_expected_is_reported(path: Path) -> None:
    expected = EXPECT.findall(path.read_text())
    assert expected
    assert [(d.code, place(d)) for d in found(path)] == expected


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
        lines = render(diagnostic, sources(path)).splitlines()
        assert lines[0] == f"{diagnostic.severity}[{diagnostic.code}]: {diagnostic.message}"
        if diagnostic.span is None:
            continue
        text, caret = lines[2], lines[3]
        marked = text[caret.index("^") : caret.rindex("^") + 1]
        assert marked.strip() or marked == "\t"
        assert len(caret) <= len(text)


def test_every_code_has_a_file() -> None:
    seen = {code for path in FILES for code, _ in EXPECT.findall(path.read_text())}
    assert seen == CODES.keys() - ELSEWHERE
