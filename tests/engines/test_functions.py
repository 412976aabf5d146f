"""Functions that a graph names."""

from __future__ import annotations

from pathlib import Path

import pytest

from hflow.diagnostics import HflowError
from hflow.ops.losses import ppo_clip
from hflow.runtime.functions import describe_failure, load_function


def test_a_function_of_a_package() -> None:
    assert load_function("hflow.ops.losses.ppo_clip") is ppo_clip


def test_a_function_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "runs = []\nruns.append(1)\ndef f(x): return x + sum(runs)\ndef g(): return runs\n"
    )
    monkeypatch.chdir(tmp_path)
    assert load_function("./mine.py:f")(2) == 3
    assert load_function(f"{tmp_path}/mine.py:g")() == [1]


def test_a_failure_is_told_with_the_line_of_the_functions_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import json\ndef inner(x):\n    return json.loads(x)\ndef f(x):\n    return inner(x)\n"
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    function = load_function(f"{tmp_path}/mine.py:f")
    for arguments, told in (
        (("{",), "mine.py:3: JSONDecodeError: Expecting"),
        ((), "TypeError: f() missing 1 required"),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            function(*arguments)
        assert describe_failure(function, caught.value).startswith(told)


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"def f(): return '{folder}'\n")
    assert [load_function(f"{tmp_path}/{folder}/same.py:f")() for folder in "ab"] == ["a", "b"]


@pytest.mark.parametrize(
    "reference,problem",
    [
        ("hflow.ops.losses.ppo", "no attribute 'ppo'"),
        ("hflow.nowhere.f", "No module named 'hflow.nowhere'"),
        ("./absent.py:f", "FileNotFoundError"),
        ("hflow.ops.aggregate.MODES", "is no function"),
    ],
)
def test_what_cannot_be_imported_is_named(reference: str, problem: str) -> None:
    with pytest.raises(HflowError, match="HF205") as caught:
        load_function(reference)
    assert problem in str(caught.value)


def test_a_file_may_import_the_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("HALF = 0.5\n")
    (tmp_path / "reward.py").write_text("from beside_it import HALF\ndef f(): return HALF\n")
    assert load_function(f"{tmp_path}/reward.py:f")() == 0.5
