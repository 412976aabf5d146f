"""What the runs of `run.sh` reached, by their summaries; exits with 1 where that is too little.

python examples/reward_model/check.py RUNS [--accuracy 0.9] [--score 0.5]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def evaluated(run: Path) -> tuple[float, float]:
    """The metric of `eval` before the first step and after the last."""
    found = json.loads((run / "summary.json").read_text())["eval"]
    return found["before"], found["after"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path)
    parser.add_argument("--accuracy", type=float, default=0.9, help="least accuracy on held-out pairs")
    parser.add_argument("--score", type=float, default=0.5, help="least gain of the true score, of 2 at most")
    wanted = parser.parse_args()
    guess, accuracy = evaluated(wanted.runs / "reward")
    before, after = evaluated(wanted.runs / "ppo")
    print(f"reward model, accuracy on held-out pairs: {guess:.3f} -> {accuracy:.3f}")
    print(f"policy, true score on held-out prompts:   {before:+.3f} -> {after:+.3f}")
    if accuracy >= wanted.accuracy and after - before >= wanted.score:
        return 0
    print(f"expected an accuracy of {wanted.accuracy} and a gain of {wanted.score}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
