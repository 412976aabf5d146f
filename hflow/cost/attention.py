"""What the tokens of a micro-batch see.

A prompt sees itself; a response sees its prompt and itself. In kernels for whole rows a prompt does so again
for each of its samples; on CPUs hflow's attention takes it once, where that saves enough.
"""

from __future__ import annotations

from hflow.cost.execution import Execution
from hflow.cost.passes import MicroBatches
from hflow.plan.shared_attention import is_worth_sharing
from hflow.plan.workload import Workload


def seen_by_rows(run: Execution, parts: MicroBatches) -> tuple[float, float]:
    """So many tokens of a micro-batch have queries, on one rank of cp, and see so many on average."""
    tokens = parts.rows * run.work.mean_sequence
    once, whole = seen_once(run.work, parts.rows, parts.prompts), parts.rows * _seen_whole(run.work)
    shares = _may_share(run) and is_worth_sharing(once, parts.tokens, whole, tokens)
    return tokens / run.mesh.cp, (once if shares else whole) / tokens


def _may_share(run: Execution) -> bool:
    """Whether the engine has attention that takes prompts once."""
    is_plain = run.mesh.cp == 1 and not run.shape.explicit_scores
    return is_plain and run.device.platform == "cpu" and not run.cluster.whole_rows


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
