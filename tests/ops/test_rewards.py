"""Rewards by rule."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
import torch

from hflow.ops.penalties import length_penalty, overlong_penalty
from hflow.ops.rewards import add, exact_match, format_match, reasoning_gym, tagged_match


def lengths(*counts: int) -> torch.Tensor:
    """A mask with so many tokens per row; every other position is a tool's."""
    return torch.tensor([[i % 2 == 0 and i < 2 * count for i in range(40)] for count in counts])


def test_exact_match() -> None:
    found = exact_match([["12", " 12\n", "1 2"], ["", "7", "7."]], ["12 ", "7"])
    assert found.dtype == torch.float32
    assert found.tolist() == [[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
    with pytest.raises(ValueError):
        exact_match([["1"]], ["1", "2"])


def test_tagged_match() -> None:
    text = [
        "<answer> 7\n</answer>.",
        "7",
        "<answer>7",
        "<answer>8</answer> <answer>7</answer>",
        "<answer>7 8</answer>",
    ]
    assert tagged_match([text], ["7 "]).tolist() == [[1.0, 0.0, 0.0, 1.0, 0.0]]
    assert tagged_match([["[7]", "[]"], ["[]", "7]"]], ["7", ""], open="[", close="]").tolist() == [
        [1, 0],
        [1, 0],
    ]
    same = ["x **7** y", "**8** **7**", "**7", "**7** then **8", "7"]
    assert tagged_match([same], ["7"], open="**", close="**").tolist() == [[1, 1, 0, 0, 0]]
    with pytest.raises(ValueError, match="open and close"):
        tagged_match([[""]], [""], close="")


def test_format_match_is_of_the_whole_text() -> None:
    text = ["<a>1</a>", "<a>1</a> and more", "<a>\n</a>", ""]
    found = format_match(text, pattern="<a>.*</a>")
    assert found.dtype == torch.float32 and found.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert format_match(text, pattern="(?s)<a>.*</a>").tolist() == [1.0, 0.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="no regular expression"):
        format_match(text, pattern="(")


def test_overlong_penalty_is_equation_13() -> None:
    """DAPO's own numbers, divided by 1024: 16 tokens free, then linear to -1 at 20."""
    found = overlong_penalty(lengths(0, 15, 16, 17, 19, 20), max_tokens=20, buffer_tokens=4)
    assert found.dtype == torch.float32
    assert found.tolist() == [0.0, 0.0, 0.0, -0.25, -0.75, -1.0]
    assert overlong_penalty(lengths(20), max_tokens=10, buffer_tokens=4).tolist() == [-1.0]


@pytest.mark.parametrize("buffer_tokens", [0, -1, 21])
def test_overlong_penalty_refuses_an_impossible_buffer(buffer_tokens: int) -> None:
    with pytest.raises(ValueError, match="buffer_tokens"):
        overlong_penalty(lengths(1), max_tokens=20, buffer_tokens=buffer_tokens)


def test_length_penalty() -> None:
    found = length_penalty(lengths(0, 3, 5, 11), per_token=0.5, free_tokens=3)
    assert found.dtype == torch.float32
    assert found.tolist() == [0.0, 0.0, -1.0, -4.0]


def test_add() -> None:
    found = add(torch.tensor([1.0, 0.0]), torch.tensor([-0.5, 2.0]), weight=0.5)
    assert found.tolist() == [0.75, 1.0]


def test_reasoning_gym_gives_the_score_of_the_dataset() -> None:
    """Entries come from the package; for countdown any expression with the given numbers may be right."""
    gym = pytest.importorskip("reasoning_gym")
    entries = list(gym.create_dataset("countdown", size=3, seed=0))
    text = [[entry["metadata"]["expression"] + "\n", "nonsense", ""] for entry in entries]
    metadata = [json.dumps(entry["metadata"]) for entry in entries]
    found = reasoning_gym(text, [entry["answer"] for entry in entries], metadata, dataset="countdown")
    score = gym.get_score_answer_fn("countdown")
    expected = [[score(t.strip(), entry) for t in row] for row, entry in zip(text, entries)]
    assert torch.equal(found, torch.tensor(expected))
    assert found[:, 0].tolist() == [1.0] * 3 and (found[:, 1:] < 1).all()


def test_reasoning_gym_refuses() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match="no dataset `sums`"):
        reasoning_gym([["1"]], ["1"], ["{}"], dataset="sums")
    with pytest.raises(ValueError, match="metadata is no JSON"):
        reasoning_gym([["1"]], ["1"], ["{'a': 1}"], dataset="countdown")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)  # importing it then fails
    rewards = importlib.import_module("hflow.ops.rewards")
    rewards._gym_scorer.cache_clear()
    with pytest.raises(ImportError, match=r"pip install -e .\.\[tasks\]"):
        reasoning_gym([["1"]], ["1"], ["{}"], dataset="countdown")
