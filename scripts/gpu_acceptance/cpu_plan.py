"""A plan for a CPU, while the GPU is visible: it runs, and as where there is none."""

from __future__ import annotations

from hflow.plan.cluster_file import load_cluster
from scripts.gpu_acceptance.models import small_model
from scripts.gpu_acceptance.runs import execute, sums
from scripts.gpu_acceptance.stage import Figures, Setting, Skipped, main, need

STEPS = 3
SAME = 1e-5  # of losses: sums of float32 in another order


def run(setting: Setting) -> Figures:
    params = {"model": small_model(setting.folder / "cpu_plan"), "rows": sums(setting.folder), "steps": STEPS}
    cluster, folder = load_cluster("local1"), setting.folder
    here = execute("grpo", cluster, folder / "cpu_plan_seen", params)
    need(not here.code, here.told, {})
    hidden = execute(
        "grpo", cluster, folder / "cpu_plan_hidden", params, environment={"CUDA_VISIBLE_DEVICES": ""}
    )
    need(not hidden.code, hidden.told, {})
    losses = [[m["loss.actor_train"] for m in done.metrics] for done in (here, hidden)]
    digests = [[m["digest.rollout"] for m in done.metrics] for done in (here, hidden)]
    apart = max(abs(a - b) for a, b in zip(*losses))
    figures = {"losses": losses[0], "loss_difference": apart, "digests": digests[0]}
    need(len(losses[0]) == STEPS and apart <= SAME, "losses are others than without a GPU", figures)
    need(digests[0] == digests[1], "tokens are others than without a GPU", figures)
    if not setting.on_gpu:
        raise Skipped("the plan runs; there was no GPU that it could have seen", figures)
    return figures


if __name__ == "__main__":
    main(run)
