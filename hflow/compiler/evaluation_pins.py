"""A node of a named evaluation in a layout of its own, which the user has pinned."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from hflow.compiler.candidates.meshes import refusal
from hflow.compiler.candidates.node_groups import NodeGroup
from hflow.compiler.pins import Pin
from hflow.compiler.regroup import generation_mesh
from hflow.compiler.state import Draft
from hflow.diagnostics import Diagnostic, HflowError
from hflow.graph.ir import Node
from hflow.plan.engine_registry import DEFAULT_ENGINE, profile_of
from hflow.plan.layout import Mesh
from hflow.plan.node_plan import NodePlan
from hflow.plan.sharding import spreads
from hflow.plan.strategy import Strategy


def pinned(draft: Draft, node: Node, step: NodePlan, pin: Pin) -> NodePlan:
    """The plan `step` of the node that `node` stands for, in the layout that `pin` says; what it does not say
    is as in the step.

    Raises:
        HflowError: HF302 when that is no layout for the node.
    """
    if profile_of(step.engine).server is not None:
        raise _refused(pin, node, f"the servers of `{step.node}` answer it, where they are")
    mesh = _mesh(step.mesh, pin)
    if mesh is None:
        raise _refused(pin, node, "its sizes do not multiply to its number of devices")
    engine = draft.engines.get(step.node, DEFAULT_ENGINE)
    role = "generate" if node.op == "generate" else "score"
    group = NodeGroup(node.name, node.model_use.model, role, (node,), engine=engine)
    if reason := refusal(draft, group, mesh):
        raise _refused(pin, node, reason)
    strategy = _sharing_experts(step.strategy, mesh, pin)
    if pin.etp == 1 and mesh.tp > 1 and not strategy.whole_experts:
        raise _refused(
            pin, node, f"the step's ep{step.strategy.ep} is none for it: name one, like ep{mesh.tp}"
        )
    strategy = replace(strategy, sp=step.strategy.sp and mesh.tp > 1)
    return replace(step, mesh=_near_trainer(draft, node, step.mesh, mesh), strategy=strategy)


def _sharing_experts(step: Strategy, mesh: Mesh, pin: Pin) -> Strategy:
    """With so many parts of the experts as the pin says, whole ones if it does; else as in the step, as far
    as the mesh allows."""
    ep, whole = pin.ep or step.ep, step.whole_experts if pin.etp is None else pin.etp < mesh.tp
    if spreads(mesh, ep, whole):
        return replace(step, ep=ep, whole_experts=whole)
    return replace(step, ep=gcd(ep, mesh.dp), whole_experts=False)


def _mesh(step: Mesh, pin: Pin) -> Mesh | None:
    """On the devices of the pin, else the step's; None where its sizes do not multiply to their number."""
    wanted, devices = dict(pin.sizes), pin.devices or tuple(sorted(step.devices))
    count, pp, cp = len(devices), wanted.get("pp", 1), wanted.get("cp", 1)
    copies = pp * cp  # of what dp and tp are left to split
    split = count // (copies * wanted["dp"]) if "dp" in wanted else gcd(step.tp, max(1, count // copies))
    tp = wanted.get("tp", split)
    dp = wanted.get("dp", count // (copies * max(1, tp)))
    return Mesh.of(devices, pp=pp, dp=dp, cp=cp, tp=tp) if copies * dp * tp == count else None


def _near_trainer(draft: Draft, node: Node, step: Mesh, mesh: Mesh) -> Mesh:
    """The same devices and sizes in the order in which the fewest weights move: the step's own mesh, the
    trainer's, or that one regrouped."""
    trainer = draft.node_plan(draft.graph.trainers(node.model_use.model)[0].name).mesh
    orders = (step, trainer, generation_mesh(trainer, mesh.tp, mesh.pp))
    alike = (o for o in orders if o and o.axes == mesh.axes and {*o.devices} == {*mesh.devices})
    return next(alike, mesh)


def _refused(pin: Pin, node: Node, reason: str) -> HflowError:
    return HflowError(Diagnostic("HF302", f"--pin {pin.text}: `{node.name}` cannot run so", help=reason))
