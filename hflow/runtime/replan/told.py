"""What the user is told when a run goes on under another plan."""

from __future__ import annotations

from collections.abc import Iterator

from hflow.plan.plan import Plan
from hflow.runtime.replan.decision import planned_lengths_of
from hflow.runtime.replan.replanner import NewPlan
from hflow.units import duration, plural


def switched_text(before: Plan, chosen: NewPlan, done: int, switch_s: float, changes: str) -> str:
    """What lengths are planned for, what a step took and is expected to take, and what switching has taken;
    then what differs between the plans."""
    step = f"a step {duration(chosen.old_s)} -> {duration(chosen.new_s)}"
    model = f"the cost model says {duration(chosen.predicted_old_s)} -> {duration(chosen.predicted_new_s)}"
    why = "; ".join((*_moved(before, chosen.plan), step))
    head = f"another plan after {plural(done, 'step')}: {why} ({model}); switching took {duration(switch_s)}"
    return f"{head}\n{changes}" if changes else head


def _moved(before: Plan, after: Plan) -> Iterator[str]:
    old, new = (planned_lengths_of(plan.graph) for plan in (before, after))
    for name in old:
        was, now = f"{old[name].mean:.3g}", f"{new[name].mean:.3g}"
        if was != now:
            yield f"tokens of {name} {was} -> {now}"
