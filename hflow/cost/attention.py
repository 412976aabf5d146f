"""What the tokens of a micro-batch see.

A prompt sees itself; a response sees its prompt and itself. In kernels for whole rows a prompt does so again
for each of its samples; hflow's own, on CPUs, take it once.
"""

from __future__ import annotations

from hflow.cost.execution import Execution
from hflow.cost.passes import MicroBatches
from hflow.plan.workload import Workload


def seen_by_rows(run: Execution, parts: MicroBatches) -> tuple[float, float]:
    """So many tokens of a micro-batch have queries, on one rank of cp, and see so many on average."""
    tokens = parts.rows * run.work.mean_sequence
    shares = run.mesh.cp == 1 and not run.shape.explicit_scores and not run.cluster.whole_rows
    if shares and run.device.platform == "cpu":
        return tokens, seen_once(run.work, parts.rows, parts.prompts) / tokens
    return tokens / run.mesh.cp, parts.rows * _seen_whole(run.work) / tokens


def seen_once(work: Workload, rows: float, prompts: float) -> float:
    """Tokens times what each sees, of `rows` rows with so many different prompts, each taken once."""
    prompt, response = (
        mean**2 + (lengths.variance if lengths else 0.0)
        for mean, lengths in ((work.mean_prompt, work.prompts), (work.mean_response, work.responses))
    )
    return prompts * prompt / 2 + rows * (work.mean_prompt * work.mean_response + response / 2)


def _seen_whole(work: Workload) -> float:
    """Of one row, with its prompt."""
    return work.mean_sequence * work.surrounding / 2
