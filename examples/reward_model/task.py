"""A made task, whose rule says how good a response is: write vowels.

A prompt is five of the letters a to h and `>`, a response up to six of these letters. Each vowel in a
response earns 1/6, each other letter costs 1/6. As a script it writes data, from which models have to find
that out:

    python examples/reward_model/task.py FOLDER

FOLDER/demonstrations.jsonl has random responses, to learn the form; FOLDER/pairs.jsonl two random responses
to each prompt, the better one by the rule as `chosen`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from hflow.ops.op import op

LETTERS = "abcdefgh"
VOWELS, LONGEST = "ae", 6
ROWS = 6000


def rule(response: str) -> float:
    """From -1 to 1: vowels less other letters, of `LONGEST`."""
    return sum(1 if letter in VOWELS else -1 for letter in response) / LONGEST


@op("text: str[rows] -> score: f32[rows]")
def true_score(text: list[str]) -> list[float]:
    """The rule, of every response."""
    return [rule(response) for response in text]


def prompts(draw: random.Random) -> Iterator[str]:
    for _ in range(ROWS):
        yield "".join(draw.choices(LETTERS, k=5)) + ">"


def response(draw: random.Random) -> str:
    return "".join(draw.choices(LETTERS, k=draw.randint(3, LONGEST)))


def pair(draw: random.Random, prompt: str) -> dict[str, str]:
    """Two responses that the rule tells apart."""
    while True:
        worse, better = sorted((response(draw), response(draw)), key=rule)
        if rule(worse) < rule(better):
            return {"prompt": prompt, "chosen": better, "rejected": worse}


def write(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    folder, draw = Path(sys.argv[1]), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    demonstrations = [{"prompt": prompt, "response": response(draw)} for prompt in prompts(draw)]
    write(folder / "demonstrations.jsonl", demonstrations)
    write(folder / "pairs.jsonl", [pair(draw, prompt) for prompt in prompts(draw)])
