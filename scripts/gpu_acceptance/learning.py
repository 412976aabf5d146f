"""Supervised, then GRPO on what it exported: both run to their end without Ray, and both learn."""

from __future__ import annotations

from statistics import mean

from scripts.gpu_acceptance.models import small_model
from scripts.gpu_acceptance.runs import execute, sums
from scripts.gpu_acceptance.stage import Figures, Setting, Skipped, main, need

SFT_STEPS, GRPO_STEPS = 60, 20


def run(setting: Setting) -> Figures:
    folder, rows = setting.folder, sums(setting.folder)
    model = small_model(folder / "learning")
    sft = execute(
        "sft", setting.cluster, folder / "learning_sft", {"model": model, "rows": rows, "steps": SFT_STEPS}
    )
    need(not sft.code, sft.told, {})
    losses = [m["loss.actor_train"] for m in sft.metrics]
    figures: Figures = {"sft_loss": [losses[0], losses[-1]]}
    need(losses[-1] < 0.8 * losses[0], "the supervised loss does not fall", figures)
    taught = sft.folder / "export" / "actor"
    grpo = execute(
        "grpo",
        setting.cluster,
        folder / "learning_grpo",
        {"model": taught, "rows": rows, "steps": GRPO_STEPS, "lr": 1e-3},
    )
    need(not grpo.code, grpo.told, figures)
    rewards = [m["reward_mean"] for m in grpo.metrics]
    figures["reward"] = [mean(rewards[:5]), mean(rewards[-5:])]
    figures["mismatch"] = max(m["actor_train.mismatch"] for m in grpo.metrics)
    figures["grpo_step_seconds"] = grpo.metrics[-1]["time_s"]
    need(figures["reward"][1] > figures["reward"][0], "the reward does not rise", figures)
    if not setting.on_gpu:
        raise Skipped("both learn on this CPU", figures)
    return figures


if __name__ == "__main__":
    main(run)
