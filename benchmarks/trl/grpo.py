"""TRL's GRPOTrainer in benchmarks/step_trl.py; runs in an environment that has TRL and not hflow."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from work import QUIET, SETTINGS, Contest, Turns


class Stepwise(TrainerCallback):
    """Every step waits for its turn, and tells how many tokens it made."""

    def __init__(self) -> None:
        self.turns, self.tokens = Turns(), 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.turns.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.turns.end(tokens=self.tokens)
        self.tokens = 0

    def reward(self, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """No answer is right. A prompt has a token per character."""
        self.tokens += sum(map(len, prompts)) + sum(map(len, completion_ids))
        return [0.0] * len(prompts)


def main() -> None:
    torch.set_num_threads(2)
    contest, steps = Contest.read(), Stepwise()
    work, setting = contest.work, SETTINGS[contest.setting]
    args = GRPOConfig(
        output_dir=str(contest.folder / "trl"),
        max_steps=10_000,
        num_generations=work.samples,
        max_completion_length=work.new,
        beta=work.kl_coef,
        loss_type="grpo",
        **QUIET,
        **setting,
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(contest.folder / "lm")
    model = AutoModelForCausalLM.from_pretrained(
        contest.folder / "lm",
        dtype=torch.bfloat16 if work.dtype == "bf16" else torch.float32,
        attn_implementation="sdpa",
    )
    trainer = GRPOTrainer(
        model,
        steps.reward,
        args,
        train_dataset=Dataset.from_dict({"prompt": contest.questions()}),
        processing_class=tokenizer,
        callbacks=[steps],
    )
    trainer.train()


main()
