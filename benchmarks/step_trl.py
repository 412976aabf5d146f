"""A step of GRPO and of PPO by hflow beside TRL: the same work on the same model and machine.

    python benchmarks/step_trl.py [--folder .trl] [--rounds 12] [--only NAME …] [--save]
    python benchmarks/step_trl.py --trl-python PATH --trl-ppo-python PATH

TRL needs environments of its own: `--folder` keeps them (made by pip on the first run, with this
environment's torch), or name the interpreters. TRL 1.16 has GRPOTrainer; 1.12 is the last with PPOTrainer.

Model: Qwen2 of 4 layers of 256 with random weights, 3 M parameters. 64 rows a step: 16 prompts of 32 tokens
with 4 answers of 32 tokens each (PPO: 64 prompts with one), one update; `grpo, long prompts` has 8 of 256
tokens with 8 answers of 64. `grpo, ragged` has prompts of 8 to 32 tokens, and answers that end by chance: the
model's weights give the end of the text a probability of 1/32 at every token, cut at 128, so lengths have the
same distribution on both sides (mean 31). For equal lengths the weights make the end all but impossible. No
answer is rewarded, which costs the same time.

Rows: TRL as it comes (its default of 8 rows at once, checkpointing), and at its best: one micro-batch, no
checkpointing, for PPO Python's garbage frozen; its optimizer is fused and its attention SDPA either way.
`static cache` is GRPO's best with that. hflow: 2 workers of 1 thread and 1 worker of 2 threads, with the
planner's plan. All have 2 cores, 2 threads and float32, but for `bf16`: there TRL's weights and Adam are in
bf16; hflow's weights too, but Adam and a copy of the weights are in float32. Contestants take turns, a step
each; medians over rounds, the first two left out. Tokens are prompt and answer of every row, without padding.
`speedup` is the better of hflow's tokens per second over the better of TRL's. `gemm_shares`: the products
that a node needs, a prompt's once for all of its answers, by its time and the machine's rate in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from step import machine, machine_flops
from trl.work import WORKS, Work

from hflow.runtime.tools.new_model import ALPHABET, new_model

ROOT = Path(__file__).resolve().parent
WARMUP = 2
THREADS = 2
SIZE: dict[str, Any] = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 688}
PEERS = {"grpo": ("default", "best", "static cache"), "ppo": ("default", "best")}
VERSIONS = {"grpo": "1.16.0", "ppo": "1.12.0"}
NEVER = -5.0  # as the weight of a token in the output matrix: a logit of -80


def write_models(folder: Path, work: Work) -> None:
    """Models `lm` and `scalar`, of which the first ends its texts at the work's rate.

    Dim 0 of every embedding is 1, far above the others, so that normalised hidden states are about
    sqrt(hidden) there: a weight of the output matrix in that dim is a constant added to a token's logit.
    """
    new_model(folder / "scalar", head="scalar", **SIZE)
    new_model(folder / "lm", **SIZE)
    file = folder / "lm" / "model.safetensors"
    weights = load_file(file)
    head = weights["lm_head.weight"]
    words = len(head) - 3
    weights["model.embed_tokens.weight"][:, 0] = 1.0
    head[:, 0] = 0.0
    head[:3, 0] = NEVER  # padding, end of text, unknown
    if work.eos_rate:
        odds = work.eos_rate / (1 - work.eos_rate)
        head[1, 0] = math.log(odds * words) / math.sqrt(SIZE["hidden"])
    save_file(weights, file, {"format": "pt"})


def write_prompts(file: Path, work: Work, count: int = 4096) -> None:
    draw, letters = random.Random(0), ALPHABET.replace(" ", "").replace("\n", "")
    with file.open("w") as lines:
        for _ in range(count):
            text = "".join(draw.choices(letters, k=draw.randint(work.shortest, work.longest)))
            lines.write(json.dumps({"question": text, "answer": "-"}) + "\n")


class Contestant:
    """A process that does one step at a time."""

    def __init__(self, python: str, script: str, work: str, setting: str, folder: Path):
        self.log = folder / f"{script}-{setting}.log"
        threads = setting.partition("x")[2] or str(THREADS)
        self.process = subprocess.Popen(
            [python, str(ROOT / "trl" / script), work, setting, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            env=os.environ | {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"},
            text=True,
        )
        self.steps: list[dict[str, Any]] = []

    def step(self) -> None:
        assert self.process.stdin and self.process.stdout
        print(file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            log = self.log.read_text()[-4000:]
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}:\n{log}")
        self.steps.append(json.loads(line))

    def result(self) -> dict[str, Any]:
        kept = self.steps[WARMUP:]
        found: dict[str, Any] = {
            "s": median(step["s"] for step in kept),
            "least_s": min(step["s"] for step in kept),
            "tokens": sum(step["tokens"] for step in kept) / len(kept),
            "tokens_per_s": median(step["tokens"] / step["s"] for step in kept),
        }
        for what in ("nodes", "flops"):
            names = kept[0].get(what, {})
            found |= {what: {n: median(s[what][n] for s in kept) for n in names}} if names else {}
        return found


@contextmanager
def contestant(*arguments: Any) -> Iterator[Contestant]:
    found = Contestant(*arguments)
    try:
        yield found
    finally:
        assert found.process.stdin
        found.process.stdin.close()
        try:
            found.process.wait(30)
        except subprocess.TimeoutExpired:
            found.process.kill()


def compare(name: str, python: str, rounds: int) -> dict[str, Any]:
    work = WORKS[name]
    peer = "ppo" if work.algorithm == "ppo" else "grpo"
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        folder = Path(made)
        write_models(folder, work)
        write_prompts(folder / "prompts.jsonl", work)
        enter = lambda *args: stack.enter_context(contestant(*args, folder))  # noqa: E731
        ours = {s: enter(sys.executable, "ours.py", name, s) for s in ("2x1", "1x2")}
        theirs = {s: enter(python, f"{peer}.py", name, s) for s in PEERS[peer]}
        everyone = [*ours.values(), *theirs.values()]
        for _ in range(WARMUP + rounds):
            for one in everyone:
                one.step()
    found = {"ours": ours, "trl": theirs}
    told = {side: {s: one.result() for s, one in ones.items()} for side, ones in found.items()}
    best = {side: max(one["tokens_per_s"] for one in ones.values()) for side, ones in told.items()}
    return {**told, "speedup": best["ours"] / best["trl"]}


def environment(folder: Path, peer: str) -> str:
    """The interpreter of an environment with TRL, made unless it is there."""
    version = VERSIONS[peer]
    home = folder.absolute() / f"trl-{version}"
    python = str(home / "bin" / "python")
    if not home.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        packages = [f"torch=={torch.__version__}", f"trl=={version}"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def gemm_shares(result: dict[str, Any], rate: float) -> dict[str, dict[str, float]]:
    """Of the machine's rate of matrix products, what each of our nodes reaches."""
    return {
        setting: {node: flops / one["nodes"][node] / rate for node, flops in one["flops"].items()}
        for setting, one in result["ours"].items()
    }


def show(name: str, result: dict[str, Any]) -> None:
    for side in ("ours", "trl"):
        for setting, one in result[side].items():
            print(f"{name:22} {side:5} {setting:13} {one['s']:7.3f} s {one['tokens_per_s']:8.0f} tokens/s")
    print(f"{name:22} {result['speedup']:.2f} times TRL's best", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A step of GRPO and of PPO beside TRL.")
    parser.add_argument(
        "--folder", type=Path, default=Path(".trl"), help="where TRL's environments are, or are made (.trl)"
    )
    parser.add_argument("--trl-python", help=f"the interpreter of an environment with TRL {VERSIONS['grpo']}")
    parser.add_argument("--trl-ppo-python", help=f"… with TRL {VERSIONS['ppo']}")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", nargs="*", choices=WORKS, default=list(WORKS))
    parser.add_argument("--save", action="store_true", help="also write results/step_trl-DATE.json")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    pythons = {"grpo": options.trl_python, "ppo": options.trl_ppo_python}
    cases: dict[str, Any] = {}
    for name in options.only:
        peer = "ppo" if WORKS[name].algorithm == "ppo" else "grpo"
        cases[name] = compare(name, pythons[peer] or environment(options.folder, peer), options.rounds)
        show(name, cases[name])
    rate = {"what": "2 processes of torch.matmul", "flops_per_s": machine_flops(THREADS)}
    for name, case in cases.items():
        case["gemm_shares"] = gemm_shares(case, rate["flops_per_s"])
        shares = max(case["gemm_shares"].values(), key=lambda own: sum(own.values()))
        print(f"{name:22} of {rate['what']}:", *(f"{node} {share:.0%}" for node, share in shares.items()))
    result = {"benchmark": "step_trl", "cases": cases, "gemm": rate, "trl": VERSIONS, **machine()}
    line = json.dumps(result)
    if options.save:
        (ROOT / f"results/step_trl-{result['date']}.json").write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
