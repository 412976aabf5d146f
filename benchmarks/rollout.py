"""Tokens per second of rollouts: hflow on Megatron-core, hflow on SGLang, and transformers' generate.

    python benchmarks/rollout.py [--rounds 7] [--only NAME …] [--save]

The same prompts and the same random weights, float32, sampling at temperature 1 with log-probs: a Qwen2 of
4 layers of 256, 64 rows. `equal`: 16 prompts of 32 tokens with 4 answers of 64 tokens each. `ragged`: prompts
of 8 to 32 tokens, and answers that end by chance, at every token with a probability of 1/32, cut at 128 (mean
31). One process with 2 threads; SGLang's server has the same 2 cores. transformers gets all rows in one batch
with its default cache, left-padded, and reads log-probs from its own logits. It and Megatron take turns; then
it is SGLang's, whose server looks for requests all the time and would take a core from others. Medians over
rounds, the first two left out. Tokens are those of answers, without padding; `ratio`: over transformers'
tokens per second.

SGLang needs `make setup-sglang`; without it the other two are measured and a row says so. On a CPU its
kernels are PyTorch's (docs/running.md), and it samples deterministically, without prefix cache: its figure
tells what tests cost here, not what SGLang does on a GPU. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file
from step import machine
from step_trl import write_models, write_prompts
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from transformers import AutoModelForCausalLM
from trl.work import Work

import hflow
from hflow.runtime.engines.protocol import EngineCall
from hflow.runtime.engines.sglang.weights import ServedWeights
from hflow.runtime.rows import Rows, from_lists, length_mask
from hflow.runtime.tokenizer import load_tokenizer
from hflow.runtime.worker.models import Engines, build_engines
from hflow.runtime.worker.world import World

ROOT = Path(__file__).resolve().parent
WARMUP, THREADS = 2, 2
WORKS = {
    "equal": Work("grpo", new=64),
    "ragged": Work("grpo", new=128, shortest=8, eos_rate=1 / 32),
}
Generate = Callable[[int, Rows], int]  # the round, and prompts; the tokens that were made


@dataclass(frozen=True)
class Ours:
    """hflow's engine for the rollout of a plan of one worker."""

    plan: hflow.Plan
    engines: Engines

    def __call__(self, step: int, prompts: Rows) -> int:
        node, own = self.plan.graph.node("rollout"), self.plan.node("rollout")
        call = EngineCall(node, own, 0, len(prompts), seed=0, step=step)
        return len(self.engines.of(node, own).run(call, {"prompt": prompts}).outputs["logprobs"].values)


@dataclass(frozen=True)
class Transformers:
    """One call of `generate` for all rows."""

    model: Any
    work: Work
    eos_id: int

    @torch.inference_mode()
    def __call__(self, step: int, prompts: Rows) -> int:
        assert prompts.lengths is not None
        torch.manual_seed(step)
        longest = int(prompts.lengths.max())
        present = length_mask(prompts.lengths, longest).flip(1)
        tokens = torch.zeros(present.shape, dtype=torch.int64)
        tokens[present] = prompts.values.long()
        tokens, present = (x.repeat_interleave(self.work.samples, 0) for x in (tokens, present))
        found = self.model.generate(
            tokens, attention_mask=present.long(), max_new_tokens=self.work.new, do_sample=True, top_k=0,
            eos_token_id=self.eos_id, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        new = found.sequences[:, longest:]
        for logits, chosen in zip(found.logits, new.T):
            logits.log_softmax(-1).gather(1, chosen[:, None])
        ended = (new == self.eos_id).long().cumsum(1)
        return int(((ended == 0) | ((ended == 1) & (new == self.eos_id))).sum())


def measure(work: Work, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_models(folder, work)
        write_prompts(folder / "prompts.jsonl", work)
        tokenizer = load_tokenizer(str(folder / "lm"))
        lines = (folder / "prompts.jsonl").read_text().splitlines()
        questions = tokenizer.encode([json.loads(line)["question"] for line in lines])
        world = World.join(HashStore(), 0, 1, torch.device("cpu"))
        model = AutoModelForCausalLM.from_pretrained(folder / "lm", dtype=torch.float32).eval()
        theirs = Transformers(model, work, tokenizer.eos_id)
        rates: dict[str, float] = {}
        try:
            for engine in _engines():
                ours = _ours(engine, folder, work, world)
                others: dict[str, Generate] = {"transformers": theirs} if engine == "megatron" else {}
                try:
                    rates |= _turns({engine: ours, **others}, questions, work, rounds)
                finally:
                    ours.engines.close()
        finally:
            world.close()
    return {
        "tokens_per_s": rates,
        "ratio": {name: rate / rates["transformers"] for name, rate in rates.items()},
    }


def _engines() -> list[str]:
    return ["megatron", "sglang"] if importlib.util.find_spec("sglang") else ["megatron"]


def _ours(engine: str, folder: Path, work: Work, world: World) -> Ours:
    params = {
        "model": folder / "lm", "prompts": folder / "prompts.jsonl", "batch": work.prompts,
        "max_new_tokens": work.new, "minibatch": work.rows, "group": work.samples,
    }  # fmt: skip
    graph = hflow.load(ROOT / "trl/grpo.yaml", [f"params.{name}={value}" for name, value in params.items()])
    plan = hflow.compile(graph, "local1", engines=(f"rollout={engine}",))
    engines = build_engines(plan, world, lambda _: None)
    for weights in (model.weights for model in engines.models.values()):
        if isinstance(weights, ServedWeights):
            _renew(weights, load_file(folder / "lm" / "model.safetensors"))
    return Ours(plan, engines)


def _renew(weights: ServedWeights, values: dict[str, torch.Tensor]) -> None:
    """As a weight edge does before every rollout; a server that waits for one is asleep."""
    weights.allocate()
    for bucket in weights.buckets:
        for name, box in bucket.boxes.items():
            weights.view(name, box).copy_(values[name])
        weights.hand_over()


def _turns(
    everyone: dict[str, Generate], questions: list[list[int]], work: Work, rounds: int
) -> dict[str, float]:
    """Tokens per second of each."""
    rates: dict[str, list[float]] = {name: [] for name in everyone}
    for step in range(WARMUP + rounds):
        at = step * work.prompts % len(questions)
        prompts = from_lists(questions[at : at + work.prompts])
        for name, generate in everyone.items():
            began = time.perf_counter()
            tokens = generate(step, prompts)
            rates[name].append(tokens / (time.perf_counter() - began))
    return {name: median(each[WARMUP:]) for name, each in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second of rollouts.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", choices=WORKS, default=list(WORKS))
    parser.add_argument("--save", action="store_true", help="also write results/rollout-DATE.json")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    torch.set_num_threads(THREADS)
    cases: dict[str, Any] = {}
    for name in options.only:
        cases[name] = measure(WORKS[name], options.rounds)
        for engine, rate in cases[name]["tokens_per_s"].items():
            print(
                f"{name:8} {engine:13} {rate:8.0f} tokens/s {cases[name]['ratio'][engine]:6.2f}", flush=True
            )
        if "sglang" not in cases[name]["ratio"]:
            print(f"{name:8} sglang        not installed: make setup-sglang", flush=True)
    result = {"benchmark": "rollout", "cases": cases, **machine()}
    line = json.dumps(result)
    if options.save:
        (ROOT / f"results/rollout-{result['date']}.json").write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
