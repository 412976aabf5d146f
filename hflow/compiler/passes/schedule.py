"""Order the programs' instructions, and predict when each node runs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from hflow.compiler.state import Draft
from hflow.plan.plan import EvaluationPlan
from hflow.plan.program import Call
from hflow.schedule.arrange import arranged
from hflow.schedule.timed_span import spans, steady_spans, step_time_s


def schedule(draft: Draft) -> Draft:
    """Fill in when nodes start in a step of a long run, and what all their executions in it take."""
    step = arranged(draft.step)
    starts: dict[str, float] = {}
    times: dict[str, float] = defaultdict(float)
    for span in (s for s in steady_spans(step) if isinstance(s.instruction, Call)):
        node = span.instruction.node
        starts[node] = min(span.start_s, starts.get(node, span.start_s))
        times[node] += span.instruction.time_s
    return replace(
        draft,
        nodes=tuple(replace(n, start_s=starts[n.node], time_s=times[n.node]) for n in draft.nodes),
        step=step,
        evaluation=arranged(draft.evaluation) if draft.evaluation else None,
        evaluations=tuple(map(_scheduled, draft.evaluations)),
        step_time_s=step_time_s(step),
    )


def _scheduled(evaluation: EvaluationPlan) -> EvaluationPlan:
    """It runs between steps, one at a time: what it takes is the end of its last instruction."""
    program = arranged(evaluation.program)
    timed = spans(program)
    starts = {s.instruction.node: s.start_s for s in reversed(timed) if isinstance(s.instruction, Call)}
    nodes = tuple(replace(n, start_s=starts.get(n.node, 0.0)) for n in evaluation.nodes)
    return replace(
        evaluation, program=program, nodes=nodes, time_s=max((s.end_s for s in timed), default=0.0)
    )
