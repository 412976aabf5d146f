"""Which cases of a matrix run: always enough to show every value of every axis, and a part of the others.

A test with the marker `matrix(one_of, cover)` has more cases than every change is worth. Of those that show
no new value (of all, with ``cover=False``) one of `one_of` runs, by the seed. That is `HFLOW_SAMPLE`, or else
the commit, so that each commit tries other cases and the same commit the same ones. ``HFLOW_SAMPLE=all`` runs
every case, and tests with the marker `acceptance`.

A test with the marker `rotating(one_of)` takes long, and what it shows seldom changes: one of so many commits
runs it. Other tests that take seconds, `slow` or `one_ray`, take turns by files, which share what they start:
one of `OF_FILES` commits runs those of a file, unless they have a matrix or the command line names the file.
"""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "HFLOW_SAMPLE"
ALL = "all"
ONE_OF = 16  # unless the marker says another number
OF_FILES = 6
Values = Mapping[str, str]  # what a case has on each axis


def seed() -> str:
    """Of `HFLOW_SAMPLE`, else the commit, else the day."""
    return os.environ.get(VARIABLE) or _commit() or date.today().isoformat()


def _commit() -> str:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        told = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return told.stdout.strip() if told.returncode == 0 else ""


def cover(cases: Sequence[Values]) -> set[int]:
    """Few cases with every value that any case has; the same ones whatever the seed is."""
    values = [set(case.items()) for case in cases]
    missing = set[tuple[str, str]]().union(*values)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda number: (len(values[number] & missing), -number))
        chosen.add(best)
        missing -= values[best]
    return chosen


def sampled(cases: Sequence[Values], seed: str, one_of: int = ONE_OF, must_cover: bool = True) -> set[int]:
    """The numbers of the cases that run, one at least. Whether a case is drawn depends neither on other cases
    nor on the test, so that tests of the same cases keep sharing what they run."""
    if seed == ALL:
        return set(range(len(cases)))
    lots = [_lot(case, seed) for case in cases]
    chosen = cover(cases) if must_cover else {lots.index(min(lots))}
    return chosen | {number for number, lot in enumerate(lots) if lot % one_of == 0}


def _lot(case: Values, seed: str) -> int:
    text = repr((seed, sorted(case.items())))
    return int.from_bytes(sha256(text.encode()).digest()[:8])


def left_out(items: Iterable[pytest.Item], named: Sequence[str], seed: str) -> set[pytest.Item]:
    """Of the collected tests; a case that the command line names runs."""
    tests: dict[tuple[Path, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("matrix"):
            tests[item.path, item.originalname].append(item)
    found: set[pytest.Item] = set()
    for cases in tests.values():
        marker = cases[0].get_closest_marker("matrix")
        assert marker
        one_of, must_cover = (*marker.args, ONE_OF)[0], marker.kwargs.get("cover", True)
        kept = sampled(values_of(cases), seed, one_of, must_cover)
        found |= {case for number, case in enumerate(cases) if number not in kept}
    found = {item for item in found if not any(item.nodeid.endswith(name) for name in named if "[" in name)}
    return found | {item for item in items if _rests(item, seed) and not _is_named(item, named)}


def _rests(item: pytest.Item, seed: str) -> bool:
    """Whether other commits run this test."""
    if seed == ALL:
        return False
    if marker := item.get_closest_marker("rotating"):
        return _lot({"test": item.nodeid}, seed) % marker.args[0] != 0
    takes_turns = any(map(item.get_closest_marker, ("slow", "one_ray")))
    file, _, _ = item.nodeid.partition("::")
    return (
        takes_turns and not item.get_closest_marker("matrix") and _lot({"file": file}, seed) % OF_FILES != 0
    )


def _is_named(item: pytest.Item, named: Sequence[str]) -> bool:
    """Whether the command line names this test, or the file with which it would take turns."""
    file, _, test = item.nodeid.partition("::")
    whole = not item.get_closest_marker("rotating")
    parts = (name.partition("::") for name in named)
    return any(
        path.endswith(Path(file).name) and test.startswith(own) and (own or whole) for path, _, own in parts
    )


def values_of(cases: Sequence[pytest.Function]) -> list[dict[str, str]]:
    """The parameters of each case of a test as words; the fields of a parameter `case` are axes."""
    numbers: dict[int, int] = {}  # of values whose words differ from process to process, by identity
    return [
        {
            axis: _word(value, numbers)
            for name, each in case.callspec.params.items()
            for axis, value in _axes(name, each)
        }
        for case in cases
    ]


def _axes(name: str, value: Any) -> list[tuple[str, Any]]:
    if name == "case" and is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return [(name, value)]


def _word(value: Any, numbers: dict[int, int]) -> str:
    text = repr(value)
    return f"#{numbers.setdefault(id(value), len(numbers))}" if " at 0x" in text else text
