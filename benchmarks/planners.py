"""hflow's planner against HybridFlow's own (arXiv:2409.19256, Algorithms 1 and 2): steps, and time to plan.

    python benchmarks/planners.py [--algorithms ppo,remax] [--models 7B] [--gpus 8,16] [--budget 20] [--save]

Both planners are given the same graph, cluster and cost model, of the paper's testbed and workload
(`benchmarks/paper.py`); both plans are lowered, scheduled and timed alike. Planning is everything up to a
placement: candidates and search. Beside it stands what the paper's figure 16 (read from pixels) says of
HybridFlow's own implementation, for PPO on its machines. Without offload, HybridFlow's planner
finds no plan on some small clusters. The last line is one JSON object; with --save it also goes to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import geometric_mean, median
from typing import Any

from benchmarks.paper import GPUS, NOTHING_FITS, ROOT, SMALLEST, at_the_papers_size
from hflow.compiler.compile import compile_graph
from hflow.compiler.options import Planner, PlannerOptions
from hflow.diagnostics import HflowError
from hflow.graph.ir import Graph
from hflow.plan.cluster import Cluster
from hflow.plan.cluster_file import load_cluster

ALGORITHMS = ("ppo", "remax", "safe_rlhf")
FIGURE_16 = {("7B", 8): 11.2, ("7B", 16): 33.4, ("13B", 32): 112.0, ("34B", 64): 402.0, ("70B", 96): 870.0}
FIGURE_16 |= {("70B", 128): 1518.0}


@dataclass(frozen=True)
class Planned:
    """A plan's step and what it took to find; `gap`: of the plans searched, None if nothing is proven."""

    step_s: float
    planning_s: float
    gap: float | None
    explored: int


@dataclass(frozen=True)
class Case:
    """None where no plan fits. `published_s`: what HybridFlow's planner takes by figure 16."""

    algorithm: str
    model: str
    gpus: int
    exact: Planned | None
    hybridflow: Planned | None
    published_s: float | None

    @property
    def ratio(self) -> float | None:
        """HybridFlow's step by hflow's."""
        return self.hybridflow.step_s / self.exact.step_s if self.exact and self.hybridflow else None


def main() -> None:
    parser = argparse.ArgumentParser(description="hflow's planner against HybridFlow's own.")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--models", default=",".join(SMALLEST), help="which of 7B,13B,34B,70B")
    parser.add_argument("--gpus", default=",".join(map(str, GPUS)), help="numbers of GPUs, whole hosts of 8")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for hflow's search")
    parser.add_argument("--save", action="store_true", help="also write results/planners-DATE.json")
    options = parser.parse_args()
    sizes = [(model, int(n)) for model in options.models.split(",") for n in options.gpus.split(",")]
    found: list[Case] = []
    for algorithm in options.algorithms.split(","):
        print(HEADER)
        for case in cases(algorithm, sizes, options.budget):
            print(row(case), flush=True)
            found.append(case)
    line = json.dumps(report(found))
    if options.save:
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        (ROOT / f"benchmarks/results/planners-{date}.json").write_text(line + "\n")
    print(line)


def cases(algorithm: str, sizes: Sequence[tuple[str, int]], budget_s: float) -> Iterator[Case]:
    """Those for which at least one of the planners finds a plan."""
    one_host = load_cluster(ROOT / "clusters/a100x8.yaml")
    for model, gpus in sizes:
        graph = at_the_papers_size(algorithm, model)
        cluster = replace(one_host, name=f"a100x{gpus}", hosts=gpus // one_host.devices_per_host)
        exact = planned(graph, cluster, "exact", budget_s)
        hybridflow = planned(graph, cluster, "hybridflow", budget_s)
        published = FIGURE_16.get((model, gpus)) if algorithm == "ppo" else None
        if exact or hybridflow:
            yield Case(algorithm, model, gpus, exact, hybridflow, published)


def planned(graph: Graph, cluster: Cluster, planner: Planner, budget_s: float) -> Planned | None:
    passed: dict[str, float] = {}
    start = time.perf_counter()
    try:
        plan = compile_graph(
            graph,
            cluster,
            options=PlannerOptions(planner=planner, budget_s=budget_s),
            after=lambda name, _: passed.update({name: time.perf_counter() - start}),
        )
    except HflowError as error:
        if all(d.code in NOTHING_FITS for d in error.diagnostics):
            return None
        raise
    return Planned(plan.step_time_s, passed["place"], plan.search.searched_gap, plan.search.explored)


HEADER = (
    f"{'':24}{'hflow':>10}{'HybridFlow':>12}{'ratio':>7}{'plans in':>12}{'HybridFlow':>12}{'figure 16':>11}"
)


def row(case: Case) -> str:
    label = f"{case.algorithm:>10} {case.model:>4} {case.gpus:>4} GPUs"
    steps = f"{_s(case.exact and case.exact.step_s):>10}{_s(case.hybridflow and case.hybridflow.step_s):>12}"
    ratio = f"{case.ratio:.2f}" if case.ratio else "-"
    exact, other = case.exact and case.exact.planning_s, case.hybridflow and case.hybridflow.planning_s
    gap = f"  gap {case.exact.gap:.1%}" if case.exact and case.exact.gap else ""
    return f"{label}{steps}{ratio:>7}{_s(exact):>12}{_s(other):>12}{_s(case.published_s):>11}{gap}"


def _s(seconds: float | None) -> str:
    return f"{seconds:,.1f} s" if seconds is not None else "-"


def report(found: Sequence[Case]) -> dict[str, Any]:
    """Ratios and times over all cases, and the cases."""
    ratios = [case.ratio for case in found if case.ratio]
    ours = [case.exact.planning_s for case in found if case.exact]
    theirs = [case.hybridflow.planning_s for case in found if case.hybridflow]
    speedups = [c.published_s / c.exact.planning_s for c in found if c.exact and c.published_s]
    return {
        "benchmark": "planners",
        "ratio": _spread(ratios),
        "exact_planning_s": _spread(ours),
        "hybridflow_planning_s": _spread(theirs),
        "figure_16_by_exact": _spread(speedups),
        "gaps": sum(1 for case in found if case.exact and case.exact.gap),
        "cases": [_rounded(asdict(case) | {"ratio": case.ratio}) for case in found],
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    figures = {
        "min": min(values),
        "median": median(values),
        "geometric_mean": geometric_mean(values),
        "max": max(values),
    }
    return {name: round(value, 3) for name, value in figures.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
