"""hflow: declare an RLHF algorithm as a typed dataflow graph, compile it to a parallel plan, run it.

graph = hflow.load("algorithms/grpo.yaml")
plan = hflow.compile(graph, "clusters/local.yaml")
run = hflow.execute(plan)
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hflow.address_space import RUN_INLINE, RUN_ON_RAY, require_address_space
from hflow.diagnostics import HflowError
from hflow.display import Bundle, show_with
from hflow.importing import refuse_in_import
from hflow.version import __version__ as __version__

if TYPE_CHECKING:
    from hflow.graph.builder.builder import GraphBuilder
    from hflow.graph.ir import Graph
    from hflow.graph.run_config import CheckpointPolicy, HangPolicy, ReplanPolicy, RunConfig, SamplePolicy
    from hflow.plan.cluster import Cluster
    from hflow.plan.plan import Plan
    from hflow.runtime.run import Run

__all__ = [
    "CheckpointPolicy", "GraphBuilder", "HangPolicy", "HflowError", "ReplanPolicy", "RunConfig",
    "SamplePolicy", "compile", "execute", "load", "run_config",
]  # fmt: skip
_LATER = {  # imported when they are asked for
    "CheckpointPolicy": "hflow.graph.run_config",
    "GraphBuilder": "hflow.graph.builder.builder",
    "HangPolicy": "hflow.graph.run_config",
    "ReplanPolicy": "hflow.graph.run_config",
    "RunConfig": "hflow.graph.run_config",
    "SamplePolicy": "hflow.graph.run_config",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def load(path: str | Path, overrides: Iterable[str] = (), files: Iterable[str | Path] = ()) -> Graph:
    """The typed graph in a YAML file; `files` are partial graph files that are merged over it, `overrides`
    texts like ``params.steps=3``; one alone needs no list. In Python, `GraphBuilder` makes the same.

    Raises:
        HflowError: with everything that is wrong with the file.
    """
    from hflow.graph.load import load as load_graph

    return load_graph(Path(path), _several(overrides), _several(files))


def run_config(
    path: str | Path, overrides: Iterable[str] = (), files: Iterable[str | Path] = ()
) -> RunConfig:
    """How runs of the graph in a YAML file are kept, for `execute`: its section `run`. As `load`."""
    from hflow.graph.load import run_config as load_run_config

    return load_run_config(Path(path), _several(overrides), _several(files))


def compile(graph: Graph, cluster: Cluster | str | Path, pins: Iterable[str] = (), **options: Any) -> Plan:
    """The plan of `graph` on a cluster: a file, or the name of one in ``clusters/``.

    `pins` are texts like ``actor_train=tp2@0-1``, one alone needs no list; options as in
    `hflow.compiler.options.PlannerOptions`.

    Raises:
        HflowError: when the cluster file is wrong, or nothing fits.
        TypeError: `graph` is no graph, but a path, say.
    """
    from hflow.compiler.compile import compile_graph
    from hflow.compiler.options import PlannerOptions
    from hflow.graph.ir import Graph
    from hflow.plan.cluster_file import load_cluster

    if not isinstance(graph, Graph):
        raise TypeError(f"{graph!r} is no graph: hflow.load reads one from a file")
    if isinstance(cluster, (str, Path)):
        cluster = load_cluster(cluster)
    if "engines" in options:
        options["engines"] = _several(options["engines"])
    return compile_graph(graph, cluster, _several(pins), PlannerOptions(**options))


def execute(plan: Plan, **options: Any) -> Run:
    """Run a plan to its end.

    Args:
        options: of `hflow.runtime.execute.execute`: `run_dir`, the folder to fill; `workers`, ``inline`` for
            a plan of one device in this process; `config`, a `RunConfig`; `resume`, to go on with the run in
            `run_dir`; `export`; `address` of a Ray cluster.

    Raises:
        HflowError: as there, and HF404 where this process may map too little memory to load torch; HF205
            when a function is being imported from the script that calls this.
    """
    refuse_in_import()
    require_address_space(*(RUN_INLINE if options.get("workers") == "inline" else RUN_ON_RAY))
    from hflow.compiler.replan import replan, replan_for_lengths
    from hflow.report.run_views import RUN_VIEWS
    from hflow.runtime.execute import execute as execute_plan

    if "run_dir" in options and options["run_dir"] is not None:
        options["run_dir"] = Path(options["run_dir"])
    made: dict[str, Any] = {"views": RUN_VIEWS, "replan": replan, "replan_for_lengths": replan_for_lengths}
    return execute_plan(plan, **{**made, **options})


def _several(given: Any) -> tuple[Any, ...]:
    """A text is one, not one per letter."""
    return (given,) if isinstance(given, (str, Path)) else tuple(given)


def _graph_bundle(graph: Graph) -> Bundle:
    from hflow.view.pages.notebook import graph_bundle

    return graph_bundle(graph)


def _plan_bundle(plan: Plan) -> Bundle:
    from hflow.view.pages.notebook import plan_bundle

    return plan_bundle(plan)


def _run_bundle(run: Run) -> Bundle:
    from hflow.view.pages.notebook import run_bundle

    return run_bundle(run.folder.name, run.status, run.metrics, run.evaluations, run.evaluated)


show_with("Graph", _graph_bundle)
show_with("Plan", _plan_bundle)
show_with("Run", _run_bundle)
