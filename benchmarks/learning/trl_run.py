"""TRL's trainers on the sums of benchmarks/learning.py; runs in an environment that has TRL and not hflow.

    python trl_run.py JOB.json

The job names the algorithm, the folders of the model to begin with and of the one to write, a file of prompts
with their answers, and what hflow's files say: rows, samples, steps, learning rate and seed.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """As `hflow.ops.rewards.exact_match`."""
    return [float(text.strip() == sought.strip()) for text, sought in zip(completions, answer)]


def settings(job: dict[str, Any]) -> dict[str, Any]:
    """AdamW and its limit on gradients are TRL's by default as hflow's are; the rest is said."""
    return {
        "output_dir": f"{job['to']}-trainer",
        "seed": job["seed"],
        "max_steps": job["updates"],
        "learning_rate": job["lr"],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "per_device_train_batch_size": job["minibatch"],
        "gradient_accumulation_steps": 1,
        "steps_per_generation": job["rows"] // job["minibatch"],
        "num_generations": job["samples"],
        "max_completion_length": job["max_new_tokens"],
        "temperature": 1.0,
        "beta": job["kl_coef"],
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    rows = json.loads(Path(job["prompts"]).read_text())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job["from"])
    model = AutoModelForCausalLM.from_pretrained(job["from"], dtype=torch.float32, attn_implementation="sdpa")
    if job["algorithm"] == "grpo":
        kind, args = GRPOTrainer, GRPOConfig(loss_type="grpo", epsilon=job["clip"], **settings(job))
    else:
        kind, args = RLOOTrainer, RLOOConfig(**settings(job))
    trainer = kind(model, right, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    model.save_pretrained(job["to"])


main()
