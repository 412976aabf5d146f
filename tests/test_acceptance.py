"""The table that `make acceptance` writes: what it says of passed, skipped and failed tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import acceptance

RESULTS = """<?xml version="1.0"?><testsuites><testsuite name="pytest">
<testcase classname="tests.a.test_one" name="test_x[1]" time="1.25" />
<testcase classname="tests.a.test_one" name="test_x[2]" time="2.5"><failure>x</failure></testcase>
<testcase classname="tests.test_two" name="test_y" time="0.5"><skipped message="SGLang" /></testcase>
<testcase classname="tests.test_two" name="test_z" time="3"><error>x</error></testcase>
</testsuite></testsuites>
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(acceptance, "ROOT", tmp_path)
    monkeypatch.setattr(acceptance, "TABLE", tmp_path / "acceptance.md")
    monkeypatch.setattr(acceptance, "commit", lambda: "0123abc")
    (tmp_path / "bad.xml").write_text(RESULTS)
    lines = [line for line in RESULTS.splitlines() if "failure" not in line and "error" not in line]
    (tmp_path / "good.xml").write_text("\n".join(lines))
    return tmp_path / "acceptance.md"


def test_a_failed_test_is_counted_named_and_fails(table: Path) -> None:
    assert acceptance.main([str(table.with_name("bad.xml"))]) == 1
    written = table.read_text()
    assert "- commit: 0123abc\n" in written and " cores, " in written
    assert "| tests/a/test_one | 1 | 0 | 1 | 4 |\n" in written
    assert "| tests/test_two | 0 | 1 | 1 | 4 |\n| **all** | 1 | 1 | 2 | 7 |\n" in written
    assert "- `tests/a/test_one.py::test_x[2]`\n- `tests/test_two.py::test_z`\n" in written


def test_results_of_several_files_are_one_table(table: Path) -> None:
    good = str(table.with_name("good.xml"))
    assert acceptance.main([good, good]) == 0
    assert "| tests/a/test_one | 2 | 0 | 0 | 2 |" in table.read_text()
    assert "Failed" not in table.read_text()


def test_a_missing_file_is_a_failure(table: Path) -> None:
    """pytest did not come to its end."""
    good = str(table.with_name("good.xml"))
    assert acceptance.main([good, f"{good}.none"]) == 2 and acceptance.main([]) == 2
    assert not table.exists()
