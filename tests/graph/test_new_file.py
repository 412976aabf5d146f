from __future__ import annotations

from pathlib import Path

import pytest

from hflow.diagnostics import HflowError
from hflow.graph.load import load
from hflow.graph.write.new_file import new_file
from hflow.shipped import find

ALGORITHMS = sorted(Path("algorithms").resolve().glob("*.yaml"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("source", ALGORITHMS, ids=lambda p: p.stem)
def test_a_copy_is_the_algorithm_by_another_name(source: Path) -> None:
    copy, original = load(new_file("mine", source)), load(source)
    assert (copy.name, copy.doc, copy.params) == ("mine", original.doc, original.params)
    assert (copy.models, copy.nodes) == (original.models, original.nodes)


def test_only_names_change() -> None:
    source = Path("base.yaml")
    text = "# head\nhflow: 1 # version\nextends: '../x/parent.yaml' # parent\nname: old # name\nnodes:\n"
    source.write_text(text + '  a: {op: call, fn: "./f.py:g"} # f\n')
    (folder := Path("sub")).mkdir()
    source.rename(folder / source)
    new_file("mine", folder / source)
    expected = text.replace("'../x/parent.yaml'", "x/parent.yaml").replace("old", "mine")
    assert Path("mine.yaml").read_text() == expected + "  a: {op: call, fn: ./sub/f.py:g} # f\n"


def test_nothing_is_overwritten_unless_asked() -> None:
    Path("mine.yaml").write_text("precious")
    with pytest.raises(HflowError) as caught:
        new_file("mine", find("grpo", "algorithms", "algorithm"))
    (problem,) = caught.value.diagnostics
    assert (problem.code, problem.help) == ("HF001", "--force overwrites it")
    assert Path("mine.yaml").read_text() == "precious"
    assert load(new_file("mine", find("grpo", "algorithms", "algorithm"), force=True)).name == "mine"


@pytest.mark.parametrize("name", ["Mine", "../mine", "1", "", "a b"])
def test_bad_names(name: str) -> None:
    with pytest.raises(HflowError) as caught:
        new_file(name, find("grpo", "algorithms", "algorithm"))
    assert caught.value.diagnostics[0].code == "HF106"
    assert not list(Path().iterdir())


def test_algorithms_are_found_by_name() -> None:
    assert load(find("sft", "algorithms", "algorithm")).name == "sft"
    Path("algorithms").mkdir()
    Path("algorithms/sft.yaml").touch()  # one's own come first
    assert find("sft", "algorithms", "algorithm") == Path("algorithms/sft.yaml")
    assert find("some/file.yaml", "algorithms", "algorithm") == Path("some/file.yaml")
    with pytest.raises(HflowError) as caught:
        find("gropo", "algorithms", "algorithm")
    (problem,) = caught.value.diagnostics
    assert problem.code == "HF001" and problem.help.startswith("did you mean `grpo`? algorithms: ")
    assert all(path.stem in problem.help for path in ALGORITHMS)
