"""The worked example of the planner's README is what the planner does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest

from hflow.compiler.compile import new_draft
from hflow.compiler.passes.candidates import candidates
from hflow.compiler.passes.weight_edges import weight_edges
from hflow.compiler.planner.branch import Branch
from hflow.compiler.planner.frontier import Frontier
from hflow.compiler.planner.incumbent import Incumbent
from hflow.compiler.planner.placements import Allocation, allocations
from hflow.compiler.planner.search import search
from hflow.compiler.planner.search_space import SearchSpace
from hflow.plan.cluster_file import load_cluster
from tests.compiler.workloads import ROOT, large

README = ROOT / "hflow/compiler/planner/README.md"


@pytest.fixture
def space() -> SearchSpace:
    graph = large("ppo", "llama-7b", "params.batch=256", "params.holdout=64")
    draft = candidates(weight_edges(new_draft(graph, load_cluster("a100x8"))))
    return SearchSpace(draft)


def test_the_worked_example(space: SearchSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counter[str]()
    first: list[float] = []

    def watch(cls: type, name: str, tell: Callable[[Any, Any], None]) -> None:
        method = getattr(cls, name)

        def watched(self: Any, *args: Any) -> Any:
            found = method(self, *args)
            tell(self, found)
            return found

        monkeypatch.setattr(cls, name, watched)

    def bounded(kind: str) -> Callable[[Any, float], None]:
        return lambda self, bound_s: counted.update({kind: 1, f"{kind} cut": bound_s >= self.best.limit_s})

    watch(Frontier, "_busiest_s", bounded("busiest"))
    watch(Frontier, "_step_s", bounded("step"))
    watch(Branch, "bound_s", bounded("looked"))
    watch(Branch, "raised_s", lambda *_: counted.update(["searched"]))
    watch(Incumbent, "offer", lambda self, _: first.append(self.choice.step_s))
    found = search(space, None)
    assert found.choice and found.gap == 0
    partitions = list(space.partitions())
    every = list(_allocations(space))
    assert _figures() == {
        "node groups": f"{len(space.groups)}",
        "partitions of the 4 models": f"{len(partitions)}",
        "allocations": f"{len(every)}",
        "full assignments in the search space": f"{sum(_full_assignments(space, a) for a in every):,}",
        "first plan (all models on 8 devices)": f"{first[0]:.2f} s",
        "partial allocations bounded by their busiest set": _of(counted, "busiest"),
        "bounded by the step's bound": _of(counted, "step"),
        "allocations looked at more closely": f"{counted['looked']}",
        "allocations searched": f"{counted['searched']}",
        "full assignments priced": f"{found.explored}",
        "best step": f"{found.choice.step_s:.2f} s",
        "proven: no plan of the space takes less than": f"{found.bound_s:.2f} s",
    }


def test_its_files_and_classes_exist() -> None:
    folder, text = README.parent, README.read_text()
    for name in re.findall(r"`([\w/]+\.py)`", text):
        assert any((root / name).exists() for root in (folder, folder.parent, ROOT)), name
    sources = "".join(file.read_text() for file in folder.parent.rglob("*.py"))
    for name in re.findall(r"`([A-Z]\w+)`", text):
        assert f"class {name}" in sources, name


def _allocations(space: SearchSpace) -> Iterator[Allocation]:
    for partition, spread, _ in space.colocations():
        sizes = [space.sizes(members) for members in partition]
        for allocation in allocations(partition, sizes, space.num_devices):
            yield Allocation(allocation.partition, allocation.counts, spread)


def _full_assignments(space: SearchSpace, allocation: Allocation) -> int:
    return prod(map(len, space.assignments(allocation).values()))


def _of(counted: Counter[str], kind: str) -> str:
    return f"{counted[kind]}, of which {counted[f'{kind} cut']} cut"


def _figures() -> dict[str, str]:
    """The table of the example."""
    example = Path(README).read_text().partition("## A worked example")[2]
    return dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", example, re.MULTILINE))
