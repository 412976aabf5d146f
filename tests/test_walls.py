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
    "imports go one way": ("graph/types.py", "import hflow.plan.layout"),
    "the runtime executes plans and makes none": ("runtime/cores.py", "import hflow.schedule.arrange"),
    "what a laptop needs loads neither torch nor Ray": ("view/picture/svg.py", "import torch"),
    "graph: source, inference, checks, files": ("graph/infer/draft.py", "import hflow.graph.load"),
    "compiler: passes, planner, candidates": (
        "compiler/candidates/meshes.py", "import hflow.compiler.planner.search",
    ),
    "engines know neither workers nor Ray": ("runtime/engines/protocol.py", "import ray"),
    "workers know no engine that runs models": (
        "runtime/worker/models.py", "import hflow.runtime.engines.sglang.options",
    ),
    "engines borrow nothing from each other": (
        "runtime/engines/sglang/options.py", "import hflow.runtime.engines.megatron.head",
    ),
}  # fmt: skip


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
    """No class and no alias of a type has the name of another one anywhere in the package."""
    counted = Counter(name for module in modules().values() for name in defined(module))
    assert [name for name, count in counted.items() if count > 1] == []
