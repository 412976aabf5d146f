"""What a step of GRPO takes of the GPU, beside what its plan says: 1.5 B parameters in bf16."""

from __future__ import annotations

import torch

import hflow
from hflow.runtime.controller.inline_pool import InlinePool
from scripts.gpu_acceptance.models import large_model
from scripts.gpu_acceptance.runs import HERE, sums
from scripts.gpu_acceptance.stage import Figures, Setting, Skipped, main, need

STEPS = 2
TOLERANCE = 1.05  # over what the plan counts
PINS = ("actor_train=offload", "ref_logprobs=offload")


def run(setting: Setting) -> Figures:
    sizes = {"batch": 8, "n": 8, "tokens": 512} if setting.on_gpu else {"batch": 2, "n": 2, "tokens": 8}
    params = {"model": large_model(setting), "rows": sums(setting.folder), "dtype": "bf16", **sizes}
    graph = hflow.load(HERE / "grpo.yaml", [f"params.{name}={value}" for name, value in params.items()])
    plan = hflow.compile(graph, setting.cluster, PINS if setting.on_gpu else ())
    [planned] = plan.memory
    pool = InlinePool(setting.device.type)
    try:
        pool.form(1)
        pool.call("load", plan)
        for step in range(STEPS):
            pool.call("run", step)
        figures: Figures = {"planned_bytes": planned.peak_bytes, "planned_parts": dict(planned.parts)}
        if not setting.on_gpu:
            raise Skipped("the plan runs; a CPU's allocator does not tell its peak", figures)
        figures |= _measured(planned.peak_bytes)
    finally:
        pool.close()
    torch.cuda.empty_cache()
    figures["free_after_close_bytes"] = torch.cuda.mem_get_info()[0]
    over = figures["peak_over_planned"]
    need(over <= TOLERANCE, f"the peak is {over:.2f} times what the plan counts", figures)
    kept = figures["kept_between_steps_bytes"]
    need(kept <= planned.peak_bytes / 2, "what is offloaded stays on the device", figures)
    return figures


def _measured(planned_bytes: int) -> Figures:
    """After the last step: what was put away is in the host's memory."""
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    kept = torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_bytes": peak,
        "peak_over_planned": peak / planned_bytes,
        "reserved_bytes": reserved,
        "reserved_over_planned": reserved / planned_bytes,
        "kept_between_steps_bytes": kept,
        "free_after_offload_bytes": free,
        "outside_torch_bytes": total - free - torch.cuda.memory_reserved(),
    }


if __name__ == "__main__":
    main(run)
