"""Order the programs' instructions, and predict when each node runs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from hflow.compiler.state import Draft
from hflow.plan.program import Call
from hflow.schedule.arrange import arranged
from hflow.schedule.timed_span import steady_spans, step_time_s


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
        step_time_s=step_time_s(step),
    )
