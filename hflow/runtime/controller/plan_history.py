"""``plans/`` of a run folder: the plans of a run that went on under others, each by the step that it began
with. A run that had one plan only has none: that is ``plan.json``."""

from __future__ import annotations

import re
from pathlib import Path

from hflow.plan.plan import Plan, to_json
from hflow.whole_file import write_whole

PLANS = "plans"
_NAME = re.compile(r"step-(\d+)\.json")


def plan_steps(run: Path) -> list[int]:
    """The first step of each plan that is recorded, in order."""
    names = (_NAME.fullmatch(file.name) for file in (run / PLANS).glob("step-*.json"))
    return sorted(int(name[1]) for name in names if name)


def record_plans(run: Path, before: Plan, plan: Plan, step: int) -> None:
    """That a run goes on with `step` under `plan`; `before`: its first plan, where none is recorded yet.

    Raises:
        HflowError: HF407 when it cannot be written.
    """
    if not plan_steps(run):
        _write(run, before, 0)
    _write(run, plan, step)


def resume_plans(run: Path, plan: Plan, step: int) -> None:
    """That a run whose plans are recorded makes `step` and those after it under `plan`: plans that began
    later have no steps any more.

    Raises:
        HflowError: HF407 as `record_plans`.
    """
    if not (steps := plan_steps(run)):
        return
    for later in (other for other in steps if other >= step):
        _file(run, later).unlink()
    last = max((other for other in steps if other < step), default=None)
    if last is None or _file(run, last).read_text() != _text(plan):
        _write(run, plan, step)


def plan_began(run: Path) -> int:
    """The step with which the present plan began."""
    return max(plan_steps(run), default=0)


def _write(run: Path, plan: Plan, step: int) -> None:
    write_whole(_file(run, step), _text(plan), "HF407")


def _text(plan: Plan) -> str:
    return to_json(plan) + "\n"


def _file(run: Path, step: int) -> Path:
    return run / PLANS / f"step-{step:08d}.json"
