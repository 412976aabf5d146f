"""The dtype of models whose graph leaves it to the cluster: what its devices multiply fastest.

Like the date of chat templates it is part of the graph that a plan holds, so that a run keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hflow.graph.ir import Graph, Model, WeightDType
from hflow.plan.cluster import Cluster


def with_dtypes(graph: Graph, cluster: Cluster) -> Graph:
    """`graph`, in which every model has a dtype. Where none was said it is bf16 on CUDA, where f32 products
    take 15 times as long (H100, data sheet), and f32 on CPUs, where runs then draw the same tokens under
    every plan."""
    fastest: WeightDType = "bf16" if cluster.device.platform == "cuda" else "f32"
    return _with(graph, lambda _: fastest)


def keep_dtypes(former: Graph, graph: Graph) -> Graph:
    """`graph`, in which models whose dtype was not said have that of the `former` graph, which a run began
    with: its checkpoints hold weights in it."""
    known: dict[str, WeightDType] = {model.name: model.weight_dtype for model in former.models}
    return _with(graph, lambda model: known.get(model.name))


def _with(graph: Graph, dtype_of: Callable[[Model], WeightDType | None]) -> Graph:
    """`graph`, in which models that leave their dtype open have their `dtype_of`, if there is one. With the
    base of another model, they have its dtype."""
    decided = {m.name: m.dtype if m.dtype != "auto" else dtype_of(m) or m.dtype for m in graph.models}
    models = tuple(replace(m, dtype=decided[m.base_owner]) for m in graph.models)
    return graph if models == graph.models else replace(graph, models=models)
