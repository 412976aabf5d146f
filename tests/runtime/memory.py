"""Plans with instructions that put memory away, written by hand into compiled ones; and what they keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hflow.cost.instances import kept_activations
from hflow.plan.frozen import moved_parameters
from hflow.plan.plan import Plan
from hflow.plan.program import Call, Instruction, Offload, Onload, Program, Release, SyncWeights
from hflow.plan.strategy import Strategy


def with_strategy(plan: Plan, node: str, strategy: Strategy) -> Plan:
    changed = tuple(replace(n, strategy=strategy) if n.node == node else n for n in plan.nodes)
    return replace(plan, nodes=changed)


def kept_bytes(plan: Plan) -> int:
    """What the plan of PPO on one device says that stays between steps: without what a checkpoint copies and
    what a shared forward pass keeps."""
    (device,) = plan.memory
    parts = sum(size for label, size in device.parts.items() if "working set" not in label)
    trained = sum(p.size for m in ("actor", "critic") for p in moved_parameters(plan.shapes[m]))
    shared = sum(kept_activations(plan.graph, plan.shapes, n) for n in plan.nodes if n.kind == "train")
    return parts - 12 * trained - shared


def put_away(plan: Plan, offloaded: Iterable[str] = (), released: Iterable[str] = ()) -> Plan:
    """The nodes `offloaded` are brought back before each call and put away after it; those `released` drop
    their own weights after it, in both programs."""
    away, dropped = frozenset(offloaded), frozenset(released)
    nodes = tuple(replace(n, offload=n.node in away) for n in plan.nodes)
    step, evaluation = (p and _put_away(p, away, dropped) for p in (plan.step, plan.evaluation))
    assert step
    return replace(plan, nodes=nodes, step=step, evaluation=evaluation)


def _put_away(program: Program, away: frozenset[str], dropped: frozenset[str]) -> Program:
    return replace(program, instructions=tuple(_around_calls(program.instructions, away, dropped)))


def _around_calls(
    instructions: Iterable[Instruction], away: frozenset[str], dropped: frozenset[str]
) -> Iterator[Instruction]:
    for i in instructions:
        if isinstance(i, Onload | Offload | Release):
            continue  # the compiler's own
        node, is_call = i.node, isinstance(i, Call)
        if is_call and node in away:
            yield Onload(node, i.devices)
        yield replace(i, after=(), donates=False) if isinstance(i, SyncWeights) else replace(i, after=())
        if is_call and node in away:
            yield Offload(node, i.devices)
        if is_call and node in dropped:
            yield Release(node, i.devices)
