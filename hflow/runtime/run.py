"""What a run did, as `hflow.execute` returns it and as summary.json says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hflow.diagnostics import Diagnostic
from hflow.display import Displayed
from hflow.plan.plan import Plan

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class Run(Displayed):
    """`metrics`: the lines of metrics.jsonl; `evaluations`: the metric of `eval` by finished steps;
    `evaluated`: those of the named evaluations, each by its key (``eval/test/pass@1``)."""

    folder: Path
    status: Literal["running", "finished", "failed", "interrupted"] = "running"
    metrics: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    evaluations: dict[int, float] = field(default_factory=dict[int, float])
    evaluated: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    wall_s: float = 0.0
    diagnostics: tuple[Diagnostic, ...] = ()

    def samples(self, step: int | None = None) -> pa.Table:
        """What was sampled in those steps of which samples were kept, or in one of them: a row for each text,
        with its prompt, response, rewards and what else `docs/running.md` lists.

        Raises:
            HflowError: HF407 when there are none of this step, or a file is damaged.
        """
        from hflow.runtime.samples.files import read_samples

        return read_samples(self.folder, step)


def summary(plan: Plan, run: Run) -> dict[str, Any]:
    """The object of summary.json."""
    from hflow.runtime.controller.plan_history import plan_began
    from hflow.runtime.samples.files import sample_files

    step_s = sum(m["time_s"] for m in run.metrics)
    evaluations = run.evaluations
    before, after = evaluations.get(0), evaluations.get(plan.graph.steps)
    named = {
        key: {"before": by.get(0), "after": by.get(plan.graph.steps), "by_step": by}
        for key, by in run.evaluated.items()
    }
    sampled = {"samples": len(files)} if (files := sample_files(run.folder)) else {}
    return {
        "status": run.status,
        "steps": len(run.metrics),
        "wall_s": run.wall_s,
        "tokens_per_s": sum(m["tokens"] for m in run.metrics) / step_s if step_s else 0.0,
        "left_out": left_out(run.metrics[-1]) if run.metrics else {},
        "eval": {"before": before, "after": after, "by_step": evaluations} if evaluations else None,
        **({"evaluations": named} if named else {}),
        "plan_hash": plan.hash,
        **({"plan_step": began} if (began := plan_began(run.folder)) else {}),
        "graph": plan.graph.name,
        "seed": plan.graph.seed,
        **sampled,
    }


LEFT_OUT = {
    "filtered_rows": "filtered",
    "dropped_rows": "too long",
    "duplicate_rows": "duplicate",
    "set_aside_rows": "of a held-out prompt",
}


def left_out(metrics: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """How many rows each data node never draws, by reason, from a line of metrics.jsonl."""
    found: dict[str, dict[str, int]] = {}
    for name, value in metrics.items():
        node, _, metric = name.rpartition(".")
        if node and metric in LEFT_OUT:
            found.setdefault(node, {})[LEFT_OUT[metric]] = int(value)
    return found
