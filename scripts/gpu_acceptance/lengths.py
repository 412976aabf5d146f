"""Long rows: a training step with recomputation over 8k, 16k and 32k tokens, 1.5 B parameters in bf16."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import hflow
from hflow.runtime.controller.inline_pool import InlinePool
from scripts.gpu_acceptance.models import large_model
from scripts.gpu_acceptance.runs import HERE
from scripts.gpu_acceptance.stage import Figures, Setting, Skipped, main, need

LENGTHS = {"cuda": (8192, 16384, 32768), "cpu": (256, 512, 1024)}
RESPONSE = 128  # of each row: as many rows of logits
PINS = ("actor_train=recompute,micro1",)


def run(setting: Setting) -> Figures:
    figures: Figures = {"lengths": {}}
    for length in LENGTHS[setting.device.type]:
        try:
            figures["lengths"][length] = _step(setting, length)
        except (hflow.HflowError, torch.OutOfMemoryError) as error:
            need(False, f"{length} tokens: {error}", figures)
    if not setting.on_gpu:
        raise Skipped("short rows run on this CPU; memory and time of long ones are a GPU's", figures)
    return figures


def _step(setting: Setting, length: int) -> Figures:
    params = {
        "model": large_model(setting), "rows": _rows(setting.folder, length), "dtype": "bf16", "batch": 1,
        "prompt": length - RESPONSE, "response": RESPONSE, "lr": 1e-5,
    }  # fmt: skip
    graph = hflow.load(HERE / "sft.yaml", [f"params.{name}={value}" for name, value in params.items()])
    plan = hflow.compile(graph, setting.cluster, PINS)
    pool = InlinePool(setting.device.type)
    try:
        pool.form(1)
        pool.call("load", plan)
        pool.call("run", 0)  # the first has kernels to load
        if setting.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        with setting.timed() as seconds:
            [report] = pool.call("run", 1)
        loss, weight = report["metrics"]["actor_train.loss"]
    finally:
        pool.close()
    planned = plan.memory[0].peak_bytes
    figures: Figures = {
        "seconds": seconds(),
        "planned_bytes": planned,
        "loss": loss / weight,
    }
    if setting.on_gpu:
        peak = torch.cuda.max_memory_allocated()
        figures |= {"peak_bytes": peak, "peak_over_planned": peak / planned}
        torch.cuda.empty_cache()
    return figures


def _rows(folder: Path, length: int) -> Path:
    """Two rows of so many characters, which are tokens; `=` and the end token are added."""
    question, answer = "1" * (length - RESPONSE - 1), "2" * (RESPONSE - 1)
    path = folder / f"rows{length}.jsonl"
    path.write_text((json.dumps({"question": question, "answer": answer}) + "\n") * 2)
    return path


if __name__ == "__main__":
    main(run)
