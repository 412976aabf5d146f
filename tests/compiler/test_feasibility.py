"""What fits where: the smallest clusters on which HybridFlow was run (arXiv:2409.19256, section 8), A100-80G,
prompts and responses of 1,024 tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hflow.compiler.compile import compile_graph, new_draft
from hflow.compiler.options import PlannerOptions
from hflow.compiler.passes.candidates import candidates
from hflow.compiler.passes.weight_edges import weight_edges
from hflow.compiler.planner.search import search
from hflow.compiler.planner.search_space import SearchSpace
from hflow.compiler.state import Draft
from hflow.diagnostics import HflowError
from hflow.plan.cluster_file import load_cluster
from hflow.plan.plan import Plan
from hflow.plan.program import Onload
from tests.compiler.workloads import large

SIZES = ("7b", "13b", "34b", "70b")
SMALLEST = [("ppo", size, gpus) for size, gpus in zip(SIZES, (8, 16, 32, 64))]
SMALLEST += [("remax", size, gpus) for size, gpus in zip(SIZES, (8, 8, 16, 32))]


@pytest.mark.parametrize(("algorithm", "size", "gpus"), SMALLEST)
def test_the_papers_smallest_runs_fit_without_offload(algorithm: str, size: str, gpus: int) -> None:
    assert _fits(_without_offload(_draft(algorithm, size, gpus)))


@pytest.mark.parametrize(("size", "gpus"), [("34b", 16), ("70b", 32)])
def test_half_of_that_needs_offload_and_says_so(size: str, gpus: int) -> None:
    assert not _fits(_without_offload(_draft("ppo", size, gpus)))
    plan = _plan("ppo", size, gpus)
    offloaded = [n.node for n in plan.nodes if n.offload]
    moved = {i.node for i in plan.step.instructions if isinstance(i, Onload) and i.time_s > 0}
    assert offloaded and moved == set(offloaded)
    assert all(m.peak_bytes <= m.capacity_bytes for m in plan.memory)


@pytest.mark.parametrize(("size", "gpus"), [("70b", 8), ("34b", 8), ("70b", 16)])
def test_what_cannot_fit_is_refused(size: str, gpus: int) -> None:
    with pytest.raises(HflowError) as caught:
        _plan("ppo", size, gpus)
    assert {d.code for d in caught.value.diagnostics} <= {"HF304", "HF305"}


def _plan(algorithm: str, size: str, gpus: int) -> Plan:
    """The first plan that fits."""
    options = PlannerOptions(budget_s=0.0)
    return compile_graph(large(algorithm, f"llama-{size}"), load_cluster(f"a100x{gpus}"), (), options)


def _draft(algorithm: str, size: str, gpus: int) -> Draft:
    graph = large(algorithm, f"llama-{size}")
    return candidates(weight_edges(new_draft(graph, load_cluster(f"a100x{gpus}"))))


def _without_offload(draft: Draft) -> Draft:
    resident = {
        group: {n: tuple(o for o in each if not o.offload) for n, each in options.items()}
        for group, options in draft.candidates.items()
    }
    some = {group: {n: each for n, each in options.items() if each} for group, options in resident.items()}
    return replace(draft, candidates=some)


def _fits(draft: Draft) -> bool:
    if not all(draft.candidates.values()):
        return False
    return search(SearchSpace(draft), budget_s=0.0).choice is not None
