"""A run that needs more memory than there is ends with HF401; neither memory nor processes are left."""

from __future__ import annotations

from dataclasses import replace

import psutil
import torch

from hflow.plan.cluster import Cluster
from scripts.gpu_acceptance.models import large_model, small_model
from scripts.gpu_acceptance.runs import execute, sums
from scripts.gpu_acceptance.stage import Figures, Setting, Skipped, main, need

TOO_MANY = {"batch": 256, "n": 64, "tokens": 2048}
LEFT_BYTES = 2**28  # that may be missing: this process has a context of its own
THOUSAND = 1000


def run(setting: Setting) -> Figures:
    if not setting.on_gpu:
        raise Skipped("there is no memory of a GPU to run out of", _ends_well(setting))
    before = torch.cuda.mem_get_info()[0]
    params = {"model": large_model(setting), "rows": sums(setting.folder), "dtype": "bf16", **TOO_MANY}
    done = execute("grpo", roomy(setting.cluster), setting.folder / "too_large", params)
    after = torch.cuda.mem_get_info()[0]
    error = next((line for line in done.told.splitlines() if line.startswith("error[")), "")
    figures: Figures = {"exit_code": done.code, "error": error[:300], "missing_bytes": before - after}
    need(done.code == 1 and error.startswith("error[HF401]"), "it does not end with HF401", figures)
    need("out of memory" in done.told.lower(), "the error does not say that memory ran out", figures)
    need("Traceback" not in done.told, "it prints a traceback", figures)
    need(done.summary["status"] == "failed", f"its status is {done.summary['status']}", figures)
    need(before - after < LEFT_BYTES, "memory of the device is still taken", figures)
    left = [child.name() for child in psutil.Process().children(recursive=True)]
    need(not left, f"processes are left: {left}", figures)
    return figures


def roomy(cluster: Cluster) -> Cluster:
    """As if it had a thousand times the memory, so that the planner takes large micro-batches."""
    device = replace(cluster.device, memory_bytes=THOUSAND * cluster.device.memory_bytes, reserve_bytes=0)
    return replace(cluster, device=device, host_link=None, host_memory_bytes=None)


def _ends_well(setting: Setting) -> Figures:
    """What runs here: the same run, which has enough."""
    params = {"model": small_model(setting.folder / "enough"), "rows": sums(setting.folder), "steps": 1}
    done = execute("grpo", roomy(setting.cluster), setting.folder / "enough_run", params)
    need(not done.code, done.told, {})
    return {"exit_code": done.code}


if __name__ == "__main__":
    main(run)
