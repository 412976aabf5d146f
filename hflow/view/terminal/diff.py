"""What differs between two plans of one graph, for those who changed a pin, a cluster or a batch."""

from __future__ import annotations

from collections.abc import Iterator

from hflow import units
from hflow.plan.node_plan import NodePlan
from hflow.plan.plan import Plan
from hflow.view import words

CHANGED = "changed"
DiffLine = tuple[str, str]


def plan_diff(old: Plan, new: Plan) -> tuple[DiffLine, ...]:
    """Labelled lines: the step's time, its work, the cluster, then every node whose plan differs, in plan
    order. Where nothing does, one line says so. Nodes without a model run where their values lie: they have
    no line."""
    lines = (*_step(old, new), *_work(old, new), *_cluster(old, new), *_nodes(old, new))
    return lines or ((CHANGED, "nothing: the same layouts on the same devices"),)


def moved_nodes(old: Plan, new: Plan) -> tuple[str, ...]:
    """The nodes with a model that have another layout or other devices; micro-batches do not count."""
    before = {node.node: _place(node) for node in old.nodes}
    return tuple(n.node for n in new.nodes if n.model and before.get(n.node) != _place(n))


def _place(node: NodePlan) -> tuple[str, tuple[int, ...]]:
    return words.layout(node), node.mesh.devices


def _step(old: Plan, new: Plan) -> Iterator[DiffLine]:
    before, after = units.seconds(old.step_time_s), units.seconds(new.step_time_s)
    if old.step_time_s != new.step_time_s:
        change = f" ({new.step_time_s / old.step_time_s - 1:+.1%})" if old.step_time_s else ""
        yield CHANGED, f"step  {before} -> {after}{change}"


def _work(old: Plan, new: Plan) -> Iterator[DiffLine]:
    if old.graph.name != new.graph.name:
        yield CHANGED, f"graph  {old.graph.name} -> {new.graph.name}"
    models = [text for model in new.graph.models for text in _model(old, new, model.name)]
    if models:
        yield CHANGED, f"models  {', '.join(models)}"
    if old.tokens_per_step != new.tokens_per_step:
        before, after = units.count(old.tokens_per_step), units.count(new.tokens_per_step)
        yield CHANGED, f"tokens per step  {before} -> {after}"


def _model(old: Plan, new: Plan, name: str) -> Iterator[str]:
    before, after = ({m.name: m for m in plan.graph.models}.get(name) for plan in (old, new))
    if not before or not after:
        return
    if before.dtype != after.dtype:
        yield f"{name} {before.dtype} -> {after.dtype}"
    if old.shapes[name] != new.shapes[name]:
        yield f"{name} of another shape"


def _cluster(old: Plan, new: Plan) -> Iterator[DiffLine]:
    if old.cluster != new.cluster:
        named = old.cluster.name != new.cluster.name
        names = f"{old.cluster.name} -> {new.cluster.name}" if named else f"{new.cluster.name}, other figures"
        yield CHANGED, f"cluster  {names}"


def _nodes(old: Plan, new: Plan) -> Iterator[DiffLine]:
    before, after = ({n.node: n for n in plan.nodes} for plan in (old, new))
    for name, node in after.items():
        if name not in before:
            yield CHANGED, f"{name}  new: {words.layout(node)} @{units.devices(node.mesh.devices)}"
        elif node.model and (differences := list(_differences(before[name], node))):
            times = f"({units.seconds(before[name].time_s)} -> {units.seconds(node.time_s)})"
            yield CHANGED, f"{name}  {', '.join(differences)} {times}"
    yield from ((CHANGED, f"{name}  gone") for name in before if name not in after)


def _differences(old: NodePlan, new: NodePlan) -> Iterator[str]:
    layouts = words.layout(old), words.layout(new)
    if layouts[0] != layouts[1]:
        yield " -> ".join(layouts)
    if old.mesh.devices != new.mesh.devices:
        devices = (f"@{units.devices(node.mesh.devices)}" for node in (old, new))
        regrouped = set(old.mesh.devices) == set(new.mesh.devices)
        yield "devices in another order" if regrouped else " -> ".join(devices)
    if old.micro_batch != new.micro_batch:
        yield f"micro-batch {old.micro_batch} -> {new.micro_batch}"
    if old.cache_tokens and new.cache_tokens and old.cache_tokens != new.cache_tokens:
        yield f"KV cache {old.cache_tokens:,} -> {new.cache_tokens:,} tokens"
