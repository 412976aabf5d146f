"""Every example in the documentation is right: graph files, functions, Python programs, diagnostics."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hflow
from hflow.diagnostics import HflowError, render
from hflow.graph.infer.functions import read_function
from hflow.graph.ir import Graph
from hflow.graph.load import check, check_text, load, load_text
from hflow.graph.write.formatter import format_text
from hflow.graph.write.printer import ir
from hflow.graph.write.yaml_printer import to_yaml

ROOT = Path(__file__).parent.parent
PAGES = sorted(page for folder in (".", "algorithms", "docs") for page in (ROOT / folder).glob("*.md"))
BLOCK = re.compile(r"(?:^`(?P<file>[\w/]+\.\w+)`:\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```", re.M | re.S)
OF_PLAN = "error[HF305]"
ERROR = re.compile(r"^(?:error|warning)\[HF\d+\]: ")
OVERRIDE = re.compile(r"--> --set (.*):1:\d+\n")
PLACE = re.compile(r"--> ([\w./]+):(\d+):\d+\n\d+ \| (.*)\n")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a reader: it has the algorithms and nothing else."""
    shutil.copytree(ROOT / "algorithms", tmp_path / "algorithms", ignore=shutil.ignore_patterns("*.md"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def by_page(pages: list[Path]) -> Any:
    return pytest.mark.parametrize("page", pages, ids=lambda p: str(p.relative_to(ROOT)))


def blocks(page: Path, language: str) -> Iterator[tuple[str, str]]:
    """The code blocks of a page in one language: the file's name, where the page tells it, and the text."""
    for match in BLOCK.finditer(page.read_text()):
        if match["language"] == language:
            yield match["file"] or "", match["text"]


def write_named(page: Path, folder: Path) -> None:
    """Make the files that a page names."""
    for match in BLOCK.finditer(page.read_text()):
        if match["file"]:
            (folder / match["file"]).parent.mkdir(exist_ok=True)
            (folder / match["file"]).write_text(match["text"])


def pages_with(language: str, text: str) -> list[Path]:
    return [page for page in PAGES if any(text in block for _, block in blocks(page, language))]


def whole(page: Path) -> list[tuple[str, str]]:
    """The graph files of a page, with their names: those of the others are free."""
    return [(name, text) for name, text in blocks(page, "yaml") if text.startswith("hflow: 1")]


@by_page(pages_with("yaml", "hflow: 1"))
def test_graph_files_are_right(page: Path, folder: Path) -> None:
    write_named(page, folder)
    beside = "algorithms/" if page.parent.name == "algorithms" else ""
    for name, text in whole(page):
        path = folder / (name or f"{beside}example.yaml")
        path.write_text(text)
        _, warnings = check(path)
        assert warnings == ()


@by_page([page for page in pages_with("yaml", "hflow: 1") if page.parent.name != "algorithms"])
def test_graph_files_are_well_formatted(page: Path) -> None:
    for _, text in whole(page):
        assert format_text(text) == text


@by_page([page for page in pages_with("yaml", "") if page.name != "ops.md"])
def test_parts_of_graph_files_are_quoted_from_algorithms(page: Path) -> None:
    quoted = [text for name, text in blocks(page, "yaml") if not name and not text.startswith("hflow: 1")]
    files = [dedent_all(file.read_text()) for file in (ROOT / "algorithms").glob("*.yaml")]
    assert [text for text in quoted if not any(dedent_all(text) in file for file in files)] == []


def dedent_all(text: str) -> str:
    """The lines without what stands before them."""
    return "".join(f"{line.strip()}\n" for line in text.splitlines())


@by_page(pages_with("python", "@op("))
def test_functions_can_be_named_by_graph_files(page: Path, folder: Path) -> None:
    for _, text in blocks(page, "python"):
        if "@op(" not in text:
            continue
        (folder / "functions.py").write_text(text)
        typed = [f.name for f in ast.parse(text).body if isinstance(f, ast.FunctionDef) and f.decorator_list]
        assert typed
        for name in typed:
            assert read_function(f"./functions.py:{name}", folder).signature


def built() -> list[Graph]:
    """The graphs that docs/builder.md builds."""
    programs = [text for _, text in blocks(ROOT / "docs/builder.md", "python") if "GraphBuilder" in text]
    spaces: list[dict[str, Any]] = []
    for program in programs:
        spaces.append(dict(spaces[-1]) if spaces else {})
        exec(compile(program, "docs/builder.md", "exec"), spaces[-1])
    return [space["graph"] for space in spaces]


def test_the_builders_programs_make_graphs() -> None:
    graphs = built()
    assert [graph.name for graph in graphs] == ["grpo_by_hand", "everything_else"]
    for graph in graphs:
        again = load_text(to_yaml(graph))
        assert ir(again) == ir(graph)


def check_override(page: Path, folder: Path, override: str, shown: str) -> None:
    """Of the one graph file that the page has."""
    write_named(page, folder)
    (file,) = (match["file"] for match in BLOCK.finditer(page.read_text()) if match["language"] == "yaml")
    with pytest.raises(HflowError) as refused:
        load(file, [override])
    assert str(refused.value) == shown


@by_page(pages_with("text", "error[HF"))
def test_diagnostics_are_those_of_the_line_that_they_show(page: Path, folder: Path) -> None:
    """A page shows what one changed line in algorithms/grpo.yaml, or a `--set`, leads to."""
    for _, shown in blocks(page, "text"):
        if not ERROR.match(shown) or OF_PLAN in shown:
            continue
        if override := OVERRIDE.search(shown):
            check_override(page, folder, override[1], shown.rstrip("\n"))
            continue
        place = PLACE.search(shown)
        assert place
        file, number, line = place[1], int(place[2]), place[3]
        lines = (ROOT / "algorithms/grpo.yaml").read_text().splitlines()
        lines[number - 1] = line
        text = "\n".join(lines)
        with pytest.raises(HflowError) as refused:
            check_text(text, file)
        assert [render(d, {file: text}) for d in refused.value.diagnostics] == [shown.rstrip("\n")]


@pytest.mark.slow
def test_what_does_not_fit_is_told_as_shown() -> None:
    """Of 70 B parameters on 8 GPUs, with the sizes of docs/plans.md; the page wraps its lines."""
    page = ROOT / "docs/plans.md"
    shown = next(text for _, text in blocks(page, "text") if text.startswith(OF_PLAN))
    sizes = next(text for name, text in blocks(page, "yaml") if name == "sizes.yaml")
    Path("sizes.yaml").write_text(sizes)
    models = [f"params.{name}=shape:llama-70b" for name in ("model", "reward_model")]
    graph = hflow.load("algorithms/ppo.yaml", models, files=["sizes.yaml"])
    with pytest.raises(HflowError) as refused:
        hflow.compile(graph, ROOT / "clusters/a100x8.yaml")
    texts = {"algorithms/ppo.yaml": Path("algorithms/ppo.yaml").read_text()}
    told = [render(d, texts) for d in refused.value.diagnostics]
    assert [text.split() for text in told] == [shown.split()]


def test_a_tools_output_is_the_one_that_is_shown(folder: Path) -> None:
    """What docs/types.md shows of `hflow show`."""
    (_, shown), *_ = blocks(ROOT / "docs/types.md", "text")
    graph, _ = check("algorithms/grpo.yaml")
    assert dedent_all(shown) in dedent_all(ir(graph))
