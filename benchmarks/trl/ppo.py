"""TRL's PPOTrainer in benchmarks/step_trl.py; runs in an environment that has TRL 1.12 and not hflow."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import gc
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer
from work import QUIET, SETTINGS, Contest, Turns


class Stepwise(TrainerCallback):
    """Every step waits for its turn. PPOTrainer collects garbage twice a step: `freeze` makes that cheap."""

    def __init__(self, turns: Turns, tokens: int, freeze: bool):
        self.turns, self.tokens, self.freeze = turns, tokens, freeze

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self.freeze:
            gc.collect()
            gc.freeze()
        self.turns.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.turns.end(tokens=self.tokens)
        self.turns.begin()


def main() -> None:
    torch.set_num_threads(2)
    contest = Contest.read()
    work, setting = contest.work, SETTINGS[contest.setting]
    args = PPOConfig(
        output_dir=str(contest.folder / "trl"),
        total_episodes=work.rows * 10_000,
        num_ppo_epochs=1,
        num_mini_batches=1,
        response_length=work.new,
        temperature=1.0,
        kl_coef=work.kl_coef,
        num_sample_generations=0,
        stop_token="eos",
        **QUIET,
        **setting,
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(contest.folder / "lm", padding_side="left")
    questions = [{"input_ids": ids} for ids in tokenizer(contest.questions())["input_ids"]]
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(
            contest.folder / "lm", dtype=torch.float32, attn_implementation="sdpa"
        )
        for _ in range(2)
    )
    value, reward = (
        AutoModelForSequenceClassification.from_pretrained(
            contest.folder / "scalar", dtype=torch.float32, attn_implementation="sdpa"
        )
        for _ in range(2)
    )
    tokens = work.rows * (work.longest + work.new)
    trainer = PPOTrainer(
        args,
        tokenizer,
        policy,
        reference,
        reward,
        train_dataset=Dataset.from_list(questions),
        value_model=value,
        callbacks=[Stepwise(Turns(), tokens, contest.setting == "best")],
    )
    trainer.train()


main()
