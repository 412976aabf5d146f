"""Wherever hflow reads a file that the user names, a device, a pipe or a huge file is refused at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hflow.diagnostics import Diagnostic, HflowError, Span, source_of
from hflow.graph.load import load, sources
from hflow.graph.write.formatter import format_file
from hflow.plan.cluster_file import load_cluster
from hflow.plan.plan_file import is_plan, load_plan
from hflow.plan.vocabulary import foreign_tokens
from tests.limits import memory_limited_to

GRAPH = "algorithms/grpo.yaml"
READERS: dict[str, tuple[Callable[[str], object], str]] = {
    "graph": (load, "HF001"),
    "extends": (lambda path: load(_child(path, f"extends: {path}")), "HF107"),
    "-f": (lambda path: load(GRAPH, (), (path,)), "HF001"),
    "--cluster": (load_cluster, "HF001"),
    "plan": (lambda path: load_plan(Path(path)), "HF001"),
    "function": (lambda path: load(GRAPH, (f"nodes.reward.fn={path}:f",)), "HF205"),
    "fmt": (format_file, "HF001"),
}
KINDS = ("device", "pipe", "folder", "huge")

pytestmark = pytest.mark.timeout(20)


def _child(path: str, text: str) -> str:
    child = Path(path).parent / "child.yaml"
    child.write_text(text)
    return str(child)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    with memory_limited_to(2**29):
        yield


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Something that may not be read to its end, under a name that any reader takes."""
    file = tmp_path / "file.py"
    match request.param:
        case "device":
            file.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case _:
            with file.open("wb") as out:
                out.truncate(2**40)
    return str(file)


@pytest.mark.parametrize("reader", READERS)
def test_refused_with_a_diagnostic(reader: str, path: str) -> None:
    read, code = READERS[reader]
    with pytest.raises(HflowError) as caught:
        read(path)
    (found,) = caught.value.diagnostics
    assert found.code in (code, "HF005") and path.rpartition("/")[2] in found.message
    assert str(caught.value)


def test_what_only_looks_passes_them_by(path: str) -> None:
    assert not is_plan(Path(path))
    assert source_of(Diagnostic("HF001", "here", Span(path, 1, 1, 2))) in ({}, {path: ""})
    assert sources(GRAPH, (), (path,))[path] == ""


def test_a_tokenizer_that_cannot_be_read_says_nothing(path: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    Path(path).rename(tmp_path / "model" / "tokenizer.json")
    graph = load("algorithms/on_policy_distillation.yaml", (f"params.model={tmp_path / 'model'}",))
    assert len({model.path for model in graph.models}) == 2
    assert list(foreign_tokens(graph)) == []
