"""hflow names nothing that the oldest torch lacks; `scripts/other_torch.sh oldest` runs the engines there."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

OLDEST = "torch>=2.11"
# What `dir` tells in 2.13 and not in 2.11: of torch, torch.distributed, ProcessGroup, Tensor, functional.
NEWER = {
    "all_gather_single",
    "all_gather_single_coalesced",
    "const_data_ptr",
    "linear_cross_entropy",
    "record_comm",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "thread_safe_generator",
    "use_pg_for_symm_mem_rendezvous",
}


def attributes(text: str) -> Iterator[tuple[str, int]]:
    """``dist.all_gather`` with its line; not what `getattr` asks for."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            yield node.attr, node.lineno


def test_the_list_is_of_the_oldest_torch() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert OLDEST in project["dependencies"]


def test_nothing_newer_is_used() -> None:
    files = [*Path("hflow").rglob("*.py"), *Path("benchmarks").rglob("*.py")]
    found = [(str(f), line, name) for f in files for name, line in attributes(f.read_text()) if name in NEWER]
    assert len(files) > 100 and not found
