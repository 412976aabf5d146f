"""Accuracy of exported models on held-out rows, measured by transformers alone.

    python scripts/check_model.py GRAPH MODEL [MODEL ...]

Reads the held-out rows of the graph's evaluation, lets `AutoModelForCausalLM` answer them greedily, and
counts the answers that are exactly right. None of hflow's engines takes part, so the printed numbers
check what hflow trained, exported, and reported. Fails when the last model is no better than the first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from hflow.graph.ir import Graph, Node
from hflow.graph.load import load
from hflow.runtime.engines.python.data import Example, open_source
from hflow.runtime.tokenizer import Tokenizer, load_tokenizer


def held_out(graph: Graph, folder: str) -> tuple[Tokenizer, tuple[Example, ...]]:
    """The rows that the graph evaluates, tokenised with the tokenizer in `folder`."""
    assert graph.evaluation is not None, f"{graph.name} has no evaluation"
    node = next(n for n in graph.nodes if n.op == "data")
    tokenizer = load_tokenizer(folder)
    source = open_source(node, {node.options["tokenizer"]: tokenizer})
    return tokenizer, source.dataset.evaluation(graph.evaluation.rows)


def accuracy(folder: str, tokenizer: Tokenizer, examples: Sequence[Example], max_new_tokens: int) -> float:
    """The fraction of greedy answers that equal the row's `answer`, white space aside."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    longest = max(len(e.prompt) for e in examples)
    padding = [longest - len(e.prompt) for e in examples]  # on the left, so that answers start together
    tokens = torch.tensor([[tokenizer.pad_id] * n + list(e.prompt) for n, e in zip(padding, examples)])
    mask = torch.arange(longest)[None, :] >= torch.tensor(padding)[:, None]
    out = model.generate(tokens, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens)
    answers = tokenizer.decode([_until_end(row, tokenizer.eos_id) for row in out[:, longest:].tolist()])
    right = [a.strip() == e.fields["answer"].strip() for a, e in zip(answers, examples)]
    return sum(right) / len(right)


def _until_end(row: list[int], eos_id: int) -> list[int]:
    return row[: row.index(eos_id)] if eos_id in row else row


def main(path: str, *folders: str) -> int:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    graph = load(Path(path), tuple(f"params.model={folder}" for folder in folders[:1]))
    rollout: Node = next(n for n in graph.nodes if n.op == "generate")
    found: list[float] = []
    for folder in folders:
        tokenizer, examples = held_out(graph, folder)
        found.append(accuracy(folder, tokenizer, examples, rollout.options["max_new_tokens"]))
        print(f"{found[-1]:6.1%} of {len(examples)} held-out answers right   {folder}")
    return 0 if found[-1] > found[0] else 1


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
