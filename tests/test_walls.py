"""The walls between packages: no circle of imports, contracts that notice a breach, and one idea a name."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

PACKAGE = Path("hflow")

# One line by contract, which that contract forbids and no other does.
BREACHES = {
    "imports go one way": ("plan/layout.py", "import hflow.cost.comm"),
    "the runtime executes plans and makes none": ("runtime/cores.py", "import hflow.schedule.arrange"),
    "what a laptop needs loads neither torch nor Ray": ("view/picture/svg.py", "import torch"),
    "graph: source, inference, checks, files": ("graph/infer/draft.py", "import hflow.graph.load"),
    "compiler: passes, planner, candidates": (
        "compiler/candidates/meshes.py", "import hflow.compiler.planner.search",
    ),
    "engines know neither workers nor Ray": ("runtime/engines/base.py", "import ray"),
}  # fmt: skip

ROOM = "a word of its file only: no other imports it"
VIEW = "a picture's own parts, named in its file"
# Top-level classes and type aliases by how often they are defined. The list may only shrink: a name that is
# defined once by now must go from here, and a new one does not come in.
TWICE = {
    "Bound": (2, "of a function's arguments; of a type's variable"),
    "Box": (2, "a part of a tensor; a rectangle of a picture"),
    "Bundle": (2, "what notebooks show; weights that move together"),
    "Call": (2, "what an engine runs; what a pool sends to a worker"),
    "Carried": (2, "values from step to step at run time; their handle in the builder"),
    "Copy": (2, "a piece that moves; a model's copy in the planner"),
    "Draft": (2, "of a node in inference; of a plan in the compiler"),
    "Drawn": (2, VIEW),
    "Engine": (2, "what runs nodes; its name in a plan"),
    "Engines": (2, "those of a worker; the option of the command line"),
    "Entries": (2, "of a process's memory; of a file that is built"),
    "Entry": (2, "of a YAML mapping; of the table of pieces to send"),
    "Gaps": (2, "between boxes of a picture; between readiness and start of a task"),
    "Groups": (2, "process groups; a published planner's groups of nodes"),
    "Head": (2, "of a model; of a command's output"),
    "Kind": (2, "of an option's value; of a YAML value"),
    "Line": (3, VIEW),
    "Link": (2, "between devices; between boxes of a picture"),
    "Load": (2, "of a sender; of a device's memory"),
    "Members": (2, ROOM),
    "Metrics": (3, ROOM),
    "Option": (2, "of a node; of the planner"),
    "Part": (4, ROOM),
    "Place": (3, ROOM),
    "Placed": (2, "in two planners that share nothing"),
    "Placement": (2, "of a tensor's dimension; of all models"),
    "Places": (2, ROOM),
    "Point": (2, VIEW),
    "Report": (4, "a worker's answer; the page of a run; what `hflow doctor` finds"),
    "Role": (2, "of log-probs; of a group of nodes"),
    "Row": (5, "of data; of a table; of a chart"),
    "Seat": (2, "a measured place; a node group's devices"),
    "Seconds": (2, "as a cluster file has them; by task"),
    "Setting": (2, "of an environment; of a measurement"),
    "Span": (2, "of a file; of time"),
    "Table": (2, "of a page; of prices"),
    "Text": (2, "what a view prints; a picture's text"),
    "Tree": (2, "of processes; of YAML"),
    "Value": (3, "of YAML; of a type's variable; the builder's"),
    "_Step": (2, "the runtime's and the compiler's walk over a step"),
}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package, parsed."""
    files = {file: file.with_suffix("").parts for file in sorted(PACKAGE.rglob("*.py"))}
    names = {file: ".".join(parts).removesuffix(".__init__") for file, parts in files.items()}
    return {name: ast.parse(file.read_text()) for file, name in names.items()}


def imported(module: ast.Module, known: set[str]) -> Iterator[str]:
    """Those of the package, wherever the import stands."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "imports are absolute here"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from (name for name in (full if full in known else node.module,) if name in known)


def circles(parsed: dict[str, ast.Module]) -> list[set[str]]:
    graph = nx.DiGraph()
    for name, module in parsed.items():
        graph.add_edges_from((name, other) for other in imported(module, set(parsed)))
    found = [set(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    return found + [{name} for name in nx.nodes_with_selfloops(graph)]


def test_no_circle_of_imports() -> None:
    """Imports in functions and for types alone count, too."""
    assert circles(modules()) == []


def test_a_circle_is_noticed() -> None:
    a = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.b import B"
    b = "def f():\n    import p.c"
    parsed = {name: ast.parse(text) for name, text in {"p.a": a, "p.b": b, "p.c": "from p import a"}.items()}
    assert circles(parsed | {"p": ast.parse("")}) == [{"p.a", "p.b", "p.c"}]


def lint(folder: Path) -> str:
    """What import-linter says about the package in `folder`."""
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    command = [sys.executable, "-c", program]
    told = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={"COLUMNS": "200"})
    assert "Contracts: " in told.stdout, told.stdout + told.stderr
    return told.stdout


def broken(told: str) -> set[str]:
    lines = told.splitlines()
    return {line.removesuffix(" BROKEN") for line in lines if line.endswith(" BROKEN")}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to break."""
    folder = tmp_path_factory.mktemp("walls")
    shutil.copytree(PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy("pyproject.toml", folder)
    return folder


@pytest.fixture(scope="module")
def broken_before(package: Path) -> set[str]:
    return broken(lint(package))


@pytest.mark.parametrize("contract", BREACHES)
def test_a_contract_notices_a_breach(package: Path, broken_before: set[str], contract: str) -> None:
    """That contract alone, which names the two modules."""
    name, line = BREACHES[contract]
    file = package / PACKAGE / name
    text = file.read_text()
    try:
        file.write_text(f"{text}\n\n{line}\n")
        told = lint(package)
    finally:
        file.write_text(text)
    assert broken(told) == broken_before | {contract}
    source = ".".join((PACKAGE / name).with_suffix("").parts)
    assert f"{source} -> {line.split()[-1]} " in told


def test_every_contract_has_a_breach() -> None:
    contracts = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {contract["name"] for contract in contracts} == set(BREACHES)


def defined(module: ast.Module) -> Iterator[str]:
    """Names of top-level classes and type aliases: those are assigned once and written like classes."""
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
            is_type = target.id[0].isupper() and not target.id.isupper()
            yield from [target.id] if is_type else []


def test_a_name_means_one_thing() -> None:
    counted = Counter(name for module in modules().values() for name in defined(module))
    found = {name: count for name, count in counted.items() if count > 1}
    allowed = {name: count for name, (count, _) in TWICE.items()}
    new = {name: count for name, count in found.items() if count > allowed.get(name, 1)}
    assert not new, "defined more often than once, or than the list allows: give one of them another name"
    done = {name: found.get(name, 1) for name, count in allowed.items() if count > found.get(name, 1)}
    assert not done, "defined less often by now: correct the list"
