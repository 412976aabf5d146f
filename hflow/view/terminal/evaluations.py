"""What the named evaluations of a plan measure, when they run, and what they take."""

from __future__ import annotations

from collections.abc import Iterator

from hflow import units
from hflow.graph.ir import NamedEvaluation, step_node
from hflow.plan.plan import EvaluationPlan, Plan


def evaluations(plan: Plan) -> Iterator[tuple[str, str]]:
    """``eval``, and a text for each: ``test: 200 rows (every 10 steps, start, end), 1.2 s each; 26 times, 4%
    of the run: pass@1, pass@4; rollout@test on dp8 @8-15``."""
    steps, seconds = plan.graph.steps, {named.name: named.time_s for named in plan.evaluations}
    apart = {named.name: _apart(plan, named) for named in plan.evaluations}
    own = {e.name: sum(e.is_due(done, steps) for done in range(steps + 1)) for e in plan.graph.evaluations}
    run_s = plan.step_time_s * steps + sum(times * seconds[name] for name, times in own.items())
    for evaluation in plan.graph.evaluations:
        each, times = seconds[evaluation.name], own[evaluation.name]
        part = f", {times * each / run_s:.0%} of the run" if run_s else ""
        often = "once" if times == 1 else f"{times} times"
        names = ", ".join(metric.name for metric in evaluation.metrics)
        head = f"{evaluation.name}: {units.plural(evaluation.rows, 'row')} ({occasions(evaluation)})"
        yield "eval", f"{head}, {units.seconds(each)} each; {often}{part}: {names}{apart[evaluation.name]}"


def _apart(plan: Plan, evaluation: EvaluationPlan) -> str:
    """Where the nodes run that are not where the step's are."""
    own = {node.node: node.mesh for node in evaluation.nodes if node.model}
    places = [f"{n} on {mesh.short_text}" for n, mesh in own.items() if mesh != plan.node(step_node(n)).mesh]
    return "".join(f"; {place}" for place in places)


def occasions(evaluation: NamedEvaluation) -> str:
    """``every 10 steps, start, end``."""
    every = f"every {units.plural(evaluation.every, 'step')}" if evaluation.every > 1 else "every step"
    return ", ".join([*([every] if evaluation.every else []), *evaluation.at])
