"""What nodes take, beside what is predicted from the data sheet and from what `calibrate` measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import hflow
from hflow.graph.run_config import CheckpointPolicy, RunConfig, SamplePolicy
from hflow.plan.cluster_file import load_cluster
from hflow.plan.plan import Plan
from hflow.view.measured import Compared, Metrics, compare
from scripts.gpu_acceptance.calibration import FILE
from scripts.gpu_acceptance.models import large_model
from scripts.gpu_acceptance.runs import HERE, sums
from scripts.gpu_acceptance.stage import Figures, Setting, Skipped, main, need

STEPS = 3
PLAIN = RunConfig(CheckpointPolicy(on_signal=False), export="none", samples=SamplePolicy(every=0))


def run(setting: Setting) -> Figures:
    file = setting.folder / FILE
    need(file.exists(), "run the stage calibration first, in the same folder", {})
    sizes = {"batch": 8, "n": 8, "tokens": 256} if setting.on_gpu else {"batch": 4, "n": 4, "tokens": 16}
    dtype = "bf16" if setting.on_gpu else "f32"
    params = {
        "model": large_model(setting), "rows": sums(setting.folder), "dtype": dtype, "steps": STEPS, **sizes
    }  # fmt: skip
    graph = hflow.load(HERE / "grpo.yaml", [f"params.{name}={value}" for name, value in params.items()])
    sheet, measured = (hflow.compile(graph, c) for c in (setting.cluster, load_cluster(str(file))))
    done = hflow.execute(
        measured, run_dir=setting.folder / "predictions", workers="inline", export=False, config=PLAIN
    )
    figures: Figures = {
        "before_calibrate": _nodes(sheet, done.metrics),
        "after_calibrate": _nodes(measured, done.metrics),
        "step_seconds": [line["time_s"] for line in done.metrics],
        "predicted_step_seconds": [sheet.step_time_s, measured.step_time_s],
    }
    if not setting.on_gpu:
        raise Skipped("predictions and times are those of this CPU", figures)
    return figures


def _nodes(plan: Plan, metrics: Sequence[Metrics]) -> list[Figures]:
    """Of nodes with a model: what they take is a GPU's."""
    models = {node.name for node in plan.graph.nodes if node.model}
    return [_told(each) for each in compare(plan, metrics) if each.name in models]


def _told(node: Compared) -> Figures:
    return {key: value for key, value in asdict(node).items() if key != "is_off"}


if __name__ == "__main__":
    main(run)
